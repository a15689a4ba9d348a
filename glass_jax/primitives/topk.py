"""``topk``: the largest elements of rows and where they are, as a JAX primitive.

The primitive marks what a row does not have with ``-inf`` and ``NO_INDEX``; the fills that a caller wants are put in
their place outside of it. Rows of the operands broadcast: ``vmap`` leaves an operand that it does not map as it is.
"""

from __future__ import annotations

import dataclasses
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from glass_jax import errors
from glass_jax.lowering import partition, sizes
from glass_jax.lowering.tiled import topk as tiled
from glass_jax.lowering.xla import topk as formula
from glass_jax.lowering.xla.topk import NO_INDEX
from glass_jax.primitives import axes, checks, operation
from glass_jax.primitives.operation import Operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters of the primitive.

    Attributes:
      k: how many elements of each row.
      sorted: largest first.
      sorted_index: lowest index first.
    """

    k: int
    sorted: bool
    sorted_index: bool


def topk(
    x: jax.typing.ArrayLike,
    k: int,
    *,
    start: jax.typing.ArrayLike | None = None,
    end: jax.typing.ArrayLike | None = None,
    sorted: bool = False,  # noqa: A002 (as torch.topk calls it)
    sorted_index: bool = False,
    value_fill: float = -math.inf,
    index_fill: int = NO_INDEX,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The ``k`` largest elements of each row, exactly, and their indices.

    The elements are those that ``lax.top_k`` takes: of equal ones the first, +0 before -0. On the CPU this is many
    times faster for 16-bit types.

    A NaN among the elements of a row that count is an error: outside of ``jit`` it raises. Where nothing can be
    raised (``jit``, ``vmap``, ``grad``, ...) all values of that row are NaN and all its indices ``index_fill``, and its
    gradient has a NaN.

    Works under ``jit``, ``vmap``, ``grad`` (of any order), ``jvp``, ``jax.checkpoint``, ``shard_map`` and on meshes
    with Auto or Explicit axes: rows stay sharded as they are, v is made whole.

    Args:
      x: ``[..., v]``; float32, float16 or bfloat16 (float64 on ``"xla"``).
      k: how many; at most 4096 on the NPU. May exceed the length of a row.
      start: int32 ``[...]``: of each row only the elements from this one on count, as queries of
        :func:`glass_jax.mqa_logits` see keys; default: from the first. Less than 0 counts as 0.
      end: int32 ``[...]``: of each row only the elements before this one count; default: all. More than v counts as v,
        and at or before ``start`` is none.
      sorted: largest first. Without it and ``sorted_index`` the order is not specified.
      sorted_index: lowest index first.
      value_fill: value where a row has less than ``k`` elements that count, always after those it has.
      index_fill: int32, index there.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      values: ``[..., k]`` of the type of ``x``, bit for bit elements of ``x``.
      indices: ``[..., k]`` int32.

    Raises:
      HardwareConstraintError: (a ValueError) an ``x`` that is no float or has no dimension, a ``start`` or ``end``
        that is no integer or not one for each row, ``k`` less than 1, ``value_fill`` NaN, ``sorted`` together with
        ``sorted_index``.
      NotANumberError: outside of ``jit``, a NaN in ``x``.
      UnsupportedError: on the NPU, float64, or ``k`` above 4096.
    """
    x = jnp.asarray(x)
    columns = x.shape[-1] if x.ndim else 0
    start, end = (
        jnp.full(x.shape[:-1], default, jnp.int32) if bound is None else jnp.asarray(bound)
        for bound, default in ((start, 0), (end, columns))
    )
    k = operator.index(k)
    _check(x, start, end, k, value_fill, index_fill, sorted and sorted_index)
    params = Params.chosen(implementation, k=k, sorted=bool(sorted), sorted_index=bool(sorted_index))
    bounds = (sizes.within_int32(bound, columns) for bound in (start, end))
    values, indices = TOPK.bind(x, *bounds, params=params)
    _check_nans(values)
    missing = indices == NO_INDEX
    if value_fill != -math.inf:
        values = jnp.where(missing & ~jnp.isnan(values), jnp.asarray(value_fill, x.dtype), values)
    if index_fill != NO_INDEX:
        indices = jnp.where(missing, jnp.int32(index_fill), indices)
    return values, indices


