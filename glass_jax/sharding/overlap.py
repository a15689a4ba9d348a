"""Products and gradients whose communication is cut up and hidden behind the computation.

In the products, blocks travel around the ring both ways at once while the blocks that are there are multiplied: a
  step's message
does not depend on the step's product. (Wang et al.: Overlap communication with dependent computation via decomposition,
ASPLOS 2023.) They are each other's derivatives, so backward passes overlap as well.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad
from jax.typing import ArrayLike

from glass_jax import errors
from glass_jax.sharding import checks, collectives, primitive
from glass_jax.sharding.execute import AxisName, Ranks
from glass_jax.sharding.linear import CollectiveProgram, collective_p
from glass_jax.sharding.primitive import Over

Gemm = Callable[[jax.Array, jax.Array], jax.Array]
BUCKET_BYTES = 4 << 20


def dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """A product with float32 sums."""
    return jnp.dot(lhs, rhs, preferred_element_type=_wide(jnp.result_type(lhs, rhs)))


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def all_gather_gemm(x: ArrayLike, w: ArrayLike, axis_name: str, *, gemm: Gemm = dot) -> jax.Array:
    """``all_gather(x) @ w``, the gathering hidden behind the product.

    Args:
      x: ``[m, K]``, this rank's rows.
      w: ``[K, n]``, on each rank its own or the same.
      axis_name: the mesh axis to gather over.
      gemm: the product of a block, ``([m, K], [K, n]) -> [m, n]``; by default with float32 sums.

    Returns:
      ``[P * m, n]`` of the operands' dtype.

    Raises:
      CollectiveError: the axis is not one, or the shapes do not match.
    """
    return _bind("all_gather_gemm", jnp.asarray(x), jnp.asarray(w), axis_name, gemm)


def gemm_reduce_scatter(x: ArrayLike, w: ArrayLike, axis_name: str, *, gemm: Gemm = dot) -> jax.Array:
    """``reduce_scatter(x @ w)``, the scattering hidden behind the product.

    Args:
      x: ``[P * m, k]``, this rank's columns.
      w: ``[k, n]``, this rank's rows.
      axis_name: the mesh axis to sum over.
      gemm: the product of a block, ``([m, k], [k, n]) -> [m, n]``; by default with float32 sums.

    Returns:
      ``[m, n]`` of the operands' dtype; sums over ranks are float32.

    Raises:
      CollectiveError: the axis is not one, the shapes do not match, or P does not divide x's rows.
    """
    x = jnp.asarray(x)
    checks.blocks(x.shape, primitive.over(axis_name, "gemm_reduce_scatter").ranks, "gemm_reduce_scatter")
    return _bind("gemm_reduce_scatter", x, jnp.asarray(w), axis_name, gemm)


def _bind(name: str, x: jax.Array, w: jax.Array, axis_name: str, gemm: Gemm) -> jax.Array:
    over = primitive.over(axis_name, name)
    if len(over.axes) > 1:
        raise errors.UnsupportedError(f"{name} runs around the ring of one mesh axis, not of {over.axes}")
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise errors.CollectiveError(f"{name}: x is {x.shape} and w {w.shape}; they must be [rows, k] and [k, columns]")
    program = Product(name, over, gemm, jnp.result_type(x, w).name)
    return product_p.bind(*primitive.vary_alike(over.axes, x, w), program=program, simulated=())


@dataclasses.dataclass(frozen=True)
class Product:
    """A product with communication in it, of two matrices: the program of a rank.

    Attributes:
      name: ``"all_gather_gemm"``, ``"gemm_reduce_scatter"``, or what both need for their derivatives,
        ``"sum_of_gemms"``: ``all_gather(x).T @ y``, of ``[m, K]`` and ``[P * m, n]``, to ``[K, n]``.
      over: the ranks.
      gemm: the product of a block.
      dtype: of the result.
    """

    name: str
    over: Over
    gemm: Gemm
    dtype: str
    invariant: bool = False

    def result(self, x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a rank's result."""
        rows = {
            "all_gather_gemm": x.shape[0] * self.over.ranks,
            "gemm_reduce_scatter": x.shape[0] // self.over.ranks,
            "sum_of_gemms": x.shape[1],
        }
        return jax.ShapeDtypeStruct((rows[self.name], w.shape[1]), jnp.dtype(self.dtype))

    def marked(self, *operands: jax.Array, simulated: tuple[str | None, ...]) -> tuple[jax.Array, ...]:
        """The operands: profiles record collectives, not products."""
        return operands

    def run(self, x: jax.Array, w: jax.Array, *, ranks: Ranks) -> jax.Array:
        """A rank's result."""
        run = {
            "all_gather_gemm": _all_gather_gemm,
            "gemm_reduce_scatter": _gemm_reduce_scatter,
            "sum_of_gemms": _sum_of_gemms,
        }
        return run[self.name](x, w, self.gemm, _Ring(ranks)).astype(self.dtype)


