"""Exceptions that glass_jax raises for a user's mistake or a limit of the hardware.

Every message says what was wrong, with the numbers, and what to do about it.
"""


class GlassError(Exception):
    """Base class of every error that glass_jax raises on purpose."""


class HardwareConstraintError(GlassError, ValueError):
    """A shape, dtype or argument that the operation or the chip cannot take."""


class OutOfOnChipMemoryError(HardwareConstraintError):
    """The live buffers of a kernel do not fit an on-chip memory of the chip."""


class UnsupportedError(GlassError, NotImplementedError):
    """A combination that is meaningful but that glass_jax does not implement."""


class DeadlockError(GlassError, RuntimeError):
    """A kernel whose pipes or cores wait for what nobody will do, so that it would never end.

    Attributes:
      waits: what each of them waits for, and where in the kernel.
      loc: ``file:line`` of the first of these places, or None where the compiler did not record it.
    """

    def __init__(self, kernel: str, waits: tuple[str, ...], loc: str | None = None):
        lines = [f"kernel {kernel} never ends: nobody sets what these wait for", *waits]
        super().__init__("\n  ".join(lines))
        self.waits = waits
        self.loc = loc


class NotANumberError(GlassError, FloatingPointError):
    """A kernel makes a NaN.

    Attributes:
      loc: ``file:line`` of the statement that made it, or None where the compiler did not record it.
    """

    def __init__(self, message: str, loc: str | None = None):
        super().__init__(message)
        self.loc = loc


class CollectiveError(GlassError, ValueError):
    """A collective that cannot run as asked: its axis, shapes, permutation or algorithm do not fit the mesh."""


class PeerFailureError(GlassError, RuntimeError):
    """A rank that a collective needs is dead, so that the others would wait for ever.

    Attributes:
      dead: the ranks, or processes, that are dead.
      waits: what each rank that cannot finish waits for; empty where it is not known which collective was running.
    """

    def __init__(self, message: str, dead: tuple[int, ...] = (), waits: tuple = ()):
        super().__init__(message)
        self.dead = dead
        self.waits = waits


class DeviceAssertionError(GlassError, AssertionError):
    """A ``T.device_assert`` of a kernel that does not hold, found while the kernel runs on the NPU model."""


class MissingDependencyError(GlassError, ImportError):
    """An optional dependency is needed for this call and is not installed."""
