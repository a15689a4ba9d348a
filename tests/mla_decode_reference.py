"""Independent judge of mla_decode: a row after the other in NumPy float64, and cases to judge it on."""

import jax.numpy as jnp
import numpy as np

# Absolute, relative and cosine tolerance of out, and relative tolerance of lse: FlashMLA's own.
ABSOLUTE, RELATIVE, COSINE = 1e-3, 2.01 / 128, 5e-6
LSE = 1e-6


def attention(q, kv_cache, block_table, cache_seqlens, *, head_dim_v, softmax_scale=None, causal=False, attn_sink=None):
    """``(out, lse)`` in float64."""
    q, cache = (np.asarray(x).astype(np.float64) for x in (q, kv_cache))
    batch, queries, heads, depth = q.shape
    scale = depth**-0.5 if softmax_scale is None else softmax_scale
    out, lse = np.zeros((batch, queries, heads, head_dim_v)), np.full((batch, heads, queries), np.inf)
    for b in range(batch):
        length = int(cache_seqlens[b])
        count = -(-length // cache.shape[1])
        tokens = cache[np.asarray(block_table)[b, :count], :, 0].reshape(-1, depth)
        for i in range(queries):
            kv = tokens[: max(length - (queries - 1 - i if causal else 0), 0)]
            if not len(kv):
                continue
            scores = q[b, i] @ kv.T * scale
            largest = scores.max(-1, keepdims=True)
            weights = np.exp(scores - largest)
            total = weights.sum(-1, keepdims=True)
            lse[b, :, i] = (largest + np.log(total))[:, 0]
            out[b, i] = weights @ kv[:, :head_dim_v] / total
            if attn_sink is not None:
                out[b, i] /= 1 + np.exp(np.asarray(attn_sink).astype(np.float64) - lse[b, :, i])[:, None]
    return out, lse


def operands(lengths, heads, *, queries=1, depth=576, page=64, spare=1, dtype="bfloat16", seed=0, unused=np.nan):
    """``q, kv_cache, block_table, cache_seqlens``: tokens as large as FlashMLA tests with, scores of about one.

    Pages lie in any order; table entries past a row's end are nonsense, ``spare`` more of them than the longest row
    has pages. Unused pages and the unused ends of pages hold ``unused``.
    """
    rng = np.random.default_rng(seed)
    counts = [-(-length // page) for length in lengths]
    pages = sum(counts) + 2
    order = rng.permutation(pages)
    cache = np.full((pages, page, 1, depth), unused, np.float32)
    table = rng.choice(np.array([-1, -(2**31), 2**31 - 1, 10**6]), (len(lengths), max([*counts, 0]) + spare))
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine, order = order[:count], order[count:]
        table[b, :count] = mine
        tokens = np.full((count * page, depth), unused, np.float32)
        tokens[:length] = rng.standard_normal((length, depth)) / 10
        cache[mine] = tokens.reshape(count, page, 1, depth)
    q = 10 * rng.standard_normal((len(lengths), queries, heads, depth)).astype(np.float32)
    return (
        jnp.asarray(q, dtype),
        jnp.asarray(cache, dtype),
        jnp.asarray(table, jnp.int32),
        jnp.asarray(np.array(lengths, np.int32)),
    )


def check(actual, expected, *, factor=1.0):
    """Compares ``(out, lse)`` with those of :func:`attention`; ``factor`` times the tolerances of out."""
    out, lse = (np.asarray(x).astype(np.float64) for x in actual)
    want, want_lse = expected
    assert out.shape == want.shape and lse.shape == want_lse.shape, (out.shape, lse.shape)
    bound = factor * (ABSOLUTE + RELATIVE * abs(want))
    assert (abs(out - want) <= bound).all(), f"out is off by {(abs(out - want) / bound).max():.3g} times the tolerance"
    total = (out * out + want * want).sum()
    if total:
        cosine = 1 - 2 * (out * want).sum() / total
        assert cosine <= factor * COSINE, f"out differs by {cosine:.3g} of its square"
    blind = np.isinf(want_lse)
    assert (lse[blind] == np.inf).all() and np.isfinite(lse[~blind]).all()
    error = abs(lse[~blind] - want_lse[~blind]) / np.maximum(abs(want_lse[~blind]), 1)
    assert (error <= LSE).all(), f"lse is off by {error.max():.3g}"
