"""``mla_decode``: attention of new tokens over a paged cache of latents (multi-head latent attention, absorbed form).

The primitive's operands are those of the public function, a sink for each row and head, -inf where there is none.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from glass_jax import errors
from glass_jax.lowering.partition import Dimensions
from glass_jax.lowering.tiled import mla_decode as tiled
from glass_jax.lowering.xla import mla_decode as formula
from glass_jax.lowering.xla.gemm import accumulator
from glass_jax.primitives import axes, checks, operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters; see :func:`glass_jax.lowering.xla.mla_decode.mla_decode`."""

    head_dim_v: int
    softmax_scale: float
    causal: bool


def mla_decode(
    q: jax.typing.ArrayLike,
    kv_cache: jax.typing.ArrayLike,
    block_table: jax.typing.ArrayLike,
    cache_seqlens: jax.typing.ArrayLike,
    *,
    head_dim_v: int = 512,
    softmax_scale: float | None = None,
    causal: bool = False,
    attn_sink: jax.typing.ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of a few new tokens of each sequence over its latents, which lie in pages of a shared cache.

    Equivalent, with ``kv`` the tokens of row ``b``, the first ``cache_seqlens[b]`` in its pages, to::

        scores = jnp.einsum("qhd,kd->hqk", q[b], kv[:, 0]) * softmax_scale
        out[b] = jnp.einsum("hqk,kd->qhd", jax.nn.softmax(scores), kv[:, 0, :head_dim_v])
        lse[b] = jax.nn.logsumexp(scores, axis=-1)

    A row's result is the same bit for bit whatever the other rows hold, however many there are and wherever it stands
    among them. What unused pages and the unused ends of pages hold, NaN among it, and table entries past a sequence's
    end never matter. On a CPU, memory beyond the operands does not grow with the cache or its sequences.

    Works under ``jit``, ``vmap`` and ``shard_map`` and on meshes with Auto or Explicit axes: rows and heads stay
    sharded as they are, every device has the whole cache. It has no derivative.

    Args:
      q: ``[B, Sq, H, D]``; float32, float16 or bfloat16 (float64 on ``"xla"``). D is 576 or 512 in DeepSeek's models;
        other sizes work as well.
      kv_cache: ``[pages, page, 1, D]`` of the same type, pages of any size.
      block_table: ``[B, n]``, integers: the pages of each sequence in order.
      cache_seqlens: ``[B]``, integers: tokens of each sequence, the new ones among them, at most ``n * page``.
      head_dim_v: the value of a token are its first ``head_dim_v`` numbers.
      softmax_scale: what scores are multiplied by. Default ``D ** -0.5``; a model in absorbed form passes the scale of
        its expanded heads, for example ``192 ** -0.5``.
      causal: query i sees the tokens before ``cache_seqlens - (Sq - 1 - i)``: the queries are the last ``Sq`` tokens.
      attn_sink: ``[H]``, floats: ``out *= exp(lse) / (exp(lse) + exp(attn_sink))``; ``lse`` is without it.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``out``: ``[B, Sq, H, head_dim_v]`` of ``q``'s type, and ``lse``: ``[B, H, Sq]`` float32 (float64 of float64), the
      natural logarithm of the sum of exponentials. A query that sees no token has ``out`` 0 and ``lse`` +inf.

    Raises:
      HardwareConstraintError: (a ValueError) shapes that do not fit each other, dtypes with no meaning, or, with
        ``glass.configure(alignment="strict")``, a dimension that the hardware cannot take as it is.
      UnsupportedError: float64 on the NPU; differentiation.
    """
    q, kv_cache, block_table, cache_seqlens = map(jnp.asarray, (q, kv_cache, block_table, cache_seqlens))
    sizes = checks.dimensions(
        "mla_decode",
        q=(q, "B Sq H D"),
        kv_cache=(kv_cache, "pages page 1 D"),
        block_table=(block_table, "B n"),
        cache_seqlens=(cache_seqlens, "B"),
    )
    checks.floats("mla_decode", q=q, kv_cache=kv_cache)
    checks.integers("mla_decode", block_table=block_table, cache_seqlens=cache_seqlens)
    if q.dtype != kv_cache.dtype:
        raise errors.HardwareConstraintError(
            f"mla_decode: q is {q.dtype} and kv_cache is {kv_cache.dtype}; cast q to {kv_cache.dtype}"
        )
    if not 1 <= head_dim_v <= sizes["D"]:
        raise errors.HardwareConstraintError(
            f"mla_decode: {head_dim_v=} of tokens of {sizes['D']} numbers (kv_cache {kv_cache.shape}); "
            f"pass 1 to {sizes['D']}"
        )
    dtype = accumulator(q.dtype)
    if attn_sink is None:
        sink = jnp.full((sizes["B"], sizes["H"]), -jnp.inf, dtype)
    else:
        attn_sink = jnp.asarray(attn_sink)
        checks.dimensions("mla_decode", q=(q, "B Sq H D"), attn_sink=(attn_sink, "H"))
        checks.floats("mla_decode", attn_sink=attn_sink)
        sink = jnp.broadcast_to(attn_sink.astype(dtype), (sizes["B"], sizes["H"]))
    params = Params.chosen(
        implementation,
        head_dim_v=head_dim_v,
        softmax_scale=float(sizes["D"] ** -0.5 if softmax_scale is None else softmax_scale),
        causal=causal,
    )
    lengths = cache_seqlens.astype(jnp.int32)
    return MLA_DECODE.bind(q, kv_cache, block_table.astype(jnp.int32), lengths, sink, params=params)


# --- rules ---------------------------------------------------------------------------------------------------------


def _abstract_eval(q, kv_cache, block_table, cache_seqlens, attn_sink, *, params: Params):
    batch, queries, heads, _ = q.shape
    if params.alignment == "strict":
        tiled.check_alignment("mla_decode", q, params)
    return (
        jax.ShapeDtypeStruct((batch, queries, heads, params.head_dim_v), q.dtype),
        jax.ShapeDtypeStruct((batch, heads, queries), accumulator(q.dtype)),
    )


def _dimensions(*avals, params: Params) -> Dimensions:
    return Dimensions("b s h d, p g o d, b n, b, b h -> b s h v, b h s", parallel="b h")


def _batch(operands, dims, *, params: Params):
    """The mapped dimension becomes more rows; caches that are mapped over become one of all their pages."""
    q, kv_cache, block_table, cache_seqlens, attn_sink = axes.lead(operands, dims)
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    if kv_cache.shape[0] != 1:
        block_table = block_table + jnp.arange(size, dtype=jnp.int32)[:, None, None] * kv_cache.shape[1]
    rows = (
        jnp.broadcast_to(x, (size, *x.shape[1:])).reshape(size * x.shape[1], *x.shape[2:])
        for x in (q, block_table, cache_seqlens, attn_sink)
    )
    q, block_table, cache_seqlens, attn_sink = rows
    kv_cache = kv_cache.reshape(-1, *kv_cache.shape[2:])
    results = MLA_DECODE.bind(q, kv_cache, block_table, cache_seqlens, attn_sink, params=params)
    return tuple(x.reshape(size, x.shape[0] // max(size, 1), *x.shape[1:]) for x in results), (0, 0)


def _derivative(*operands, params: Params):
    raise errors.UnsupportedError(
        "mla_decode has no derivative: it is for generating tokens. Train with glass.mla_prefill, which has one, or "
        "put jax.lax.stop_gradient around the arguments"
    )


def _formula(*operands, params: Params):
    return formula.mla_decode(
        *operands, head_dim_v=params.head_dim_v, softmax_scale=params.softmax_scale, causal=params.causal
    )


MLA_DECODE = operation.Operation(
    "mla_decode",
    abstract_eval=_abstract_eval,
    formula=_formula,
    tiled=tiled.mla_decode,
    batch=_batch,
    dimensions=_dimensions,
    multiple_results=True,
    derivative=_derivative,
)
