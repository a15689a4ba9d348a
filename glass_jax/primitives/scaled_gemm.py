"""``scaled_gemm``: product of fp8 matrices with a scale for each block, as a JAX primitive.

The public function brings every layout of scales to one: K cut into blocks, and for each row of ``lhs`` and column of
the result a scale for each block. So the primitive has a dimension "block of K", over which devices may share the sum,
and rows and columns are split wherever they are. Batch dimensions are equal or 1, as those of ``gemm``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax import config, errors
from glass_jax.lowering import partition
from glass_jax.lowering.tiled import scaled_gemm as tiled
from glass_jax.lowering.xla import scaled_gemm as formula
from glass_jax.lowering.xla.scaled_gemm import E8M0
from glass_jax.primitives import axes, operation, products

ROWS = (1, 128)  # rows, or columns of the result, that may share a scale
DEPTHS = (128, 32)  # and elements of K


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters of the primitive; see :func:`glass_jax.lowering.xla.scaled_gemm.scaled_gemm`."""

    out_dtype: jnp.dtype
    transpose_rhs: bool


def scaled_gemm(
    lhs: jax.typing.ArrayLike,
    lhs_scale: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    rhs_scale: jax.typing.ArrayLike,
    *,
    transpose_rhs: bool = True,
    preferred_element_type: jax.typing.DTypeLike | None = jnp.bfloat16,
    implementation: str | None = None,
) -> jax.Array:
    """The product of two quantized matrices, multiplied out: what :func:`glass_jax.quantize` returns goes in here.

    Equivalent, up to summation order, to::

        spread = lambda scale, shape: jnp.repeat(jnp.repeat(scale, rows, -2), depth, -1)[..., : shape[-2], : shape[-1]]
        x, w = lhs * spread(lhs_scale, lhs.shape), rhs * spread(rhs_scale, rhs.shape)        # in float32
        return jnp.matmul(x, w.mT).astype(preferred_element_type)                            # w if not transpose_rhs

    Each scale is for ``rows`` = 1 or 128 rows (columns of a ``[K, N]``) and ``depth`` = 128 or 32 elements of K; which
    one follows from its shape. Sums are float32, with one rounding at the end.

    **On the NPU** scales are powers of two (``glass.quantize(..., scale="e8m0")``), the operands float8_e4m3fn. A
    float32 scale that is no power of two is an error: outside of ``jit`` it raises. Where nothing can be raised, what
    it scales is NaN: a row of the result, or a column. ``"xla"`` takes any scales.

    Works under ``jit``, ``vmap``, ``jax.checkpoint``, ``shard_map`` and on meshes with Auto or Explicit axes: M, N and
    batch dimensions stay sharded as they are, a K that is sharded by whole blocks ends in one all-reduce of the result.
    It has no derivative.

    Args:
      lhs: ``[*batch, M, K]``, float8_e4m3fn or float8_e5m2.
      lhs_scale: ``[*batch, ceil(M / rows), ceil(K / depth)]``, float32 or float8_e8m0fnu.
      rhs: ``[N, K]`` or ``[*batch, N, K]`` (``[K, N]`` without ``transpose_rhs``), one of the same types. Batch
        dimensions broadcast as in NumPy.
      rhs_scale: ``[*batch, ceil(N / rows), ceil(K / depth)]``, in the order of ``rhs``; batch dimensions are its own.
      transpose_rhs: ``rhs`` holds ``[N, K]``.
      preferred_element_type: type of the result, bfloat16, float16 or float32.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``[*batch, M, N]``.

    Raises:
      HardwareConstraintError: (a ValueError) shapes that do not fit each other, other dtypes, on the NPU and outside of
        ``jit`` a scale that is no power of two, or, with ``glass.configure(alignment="strict")``, a dimension that the
        hardware cannot take as it is.
      UnsupportedError: on the NPU, float8_e5m2, or a chip that no code is generated for; differentiation.
    """
    lhs, lhs_scale, rhs, rhs_scale = map(jnp.asarray, (lhs, lhs_scale, rhs, rhs_scale))
    out_dtype = _check(lhs, rhs, transpose_rhs, preferred_element_type)
    params = Params.chosen(implementation, out_dtype=out_dtype, transpose_rhs=transpose_rhs)
    k = lhs.shape[-1]
    rows = lhs.shape[-2], rhs.shape[-2 if transpose_rhs else -1]
    if params.alignment == "strict":
        tiled.check_alignment(*rows, k, params)
    granules = [
        _granule("lhs", lhs, lhs_scale, rows[0], transposed=False),
        _granule("rhs", rhs, rhs_scale, rows[1], transposed=not transpose_rhs),
    ]
    if params.implementation in config.KERNEL_IMPLEMENTATIONS:
        _check_powers_of_two(lhs_scale=lhs_scale, rhs_scale=rhs_scale)
    if not transpose_rhs:
        rhs_scale = jnp.swapaxes(rhs_scale, -1, -2)
    finest = min(depth for _, depth in granules)
    # Smaller blocks are taken where K is not a multiple of the given ones: operands would have to be padded.
    depth = next((size for size in (128, 64, 32) if size <= finest and k % size == 0), 32)
    scales = [
        _spread(scale, granule, depth, count, k)
        for scale, granule, count in zip((lhs_scale, rhs_scale), granules, rows, strict=True)
    ]
    lhs = axes.into_blocks(lhs, lhs.ndim - 1, depth)
    rhs = axes.into_blocks(rhs, rhs.ndim - (1 if transpose_rhs else 2), depth)
    rank = max(lhs.ndim, rhs.ndim)
    operands = (
        lax.expand_dims(x, range(full - x.ndim))
        for x, full in ((lhs, rank), (scales[0], rank - 1), (rhs, rank), (scales[1], rank - 1))
    )
    return SCALED_GEMM.bind(*operands, params=params)


