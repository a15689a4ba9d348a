"""``paged_attention``: one new token of each sequence over paged keys and values, for multi-head and grouped heads.

The primitive's ``q`` and result have the heads as ``[Hk, G]``: the ``G`` query heads that share a key-value head.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from glass_jax import errors
from glass_jax.lowering.partition import Dimensions
from glass_jax.lowering.tiled import paged_attention as tiled
from glass_jax.lowering.xla import paged_attention as formula
from glass_jax.primitives import axes, checks, operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters; ``scale`` is what scores are multiplied by."""

    scale: float


def paged_attention(
    q: jax.typing.ArrayLike,
    k_cache: jax.typing.ArrayLike,
    v_cache: jax.typing.ArrayLike,
    page_table: jax.typing.ArrayLike,
    context_lens: jax.typing.ArrayLike,
    *,
    softmax_scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of one token of each sequence over its context, which lies in pages of shared caches.

    Equivalent, for a row ``b`` with ``k`` and ``v`` its first ``context_lens[b]`` tokens in the order of
    ``page_table[b]``, each head repeated for the ``H / Hk`` query heads that share it, to::

        scores = jnp.einsum("hd,khd->hk", q[b], k) * softmax_scale
        out[b] = jnp.einsum("hk,khd->hd", jax.nn.softmax(scores), v)

    A row's result is the same bit for bit whatever the other rows hold, however many there are and wherever it stands
    among them. What unused pages and the unused ends of pages hold, NaN among it, and table entries past a context's
    end never matter. On a CPU, memory beyond the operands does not grow with the caches or the contexts.

    Works under ``jit``, ``vmap`` and ``shard_map`` and on meshes with Auto or Explicit axes: rows and heads stay
    sharded as they are, every device has all pages, of its key-value heads. It has no derivative.

    Args:
      q: ``[B, H, D]``; float32, float16 or bfloat16 (float64 on ``"xla"``).
      k_cache: ``[pages, page, Hk, D]`` of the same type, H a multiple of Hk, pages of any size.
      v_cache: the same.
      page_table: ``[B, n]``, integers: the pages of each context in order.
      context_lens: ``[B]``, integers: tokens of each context, at most ``n * page``. Of none the result is 0.
      softmax_scale: what scores are multiplied by. Default ``D ** -0.5``.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``[B, H, D]`` of ``q``'s type.

    Raises:
      HardwareConstraintError: (a ValueError) shapes that do not fit each other, dtypes with no meaning, or, with
        ``glass.configure(alignment="strict")``, a dimension that the hardware cannot take as it is.
      UnsupportedError: float64 on the NPU; differentiation.
    """
    name = "paged_attention"
    q, k_cache, v_cache, page_table, context_lens = map(jnp.asarray, (q, k_cache, v_cache, page_table, context_lens))
    sizes = checks.dimensions(
        name,
        q=(q, "B H D"),
        k_cache=(k_cache, "pages page Hk D"),
        v_cache=(v_cache, "pages page Hk D"),
        page_table=(page_table, "B n"),
        context_lens=(context_lens, "B"),
    )
    checks.floats(name, q=q, k_cache=k_cache, v_cache=v_cache)
    checks.integers(name, page_table=page_table, context_lens=context_lens)
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise errors.HardwareConstraintError(
            f"{name}: q is {q.dtype}, k_cache {k_cache.dtype} and v_cache {v_cache.dtype}; pass one type"
        )
    heads, kv_heads, dim = sizes["H"], sizes["Hk"], sizes["D"]
    if not (kv_heads and dim) or heads % kv_heads:
        raise errors.HardwareConstraintError(
            f"{name}: {heads} query heads (q {q.shape}) cannot share {kv_heads} key-value heads of {dim} numbers "
            f"(k_cache {k_cache.shape}); H must be a multiple of Hk, D at least 1"
        )
    params = Params.chosen(implementation, scale=float(dim**-0.5 if softmax_scale is None else softmax_scale))
    grouped = q.reshape(sizes["B"], kv_heads, heads // kv_heads, dim)
    lengths = context_lens.astype(jnp.int32)
    out = PAGED_ATTENTION.bind(grouped, k_cache, v_cache, page_table.astype(jnp.int32), lengths, params=params)
    return out.reshape(q.shape)


# --- rules ---------------------------------------------------------------------------------------------------------


def _abstract_eval(q, k_cache, *rest, params: Params):
    if params.alignment == "strict":
        tiled.check_alignment(page=k_cache.shape[1], head_dim=q.shape[-1])
    return jax.ShapeDtypeStruct(q.shape, q.dtype)


def _dimensions(*avals, params: Params) -> Dimensions:
    return Dimensions("b h g d, p s h d, p s h d, b n, b -> b h g d", parallel="b h g")


def _batch(operands, dims, *, params: Params):
    """The mapped dimension becomes the inner part of the rows; mapped caches become one, of all their pages."""
    q, k_cache, v_cache, table, lengths = axes.lead(operands, dims)
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    if max(k_cache.shape[0], v_cache.shape[0]) > 1:
        k_cache, v_cache = (jnp.broadcast_to(x, (size, *x.shape[1:])) for x in (k_cache, v_cache))
        table = table + jnp.arange(size, dtype=jnp.int32)[:, None, None] * k_cache.shape[1]
    rows = [jnp.swapaxes(jnp.broadcast_to(x, (size, *x.shape[1:])), 0, 1) for x in (q, table, lengths)]
    q, table, lengths = (x.reshape(x.shape[0] * size, *x.shape[2:]) for x in rows)
    caches = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (k_cache, v_cache))
    out = PAGED_ATTENTION.bind(q, *caches, table, lengths, params=params)
    return out.reshape(*rows[0].shape), 1


def _derivative(*operands, params: Params):
    raise errors.UnsupportedError(
        "paged_attention has no derivative: it is for generating tokens. Train with jax.nn.dot_product_attention or "
        "glass.mla_prefill, or put jax.lax.stop_gradient around the arguments"
    )


def _formula(*operands, params: Params):
    return formula.paged_attention(*operands, scale=params.scale)


PAGED_ATTENTION = operation.Operation(
    "paged_attention",
    abstract_eval=_abstract_eval,
    formula=_formula,
    tiled=tiled.paged_attention,
    batch=_batch,
    dimensions=_dimensions,
    derivative=_derivative,
)
