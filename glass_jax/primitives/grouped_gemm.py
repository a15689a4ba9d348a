"""``grouped_gemm`` and ``masked_grouped_gemm``: each row times the matrix of its group, as JAX primitives.

Both are one primitive, over B lists of groups with rows of their own: the first has one list, and the second a list of
one group for each. A batch dimension of 1 stands for all lists, which is how ``vmap`` treats operands that it does not
map over. The gradient of the matrices is a second primitive, ``k_grouped_gemm``, a product over the rows of each group.
Each is the transpose of the other, so that derivatives of any order are these two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from glass_jax.lowering import groups
from glass_jax.lowering.partition import Dimensions
from glass_jax.lowering.tiled import grouped_gemm as tiled
from glass_jax.lowering.xla import grouped_gemm as formula
from glass_jax.primitives import axes, checks, operation, products


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters of ``grouped_gemm``; see :func:`glass_jax.lowering.xla.grouped_gemm.grouped_gemm`."""

    out_dtype: jnp.dtype
    transpose_rhs: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class KParams(operation.Params):
    """Static parameters of ``k_grouped_gemm``; see :func:`glass_jax.lowering.xla.grouped_gemm.k_grouped_gemm`."""

    out_dtype: jnp.dtype
    sum_batch: bool = False


def grouped_gemm(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    group_sizes: jax.typing.ArrayLike,
    *,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The rows of each group times the matrix of the group, as ``jax.lax.ragged_dot``.

    Equivalent, up to summation order, to::

        group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(M), side="right")
        y = jnp.einsum("mk,mkn->mn", lhs, rhs[group], preferred_element_type=jnp.float32)
        return jnp.where((group < G)[:, None], y, 0).astype(preferred_element_type)

    Empty groups cost nothing, and their matrices are not read. Works under ``jit`` (sizes may be traced), ``vmap``,
    ``grad``, ``jvp``, ``jax.checkpoint``, ``shard_map`` and on meshes with Auto or Explicit axes: N stays sharded as it
    is; G (each device multiplies the rows of its own groups) and K end in one all-reduce of the result.

    Args:
      lhs: ``[M, K]``; float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8 (float64 on ``"xla"``). The rows
        of the first group, then those of the second, and so on.
      rhs: ``[G, K, N]``. The two fp8 formats mix freely, and so do the wider floats.
      group_sizes: integers ``[G]``, the number of rows of each group. If they sum up to less than M, the rows left over
        are zero in the result; what they have more than M does not exist.
      preferred_element_type: type of the result. Default: the operands' type; float32 for fp8, int32 for int8.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``[M, N]``.

    Raises:
      HardwareConstraintError: (a ValueError) shapes that do not fit each other, dtypes with no meaning, or, with
        ``glass.configure(alignment="strict")``, a dimension that the hardware cannot take as it is.
      UnsupportedError: float64 on the NPU.
    """
    lhs, rhs, group_sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    sizes = checks.dimensions("grouped_gemm", lhs=(lhs, "M K"), rhs=(rhs, "G K N"), group_sizes=(group_sizes, "G"))
    checks.integers("grouped_gemm", group_sizes=group_sizes)
    starts, ends = groups.one_after_another(_whole(group_sizes)[None], sizes["M"])
    return _call("grouped_gemm", lhs[None], rhs[None], starts, ends, preferred_element_type, implementation)[0]


def masked_grouped_gemm(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    masked_m: jax.typing.ArrayLike,
    *,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The first ``masked_m[g]`` rows of each group times the matrix of the group; the others are zero.

    Equivalent, up to summation order, to::

        y = jnp.einsum("gmk,gkn->gmn", lhs, rhs, preferred_element_type=jnp.float32)
        return jnp.where(jnp.arange(M)[:, None] < masked_m[:, None, None], y, 0).astype(preferred_element_type)

    Rows beyond ``masked_m[g]`` are not multiplied, and may hold anything. Transformations and meshes are those of
    :func:`grouped_gemm`, but that G stays sharded without communication.

    Args:
      lhs: ``[G, M, K]``, of the types that :func:`grouped_gemm` takes.
      rhs: ``[G, K, N]``.
      masked_m: integers ``[G]``; below 0 is 0, above M is M.
      preferred_element_type: as in :func:`grouped_gemm`.
      implementation: as in :func:`grouped_gemm`.

    Returns:
      ``[G, M, N]``.

    Raises:
      HardwareConstraintError: as :func:`grouped_gemm`.
      UnsupportedError: float64 on the NPU.
    """
    lhs, rhs, masked_m = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(masked_m)
    sizes = checks.dimensions("masked_grouped_gemm", lhs=(lhs, "G M K"), rhs=(rhs, "G K N"), masked_m=(masked_m, "G"))
    checks.integers("masked_grouped_gemm", masked_m=masked_m)
    ends = jnp.clip(masked_m, 0, sizes["M"]).astype(jnp.int32)[:, None]
    return _call(
        "masked_grouped_gemm", lhs, rhs[:, None], jnp.zeros_like(ends), ends, preferred_element_type, implementation
    )