class _Ring:
    """The ranks of one axis as a ring."""

    def __init__(self, ranks: Ranks):
        self.rank, self.ranks = ranks.index(), lax.axis_size(ranks.axis_name)
        up, down = ((np.arange(self.ranks) + step) % self.ranks for step in (1, -1))
        self.up, self.down = functools.partial(ranks.permute, dst=up), functools.partial(ranks.permute, dst=down)

    def block(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """Block ``index``, modulo P, of P blocks of rows."""
        rows = x.shape[0] // self.ranks
        return lax.dynamic_slice_in_dim(x, (index % self.ranks) * rows, rows)

    def visits(self, x: jax.Array, visit: Callable, carry: Any) -> tuple[Any, jax.Array]:
        """Takes every rank's ``x`` past every rank, (P - 1) / 2 steps both ways.

        ``carry, y = visit(carry, block, source)`` is called for the rank's own block, then for those of ranks r - 1 and
        r + 1, r - 2 and r + 2, and so on, while the next ones are under way. Returns the last carry, and the ys by
        source, ``[P, ...]``.
        """
        rank = self.rank

        def pair(carry, t, from_below, from_above):
            carry, below = visit(carry, from_below, rank - t)
            carry, above = visit(carry, from_above, rank + t)
            return carry, (below, above)

        def step(state, t):
            carry, from_below, from_above = state
            under_way = self.up(from_below), self.down(from_above)
            carry, ys = pair(carry, t, from_below, from_above)
            return (carry, *under_way), ys

        from_below, pairs = x, (self.ranks - 1) // 2
        below, above = [], []
        if pairs:
            from_below, from_above = self.up(x), self.down(x)
        carry, own = visit(carry, x, rank)
        if pairs:
            state = carry, from_below, from_above
            (carry, from_below, from_above), ys = lax.scan(step, state, jnp.arange(1, pairs))
            carry, last = pair(carry, pairs, from_below, from_above)
            below, above = ([many, one[None]] for many, one in zip(ys, last, strict=True))
        if self.ranks % 2 == 0:  # the rank on the other side of the ring
            carry, opposite = visit(carry, self.up(from_below), rank - self.ranks // 2)
            below.append(opposite[None])
        # Of sources r, r - 1, r - 2, ...
        ys = jnp.concatenate([own[None], *below, *(part[::-1] for part in above[::-1])])
        return carry, ys[(rank - jnp.arange(self.ranks)) % self.ranks]


def _all_gather_gemm(x: jax.Array, w: jax.Array, gemm: Gemm, ring: _Ring) -> jax.Array:
    _, products = ring.visits(x, lambda carry, block, source: (carry, gemm(block, w)), ())
    return products.reshape(-1, w.shape[1])


def _gemm_reduce_scatter(x: jax.Array, w: jax.Array, gemm: Gemm, ring: _Ring) -> jax.Array:
    """Partial sums for a rank travel to it from both sides, each rank on the way adding its product."""
    ranks, rank = ring.ranks, ring.rank

    def product(target: jax.Array) -> jax.Array:
        return gemm(ring.block(x, target), w).astype(_wide(x.dtype))

    def step(sums, distance):
        rising, falling = ring.up(sums[0]), ring.down(sums[1])
        return (rising + product(rank + distance), falling + product(rank - distance)), None

    total, pairs = product(rank), (ranks - 1) // 2
    rising = product(rank + ranks // 2)
    if ranks % 2 == 0 and pairs:  # the sums for the rank on the other side rise one step further than others fall
        rising = ring.up(rising) + product(rank + pairs)
    if pairs:
        (rising, falling), _ = lax.scan(step, (rising, product(rank - pairs)), jnp.arange(1, pairs)[::-1])
        total = total + ring.down(falling)
    return total + ring.up(rising) if ranks > 1 else total


def _sum_of_gemms(x: jax.Array, y: jax.Array, gemm: Gemm, ring: _Ring) -> jax.Array:
    def visit(total, block, source):
        return total + gemm(block.T, ring.block(y, source)).astype(total.dtype), jnp.zeros_like(x, shape=(0,))

    total, _ = ring.visits(x, visit, jnp.zeros_like(x, shape=(x.shape[1], y.shape[1]), dtype=_wide(x.dtype)))
    return total


product_p = primitive.ranked("glass_product")


def _product(name: str, lhs: jax.Array, rhs: jax.Array, of: jax.Array, program: Product, simulated: Any) -> jax.Array:
    """A product that is a derivative, of the dtype of what it is the cotangent of."""
    program = dataclasses.replace(program, name=name, dtype=of.aval.dtype.name)
    return product_p.bind(lhs, rhs, program=program, simulated=simulated)


def _turned(matrix: jax.Array) -> jax.Array:
    return jnp.swapaxes(matrix, -1, -2)


def _transpose_lhs(ct, x, w, *, program: Product, simulated: tuple[str | None, ...]):
    match program.name:
        case "all_gather_gemm":
            return _product("gemm_reduce_scatter", ct, _turned(w), x, program, simulated)
        case "gemm_reduce_scatter":
            return _product("all_gather_gemm", ct, _turned(w), x, program, simulated)
    return _product("gemm_reduce_scatter", w, _turned(ct), x, program, simulated)


def _transpose_rhs(ct, x, w, *, program: Product, simulated: tuple[str | None, ...]):
    match program.name:
        case "all_gather_gemm":
            return _product("sum_of_gemms", x, ct, w, program, simulated)
        case "gemm_reduce_scatter":
            return _turned(_product("sum_of_gemms", ct, x, w, program, simulated))
    return _product("all_gather_gemm", x, ct, w, program, simulated)


ad.defbilinear(product_p, _transpose_lhs, _transpose_rhs)


def all_reduce_buckets(
    tree: Any, axis_name: AxisName, *, bucket_bytes: int = BUCKET_BYTES, algorithm: str = "auto"
) -> Any:
    """:func:`collectives.all_reduce` of every leaf, in few large messages.

    Leaves of a dtype are put together, the last first, as a backward pass makes them, until a bucket has
    ``bucket_bytes``; a bucket depends on its own leaves only, so it can be under way while the backward pass computes
    the next one's.

    Args:
      tree: a pytree of arrays, for example a rank's gradients.
      axis_name: mesh axes to sum over.
      bucket_bytes: of a full bucket; a larger leaf is a bucket of its own.
      algorithm: see ``collectives``.

    Raises:
      CollectiveError: the axis or algorithm is not one, or ``bucket_bytes`` is not positive.
    """
    if bucket_bytes < 1:
        raise errors.CollectiveError(f"all_reduce_buckets: {bucket_bytes=} must be at least 1")
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    leaves = primitive.vary_alike(primitive.over(axis_name, "all_reduce_buckets").axes, *leaves)
    buckets = _buckets(leaves, axis_name, bucket_bytes, algorithm)
    return jax.tree.unflatten(structure, _reduced(leaves, buckets))


def _buckets(
    leaves: list[jax.Array], axis_name: AxisName, bucket_bytes: int, algorithm: str
) -> list[tuple[list[int], CollectiveProgram]]:
    """Indices of the leaves of each bucket, and the all-reduce of it."""
    buckets: list[list[int]] = []
    filling: dict[jnp.dtype, tuple[list[int], int]] = {}
    for index in reversed(range(len(leaves))):
        leaf = leaves[index]
        bucket, filled = filling.get(leaf.dtype, ([], bucket_bytes))
        if filled + leaf.nbytes > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        filling[leaf.dtype] = bucket, filled + leaf.nbytes
    flat = [
        jax.eval_shape(lambda *parts: jnp.concatenate(parts), *(leaves[i].ravel() for i in bucket))
        for bucket in buckets
    ]
    return [
        (bucket, collectives.prepare(x, "all_reduce", axis_name, algorithm, invariant=True))
        for bucket, x in zip(buckets, flat, strict=True)
    ]


def _reduced(leaves: list[jax.Array], buckets: list[tuple[list[int], CollectiveProgram]]) -> list[jax.Array]:
    results = list(leaves)
    for bucket, program in buckets:
        flat = jnp.concatenate([leaves[index].ravel() for index in bucket])
        total = collective_p.bind(flat, program=program, simulated=())
        ends = np.cumsum([leaves[index].size for index in bucket])[:-1]
        for index, part in zip(bucket, jnp.split(total, ends), strict=True):
            results[index] = part.reshape(leaves[index].shape)
    return results


def with_reduced_gradients(params: Any, axis_name: AxisName, *, algorithm: str = "auto") -> Any:
    """``params``, whose gradients arrive summed over the ranks, in one bucket a dtype.

    Applied to a layer's parameters where the layer uses them, also in a ``scan`` over layers, it puts the all-reduce of
    the layer's gradients into the backward pass at that layer, where the layers before it hide it.

    Args:
      params: a pytree of floating-point arrays that are equal on all ranks.
      axis_name: mesh axes to sum over.
      algorithm: see ``collectives``.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, params))
    axes = primitive.over(axis_name, "with_reduced_gradients").axes
    # Prepared here: under vmap the backward rule runs where the axis is no longer bound.
    buckets = _buckets(primitive.vary_alike(axes, *leaves), axis_name, sys.maxsize, algorithm)

    @jax.custom_vjp
    def identity(leaves):
        return primitive.vary_alike(axes, *leaves)

    identity.defvjp(lambda leaves: (identity(leaves), None), lambda _, gradients: (_reduced(gradients, buckets),))
    return jax.tree.unflatten(structure, identity(leaves))
