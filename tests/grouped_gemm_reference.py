"""The grouped products in NumPy float64, group by group."""

import numpy as np

import numpy_reference as ref


def spans(sizes, m):
    """First row and the one after the last of each group, of ``m`` rows."""
    end, found = 0, []
    for size in np.asarray(sizes).tolist():
        start, end = end, min(end + max(size, 0), m)
        found.append((start, end))
    return found


def grouped_gemm(lhs, rhs, sizes) -> np.ndarray:
    lhs, rhs = ref.f64(lhs), ref.f64(rhs)
    out = np.zeros((len(lhs), rhs.shape[2]))
    for matrix, (start, end) in zip(rhs, spans(sizes, len(lhs)), strict=True):
        out[start:end] = lhs[start:end] @ matrix
    return out


def masked_grouped_gemm(lhs, rhs, masked_m) -> np.ndarray:
    return np.stack([grouped_gemm(a, b[None], [n]) for a, b, n in zip(lhs, rhs, np.asarray(masked_m), strict=True)])


def gradients(lhs, rhs, sizes, weight) -> tuple[np.ndarray, np.ndarray]:
    """Of ``sum(grouped_gemm(lhs, rhs, sizes) * weight)``, by ``lhs`` and ``rhs``."""
    lhs, rhs, weight = map(ref.f64, (lhs, rhs, weight))
    d_lhs, d_rhs = np.zeros_like(lhs), np.zeros_like(rhs)
    for g, (start, end) in enumerate(spans(sizes, len(lhs))):
        d_lhs[start:end] = weight[start:end] @ rhs[g].T
        d_rhs[g] = lhs[start:end].T @ weight[start:end]
    return d_lhs, d_rhs


def uneven(rng, groups: int, m: int) -> np.ndarray:
    """Sizes of ``groups`` groups that sum up to ``m``, some small and some large."""
    return rng.multinomial(m, rng.dirichlet(np.ones(groups))).astype(np.int32)