def _check(
    x: jax.Array,
    start: jax.Array,
    end: jax.Array,
    k: int,
    value_fill: float,
    index_fill: int,
    both_orders: bool,
) -> None:
    checks.dimensions("topk", x=(x, "... v"))
    checks.floats("topk", x=x)
    checks.integers("topk", start=start, end=end)
    for name, bound in (("start", start), ("end", end)):
        if bound.shape != x.shape[:-1]:
            raise errors.HardwareConstraintError(
                f"topk: {name} has shape {bound.shape}, expected {x.shape[:-1]}: one number for each row of x {x.shape}"
            )
    if k < 1:
        raise errors.HardwareConstraintError(f"topk: {k=} must be at least 1")
    if both_orders:
        raise errors.HardwareConstraintError("topk: sorted and sorted_index are two orders; ask for one of them")
    if math.isnan(value_fill):
        raise errors.HardwareConstraintError(
            "topk: value_fill is NaN, which stands for a row that holds one; use another value"
        )
    if not -(2**31) <= index_fill < 2**31:
        raise errors.HardwareConstraintError(f"topk: {index_fill=} is not an int32")


def _check_nans(values: jax.Array) -> None:
    if not isinstance(values, jax.core.Tracer) and (poisoned := jnp.isnan(values).any(-1)).any():
        first = tuple(map(int, np.argwhere(poisoned)[0]))
        raise errors.NotANumberError(
            f"topk: {int(poisoned.sum())} of {poisoned.size} rows of x hold a NaN, the first one at {first}; there is "
            "no order with it. Replace it, or let start and end exclude it"
        )


def _abstract_eval(x, start, end, *, params: Params) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = (*jnp.broadcast_shapes(x.shape[:-1], start.shape, end.shape), params.k)
    return jax.ShapeDtypeStruct(shape, x.dtype), jax.ShapeDtypeStruct(shape, jnp.int32)


def _dimensions(x, start, end, *, params: Params) -> partition.Dimensions:
    shape = jnp.broadcast_shapes(x.shape[:-1], start.shape, end.shape)
    rows, of_x, of_start, of_end = (
        " ".join(partition.broadcast("r", tag, given, shape))
        for tag, given in (("", shape), ("x", x.shape), ("s", start.shape), ("e", end.shape))
    )
    return partition.Dimensions(f"{of_x} v, {of_start}, {of_end} -> {rows} k, {rows} k", parallel=rows)


def _formula(x, start, end, *, params: Params) -> tuple[jax.Array, jax.Array]:
    return formula.topk(x, start, end, k=params.k, sorted_index=params.sorted_index)


def _jvp(primals, tangents, *, params: Params):
    """The tangents of the elements that were chosen: linear in those of ``x``, so that JAX transposes it."""
    values, indices = TOPK.bind(*primals, params=params)
    x_dot, *_ = tangents
    indices_dot = ad.Zero(jax.typeof(indices).to_tangent_aval())
    if isinstance(x_dot, ad.Zero):
        return (values, indices), (ad.Zero(jax.typeof(values).to_tangent_aval()), indices_dot)
    if axes.is_sharded(x_dot_type := jax.typeof(x_dot)):  # which the gather takes with v whole
        x_dot = jax.sharding.reshard(x_dot, jax.P(*x_dot_type.sharding.spec[:-1], None))
    # A row with a NaN has none that were chosen: its first element stands for them, times NaN.
    poisoned = jnp.isnan(values)
    x_dot = jnp.broadcast_to(x_dot, (*values.shape[:-1], x_dot.shape[-1]))
    chosen = jnp.where(poisoned, 0, indices)
    values_dot = jnp.take_along_axis(x_dot, chosen, axis=-1, mode="fill", fill_value=0)
    return (values, indices), (values_dot * jnp.where(poisoned, jnp.nan, 1).astype(x_dot.dtype), indices_dot)


TOPK = Operation(
    "topk",
    abstract_eval=_abstract_eval,
    formula=_formula,
    tiled=tiled.topk,
    batch=lambda operands, dims, *, params: (TOPK.bind(*axes.lead(operands, dims), params=params), (0, 0)),
    dimensions=_dimensions,
    multiple_results=True,
    jvp=_jvp,
)
