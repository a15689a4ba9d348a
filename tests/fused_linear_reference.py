"""Independent judge of ``ln_gelu_linear`` and ``linear_ln_gelu``: NumPy float64."""

import math

import numpy as np

from numpy_reference import f64

_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(z: np.ndarray, approximate: bool) -> np.ndarray:
    if approximate:
        return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    return 0.5 * z * (1 + _erf(z / np.sqrt(2)))


def layer_norm_gelu(x, gamma, beta, eps: float = 1e-5, approximate: bool = True) -> np.ndarray:
    x = f64(x)
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return gelu(normal * f64(gamma) + f64(beta), approximate)


def linear(x, w, b=None) -> np.ndarray:
    return f64(x) @ f64(w) + (0 if b is None else f64(b))


def ln_gelu_linear(x, gamma, beta, w, b=None, **options) -> np.ndarray:
    return linear(layer_norm_gelu(x, gamma, beta, **options), w, b)


def linear_ln_gelu(x, w, b, gamma, beta, **options) -> np.ndarray:
    return layer_norm_gelu(linear(x, w, b), gamma, beta, **options)
