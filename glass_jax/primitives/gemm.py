"""``gemm``: matrix product with bias and activation, as a JAX primitive.

The primitive works on operands of one rank whose batch dimensions are equal or 1, as ``jnp.matmul`` broadcasts them;
the public function brings its arguments to that form. An operand with a 1 stands for all positions of that dimension
and is never copied, which is how ``vmap`` treats operands it does not map over.
"""

from __future__ import annotations

import collections
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from glass_jax import errors
from glass_jax.lowering import partition
from glass_jax.lowering.tiled import gemm as tiled
from glass_jax.lowering.xla import gemm as formula
from glass_jax.primitives import axes, checks, operation, products

ACTIVATIONS = (None, "relu", "gelu", "silu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters of the primitive; see :func:`glass_jax.lowering.xla.gemm.gemm`."""

    out_dtype: jnp.dtype
    transpose_lhs: bool = False
    transpose_rhs: bool = False
    activation: str | None = None

    @property
    def statics(self) -> dict:
        """The parameters of the formula."""
        names = ("out_dtype", "transpose_lhs", "transpose_rhs", "activation")
        return {name: getattr(self, name) for name in names}


def gemm(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    *,
    bias: jax.typing.ArrayLike | None = None,
    activation: str | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """``activation(lhs @ rhs + bias)``, with one rounding at the end.

    Equivalent, up to summation order, to::

        y = jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32) + bias   # int32 for int8 operands
        return activation(y).astype(preferred_element_type)

    Works under ``jit``, ``vmap``, ``grad``, ``jvp``, ``jax.checkpoint``, ``shard_map`` and on meshes with Auto or
    Explicit axes: M, N and batch dimensions stay sharded as they are, a sharded K ends in one all-reduce of the result.

    Args:
      lhs: ``[*batch, M, K]``; float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8 (float64 on ``"xla"``).
      rhs: ``[K, N]`` or ``[*batch, K, N]`` (``[N, K]`` with ``transpose_rhs``). Batch dimensions broadcast as in NumPy.
        The two fp8 formats mix freely, and so do the wider floats (the product is of their promoted type).
      bias: ``[N]`` or ``[*batch, N]``, a float, or int32 for int8 operands; added before the activation.
      activation: ``"relu"``, ``"gelu"`` (the tanh form, like ``jax.nn.gelu``), ``"silu"`` or None; int8: relu or None.
      transpose_rhs: ``rhs`` holds ``[N, K]``.
      preferred_element_type: type of the result. Default: the operands' type; float32 for fp8, int32 for int8.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``[*batch, M, N]``.

    Raises:
      HardwareConstraintError: (a ValueError) shapes that do not fit each other, dtypes with no meaning, or, with
        ``glass.configure(alignment="strict")``, a dimension that the hardware cannot take as it is.
      UnsupportedError: float64 on the NPU.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    if lhs.ndim < 2 or rhs.ndim < 2:
        raise errors.HardwareConstraintError(
            f"gemm multiplies matrices: lhs has shape {lhs.shape} and rhs {rhs.shape}; "
            "add a dimension to a vector with x[None, :] or x[:, None]"
        )
    k_lhs, (k_rhs, n) = lhs.shape[-1], rhs.shape[:-3:-1] if transpose_rhs else rhs.shape[-2:]
    if k_lhs != k_rhs:
        other = rhs.shape[-2:] if not transpose_rhs else (n, k_rhs)
        hint = "transpose_rhs=True" if not transpose_rhs and rhs.shape[-1] == k_lhs else "a matching rhs"
        raise errors.HardwareConstraintError(
            f"gemm: K of lhs is {k_lhs} (lhs {lhs.shape}) and K of rhs is {k_rhs} (rhs [..., {other[0]}, {other[1]}], "
            f"{transpose_rhs=}): pass {hint}"
        )
    dtype = products.operand_dtype("gemm", lhs.dtype, rhs.dtype)
    out_dtype = products.result_dtype("gemm", dtype, preferred_element_type)
    if activation not in ACTIVATIONS or (dtype == jnp.int8 and activation not in (None, "relu")):
        allowed = "relu or None" if dtype == jnp.int8 else "relu, gelu, silu or None"
        raise errors.HardwareConstraintError(f"gemm: {activation=} with {dtype} operands; use {allowed}")
    if lhs.dtype not in products.FLOAT8:
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)

    try:
        batch = jnp.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    except ValueError as error:
        raise errors.HardwareConstraintError(
            f"gemm: batch dimensions {lhs.shape[:-2]} of lhs and {rhs.shape[:-2]} of rhs do not broadcast"
        ) from error
    operands = [_with_rank(lhs, len(batch) + 2), _with_rank(rhs, len(batch) + 2)]
    if bias is not None:
        operands.append(_with_rank(_checked_bias(jnp.asarray(bias), dtype, batch, n), len(batch) + 1))

    params = Params.chosen(implementation, out_dtype=out_dtype, transpose_rhs=transpose_rhs, activation=activation)
    _check_sharding(*map(jax.typeof, operands[:2]), params)
    return GEMM.bind(*operands, params=params)


def _check_sharding(lhs, rhs, params: Params) -> None:
    """Raises HardwareConstraintError if it is open which dimension of the result an Explicit mesh axis would shard."""
    left, right = lhs.sharding.spec, rhs.sharding.spec
    batch = [a if a is not None else b for a, b in zip(left[:-2], right[:-2], strict=True)]
    of_result = (*batch, left[-2], right[-2 if params.transpose_rhs else -1])
    counts = collections.Counter(name for entry in of_result for name in partition.axes(entry))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise errors.HardwareConstraintError(
            f"gemm: lhs {left} and rhs {right} would both shard dimensions of the result over {', '.join(twice)}; make "
            "rhs whole over it with jax.sharding.reshard"
        )


def _checked_bias(bias: jax.Array, dtype: jnp.dtype, batch: tuple[int, ...], n: int) -> jax.Array:
    """``bias`` in the accumulator's type."""
    shapes_fit = bias.ndim >= 1 and bias.shape[-1] == n and bias.ndim <= len(batch) + 1
    if shapes_fit:
        shapes_fit = all(b in (1, full) for b, full in zip(bias.shape[-2::-1], batch[::-1], strict=False))
    if not shapes_fit:
        expected = f"({n},)" + (f" or {(*batch, n)}" if batch else "")
        raise errors.HardwareConstraintError(f"gemm: bias has shape {bias.shape}; expected {expected}")
    accumulator = formula.accumulator(dtype)
    if bias.dtype != accumulator and not (bias.dtype in checks.FLOATS and accumulator in checks.FLOATS):
        raise errors.HardwareConstraintError(
            f"gemm: bias is {bias.dtype}, added to sums of {dtype} products; pass {accumulator}"
        )
    return bias.astype(accumulator)


def _with_rank(x: jax.Array, ndim: int) -> jax.Array:
    return lax.expand_dims(x, range(ndim - x.ndim))


def _product(lhs: jax.Array, rhs: jax.Array, params: Params, **changes: object) -> jax.Array:
    """A plain product as ``params`` say, operands of different floating types promoted."""
    lhs, rhs = products.promoted(lhs, rhs)
    return GEMM.bind(lhs, rhs, params=dataclasses.replace(params, activation=None, **changes))


# --- abstract evaluation and dimensions ----------------------------------------------------------------------------


def _extents(lhs, rhs, params: Params) -> tuple[tuple[int, ...], int, int, int]:
    """The batch dimensions, M, N and K."""
    m, k = lhs.shape[-2:][::-1] if params.transpose_lhs else lhs.shape[-2:]
    n = rhs.shape[-2 if params.transpose_rhs else -1]
    return jnp.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2]), m, n, k


