"""Independent judges: the operations in NumPy float64, and how far a result may be from them."""

import jax.numpy as jnp
import numpy as np

# Relative Frobenius error that each type of result may have, int32 being exact.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2, "int32": 0.0}


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def activate(x: np.ndarray, activation: str | None) -> np.ndarray:
    match activation:
        case "relu":
            return np.where(x > 0, x, 0.0)
        case "gelu":
            return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        case "silu":
            return x / (1 + np.exp(-x))
    return x


def gemm(lhs, rhs, bias=None, activation=None, transpose_rhs=False) -> np.ndarray:
    rhs = np.swapaxes(f64(rhs), -1, -2) if transpose_rhs else f64(rhs)
    out = f64(lhs) @ rhs
    if bias is not None:
        out = out + f64(bias)[..., None, :]
    return activate(out, activation)


def error(actual, expected: np.ndarray) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    actual = f64(actual)
    assert actual.shape == expected.shape, f"shape {actual.shape} instead of {expected.shape}"
    if not np.isfinite(actual).all():
        return np.inf
    scale = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / (scale if scale > 0 else 1.0))


def assert_close(actual, expected: np.ndarray, tolerance: float | None = None) -> None:
    limit = TOLERANCE[str(jnp.dtype(actual.dtype))] if tolerance is None else tolerance
    assert (e := error(actual, expected)) <= limit, f"relative error {e:.3g} above {limit:.3g}"


def random(rng: np.random.Generator, shape, dtype) -> jnp.ndarray:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.integers(-128, 128, shape), dtype)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)
