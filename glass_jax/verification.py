"""``glass.verify``: what a chip cannot take in the kernels of a function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from glass_jax import config
from glass_jax.hw import chips, verifier
from glass_jax.hw.rules.base import Violation
from glass_jax.lowering import collect


def verify(fn_or_kernel: Any, *args: Any, chip: str | None = None, run: bool = False) -> list[Violation]:
    """What ``chip`` would reject or silently get wrong in the kernels of ``fn_or_kernel``. Runs nothing by itself.

    ::

        for violation in glass.verify(model, jax.ShapeDtypeStruct((8, 1024), jnp.bfloat16), chip="950PR"):
            print(violation)  # kernels.py:41: [memory-overflow] UB needs 262144 bytes and 950PR has 253952: ...

    Args:
      fn_or_kernel: a JAX function, or a TileLang kernel: a ``@T.prim_func`` or a ``@tilelang.jit`` function.
      *args: a function's arguments, as arrays or ``jax.ShapeDtypeStruct``; those of a ``@tilelang.jit`` function.
      chip: the chip, for example ``"950DT"`` or ``"910B3"``; default: ``glass.configure``'s. No code is generated for
        the 910 family: for such a chip a kernel is judged as written for the 950DT.
      run: also executes the generated code on this machine, on ``args`` (a function's
        ``jax.ShapeDtypeStruct`` and a kernel's operands are made up: normally distributed numbers, integers 0), under
        several orders of its pipes. Reports races, deadlocks, accesses out of bounds, reads of what nobody wrote,
        results that depend on the order, and results that are not the NPU model's.

    Returns:
      The violations, each with its rule, kernel, place, numbers and what to do; empty if the kernels are sound, or if
      the function uses none.

    Raises:
      HardwareConstraintError: (a ValueError) there is no such chip.
      MissingDependencyError: a kernel has to be compiled and TileLang is not installed; with ``run``, there is no C++
        compiler.
      GlassError: the compiler refused a kernel for a reason that no rule explains.
    """
    target = chips.get(config.current().chip if chip is None else chip)
    kernels = collect.find(fn_or_kernel, *args, chip=collect.stand_in(target))
    found = violations(kernels, target)
    return [*found, *executed(fn_or_kernel, args, kernels, collect.stand_in(target))] if run else found


def executed(fn_or_kernel: Any, args: Sequence[Any], kernels: Iterable[collect.Found], chip: str) -> list[Violation]:
    """The violations that show when the generated code of ``kernels`` is executed; arguments as in :func:`verify`."""
    from glass_jax.lowering.host import check

    if collect.is_tilelang(fn_or_kernel):
        return [violation for kernel in kernels for violation in check.of_kernel(kernel.compiled())]
    return check.of_function(fn_or_kernel, args, chip)


def violations(kernels: Iterable[collect.Found], chip: chips.Chip) -> list[Violation]:
    """The violations of every kernel; raises the compiler's refusal of one in which no rule finds any."""
    result = []
    for kernel in kernels:
        found = verifier.verify(kernel.program, chip, kernel.memory, kernel.flags)
        if not found:
            kernel.compiled()
        result.extend(found)
    return result
