"""``glass.topk`` on the CPU against ``lax.top_k``, of the same values in float32 too, and torch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import glass_jax as glass
from benchmarks import measure
from benchmarks.measure import Report, Verdict
from benchmarks.shapes.topk import SHAPES, Shape

PROMISED = "selection"


def cpu() -> list[Report]:
    """Rows of 16-bit elements; of float32 the formula is ``lax.top_k`` itself."""
    return [_compare(name, SHAPES[name]) for name in (PROMISED, "selection_1m", "selection_batch")]


def _compare(name: str, shape: Shape) -> Report:
    import torch

    x = jax.random.normal(jax.random.key(0), (shape.rows, shape.columns), shape.dtype)
    wide = x.astype(jnp.float32)
    t = torch.tensor(np.asarray(wide)).to(getattr(torch, shape.dtype))
    ours, theirs = (jax.jit(functools.partial(f, k=shape.k)) for f in (glass.topk, lax.top_k))
    sides = {
        "torch.topk": lambda: tuple(out.shape for out in torch.topk(t, shape.k)),
        # After torch, whose threads hold the cores a while longer, comes what takes long anyway.
        "lax.top_k": lambda: theirs(x),
        "lax.top_k, float32": lambda: theirs(wide),
        "glass.topk": lambda: ours(x),
    }
    with torch.inference_mode():
        seconds = measure.interleaved(sides, seconds=0.3)
    promises = {"lax.top_k": ("at least", 50), "lax.top_k, float32": ("at least", 1)} if name == PROMISED else {}
    verdicts = [
        Verdict(f"{side} over glass.topk", seconds[side] / seconds["glass.topk"], promise=promises.get(side))
        for side in list(sides)[:-1]
    ]
    return Report(f"{name}: {shape.dtype} {shape.rows} x {shape.columns}, k {shape.k}", seconds, verdicts)
