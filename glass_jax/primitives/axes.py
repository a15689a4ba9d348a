"""Mesh axes of operands: which ones a value varies over, and how a result is sharded."""

from __future__ import annotations

import jax
from jax import lax


def varying(x: jax.Array) -> frozenset[str]:
    """Names of the manual mesh axes (of an enclosing ``shard_map``) over which ``x`` may differ between devices."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_alike(*operands: jax.Array) -> list[jax.Array]:
    """``operands``, each marked as varying over every manual axis that any of them varies over.

    A primitive whose operands vary over different axes has a wrong gradient: the invariant one's cotangents would not
    be summed over the axis. The cast's transpose is that sum.
    """
    union = frozenset().union(*map(varying, operands))
    return [
        lax.pcast(x, tuple(sorted(union - varying(x))), to="varying") if union - varying(x) else x for x in operands
    ]


def is_sharded(aval: jax.core.ShapedArray) -> bool:
    """Whether the type itself says how the array is sharded, as it does where mesh axes are Explicit."""
    return any(entry is not None for entry in aval.sharding.spec)
