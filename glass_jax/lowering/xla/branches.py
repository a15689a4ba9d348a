"""What keeps XLA from computing ahead of a loop on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def in_a_branch(holds: jax.Array, fn: Callable[..., jax.Array], *args: Any) -> jax.Array:
    """``fn(*args)`` where ``holds``, else zeros: inside a branch, out of which XLA moves nothing.

    A CPU slices and gathers 16-bit floats as float32. What does not change in a loop XLA computes before it, and so it
    would convert all of an array of which each step of the loop reads a part; in the branches of a condition, even of
    one that always holds, it does not look for such things.
    """
    result = jax.eval_shape(fn, *args)
    return lax.cond(holds, fn, lambda *_: jnp.zeros(result.shape, result.dtype), *args)