def _call(name: str, lhs, rhs, starts, ends, preferred_element_type, implementation) -> jax.Array:
    dtype = products.operand_dtype(name, lhs.dtype, rhs.dtype)
    out_dtype = products.result_dtype(name, dtype, preferred_element_type)
    if dtype not in products.FLOAT8:
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    return GROUPED_GEMM.bind(lhs, rhs, starts, ends, params=Params.chosen(implementation, out_dtype=out_dtype))


def _whole(sizes: jax.Array) -> jax.Array:
    """All of the sizes on every device: where a group begins depends on those before it."""
    return axes.placed(sizes, jax.P(None))


# --- abstract evaluation and dimensions ----------------------------------------------------------------------------


def _batch_of(*operands) -> int:
    return max(x.shape[0] for x in operands)


def _abstract_eval(lhs, rhs, starts, ends, *, params: Params):
    n = rhs.shape[2 if params.transpose_rhs else 3]
    if params.alignment == "strict":
        tiled.check_alignment(lhs, rhs, params)
    return jax.ShapeDtypeStruct((_batch_of(lhs, rhs, starts, ends), lhs.shape[1], n), params.out_dtype)


def _k_abstract_eval(lhs, rhs, starts, ends, *, params: KParams):
    if params.alignment == "strict":
        tiled.check_k_alignment(lhs, rhs, params)
    batch = 1 if params.sum_batch else _batch_of(lhs, rhs, starts, ends)
    return jax.ShapeDtypeStruct((batch, starts.shape[1], lhs.shape[2], rhs.shape[2]), params.out_dtype)


def _lists(*operands) -> list[str]:
    """Name of each operand's batch dimension: one of size 1 among larger ones is a dimension of its own."""
    batch = _batch_of(*operands)
    return ["b" if x.shape[0] == batch else f"b{i}" for i, x in enumerate(operands)]


def _dimensions(*operands, params: Params) -> Dimensions:
    lhs, rhs, starts, ends = _lists(*operands)
    matrix = "n k" if params.transpose_rhs else "k n"
    rule = f"{lhs} m k, {rhs} g {matrix}, {starts} g, {ends} g -> b m n"
    return Dimensions(rule, parallel="b n", summed="g k")


def _k_dimensions(*operands, params: KParams) -> Dimensions:
    lhs, rhs, starts, ends = _lists(*operands)
    rule = f"{lhs} m k, {rhs} m n, {starts} g, {ends} g -> "
    if params.sum_batch:
        return Dimensions(rule + "all g k n", parallel="g k n", summed="b")
    return Dimensions(rule + "b g k n", parallel="b g k n")


# --- transformations -----------------------------------------------------------------------------------------------


def _jvp(bind, primals, tangents, *, params):
    """Both operations are linear in each of their first two operands; integers have no tangents."""
    lhs, rhs, *bounds = primals
    lhs_dot, rhs_dot, *_ = tangents
    out = bind(lhs, rhs, *bounds, params=params)
    terms = []
    if not isinstance(lhs_dot, ad.Zero):
        terms.append(bind(lhs_dot, rhs, *bounds, params=params))
    if not isinstance(rhs_dot, ad.Zero):
        terms.append(bind(lhs, rhs_dot, *bounds, params=params))
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, sum(terms[1:], start=terms[0])


def _transpose(cotangent, lhs, rhs, *bounds, params: Params):
    cotangent = ad.instantiate_zeros(cotangent)
    if ad.is_undefined_primal(lhs):
        grad = _grouped(
            cotangent, rhs, *bounds, params=_changed(Params, params, lhs.aval, transpose_rhs=not params.transpose_rhs)
        )
        return _like(grad, lhs.aval), None, None, None
    pair = (cotangent, lhs) if params.transpose_rhs else (lhs, cotangent)
    # Each device needs the groups whose matrices it has.
    bounds = [axes.placed(x, jax.P(jax.typeof(x).sharding.spec[0], rhs.aval.sharding.spec[1])) for x in bounds]
    sum_batch = rhs.aval.shape[0] < _batch_of(*pair, *bounds)
    grad = _k_grouped(*pair, *bounds, params=_changed(KParams, params, rhs.aval, sum_batch=sum_batch))
    return None, _like(grad, rhs.aval), None, None