def _abstract_eval(lhs, rhs, *bias, params: Params) -> jax.ShapeDtypeStruct:
    batch, m, n, k = _extents(lhs, rhs, params)
    if params.alignment == "strict":
        tiled.check_alignment(m, n, k, lhs.dtype, rhs.dtype, params)
    return jax.ShapeDtypeStruct((*batch, m, n), params.out_dtype)


def _dimensions(lhs, rhs, *bias, params: Params) -> partition.Dimensions:
    batch, *_ = _extents(lhs, rhs, params)

    def names(tag, x, last):
        return " ".join([*partition.broadcast("b", tag, x.shape, batch), last])

    terms = [
        names("l", lhs, "k m" if params.transpose_lhs else "m k"),
        names("r", rhs, "n k" if params.transpose_rhs else "k n"),
        *(names("c", x, "n") for x in bias),
    ]
    result = " ".join([*(f"b{d}" for d in range(len(batch))), "m n"])
    return partition.Dimensions(f"{', '.join(terms)} -> {result}", parallel=result, summed="k")


def _sum_of_parts(fn, over, lhs, rhs, *bias, params: Params) -> jax.Array:
    """Where devices share out K, bias and activation come once, after the sum."""
    sums = dataclasses.replace(params, activation=None, out_dtype=formula.accumulator(lhs.dtype))
    total = lax.psum(fn(lhs, rhs, params=sums), over[0])
    return formula.finish(total, *bias or [None], activation=params.activation, out_dtype=params.out_dtype)


