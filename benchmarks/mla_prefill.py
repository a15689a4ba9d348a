"""``glass.mla_prefill`` on the CPU, and its gradient, against attention in plain JAX and in PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import glass_jax as glass
from benchmarks import measure
from benchmarks.measure import Report, Verdict
from benchmarks.shapes.mla_prefill import SHAPES

PROMISED = ("at most", 0.6)  # of the time of attention in plain JAX


def forward() -> list[Report]:
    """Eight causal heads of 1024 tokens."""
    return [_compare("mla_prefill", dtype, _forwards) for dtype in ("float32", "bfloat16")]


def gradient() -> list[Report]:
    """The same with the gradients of q, k and v."""
    return [_compare("mla_prefill and its gradient", dtype, _gradients) for dtype in ("float32", "bfloat16")]


def _compare(title: str, dtype: str, sides_of: Callable[..., dict[str, Callable[[], Any]]]) -> Report:
    shape = SHAPES["promise"]
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(x.shape, np.float32)).astype(dtype) for x in shape.arguments()]
    seconds = measure.interleaved(sides_of(*arrays))
    mine = seconds["glass.mla_prefill"]
    plain = min(time for side, time in seconds.items() if side.startswith("JAX"))
    verdicts = [
        Verdict("ours over plain JAX", mine / plain, promise=PROMISED if sides_of is _forwards else None),
        Verdict("ours over PyTorch", mine / seconds["PyTorch, scaled_dot_product_attention"]),
    ]
    sizes = f"{shape.heads} causal heads x {shape.length} x {shape.length} x {shape.d}/{shape.dv}"
    return Report(f"{title}, {dtype}, {sizes}", seconds, verdicts)


def _forwards(q: jax.Array, k: jax.Array, v: jax.Array) -> dict[str, Callable[[], Any]]:
    sides = {
        "JAX, einsum and softmax": plain,
        "JAX, jax.nn.dot_product_attention": dot_product_attention,
        "glass.mla_prefill": lambda q, k, v: glass.mla_prefill(q, k, v)[0],
    }
    called = {name: functools.partial(jax.jit(side), q, k, v) for name, side in sides.items()}
    return called | {"PyTorch, scaled_dot_product_attention": _torch(q, k, v, gradient=False)}


def _gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> dict[str, Callable[[], Any]]:
    sides = {"JAX, einsum and softmax": plain, "glass.mla_prefill": lambda q, k, v: glass.mla_prefill(q, k, v)[0]}

    def both(side, q, k, v):
        out, pullback = jax.vjp(side, q, k, v)
        return out, pullback(jnp.ones_like(out))

    called = {name: functools.partial(jax.jit(functools.partial(both, side)), q, k, v) for name, side in sides.items()}
    return called | {"PyTorch, scaled_dot_product_attention": _torch(q, k, v, gradient=True)}


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention as one would write it: scores of all heads in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, preferred_element_type=jnp.float32).astype(v.dtype)


def dot_product_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same by JAX, which wants values as long as keys."""
    wide = jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[-1] - v.shape[-1])])
    return jax.nn.dot_product_attention(q, k, wide, is_causal=True)[..., : v.shape[-1]]


def _torch(q: jax.Array, k: jax.Array, v: jax.Array, *, gradient: bool) -> Callable[[], Any]:
    """The same in PyTorch, heads before the sequence as it wants them."""
    import torch

    def tensor(x):
        x = torch.tensor(np.asarray(jnp.swapaxes(x, 1, 2).astype(jnp.float32)))
        return x.to(getattr(torch, str(q.dtype))).requires_grad_(gradient)

    tensors = [tensor(x) for x in (q, k, v)]

    def run():
        with torch.set_grad_enabled(gradient):
            out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
            return torch.autograd.grad(out, tensors, torch.ones_like(out)) if gradient else out

    return run
