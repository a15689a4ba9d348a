"""Axes of operands: the mesh axes that a value varies over or is sharded over, and those that ``vmap`` adds."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
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


def lead(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> list[jax.Array]:
    """``operands`` of a batching rule with the mapped dimension first, of size 1 where an operand is not mapped."""
    return [x[None] if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True)]
