"""Independent judge of mqa_logits and its gradients: NumPy in float64, one query and one head after the other."""

import numpy as np


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def mqa_logits(q, kv, kv_scale, weights, starts, ends) -> np.ndarray:
    """``[Sq, Skv]`` of operands without batch dimensions; ``kv_scale`` None is ones."""
    q, kv, weights = map(f64, (q, kv, weights))
    scale = np.ones(len(kv)) if kv_scale is None else f64(kv_scale)
    out = np.full((len(q), len(kv)), -np.inf)
    for i, (start, end) in enumerate(zip(np.asarray(starts), np.asarray(ends), strict=True)):
        mine = slice(max(int(start), 0), max(int(end), 0))
        total = np.zeros(len(kv[mine]))
        for head, weight in zip(q[i], weights[i], strict=True):
            total += weight * np.maximum(kv[mine] @ head, 0)
        out[i, mine] = total * scale[mine]
    return out


def batched(*operands) -> np.ndarray:
    """The same of operands that all have the same batch dimensions."""
    batch = operands[0].shape[:-3]
    arrays = list(map(np.asarray, operands))
    first = mqa_logits(*(x[(0,) * len(batch)] for x in arrays))
    out = np.empty((*batch, *first.shape))
    for place in np.ndindex(*batch):
        out[place] = mqa_logits(*(x[place] for x in arrays))
    return out


def gradients(q, kv, kv_scale, weights, starts, ends, out_gradient) -> list[np.ndarray]:
    """Of the sum of ``out_gradient`` times what is finite of the logits: by q, kv, kv_scale and weights."""
    q, kv, scale, weights, g = map(f64, (q, kv, kv_scale, weights, out_gradient))
    d_q, d_kv, d_scale, d_weights = (np.zeros_like(x) for x in (q, kv, scale, weights))
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for j in range(max(start, 0), min(end, len(kv))):
            s = q[i] @ kv[j]
            positive = np.maximum(s, 0)
            d_scale[j] += g[i, j] * weights[i] @ positive
            d_weights[i] += g[i, j] * scale[j] * positive
            by_s = g[i, j] * scale[j] * weights[i] * (s > 0)
            d_q[i] += by_s[:, None] * kv[j]
            d_kv[j] += by_s @ q[i]
    return [d_q, d_kv, d_scale, d_weights]


def finite(x) -> np.ndarray:
    """``x`` with 0 in place of minus infinity."""
    return np.where(f64(x) == -np.inf, 0, f64(x))


def assert_close(actual, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    """What is hidden is -inf, exactly that; the rest agrees, by the Frobenius norm."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual == -np.inf, expected == -np.inf)
    error = np.linalg.norm(finite(actual) - finite(expected))
    assert error <= tolerance * (np.linalg.norm(finite(expected)) or 1), f"relative error {error:.3g}"
