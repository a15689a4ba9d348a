"""Independent judge of sparse_mla_prefill: a query after the other in NumPy float64, and cases to judge it on."""

import jax.numpy as jnp
import numpy as np

import mla_decode_reference

NONSENSE = (-1, -(2**31), 2**31 - 1, 10**6)  # indices that name no token, whatever the number of tokens is


def attention(q, kv, indices, *, softmax_scale, head_dim_v, attn_sink=None, topk_length=None):
    """``(out, max_logits, lse)`` in float64."""
    q, kv = (np.asarray(x).astype(np.float64) for x in (q, kv))
    queries, heads, _ = q.shape
    out = np.zeros((queries, heads, head_dim_v))
    largest, lse = np.full((queries, heads), -np.inf), np.full((queries, heads), np.inf)
    for i in range(queries):
        named = np.asarray(indices)[i, 0, : None if topk_length is None else max(int(topk_length[i]), 0)]
        tokens = kv[[j for j in named if 0 <= j < len(kv)], 0]
        if not len(tokens):
            continue
        scores = q[i] @ tokens.T * softmax_scale
        largest[i] = scores.max(-1)
        weights = np.exp(scores - largest[i][:, None])
        total = weights.sum(-1)
        lse[i] = largest[i] + np.log(total)
        out[i] = weights @ tokens[:, :head_dim_v] / total[:, None]
        if attn_sink is not None:
            out[i] /= 1 + np.exp(np.asarray(attn_sink).astype(np.float64) - lse[i])[:, None]
    return out, largest, lse


def operands(queries, heads, tokens, topk, *, depth=512, dtype="bfloat16", scattered=False, seed=0, unnamed=np.nan):
    """``q, kv, indices``: tokens as large as FlashMLA tests with, scores of about one.

    A third of the tokens hold ``unnamed`` and no index names them. A query names different ones of the others, in any
    order, and nonsense where there are not as many: at the end, or ``scattered``, which is a fourth of all then.
    """
    rng = np.random.default_rng(seed)
    kv = np.full((tokens, 1, depth), unnamed, np.float32)
    good = rng.permutation(tokens)[: max(2 * tokens // 3, min(tokens, 1))]
    kv[good, 0] = rng.standard_normal((len(good), depth)) / 10
    indices = rng.choice(np.array(NONSENSE), (queries, 1, topk))
    for row in indices[:, 0]:
        named = rng.permutation(good)[: topk * 3 // 4 if scattered else topk]
        places = rng.permutation(topk) if scattered else np.arange(topk)
        row[places[: len(named)]] = named
    q = 10 * rng.standard_normal((queries, heads, depth)).astype(np.float32)
    return jnp.asarray(q, dtype), jnp.asarray(kv, dtype), jnp.asarray(indices, jnp.int32)


def check(actual, expected):
    """Compares ``(out, max_logits, lse)`` with those of :func:`attention`."""
    out, largest, lse = actual
    want, want_largest, want_lse = expected
    mla_decode_reference.check((out, lse), (want, want_lse))
    np.testing.assert_allclose(np.asarray(largest).astype(np.float64), want_largest, rtol=1e-6, atol=1e-6)
