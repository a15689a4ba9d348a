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


class CollectiveError(GlassError, ValueError):
    """A collective that cannot run as asked: its axis, shapes, permutation or algorithm do not fit the mesh."""


class MissingDependencyError(GlassError, ImportError):
    """An optional dependency is needed for this call and is not installed."""