def _check(lhs: jax.Array, rhs: jax.Array, transpose_rhs: bool, preferred: jax.typing.DTypeLike | None) -> jnp.dtype:
    """The type of the result, if the operands fit each other."""
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if x.dtype not in products.FLOAT8:
            raise errors.HardwareConstraintError(
                f"scaled_gemm: {name} is {x.dtype}; use float8_e4m3fn or float8_e5m2 (glass.quantize makes them), or "
                "glass.gemm for operands without scales"
            )
        if x.ndim < 2:
            raise errors.HardwareConstraintError(
                f"scaled_gemm multiplies matrices: {name} has shape {x.shape}; add a dimension with x[None, :]"
            )
    if lhs.shape[-1] != rhs.shape[-1 if transpose_rhs else -2]:
        raise errors.HardwareConstraintError(
            f"scaled_gemm: K of lhs {lhs.shape} is {lhs.shape[-1]} and K of rhs {rhs.shape} is "
            f"{rhs.shape[-1 if transpose_rhs else -2]} ({transpose_rhs=}): pass rhs as [..., N, K], or as [..., K, N] "
            "with transpose_rhs=False"
        )
    try:
        jnp.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    except ValueError as error:
        raise errors.HardwareConstraintError(
            f"scaled_gemm: batch dimensions {lhs.shape[:-2]} of lhs and {rhs.shape[:-2]} of rhs do not broadcast"
        ) from error
    return products.result_dtype("scaled_gemm", lhs.dtype, preferred)


