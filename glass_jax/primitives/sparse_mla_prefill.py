"""``sparse_mla_prefill``: attention of each query over tokens chosen for it (DeepSeek sparse attention, absorbed form).

The primitive's operands: the indices of what does not count are -1, and there is a sink for each query and head, -inf
where there is none.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax import errors
from glass_jax.lowering.partition import Dimensions
from glass_jax.lowering.tiled import sparse_mla_prefill as tiled
from glass_jax.lowering.xla import sparse_mla_prefill as formula
from glass_jax.lowering.xla.gemm import accumulator
from glass_jax.primitives import axes, checks, operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters; see :func:`glass_jax.lowering.xla.sparse_mla_prefill.sparse_mla_prefill`."""

    head_dim_v: int
    softmax_scale: float

    @property
    def statics(self) -> dict:
        """The parameters of the formulas."""
        return {"head_dim_v": self.head_dim_v, "softmax_scale": self.softmax_scale}


def sparse_mla_prefill(
    q: jax.typing.ArrayLike,
    kv: jax.typing.ArrayLike,
    indices: jax.typing.ArrayLike,
    *,
    softmax_scale: float,
    head_dim_v: int = 512,
    attn_sink: jax.typing.ArrayLike | None = None,
    topk_length: jax.typing.ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of each query over the latents that its indices name, as an indexer has chosen them.

    Equivalent, for query ``i`` with ``chosen`` those of ``indices[i, 0, :topk_length[i]]`` that are from 0 to Skv - 1,
    to::

        tokens = kv[chosen, 0]
        scores = jnp.einsum("hd,kd->hk", q[i], tokens) * softmax_scale
        out[i] = jnp.einsum("hk,kd->hd", jax.nn.softmax(scores), tokens[:, :head_dim_v])
        max_logits[i] = scores.max(axis=-1)
        lse[i] = jax.nn.logsumexp(scores, axis=-1)

    An index that occurs twice counts twice. Causal attention is what the indices make it. Tokens that a query does not
    name, NaN among them, do not matter to it, and its result is the same bit for bit whatever the other queries are.
    On a CPU the tokens of one query are gathered at a time, at most 1024 of them (all of them for a gradient).

    Works under ``jit``, ``vmap``, ``grad``, ``jax.checkpoint``, ``shard_map`` and on meshes with Auto or Explicit axes:
    queries and heads stay sharded as they are, every device has all of ``kv``. ``out`` and ``lse`` have gradients, in
    reverse mode and of first order, in ``q``, ``kv`` and ``attn_sink``; they are plain JAX with every implementation,
    and on a mesh every device computes all of them unless ``shard_map`` divides the work. ``max_logits`` counts as
    constant.

    Args:
      q: ``[Sq, H, D]``; float32, float16 or bfloat16 (float64 on ``"xla"``). D is 576 or 512 in DeepSeek's models.
      kv: ``[Skv, 1, D]`` of the same type.
      indices: ``[Sq, 1, topk]``, integers; those below 0 and those from Skv on name no token.
      softmax_scale: what scores are multiplied by; of a model in absorbed form that of its expanded heads, for example
        ``192 ** -0.5``.
      head_dim_v: the value of a token are its first ``head_dim_v`` numbers.
      attn_sink: ``[H]``, floats: ``out *= exp(lse) / (exp(lse) + exp(attn_sink))``; ``max_logits`` and ``lse`` are
        without it.
      topk_length: ``[Sq]``, integers: how many of a query's indices count, from the first. Default: all.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``out``: ``[Sq, H, head_dim_v]`` of ``q``'s type; ``max_logits``: ``[Sq, H]`` float32 (float64 of float64), the
      largest scaled score; ``lse``: the same, the natural logarithm of the sum of exponentials. A query without tokens
      has ``out`` 0, ``max_logits`` -inf and ``lse`` +inf.

    Raises:
      HardwareConstraintError: (a ValueError) shapes that do not fit each other, dtypes with no meaning, or, with
        ``glass.configure(alignment="strict")``, a dimension that the hardware cannot take as it is.
      OutOfOnChipMemoryError: (a HardwareConstraintError) tokens too large for the NPU's memories.
      UnsupportedError: float64 on the NPU; second derivatives.
    """
    q, kv, indices = map(jnp.asarray, (q, kv, indices))
    sizes = checks.dimensions("sparse_mla_prefill", q=(q, "Sq H D"), kv=(kv, "Skv 1 D"), indices=(indices, "Sq 1 topk"))
    checks.floats("sparse_mla_prefill", q=q, kv=kv)
    checks.integers("sparse_mla_prefill", indices=indices)
    if q.dtype != kv.dtype:
        raise errors.HardwareConstraintError(
            f"sparse_mla_prefill: q is {q.dtype} and kv is {kv.dtype}; cast q to {kv.dtype}"
        )
    if not 1 <= head_dim_v <= sizes["D"]:
        raise errors.HardwareConstraintError(
            f"sparse_mla_prefill: {head_dim_v=} of tokens of {sizes['D']} numbers (kv {kv.shape}); "
            f"pass 1 to {sizes['D']}"
        )
    counts = (indices >= 0) & (indices < sizes["Skv"])
    if topk_length is not None:
        topk_length = jnp.asarray(topk_length)
        checks.dimensions("sparse_mla_prefill", q=(q, "Sq H D"), topk_length=(topk_length, "Sq"))
        checks.integers("sparse_mla_prefill", topk_length=topk_length)
        counts &= lax.broadcasted_iota(topk_length.dtype, indices.shape, 2) < topk_length[:, None, None]
    dtype = accumulator(q.dtype)
    if attn_sink is None:
        attn_sink = jnp.full(sizes["H"], -jnp.inf, dtype)
    else:
        attn_sink = jnp.asarray(attn_sink)
        checks.dimensions("sparse_mla_prefill", q=(q, "Sq H D"), attn_sink=(attn_sink, "H"))
        checks.floats("sparse_mla_prefill", attn_sink=attn_sink)
    sink = jnp.broadcast_to(attn_sink.astype(dtype), (sizes["Sq"], sizes["H"]))
    params = Params.chosen(implementation, head_dim_v=head_dim_v, softmax_scale=float(softmax_scale))
    chosen = jnp.where(counts, indices, -1).astype(jnp.int32)
    return _attention(params, *axes.vary_alike(q, kv, chosen, sink))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(params: Params, *operands: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return SPARSE_MLA_PREFILL.bind(*operands, params=params)


def _attention_forward(params: Params, *operands: jax.Array):
    out, largest, lse = SPARSE_MLA_PREFILL.bind(*operands, params=params)
    return (out, largest, lse), (*operands, out, lse)


def _attention_backward(params: Params, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]):
    d_out, _, d_lse = cotangents
    gradients = SPARSE_MLA_PREFILL_BACKWARD.bind(*saved, d_out, d_lse, params=params)
    q, kv, _, sink, *_ = saved
    # Every device has computed all of them; over Explicit axes a gradient is sharded as what it is of.
    d_q, d_kv, d_sink = (
        jax.sharding.reshard(x, aval.sharding) if axes.is_sharded(aval := jax.typeof(of)) else x
        for x, of in zip(gradients, (q, kv, sink), strict=True)
    )
    return d_q, d_kv, None, d_sink


_attention.defvjp(_attention_forward, _attention_backward)


# --- rules ---------------------------------------------------------------------------------------------------------


def _abstract_eval(q, kv, indices, sink, *, params: Params):
    queries, heads, _ = q.shape
    if params.alignment == "strict":
        tiled.check_alignment(q, params)
    scores = jax.ShapeDtypeStruct((queries, heads), accumulator(q.dtype))
    return jax.ShapeDtypeStruct((queries, heads, params.head_dim_v), q.dtype), scores, scores


def _abstract_eval_backward(q, kv, indices, sink, *rest, params: Params):
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, kv, sink))


def _dimensions(*avals, params: Params) -> Dimensions:
    return Dimensions("s h d, t o d, s o k, s h -> s h v, s h, s h", parallel="s h")


def _dimensions_backward(*avals, params: Params) -> Dimensions:
    """Gradients of tokens are sums over queries and heads: no part of them is a part of the operation."""
    return Dimensions("s h d, t o d, s o k, s h, s h v, s h, s h v, s h -> s h d, t o d, s h", parallel="")


def _batch(operands, dims, *, params: Params):
    """The mapped dimension becomes more queries; tokens that are mapped over become those of all."""
    q, kv, indices, sink = axes.lead(operands, dims)
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    if kv.shape[0] != 1:
        first = jnp.arange(size, dtype=jnp.int32)[:, None, None, None] * kv.shape[1]
        indices = jnp.where(indices >= 0, indices + first, -1)
    q, indices, sink = (
        jnp.broadcast_to(x, (size, *x.shape[1:])).reshape(size * x.shape[1], *x.shape[2:]) for x in (q, indices, sink)
    )
    results = SPARSE_MLA_PREFILL.bind(q, kv.reshape(-1, *kv.shape[2:]), indices, sink, params=params)
    return [x.reshape(size, x.shape[0] // max(size, 1), *x.shape[1:]) for x in results], [0] * len(results)


def _batch_backward(operands, dims, *, params: Params):
    """One after the other: each has its own gradient of the tokens."""
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    each = [jnp.broadcast_to(x, (size, *x.shape[1:])) for x in axes.lead(operands, dims)]
    results = lax.map(lambda one: SPARSE_MLA_PREFILL_BACKWARD.bind(*one, params=params), each)
    return results, [0] * len(results)


def _backward(*operands, params: Params):
    return formula.sparse_mla_prefill_backward(*operands, **params.statics)


def _derivative(*operands, params: Params):
    raise errors.UnsupportedError(
        "sparse_mla_prefill has no second derivatives: put jax.lax.stop_gradient around the arguments, or write the "
        "attention over gathered tokens in JAX"
    )


# --- implementations and registration ------------------------------------------------------------------------------


SPARSE_MLA_PREFILL = operation.Operation(
    "sparse_mla_prefill",
    abstract_eval=_abstract_eval,
    formula=lambda *operands, params: formula.sparse_mla_prefill(*operands, **params.statics),
    tiled=tiled.sparse_mla_prefill,
    batch=_batch,
    dimensions=_dimensions,
    multiple_results=True,
    derivative=_derivative,
)
SPARSE_MLA_PREFILL_BACKWARD = operation.Operation(
    "sparse_mla_prefill_backward",
    abstract_eval=_abstract_eval_backward,
    formula=_backward,
    tiled=_backward,
    batch=_batch_backward,
    dimensions=_dimensions_backward,
    multiple_results=True,
    derivative=_derivative,
)
