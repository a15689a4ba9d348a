"""The kernels of a function, or of whatever else describes one, for looking at them: nothing runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from glass_jax import config, errors
from glass_jax.hw.chips import Chip
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Allocation
from glass_jax.lowering import artifact, ascend, bundle, cache

REFERENCE_CHIP = "950DT"  # whose code stands for that of a chip that none is generated for


def stand_in(chip: Chip) -> str:
    """The chip to compile for when a kernel is looked at on ``chip``: itself, or the one that stands for it."""
    return chip.name if chip.has_generator else REFERENCE_CHIP


@dataclasses.dataclass(frozen=True)
class Found:
    """A kernel: its program, and what the compiler made of it, or why it refused.

    Attributes:
      program: the kernel as its author wrote it.
      made: the compiled kernel, or None.
      refusal: the compiler's error if it refused the kernel.
    """

    program: ir.Program
    made: artifact.Artifact | None
    refusal: errors.GlassError | None = None

    @property
    def memory(self) -> tuple[Allocation, ...] | None:
        """The compiler's memory map, if it made one."""
        return self.made.memory if self.made else None

    @property
    def flags(self) -> ir.Program | None:
        """The synchronization in the generated code, if the compiler made it."""
        return self.made.flags if self.made else None

    def compiled(self) -> artifact.Artifact:
        """The compiled kernel; raises the compiler's error if it refused."""
        if self.made is None:
            raise self.refusal
        return self.made


def find(fn_or_kernel: Any, *args: Any, chip: str, **kwargs: Any) -> tuple[Found, ...]:
    """The kernels of a JAX function, of a ``@T.prim_func``, or of a ``@tilelang.jit`` function.

    Args:
      fn_or_kernel: what to look at.
      *args: arguments of the function: arrays or ``jax.ShapeDtypeStruct`` for a JAX function.
      chip: name of the chip to compile for.
      **kwargs: more arguments of a ``@tilelang.jit`` function.

    Raises:
      UnsupportedError: no code is generated for the chip, or a kernel has no form as a Program.
      MissingDependencyError: a kernel has to be compiled and TileLang is not installed.
      GlassError: what the operations of a JAX function raise.
    """
    if not is_tilelang(fn_or_kernel):
        return _of_function(fn_or_kernel, args, chip)
    from glass_jax.lowering.tilelang import user

    return (_of_kernel(user.user_kernel(fn_or_kernel, *args, **kwargs), chip),)


def program(kernel: Any, out_idx: Any, chip: str) -> tuple[ir.Program, tuple[int, ...]]:
    """The program of a TileLang kernel, and the positions of its results among its parameters.

    Args:
      kernel: a ``@T.prim_func``, or a ``@tilelang.jit`` function that takes no arguments.
      out_idx: positions of the results, or None for what the kernel says.
      chip: name of the chip it is built for.

    Raises:
      HardwareConstraintError: ``kernel`` is no TileLang kernel, or has no parameter at ``out_idx``.
      UnsupportedError: the kernel has no form as a Program.
    """
    if not is_tilelang(kernel):
        raise errors.HardwareConstraintError(
            f"expected a TileLang kernel (a @T.prim_func or a @tilelang.jit function), got {type(kernel).__name__}"
        )
    from glass_jax.lowering.tilelang import decode, user

    found = user.user_kernel(kernel, out_idx=out_idx)
    return decode.decode(found.build(chip), dict(found.pass_configs)), found.outputs


def is_tilelang(fn_or_kernel: Any) -> bool:
    """Whether this is an object of TileLang, decided without loading it."""
    return type(fn_or_kernel).__module__.partition(".")[0] in ("tilelang", "tvm")


def _of_function(fn: Callable[..., Any], args: tuple[Any, ...], chip: str) -> tuple[Found, ...]:
    """The kernels that ``fn`` launches when it is lowered for Ascend, each once, in program order."""
    with config.configure(chip=chip, implementation="ascend"):
        exported = bundle.lower(fn, args, (ascend.PLATFORM,))
    made = [cache.find(sha) for sha in bundle.launched(exported)]
    return tuple(Found(item.program, item) for item in made)


def _of_kernel(kernel: artifact.Kernel, chip: str) -> Found:
    try:
        made = cache.compile(kernel, chip)
    except (errors.UnsupportedError, errors.MissingDependencyError):
        raise
    except errors.GlassError as refusal:  # for a reason that the verifier may explain better
        from glass_jax.lowering.tilelang import decode

        return Found(decode.decode(kernel.build(chip), dict(kernel.pass_configs)), None, refusal)
    return Found(made.program, made)
