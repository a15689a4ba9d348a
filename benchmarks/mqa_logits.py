"""``glass.mqa_logits`` on the CPU, and its gradient, against the same written in plain JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import glass_jax as glass
from benchmarks import cpu_gemm, measure
from benchmarks.measure import Report, Verdict
from benchmarks.shapes.mqa_logits import SHAPES, Shape

_CAUSAL = Shape(512, 4096, dtype="bfloat16")
_GRADIENT = Shape(256, 1024, dtype="bfloat16")


def cpu() -> list[Report]:
    """Many queries, one, and a chunk of a prompt whose queries are the last of its keys."""
    names = ("v3.2_128x4096", "v3.2_1x32768", "heads_16")
    return [_compare(name, SHAPES[name]) for name in names] + [_compare("v3.2 512x4096, causal", _CAUSAL)]


def gradient() -> list[Report]:
    """Of queries, keys, scales and weights."""
    (*moving, starts, ends), remark = _operands(_GRADIENT), _remark()
    weight = jax.random.normal(jax.random.key(1), (_GRADIENT.queries, _GRADIENT.keys))

    def of(function):
        def loss(*moving):
            out = function(*moving, starts, ends)
            return jnp.sum(jnp.where(jnp.isfinite(out), out * weight, 0))

        compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*moving).compile()
        return compiled, compiled.memory_analysis().temp_size_in_bytes

    (plain, plain_bytes), (ours, our_bytes) = of(_plain), of(glass.mqa_logits)
    seconds = measure.interleaved({"plain JAX": lambda: plain(*moving), "glass.mqa_logits": lambda: ours(*moving)})
    verdicts = [
        Verdict("plain JAX over ours", seconds["plain JAX"] / seconds["glass.mqa_logits"], remark=remark),
        Verdict("memory of plain JAX over ours", plain_bytes / our_bytes),
    ]
    return [Report(f"gradients, {_title(_GRADIENT)}", seconds, verdicts)]


def _compare(name: str, shape: Shape) -> Report:
    operands = _operands(shape)
    sides = {"plain JAX": jax.jit(_plain), "glass.mqa_logits": jax.jit(glass.mqa_logits)}
    seconds = measure.interleaved({side: functools.partial(f, *operands) for side, f in sides.items()})
    ratio = seconds["plain JAX"] / seconds["glass.mqa_logits"]
    return Report(f"{name}: {_title(shape)}", seconds, [Verdict("plain JAX over ours", ratio, remark=_remark())])


def _title(shape: Shape) -> str:
    return f"{shape.queries} queries, {shape.keys} keys, {shape.heads} heads of {shape.d}, {shape.dtype}"


def _remark() -> str:
    return "" if cpu_gemm.has_bfloat16() else "this machine has no avx512_bf16"


def _operands(shape: Shape) -> list[jax.Array]:
    """Random ones; a query sees the keys up to its own."""
    rng, (*floats, starts, ends) = np.random.default_rng(0), shape.arguments()
    numbers = [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in floats]
    last = np.arange(shape.queries) + shape.keys - shape.queries + 1
    return [*numbers, jnp.zeros(starts.shape, jnp.int32), jnp.asarray(last, ends.dtype)]


def _plain(q, kv, kv_scale, weights, starts, ends):
    """As one writes it: the products of all heads, fp8 as bfloat16, in which they are exact."""
    if q.dtype == jnp.float8_e4m3fn:
        q, kv = q.astype(jnp.bfloat16), kv.astype(jnp.bfloat16)
    s = jnp.einsum("shd,nd->shn", q, kv, preferred_element_type=jnp.float32)
    out = jnp.einsum("shn,sh->sn", jax.nn.relu(s), weights) * kv_scale
    key = jnp.arange(len(kv))
    return jnp.where((starts[:, None] <= key) & (key < ends[:, None]), out, -jnp.inf)
