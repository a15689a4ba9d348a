"""``sparse_mla_prefill``: attention of each query over tokens chosen for it (DeepSeek sparse attention, absorbed form).

The primitive's operands: the indices of what does not count are -1, and there is a sink for each query and head, -inf
where there is none. Leading batch dimensions, equal or 1, come from ``vmap``. The tangent, linear in those of q, kv and
sink, is a second primitive, and the transpose of that a third, the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from glass_jax import errors
from glass_jax.lowering import partition
from glass_jax.lowering.tiled import sparse_mla_prefill as tiled
from glass_jax.lowering.xla import sparse_mla_prefill as formula
from glass_jax.lowering.xla.gemm import accumulator
from glass_jax.primitives import axes, checks, operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters; see :func:`glass_jax.lowering.xla.sparse_mla_prefill.sparse_mla_prefill`.

    Attributes:
      wide: leave the gradient of ``kv`` in the type that it is summed in.
    """

    head_dim_v: int
    softmax_scale: float
    wide: bool = False

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

    Works under ``jit``, ``vmap``, ``grad``, ``jvp``, ``jax.checkpoint``, ``shard_map`` and on meshes with Auto or
    Explicit axes: queries and heads stay sharded as they are, and so does what ``vmap`` maps; every device has all of
    ``kv``, whose gradient ends in one all-reduce. ``out`` and ``lse`` have derivatives of first order in ``q``, ``kv``
    and ``attn_sink``, plain JAX with every implementation. ``max_logits`` counts as constant.

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
        topk_length = axes.placed(topk_length, jax.P(jax.typeof(indices).sharding.spec[0]))
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
    return SPARSE_MLA_PREFILL.bind(q, kv, chosen, sink, params=params)


# --- rules ---------------------------------------------------------------------------------------------------------


def _abstract_eval(q, kv, indices, sink, *, params: Params):
    if params.alignment == "strict":
        tiled.check_alignment(q, params)
    shape = (*formula.batch_shape(q, kv, indices, sink), *q.shape[-3:-1])
    scores = jax.ShapeDtypeStruct(shape, accumulator(q.dtype))
    return jax.ShapeDtypeStruct((*shape, params.head_dim_v), q.dtype), scores, scores


def _abstract_eval_tangent(d_q, d_kv, d_sink, q, kv, indices, sink, out, lse, *, params: Params):
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse))


def _abstract_eval_backward(q, kv, indices, sink, *rest, params: Params):
    d_kv = jax.ShapeDtypeStruct(kv.shape, accumulator(kv.dtype) if params.wide else kv.dtype)
    return jax.ShapeDtypeStruct(q.shape, q.dtype), d_kv, jax.ShapeDtypeStruct(sink.shape, sink.dtype)


def _terms(q, kv, indices, sink) -> tuple[str, list[str]]:
    """The names of the batch dimensions, and of all dimensions of each operand."""
    batch = formula.batch_shape(q, kv, indices, sink)
    operands = (q, "q", "s h d"), (kv, "k", "t o d"), (indices, "i", "s p c"), (sink, "a", "s h")
    terms = [" ".join([*partition.broadcast("b", tag, x.shape, batch), last]) for x, tag, last in operands]
    return " ".join(f"b{d}" for d in range(len(batch))), terms


def _dimensions(*operands, params: Params) -> partition.Dimensions:
    batch, terms = _terms(*operands)
    rule = f"{', '.join(terms)} -> {batch} s h v, {batch} s h, {batch} s h"
    return partition.Dimensions(rule, parallel=f"{batch} s h")


def _dimensions_tangent(*operands, params: Params) -> partition.Dimensions:
    batch, terms = _terms(*operands[3:7])
    q, kv, _, sink = terms
    results = f"{batch} s h v, {batch} s h"
    return partition.Dimensions(f"{', '.join([q, kv, sink, *terms])}, {results} -> {results}", parallel=f"{batch} s h")


def _dimensions_backward(*operands, params: Params) -> partition.Dimensions:
    batch, terms = _terms(*operands[:4])
    q, kv, _, sink = terms
    results = f"{batch} s h v, {batch} s h"
    rule = f"{', '.join(terms)}, {results}, {results} -> {q}, {kv}, {sink}"
    return partition.Dimensions(rule, parallel="", summed=f"{batch} s h")


