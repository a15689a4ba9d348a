"""``ln_gelu_linear`` and ``linear_ln_gelu`` on the CPU against the bare product, plain JAX and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import glass_jax as glass
from benchmarks import cpu_gemm, measure
from benchmarks.measure import Report, Verdict
from benchmarks.shapes.fused_linear import SHAPES


def before() -> list[Report]:
    """``ln_gelu_linear``, float32 and bfloat16."""

    def plain(x, gamma, beta, w, b):
        return (jnp.dot(_activations(x, gamma, beta).astype(x.dtype), w) + b).astype(x.dtype)

    def with_torch(F, x, gamma, beta, w, b):
        return F.linear(F.gelu(F.layer_norm(x, gamma.shape, gamma, beta), approximate="tanh"), w, b)

    def report(shape: str, speedup: float | None) -> Report:
        return _compared("ln_gelu_linear", shape, plain, with_torch, most=1.1, speedup=speedup)

    return [report("promise_float32", None), report("promise", 1.6)]


def after() -> list[Report]:
    """``linear_ln_gelu``, float32 and bfloat16."""

    def plain(x, w, b, gamma, beta):
        return _activations(jnp.dot(x, w) + b, gamma, beta).astype(x.dtype)

    def with_torch(F, x, w, b, gamma, beta):
        return F.gelu(F.layer_norm(F.linear(x, w, b), gamma.shape, gamma, beta), approximate="tanh")

    return [_compared("linear_ln_gelu", shape, plain, with_torch) for shape in ("promise_float32", "promise")]


def _activations(x: jax.Array, gamma: jax.Array, beta: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return jax.nn.gelu(x * gamma + beta)


def _compared(
    name: str,
    shape: str,
    plain: Callable[..., jax.Array],
    with_torch: Callable[..., Any],
    most: float | None = None,
    speedup: float | None = None,
) -> Report:
    """One operation at one shape, with the promised times of the bare product and speedup over plain JAX."""
    sizes = SHAPES[shape]
    operands = getattr(sizes, name)
    keys = jax.random.split(jax.random.key(0), len(operands))
    args = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, operands, strict=True)]
    x, w = (a for a in args if a.ndim == 2)
    op, dot, written = jax.jit(getattr(glass, name)), jax.jit(glass.gemm), jax.jit(plain)
    # Torch's threads spin for a while and hold the cores: what is promised does not follow right after it.
    seconds = measure.interleaved(
        {
            "torch": _torch(with_torch, args, sizes.dtype),
            "plain JAX": lambda: written(*args),
            name: lambda: op(*args),
            "the bare product": lambda: dot(x, w),
        }
    )
    has_bfloat16 = sizes.dtype == "float32" or cpu_gemm.has_bfloat16()
    remark = "" if has_bfloat16 else "this machine has no avx512_bf16, which the promise needs"
    ours = seconds[name]
    verdicts = [
        Verdict(
            f"{name} over the bare product",
            ours / seconds["the bare product"],
            promise=None if most is None else ("at most", most),
        ),
        Verdict(
            f"plain JAX over {name}",
            seconds["plain JAX"] / ours,
            promise=None if speedup is None else ("at least", speedup),
            remark=remark,
        ),
        Verdict(f"torch over {name}", seconds["torch"] / ours),
    ]
    return Report(f"{name} {sizes.dtype} {sizes.rows}x{sizes.inputs}x{sizes.outputs}", seconds, verdicts)


def _torch(fn: Callable[..., Any], args: list[jax.Array], dtype: str) -> Callable[[], Any]:
    """``fn(torch.nn.functional, *args)`` on torch tensors of one type, the weights ``[N, K]``, as torch keeps them."""
    import torch

    tensors = [torch.from_numpy(np.array(x, np.float32)).to(getattr(torch, dtype)) for x in args]
    x, *others = tensors
    others = [a.T.contiguous() if a.ndim == 2 else a for a in others]

    def run():
        with torch.inference_mode():
            return fn(torch.nn.functional, x, *others)

    return run