# --- transformations -----------------------------------------------------------------------------------------------


def _jvp(primals, tangents, *, params: Params):
    if params.activation is not None:
        # The pre-activation sums are needed for the derivative; the result is the fused kernel's, which rounds once.
        sums = dataclasses.replace(params, activation=None, out_dtype=formula.accumulator(primals[0].dtype))
        z, z_dot = _jvp(primals, tangents, params=sums)
        act = partial(formula.activate, activation=params.activation)
        if isinstance(z_dot, ad.Zero):
            return act(z).astype(params.out_dtype), ad.Zero(jax.typeof(z).to_tangent_aval())
        y, y_dot = jax.jvp(act, (z,), (z_dot,))
        return y.astype(params.out_dtype), y_dot.astype(params.out_dtype)
    lhs, rhs, *_ = primals
    out = GEMM.bind(*primals, params=params)
    lhs_dot, rhs_dot, *bias_dot = tangents
    terms = []
    if not isinstance(lhs_dot, ad.Zero):
        terms.append(_product(lhs_dot, rhs, params))
    if not isinstance(rhs_dot, ad.Zero):
        terms.append(_product(lhs, rhs_dot, params))
    if bias_dot and not isinstance(bias_dot[0], ad.Zero):
        row, aval = jnp.expand_dims(bias_dot[0], -2).astype(params.out_dtype), jax.typeof(out)
        places = zip(aval.sharding.spec, aval.shape, row.shape, strict=True)
        spec = [entry if size == full else None for entry, full, size in places]
        sharding = aval.sharding if axes.is_sharded(aval) else None
        terms.append(jnp.broadcast_to(axes.placed(row, jax.P(*spec)), out.shape, out_sharding=sharding))
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, sum(terms[1:], start=terms[0])


def _transpose(cotangent, lhs, rhs, *, params: Params):
    """The transpose of a plain product in the operand that is undefined: a product with the other one."""
    cotangent = ad.instantiate_zeros(cotangent)
    if ad.is_undefined_primal(lhs):
        aval = lhs.aval
        if params.transpose_lhs:
            grad = _product(
                rhs, cotangent, params, out_dtype=aval.dtype, transpose_lhs=params.transpose_rhs, transpose_rhs=True
            )
        else:
            grad = _product(cotangent, rhs, params, out_dtype=aval.dtype, transpose_rhs=not params.transpose_rhs)
        return _sum_to(grad, aval.shape), None
    aval = rhs.aval
    lhs, cotangent = _fold_batch(lhs, cotangent, aval.shape, params)
    if params.transpose_rhs:
        grad = _product(
            cotangent, lhs, params, out_dtype=aval.dtype, transpose_lhs=True, transpose_rhs=params.transpose_lhs
        )
    else:
        grad = _product(
            lhs, cotangent, params, out_dtype=aval.dtype, transpose_lhs=not params.transpose_lhs, transpose_rhs=False
        )
    return None, _sum_to(grad, aval.shape)


def _fold_batch(lhs, cotangent, rhs_shape: tuple[int, ...], params: Params):
    """Batch dimensions that rhs lacks, folded into M where that is a mere reshape, so that they are summed inside."""
    shared = any(size != 1 for size in rhs_shape[:-2])
    sharded = axes.is_sharded(jax.typeof(lhs)) or axes.is_sharded(jax.typeof(cotangent))
    if shared or sharded or params.transpose_lhs or lhs.ndim == 2:
        return lhs, cotangent
    ones = (1,) * (lhs.ndim - 2)
    return (x.reshape(*ones, -1, x.shape[-1]) for x in (lhs, cotangent))


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    reduced = [d for d, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want]
    return jnp.sum(x, reduced, keepdims=True, dtype=formula.accumulator(x.dtype)).astype(x.dtype) if reduced else x


def _batch(operands, dims, *, params: Params):
    moved = axes.lead(operands, dims)
    if dims[0] is None and dims[1] is None:  # only the bias is mapped over
        moved[0] = jnp.broadcast_to(moved[0], (moved[2].shape[0], *moved[0].shape[1:]))
    return GEMM.bind(*moved, params=params), 0


# --- implementations and registration ------------------------------------------------------------------------------


def _formula(*operands, params: Params) -> jax.Array:
    return formula.gemm(*operands, **params.statics)


GEMM = operation.Operation(
    "gemm",
    abstract_eval=_abstract_eval,
    dimensions=_dimensions,
    formula=_formula,
    tiled=tiled.gemm,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    sum_of_parts=_sum_of_parts,
    formula_by_xla=True,
)
