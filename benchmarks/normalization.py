"""``glass.rms_norm``, ``glass.layer_norm`` and ``glass.swiglu`` on the CPU against plain JAX and torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import glass_jax as glass
from benchmarks import measure
from benchmarks.measure import Report, Verdict
from benchmarks.shapes import normalization as norm_shapes
from benchmarks.shapes import swiglu as swiglu_shapes

TOKENS = 4096
DTYPES = ("float32", "bfloat16")


def norms() -> list[Report]:
    """Both norms of the hidden states of V2-Lite and V3."""
    widths = [norm_shapes.WIDTHS[name] for name in ("v2_lite_hidden", "v3_hidden")]
    return [_norm(name, width, dtype) for name in ("rms_norm", "layer_norm") for width in widths for dtype in DTYPES]


def swiglu() -> list[Report]:
    """The gate of an expert of V2-Lite."""
    return [_swiglu(swiglu_shapes.WIDTHS["v2_lite_expert"], dtype) for dtype in DTYPES]


def plain_rms_norm(x: jax.Array, gamma: jax.Array) -> jax.Array:
    """As models write it: the normalized row is rounded before it is scaled."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * gamma


def plain_layer_norm(x: jax.Array, gamma: jax.Array, beta: jax.Array) -> jax.Array:
    """The same."""
    y = x.astype(jnp.float32)
    y = (y - jnp.mean(y, -1, keepdims=True)) * lax.rsqrt(jnp.var(y, -1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * gamma + beta


def _norm(name: str, width: int, dtype: str) -> Report:
    import torch

    x = jax.random.normal(jax.random.key(0), (TOKENS, width), dtype)
    weights = [jnp.ones(width, dtype)] * (2 if name == "layer_norm" else 1)
    torch_norm = getattr(torch.nn.functional, name)
    t = torch.randn(TOKENS, width, dtype=getattr(torch, dtype))
    t_weights = [torch.ones(width, dtype=t.dtype) for _ in weights]
    plain = {"rms_norm": plain_rms_norm, "layer_norm": plain_layer_norm}[name]
    return _compared(
        f"{name} {dtype} {TOKENS} x {width}",
        {f"glass.{name}": getattr(glass, name), "plain JAX": plain},
        (x, *weights),
        lambda: torch_norm(t, (width,), *t_weights),
    )


def _swiglu(width: int, dtype: str) -> Report:
    import torch

    gate, up = (jax.random.normal(key, (TOKENS, width), dtype) for key in jax.random.split(jax.random.key(0)))
    t_gate, t_up = (torch.randn(TOKENS, width, dtype=getattr(torch, dtype)) for _ in range(2))
    return _compared(
        f"swiglu {dtype} {TOKENS} x {width}",
        {"glass.swiglu": glass.swiglu, "plain JAX": lambda gate, up: jax.nn.silu(gate) * up},
        (gate, up),
        lambda: torch.nn.functional.silu(t_gate) * t_up,
    )


def _compared(title: str, functions: dict, operands: tuple[jax.Array, ...], torch_side) -> Report:
    """Times jitted ``functions``, ours first, and ``torch_side``."""
    import torch

    jitted = {name: jax.jit(function) for name, function in functions.items()}
    sides = {name: lambda function=function: function(*operands) for name, function in jitted.items()}
    ours, plain = sides
    # Torch's threads spin for a while and hold the cores: ours does not follow right after it.
    sides = {"torch": lambda: torch_side().shape, plain: sides[plain], ours: sides[ours]}
    with torch.inference_mode():
        seconds = measure.interleaved(sides, seconds=0.3)
    verdicts = [Verdict(f"{side} over {ours}", seconds[side] / seconds[ours]) for side in (plain, "torch")]
    return Report(title, seconds, verdicts)
