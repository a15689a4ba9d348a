"""``mla_prefill``: attention of a whole sequence to itself, as a JAX primitive.

Its tangent, linear in those of q, k and v, is a second primitive, and the transpose of that a third, the gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from glass_jax import errors
from glass_jax.lowering.partition import Dimensions
from glass_jax.lowering.tiled import mla_prefill as tiled
from glass_jax.lowering.xla import mla_prefill as formula
from glass_jax.lowering.xla.gemm import accumulator
from glass_jax.primitives import axes, checks, operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters of the primitives; see :func:`glass_jax.lowering.xla.mla_prefill.mla_prefill`."""

    scale: float
    causal: bool

    @property
    def statics(self) -> dict:
        """The parameters of the formulas."""
        return {"scale": self.scale, "causal": self.causal}


def mla_prefill(
    q: jax.typing.ArrayLike,
    k: jax.typing.ArrayLike,
    v: jax.typing.ArrayLike,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    segment_ids: jax.typing.ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention on expanded heads, ``softmax(q k' * softmax_scale) v``, in blocks that never hold all scores.

    Equivalent, up to summation order, to::

        s = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * softmax_scale
        s = jnp.where(seen, s, -jnp.inf)     # causal: key <= query + Skv - Sq; segment_ids: those of both are equal
        lse = jax.nn.logsumexp(s, axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(s - lse[..., None]).astype(v.dtype), v)

    A query that sees no key (causal with Sq > Skv) has output 0 and lse +inf. Works under ``jit``, ``vmap``, ``grad``,
    ``jvp``, ``jax.checkpoint``, ``shard_map`` and on meshes with Auto or Explicit axes: batch and heads stay sharded as
    they are. Both results have derivatives of any order; those of the first, in forward mode (plain JAX with every
    implementation) and in reverse, are computed in blocks too, those of higher order hold all scores.

    Args:
      q: ``[B, Sq, H, D]``; float32, float16 or bfloat16 (float64 on ``"xla"``). MLA: 192 = 128 + 64 of RoPE.
      k: ``[B, Skv, H, D]``. Operands of different types are promoted.
      v: ``[B, Skv, H, Dv]``. MLA: 128.
      causal: a query sees no key after its own; if there are more keys than queries, the queries are the
        last positions.
      softmax_scale: a positive number. Default: ``D ** -0.5``.
      segment_ids: ``[B, S]``, integers, where Sq = Skv = S: of sequences packed into one, positions see those of the
        same id only.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``out`` ``[B, Sq, H, Dv]``, in the operands' type, and ``lse`` ``[B, H, Sq]``, float32 (float64 for float64): the
      natural logarithm of the sum of a query's ``exp(score * softmax_scale)``.

    Raises:
      HardwareConstraintError: (a ValueError) shapes that do not fit each other, dtypes with no meaning, or, with
        ``glass.configure(alignment="strict")``, a dimension that the hardware cannot take as it is.
      OutOfOnChipMemoryError: (a HardwareConstraintError) head dimensions that no tile of fits the NPU's memories.
      UnsupportedError: float64 on the NPU.
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    checks.floats("mla_prefill", q=q, k=k, v=v)
    sizes = checks.dimensions("mla_prefill", q=(q, "B Sq H D"), k=(k, "B Skv H D"), v=(v, "B Skv H Dv"))
    if not (sizes["D"] and sizes["Dv"]):
        raise errors.HardwareConstraintError(f"mla_prefill: D is {sizes['D']} and Dv {sizes['Dv']}; pass at least 1")
    scale = sizes["D"] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not (scale > 0 and math.isfinite(scale)):
        raise errors.HardwareConstraintError(f"mla_prefill: {softmax_scale=}; pass a positive number")
    ids = []
    if segment_ids is not None:
        ids = [jnp.asarray(segment_ids)]
        checks.integers("mla_prefill", segment_ids=ids[0])
        checks.dimensions("mla_prefill", q=(q, "B S H D"), k=(k, "B S H D"), segment_ids=(ids[0], "B S"))
        ids = [ids[0].astype(jnp.int32)]
    dtype = jnp.result_type(q, k, v)
    params = Params.chosen(implementation, scale=scale, causal=bool(causal))
    return MLA_PREFILL.bind(*(x.astype(dtype) for x in (q, k, v)), *ids, params=params)


# --- rules ---------------------------------------------------------------------------------------------------------


def _abstract_eval(q, k, v, *ids, params: Params):
    (batch, length, heads, d), dv = q.shape, v.shape[-1]
    if params.alignment == "strict":
        tiled.check_alignment(d, dv)
    return (
        jax.ShapeDtypeStruct((batch, length, heads, dv), q.dtype),
        jax.ShapeDtypeStruct((batch, heads, length), accumulator(q.dtype)),
    )


def _abstract_eval_tangent(d_q, d_k, d_v, *operands, params: Params):
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[3:5])


def _abstract_eval_backward(q, k, v, *rest, params: Params):
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))


