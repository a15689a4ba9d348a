"""``mla_prefill``: attention of a whole sequence to itself, as a JAX primitive with a primitive for its gradient."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from glass_jax import errors
from glass_jax.lowering.partition import Dimensions
from glass_jax.lowering.tiled import mla_prefill as tiled
from glass_jax.lowering.xla import mla_prefill as formula
from glass_jax.lowering.xla.gemm import accumulator
from glass_jax.primitives import axes, checks, operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters of both primitives; see :func:`glass_jax.lowering.xla.mla_prefill.mla_prefill`."""

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
    ``jax.checkpoint``, ``shard_map`` and on meshes with Auto or Explicit axes: batch and heads stay sharded as they
    are. Both results have gradients, in blocks too; derivatives of the gradient hold all scores, and forward mode
    (``jvp``) exists only of the gradient.

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
    return _attention(params, *axes.vary_alike(*(x.astype(dtype) for x in (q, k, v)), *ids))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(params: Params, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    return MLA_PREFILL.bind(*operands, params=params)


def _attention_forward(params: Params, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array):
    out, lse = MLA_PREFILL.bind(q, k, v, *ids, params=params)
    return (out, lse), (q, k, v, out, lse, ids)


def _attention_backward(params: Params, saved: tuple, cotangents: tuple[jax.Array, jax.Array]):
    q, k, v, out, lse, ids = saved
    gradients = MLA_PREFILL_BACKWARD.bind(q, k, v, out, lse, *cotangents, *ids, params=params)
    return (*gradients, *(None for _ in ids))


_attention.defvjp(_attention_forward, _attention_backward)


# --- rules ---------------------------------------------------------------------------------------------------------


def _abstract_eval(q, k, v, *ids, params: Params):
    (batch, length, heads, d), dv = q.shape, v.shape[-1]
    if params.alignment == "strict":
        tiled.check_alignment(d, dv)
    return (
        jax.ShapeDtypeStruct((batch, length, heads, dv), q.dtype),
        jax.ShapeDtypeStruct((batch, heads, length), accumulator(q.dtype)),
    )


def _abstract_eval_backward(q, k, v, *rest, params: Params):
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))


def _dimensions(*avals, params: Params) -> Dimensions:
    ids = ", b i" if len(avals) > 3 else ""
    return Dimensions(f"b s h d, b t h d, b t h v{ids} -> b s h v, b h s", parallel="b h")


def _dimensions_backward(*avals, params: Params) -> Dimensions:
    ids = ", b i" if len(avals) > 7 else ""
    operands = f"b s h d, b t h d, b t h v, b s h v, b h s, b s h v, b h s{ids}"
    return Dimensions(f"{operands} -> b s h d, b t h d, b t h v", parallel="b h")


def _batch(operands, dims, *, params: Params, backward: bool = False):
    """The mapped dimension becomes the inner part of the batch, so that a batch that is sharded stays so."""
    moved = [jnp.swapaxes(x, 0, 1) for x in axes.lead(operands, dims)]
    size = max(x.shape[1] for x in moved)
    folded = [jnp.broadcast_to(x, (x.shape[0], size, *x.shape[2:])).reshape(-1, *x.shape[2:]) for x in moved]
    bound = MLA_PREFILL_BACKWARD if backward else MLA_PREFILL
    results = bound.bind(*folded, params=params)
    return [x.reshape(-1, size, *x.shape[1:]) for x in results], [1] * len(results)


def _gradient_of_quadratic(q, k, v, out, lse, d_out, d_lse, *ids, params: Params):
    """The gradients as functions of the operands and of the results' gradients alone, to be differentiated again."""
    _, pullback = jax.vjp(lambda *qkv: formula.quadratic(*qkv, *ids, **params.statics), q, k, v)
    return pullback((d_out, d_lse))


# --- implementations and registration ------------------------------------------------------------------------------


MLA_PREFILL = operation.Operation(
    "mla_prefill",
    multiple_results=True,
    abstract_eval=_abstract_eval,
    formula=lambda *operands, params: formula.mla_prefill(*operands, **params.statics),
    tiled=tiled.mla_prefill,
    dimensions=_dimensions,
    batch=_batch,
    derivative=lambda *operands, params: formula.quadratic(*operands, **params.statics),
)
MLA_PREFILL_BACKWARD = operation.Operation(
    "mla_prefill_backward",
    multiple_results=True,
    abstract_eval=_abstract_eval_backward,
    formula=lambda *operands, params: formula.mla_prefill_backward(*operands, **params.statics),
    tiled=tiled.mla_prefill_backward,
    dimensions=_dimensions_backward,
    batch=functools.partial(_batch, backward=True),
    derivative=_gradient_of_quadratic,
)