def _sum_of_parts(fn, over, *operands, params: Params):
    """Where devices share out queries or heads, gradients are added up before they are rounded."""
    kv = operands[1]
    parts = fn(*operands, params=dataclasses.replace(params, wide=True))
    d_q, d_kv, d_sink = (lax.psum(part, names) for part, names in zip(parts, over, strict=True))
    return d_q, d_kv if params.wide else d_kv.astype(kv.dtype), d_sink


def _batch(bind: Callable, operands, dims, *, params: Params):
    results = bind(*axes.lead(operands, dims), params=params)
    return results, (0,) * len(results)


def _batch_backward(operands, dims, *, params: Params):
    """What has a gradient is mapped over: each of the mapped has its own."""
    q, kv, indices, sink, *rest = axes.lead(operands, dims)
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    q, kv, sink = (jnp.broadcast_to(x, (size, *x.shape[1:])) for x in (q, kv, sink))
    results = SPARSE_MLA_PREFILL_BACKWARD.bind(q, kv, indices, sink, *rest, params=params)
    return results, (0,) * len(results)


# --- derivatives ---------------------------------------------------------------------------------------------------


def _jvp(primals, tangents, *, params: Params):
    q, kv, indices, sink = primals
    results = out, _, lse = SPARSE_MLA_PREFILL.bind(*primals, params=params)
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    moving = [tangents[0], tangents[1], tangents[3]]
    if all(isinstance(t, ad.Zero) for t in moving):
        return results, tuple(zeros)
    operands = (*map(ad.instantiate_zeros, moving), q, kv, indices, sink, out, lse)
    d_out, d_lse = SPARSE_MLA_PREFILL_TANGENT.bind(*operands, params=params)
    return results, (d_out, zeros[1], d_lse)


def _transpose_tangent(cotangents, *operands, params: Params):
    gradients = SPARSE_MLA_PREFILL_BACKWARD.bind(*operands[3:], *map(ad.instantiate_zeros, cotangents), params=params)
    return *gradients, *(None for _ in operands[3:])


def _second_derivative(*operands, params: Params):
    raise errors.UnsupportedError(
        "sparse_mla_prefill has no second derivatives: put jax.lax.stop_gradient around the arguments, or write the "
        "attention over gathered tokens in JAX"
    )


# --- implementations and registration ------------------------------------------------------------------------------


def _tangent(*operands, params: Params):
    return formula.sparse_mla_prefill_tangent(*operands, **params.statics)


def _backward(*operands, params: Params):
    d_q, d_kv, d_sink = formula.sparse_mla_prefill_backward(*operands, **params.statics)
    return d_q, d_kv if params.wide else d_kv.astype(operands[1].dtype), d_sink


SPARSE_MLA_PREFILL = operation.Operation(
    "sparse_mla_prefill",
    multiple_results=True,
    abstract_eval=_abstract_eval,
    dimensions=_dimensions,
    formula=lambda *operands, params: formula.sparse_mla_prefill(*operands, **params.statics),
    tiled=tiled.sparse_mla_prefill,
    batch=lambda operands, dims, *, params: _batch(SPARSE_MLA_PREFILL.bind, operands, dims, params=params),
    jvp=_jvp,
)
SPARSE_MLA_PREFILL_TANGENT = operation.Operation(
    "sparse_mla_prefill_tangent",
    multiple_results=True,
    abstract_eval=_abstract_eval_tangent,
    dimensions=_dimensions_tangent,
    formula=_tangent,
    tiled=_tangent,
    batch=lambda operands, dims, *, params: _batch(SPARSE_MLA_PREFILL_TANGENT.bind, operands, dims, params=params),
    derivative=_second_derivative,
    transpose=_transpose_tangent,
)
SPARSE_MLA_PREFILL_BACKWARD = operation.Operation(
    "sparse_mla_prefill_backward",
    multiple_results=True,
    abstract_eval=_abstract_eval_backward,
    dimensions=_dimensions_backward,
    formula=_backward,
    tiled=_backward,
    batch=_batch_backward,
    derivative=_second_derivative,
    sum_of_parts=_sum_of_parts,
)