def _dimensions(*avals, params: Params) -> Dimensions:
    ids = ", b i" if len(avals) > 3 else ""
    return Dimensions(f"b s h d, b t h d, b t h v{ids} -> b s h v, b h s", parallel="b h")


def _dimensions_tangent(*avals, params: Params) -> Dimensions:
    ids = ", b i" if len(avals) > 8 else ""
    operands = f"b s h d, b t h d, b t h v, b s h d, b t h d, b t h v, b s h v, b h s{ids}"
    return Dimensions(f"{operands} -> b s h v, b h s", parallel="b h")


def _dimensions_backward(*avals, params: Params) -> Dimensions:
    ids = ", b i" if len(avals) > 7 else ""
    operands = f"b s h d, b t h d, b t h v, b s h v, b h s, b s h v, b h s{ids}"
    return Dimensions(f"{operands} -> b s h d, b t h d, b t h v", parallel="b h")


def _batch(bind: Callable, operands, dims, *, params: Params):
    """The mapped dimension becomes the inner part of the batch, so that a batch that is sharded stays so."""
    moved = [jnp.swapaxes(x, 0, 1) for x in axes.lead(operands, dims)]
    size = max(x.shape[1] for x in moved)
    folded = [jnp.broadcast_to(x, (x.shape[0], size, *x.shape[2:])).reshape(-1, *x.shape[2:]) for x in moved]
    results = bind(*folded, params=params)
    return [x.reshape(-1, size, *x.shape[1:]) for x in results], [1] * len(results)


def _jvp(primals, tangents, *, params: Params):
    q, k, v, *ids = primals
    out, lse = MLA_PREFILL.bind(*primals, params=params)
    if all(isinstance(t, ad.Zero) for t in tangents[:3]):
        return (out, lse), tuple(ad.Zero(jax.typeof(x).to_tangent_aval()) for x in (out, lse))
    moving = map(ad.instantiate_zeros, tangents[:3])
    return (out, lse), MLA_PREFILL_TANGENT.bind(*moving, q, k, v, out, lse, *ids, params=params)


def _transpose_tangent(cotangents, *operands, params: Params):
    q, k, v, out, lse, *ids = operands[3:]
    d_out, d_lse = map(ad.instantiate_zeros, cotangents)
    gradients = MLA_PREFILL_BACKWARD.bind(q, k, v, out, lse, d_out, d_lse, *ids, params=params)
    return *gradients, *(None for _ in operands[3:])


def _tangent_of_quadratic(d_q, d_k, d_v, q, k, v, out, lse, *ids, params: Params):
    """The tangents as functions of the operands and of their tangents alone, to be differentiated again."""
    return jax.jvp(lambda *qkv: formula.quadratic(*qkv, *ids, **params.statics), (q, k, v), (d_q, d_k, d_v))[1]


def _gradient_of_quadratic(q, k, v, out, lse, d_out, d_lse, *ids, params: Params):
    """The gradients as functions of the operands and of the results' gradients alone, to be differentiated again."""
    _, pullback = jax.vjp(lambda *qkv: formula.quadratic(*qkv, *ids, **params.statics), q, k, v)
    return pullback((d_out, d_lse))


# --- implementations and registration ------------------------------------------------------------------------------


def _tangent(*operands, params: Params):
    return formula.mla_prefill_tangent(*operands, **params.statics)


MLA_PREFILL = operation.Operation(
    "mla_prefill",
    multiple_results=True,
    abstract_eval=_abstract_eval,
    dimensions=_dimensions,
    formula=lambda *operands, params: formula.mla_prefill(*operands, **params.statics),
    tiled=tiled.mla_prefill,
    batch=lambda operands, dims, *, params: _batch(MLA_PREFILL.bind, operands, dims, params=params),
    jvp=_jvp,
)
MLA_PREFILL_TANGENT = operation.Operation(
    "mla_prefill_tangent",
    multiple_results=True,
    abstract_eval=_abstract_eval_tangent,
    dimensions=_dimensions_tangent,
    formula=_tangent,
    tiled=_tangent,
    batch=lambda operands, dims, *, params: _batch(MLA_PREFILL_TANGENT.bind, operands, dims, params=params),
    derivative=_tangent_of_quadratic,
    transpose=_transpose_tangent,
)
MLA_PREFILL_BACKWARD = operation.Operation(
    "mla_prefill_backward",
    multiple_results=True,
    abstract_eval=_abstract_eval_backward,
    dimensions=_dimensions_backward,
    formula=lambda *operands, params: formula.mla_prefill_backward(*operands, **params.statics),
    tiled=tiled.mla_prefill_backward,
    batch=lambda operands, dims, *, params: _batch(MLA_PREFILL_BACKWARD.bind, operands, dims, params=params),
    derivative=_gradient_of_quadratic,
)
