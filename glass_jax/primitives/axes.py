"""Axes of operands: the mesh axes that a value varies over or is sharded over, and those that ``vmap`` adds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering import partition


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


def placed(x: jax.Array, spec: Sequence) -> jax.Array:
    """``x`` sharded over Explicit mesh axes as ``spec`` says, if it is not."""
    sharding = jax.typeof(x).sharding
    return x if sharding.spec == spec else jax.sharding.reshard(x, jax.NamedSharding(sharding.mesh, spec))


def lead(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> list[jax.Array]:
    """``operands`` of a batching rule with the mapped dimension first, of size 1 where an operand is not mapped."""
    return [x[None] if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True)]


def into_blocks(x: jax.Array, axis: int, size: int) -> jax.Array:
    """``x`` with ``axis``, not negative, as two: blocks, and the ``size`` elements of each, zeros after the last ones.

    Over Explicit mesh axes the blocks stay sharded where every device has whole ones; else each device has all.
    """
    length = x.shape[axis]
    if is_sharded(aval := jax.typeof(x)):
        mesh, spec = aval.sharding.mesh, list(aval.sharding.spec)
        if length % (size * math.prod(mesh.shape[name] for name in partition.axes(spec[axis]))):
            spec[axis] = None
            x = jax.sharding.reshard(x, jax.NamedSharding(mesh, jax.P(*spec)))
    if length % size:
        x = jnp.pad(x, [(0, -length % size if d == axis else 0) for d in range(x.ndim)])
    return x.reshape(*x.shape[:axis], -(-length // size), size, *x.shape[axis + 1 :])


def out_of_blocks(x: jax.Array, axis: int, length: int) -> jax.Array:
    """``x`` with the two dimensions at ``axis`` as one again, of which the first ``length`` elements."""
    if x.shape[axis] * x.shape[axis + 1] == length:
        return lax.collapse(x, axis, axis + 2)
    if is_sharded(aval := jax.typeof(x)):
        spec = [None if d == axis else entry for d, entry in enumerate(aval.sharding.spec)]
        x = jax.sharding.reshard(x, jax.NamedSharding(aval.sharding.mesh, jax.P(*spec)))
    return lax.slice_in_dim(lax.collapse(x, axis, axis + 2), 0, length, axis=axis)


def repeated(x: jax.Array, axis: int, repeats: int, length: int) -> jax.Array:
    """``x`` with each element ``repeats`` times along ``axis``, not negative; of that the first ``length`` ones."""
    blocks = jnp.repeat(jnp.expand_dims(x, axis + 1), repeats, axis + 1)
    return out_of_blocks(blocks, axis, length)