def _k_transpose(cotangent, lhs, rhs, *bounds, params: KParams):
    cotangent = ad.instantiate_zeros(cotangent)
    if ad.is_undefined_primal(lhs):
        grad = _grouped(rhs, cotangent, *bounds, params=_changed(Params, params, lhs.aval, transpose_rhs=True))
        return _like(grad, lhs.aval), None, None, None
    grad = _grouped(lhs, cotangent, *bounds, params=_changed(Params, params, rhs.aval))
    return None, _like(grad, rhs.aval), None, None


def _changed(kind: type, params: operation.Params, aval, **own) -> operation.Params:
    """The parameters of a product whose result has the type of ``aval``, by the implementation of ``params``."""
    shared = {field.name: getattr(params, field.name) for field in dataclasses.fields(operation.Params)}
    return kind(**shared, out_dtype=aval.dtype, **own)


def _like(grad: jax.Array, aval) -> jax.Array:
    """``grad`` in the shape of its operand: one list may stand for all, or all cotangents be the same."""
    if grad.shape[0] != aval.shape[0]:
        if aval.shape[0] == 1:
            grad = jnp.sum(grad, 0, keepdims=True, dtype=formula.accumulator(grad.dtype)).astype(grad.dtype)
        else:
            grad = jnp.broadcast_to(grad, aval.shape)
    return grad


def _fold(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> tuple[list[jax.Array], tuple[int, int]]:
    """``operands`` with the mapped and the batch dimension as one, of the full size or 1; and both full sizes."""
    moved = axes.lead(operands, dims)
    full = max(x.shape[0] for x in moved), max(x.shape[1] for x in moved)

    def flat(x):
        if x.shape[:2] == (1, 1):
            return x[0]
        # Only operands with one but not both of the dimensions are copied.
        return jnp.broadcast_to(x, (*full, *x.shape[2:])).reshape(-1, *x.shape[2:])

    return [flat(x) for x in moved], full


def _batch(operands, dims, *, params: Params):
    folded, full = _fold(operands, dims)
    out = GROUPED_GEMM.bind(*folded, params=params)
    return out.reshape(*full, *out.shape[1:]), 0


def _k_batch(operands, dims, *, params: KParams):
    folded, full = _fold(operands, dims)
    out = K_GROUPED_GEMM.bind(*folded, params=dataclasses.replace(params, sum_batch=False))
    out = out.reshape(*full, *out.shape[1:])
    if params.sum_batch:
        out = jnp.sum(out, 1, keepdims=True, dtype=formula.accumulator(out.dtype)).astype(out.dtype)
    return out, 0


# --- registration --------------------------------------------------------------------------------------------------


def _grouped(lhs, rhs, *bounds, params: Params) -> jax.Array:
    return GROUPED_GEMM.bind(*products.promoted(lhs, rhs), *bounds, params=params)


def _k_grouped(lhs, rhs, *bounds, params: KParams) -> jax.Array:
    return K_GROUPED_GEMM.bind(*products.promoted(lhs, rhs), *bounds, params=params)


def _formula(*operands, params: Params) -> jax.Array:
    return formula.grouped_gemm(*operands, transpose_rhs=params.transpose_rhs, out_dtype=params.out_dtype)


def _k_formula(*operands, params: KParams) -> jax.Array:
    return formula.k_grouped_gemm(*operands, sum_batch=params.sum_batch, out_dtype=params.out_dtype)


GROUPED_GEMM = operation.Operation(
    "grouped_gemm",
    abstract_eval=_abstract_eval,
    formula=_formula,
    tiled=tiled.grouped_gemm,
    batch=_batch,
    dimensions=_dimensions,
    jvp=functools.partial(_jvp, _grouped),
    transpose=_transpose,
)

K_GROUPED_GEMM = operation.Operation(
    "k_grouped_gemm",
    abstract_eval=_k_abstract_eval,
    formula=_k_formula,
    tiled=tiled.k_grouped_gemm,
    batch=_k_batch,
    dimensions=_k_dimensions,
    jvp=functools.partial(_jvp, _k_grouped),
    transpose=_k_transpose,
)