def _granule(name: str, x: jax.Array, scale: jax.Array, rows: int, *, transposed: bool) -> tuple[int, int]:
    """Rows and elements of K that share one of ``scale``, which is in the order of ``x``, ``transposed`` or not.

    Shapes never leave a choice that matters: where two sizes of a block make as many of them, there is one.
    """
    if scale.dtype not in (jnp.float32, E8M0):
        raise errors.HardwareConstraintError(
            f"scaled_gemm: {name}_scale is {scale.dtype}; use float32 or float8_e8m0fnu"
        )
    k, order = x.shape[-2 if transposed else -1], -1 if transposed else 1
    found = [
        (high, deep)
        for high in ROWS
        for deep in DEPTHS
        if scale.shape == (*x.shape[:-2], *(-(-rows // high), -(-k // deep))[::order])
    ]
    if not found:
        expected = [f"{rows} or {-(-rows // 128)}", f"{-(-k // 128)} or {-(-k // 32)}"][::order]
        raise errors.HardwareConstraintError(
            f"scaled_gemm: {name}_scale has shape {scale.shape}; with {name} {x.shape} expected "
            f"[{', '.join([*map(str, x.shape[:-2]), *expected])}]: a scale for 1 or 128 "
            f"{'columns' if transposed else 'rows'} and 128 or 32 elements of K"
        )
    return found[0]


def _check_powers_of_two(**scales: jax.Array) -> None:
    """Raises HardwareConstraintError for a known float32 scale that is no power of two."""
    for name, scale in scales.items():
        if scale.dtype == E8M0 or isinstance(scale, jax.core.Tracer):
            continue
        wrong = np.asarray(tiled.e8m0_bytes(scale) == tiled.NAN)
        if wrong.any():
            first = tuple(map(int, np.argwhere(wrong)[0]))
            raise errors.HardwareConstraintError(
                f"scaled_gemm: {int(wrong.sum())} of {wrong.size} scales in {name} are no powers of two, the first one "
                f'{scale[first]} at {first}, and the NPU multiplies with powers of two only. Use scale="e8m0" of '
                'glass.quantize, or implementation="xla"'
            )


def _spread(scale: jax.Array, granule: tuple[int, int], depth: int, rows: int, k: int) -> jax.Array:
    """A scale for each row and each ``depth`` elements of K, from one for each granule."""
    high, deep = granule
    for axis, repeats, length in ((scale.ndim - 2, high, rows), (scale.ndim - 1, deep // depth, -(-k // depth))):
        if scale.shape[axis] != length:
            scale = axes.repeated(scale, axis, repeats, length)
    return scale


# --- rules ---------------------------------------------------------------------------------------------------------


def _batch_shape(lhs, lhs_scale, rhs, rhs_scale) -> tuple[int, ...]:
    return jnp.broadcast_shapes(lhs.shape[:-3], lhs_scale.shape[:-2], rhs.shape[:-3], rhs_scale.shape[:-2])


def _abstract_eval(*operands, params: Params) -> jax.ShapeDtypeStruct:
    lhs, _, rhs, _ = operands
    m, n = lhs.shape[-3], rhs.shape[-3 if params.transpose_rhs else -1]
    return jax.ShapeDtypeStruct((*_batch_shape(*operands), m, n), params.out_dtype)


def _dimensions(*operands, params: Params) -> partition.Dimensions:
    batch = _batch_shape(*operands)
    lasts = ("m g c", "m g", "n g c" if params.transpose_rhs else "g c n", "n g")
    terms = [
        " ".join([*partition.broadcast("b", tag, x.shape, batch), last])
        for x, last, tag in zip(operands, lasts, ("l", "s", "r", "t"), strict=True)
    ]
    names = " ".join(f"b{d}" for d in range(len(batch)))
    return partition.Dimensions(f"{', '.join(terms)} -> {names} m n", parallel=f"{names} m n", summed="g")


def _derivative(*operands, params: Params):
    raise errors.UnsupportedError(
        "scaled_gemm has no derivative: its operands are quantized. Put jax.lax.stop_gradient around them, or give the "
        "function that quantizes and multiplies a derivative of its own with jax.custom_vjp"
    )


def _formula(*operands, params: Params) -> jax.Array:
    return formula.scaled_gemm(*operands, transpose_rhs=params.transpose_rhs, out_dtype=params.out_dtype)


SCALED_GEMM = operation.Operation(
    "scaled_gemm",
    abstract_eval=_abstract_eval,
    formula=_formula,
    tiled=tiled.scaled_gemm,
    batch=lambda operands, dims, *, params: (SCALED_GEMM.bind(*axes.lead(operands, dims), params=params), 0),
    dimensions=_dimensions,
    derivative=_derivative,
)
