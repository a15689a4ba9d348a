"""RMSNorm, LayerNorm and SwiGLU in NumPy float64, with the gradients of ``sum(weight * result)`` worked out by hand."""

import numpy as np


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def rms_norm(x, gamma, eps=1e-6) -> np.ndarray:
    x = f64(x)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * f64(gamma)


def layer_norm(x, gamma, beta, eps=1e-5) -> np.ndarray:
    x = f64(x)
    deviation = np.sqrt(np.var(x, axis=-1, keepdims=True) + eps)
    return (x - np.mean(x, axis=-1, keepdims=True)) / deviation * f64(gamma) + f64(beta)


def swiglu(gate, up) -> np.ndarray:
    gate = f64(gate)
    with np.errstate(over="ignore"):  # exp of large numbers is infinite, and the quotient 0
        return gate / (1 + np.exp(-gate)) * f64(up)


def rms_norm_gradients(x, gamma, weight, eps=1e-6) -> tuple[np.ndarray, ...]:
    """Of x and gamma."""
    x, gamma, weight = f64(x), f64(gamma), f64(weight)
    factor = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    normal, inner = x * factor, weight * gamma
    d_x = factor * (inner - normal * np.mean(inner * normal, axis=-1, keepdims=True))
    return d_x, np.sum(weight * normal, axis=tuple(range(x.ndim - 1)))


def layer_norm_gradients(x, gamma, beta, weight, eps=1e-5) -> tuple[np.ndarray, ...]:
    """Of x, gamma and beta."""
    x, gamma, weight = f64(x), f64(gamma), f64(weight)
    rows = tuple(range(x.ndim - 1))
    factor = 1 / np.sqrt(np.var(x, axis=-1, keepdims=True) + eps)
    normal, inner = (x - np.mean(x, axis=-1, keepdims=True)) * factor, weight * gamma
    along = np.mean(inner * normal, axis=-1, keepdims=True)
    d_x = factor * (inner - np.mean(inner, axis=-1, keepdims=True) - normal * along)
    return d_x, np.sum(weight * normal, axis=rows), np.sum(weight, axis=rows)


def swiglu_gradients(gate, up, weight) -> tuple[np.ndarray, ...]:
    """Of gate and up."""
    gate, up, weight = f64(gate), f64(up), f64(weight)
    s = 1 / (1 + np.exp(-gate))
    return weight * up * s * (1 + gate * (1 - s)), weight * gate * s
