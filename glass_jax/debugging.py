"""``glass.debug``: a kernel on the NPU model, statement by statement, with its memories in view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from glass_jax import config
from glass_jax.hw import chips
from glass_jax.hw.model import observers
from glass_jax.lowering import collect


def debug(kernel: Any, *, check_nans: bool = False, out_idx: int | Sequence[int] | None = None) -> Callable[..., Any]:
    """A kernel as a function that shows what its memories hold, or that finds its first NaN.

    ::

        seen = glass.debug(attention)(q, k, v, watch=["s_ub", "o_l0c"], at={"bx": 0, "k": 3})
        seen["s_ub"]   # of both vector units: [2, rows, columns]

        glass.debug(attention, check_nans=True)(q, k, v)
        # NotANumberError: attention.py:61: `u[i] = u[i] / s[i]` leaves NaN in u, 4 of them, the first at (0, 3);
        # bx = 0, k = 3

    It runs on the NPU model with JAX's jit disabled, one operation after the other: for small arrays.

    Args:
      kernel: a ``@T.prim_func`` of static shapes, or a ``@tilelang.jit`` function that takes no arguments.
      check_nans: run the whole kernel and return its results; raise if there is a NaN.
      out_idx: positions of the results among the kernel's parameters; default: what ``@tilelang.jit`` says, else the
        last.

    Returns:
      A function of the kernel's other parameters. Without ``check_nans`` it takes two keywords: ``watch``, names of
      buffers, and ``at``, values of loop variables (as the kernel names them, or numbered where a name occurs twice:
      see ``glass lower --dry-run``); it returns the buffers' contents, by name, at the end of the first iteration in
      which all variables have these values. Default: at the end of the first block.

    Raises:
      HardwareConstraintError: (a ValueError) there is no such buffer or variable, or the moment never comes.
      NotANumberError: (a FloatingPointError) a statement makes a NaN, with its line, element and iteration.
      MissingDependencyError: TileLang is not installed.
    """
    program, outputs = collect.program(kernel, out_idx, collect.stand_in(chips.get(config.current().chip)))

    def check(*args: jax.typing.ArrayLike) -> Any:
        results = observers.find_nan(program, args, outputs)
        return results[0] if len(results) == 1 else results

    def look(
        *args: jax.typing.ArrayLike, watch: Sequence[str], at: Mapping[str, int] | None = None
    ) -> dict[str, np.ndarray]:
        return observers.watch(program, args, outputs, watch, at)

    chosen = check if check_nans else look
    chosen.__name__ = program.name
    return chosen
