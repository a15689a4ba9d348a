"""Independent judge of mla_prefill: query after query in NumPy float64, its gradient, and cases to judge it on."""

import jax.numpy as jnp
import numpy as np

# Relative Frobenius error of out and of each gradient: FlashMLA's, and what operands of the type make of exact sums.
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 1e-3, "bfloat16": 7e-3}
LSE = 2e-6


def f64(x):
    return np.asarray(x).astype(np.float64)


def seen_by(i, queries, keys, causal, ids):
    """Which keys query ``i`` sees."""
    seen = np.ones(keys, bool)
    if causal:
        seen &= np.arange(keys) <= i + keys - queries
    return seen if ids is None else seen & (ids == ids[i])


def attention(q, k, v, *, causal=True, softmax_scale=None, segment_ids=None, d_out=None, d_lse=None):
    """``(out, lse)``, and with ``d_out`` and ``d_lse`` also ``(dq, dk, dv)``, in float64."""
    q, k, v = f64(q), f64(k), f64(v)
    (batch, queries, heads, d), keys = q.shape, k.shape[1]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out, lse = np.zeros((batch, queries, heads, v.shape[-1])), np.full((batch, heads, queries), np.inf)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, h, i in np.ndindex(batch, heads, queries):
        seen = seen_by(i, queries, keys, causal, None if segment_ids is None else np.asarray(segment_ids)[b])
        if not seen.any():
            continue
        kb, vb = k[b, seen, h], v[b, seen, h]
        scores = kb @ q[b, i, h] * scale
        exps = np.exp(scores - scores.max())
        p = exps / exps.sum()
        lse[b, h, i] = scores.max() + np.log(exps.sum())
        out[b, i, h] = p @ vb
        if d_out is not None:
            dp = vb @ f64(d_out)[b, i, h]
            ds = p * (dp - p @ dp) + p * f64(d_lse)[b, h, i]  # the Jacobians of softmax and of logsumexp
            dq[b, i, h] = ds @ kb * scale
            dk[b, seen, h] += np.outer(ds, q[b, i, h]) * scale
            dv[b, seen, h] += np.outer(p, f64(d_out)[b, i, h])
    return (out, lse) if d_out is None else (out, lse, (dq, dk, dv))


def operands(batch, queries, keys, heads, d, dv, dtype, *, ids=None, seed=0, size=1.0):
    """Random q, k and v, and ids: ``ids`` packed sequences at places of their own in each row; 0 for all different."""
    rng = np.random.default_rng(seed)
    shapes = ((batch, queries, heads, d), (batch, keys, heads, d), (batch, keys, heads, dv))
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype) for shape in shapes)
    if ids is None:
        return q * size, k, v, None
    if ids == 0:
        return q * size, k, v, jnp.asarray(np.stack([rng.permutation(queries) for _ in range(batch)]), jnp.int32)
    return q * size, k, v, jnp.asarray(np.sort(rng.integers(0, ids, (batch, queries)), axis=1), jnp.int32)


def error(actual, expected):
    """Relative Frobenius error; NaN counts as infinite, and infinities must be the same."""
    actual = f64(actual)
    assert actual.shape == expected.shape, f"shape {actual.shape} instead of {expected.shape}"
    np.testing.assert_array_equal(np.isposinf(actual), np.isposinf(expected))
    actual, expected = (np.where(np.isposinf(x), 0, x) for x in (actual, expected))
    if not np.isfinite(actual).all():
        return np.inf
    scale = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / (scale if scale > 0 else 1.0))


def assert_close(actual, expected, limit):
    assert (e := error(actual, expected)) <= limit, f"relative error {e:.3g} above {limit:.3g}"


def assert_attention(results, expected):
    """``(out, lse)`` are the reference's."""
    out, lse = results
    assert_close(out, expected[0], TOLERANCE[str(out.dtype)])
    assert_close(lse, expected[1], 1e-12 if lse.dtype == jnp.float64 else LSE)
