"""The grouped products on the CPU: against ``lax.ragged_dot``, and against PyTorch's ``_grouped_mm``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import glass_jax as glass
from benchmarks import cpu_gemm, measure
from benchmarks.measure import Report, Verdict
from benchmarks.shapes.grouped_gemm import SHAPES, Shape

PROMISED = Shape(groups=32, m=1024, n=512, k=512)
DECODE = SHAPES["v2_lite_decode"]
LARGE = Shape(groups=8, m=4096, n=512, k=512)


def cpu() -> list[Report]:
    """The promised size, few rows of many groups, and many rows of few."""
    remark = "" if cpu_gemm.has_bfloat16() else "this machine has no avx512_bf16, which the promise needs"
    return [
        _compare(PROMISED, "float32", {"lax.ragged_dot": ("at least", 12), "PyTorch": ("at most", 1.5)}),
        _compare(PROMISED, "bfloat16", {"lax.ragged_dot": ("at least", 12), "PyTorch": ("at most", 3)}, remark),
        _compare(LARGE, "bfloat16", {}),
        _compare(DECODE, "bfloat16", {}, peers=("PyTorch",)),
    ]


def gradients() -> list[Report]:
    """Value and both gradients against those of ``lax.ragged_dot``."""
    lhs, rhs, sizes = _operands(PROMISED, "float32")

    def step(product):
        return jax.jit(lambda a, b: jax.vjp(lambda a, b: product(a, b, sizes), a, b)[1](a))

    sides = {"lax.ragged_dot": step(lax.ragged_dot), "glass.grouped_gemm": step(glass.grouped_gemm)}
    seconds = measure.interleaved({name: functools.partial(f, lhs, rhs) for name, f in sides.items()})
    ratio = seconds["lax.ragged_dot"] / seconds["glass.grouped_gemm"]
    return [Report(f"gradients, {_title(PROMISED, 'float32')}", seconds, [Verdict("lax.ragged_dot over ours", ratio)])]


def _compare(
    shape: Shape, dtype: str, promises: dict, remark: str = "", peers: tuple[str, ...] = ("lax.ragged_dot", "PyTorch")
) -> Report:
    lhs, rhs, sizes = _operands(shape, dtype)
    ours, theirs = jax.jit(glass.grouped_gemm), jax.jit(lax.ragged_dot)
    # Never right after PyTorch, whose threads spin for a while and hold the cores: what follows it is slower for that.
    sides = {
        "PyTorch": _torch(lhs, rhs, sizes),
        "lax.ragged_dot": functools.partial(theirs, lhs, rhs, sizes),
        "glass.grouped_gemm": functools.partial(ours, lhs, rhs, sizes),
    }
    sides = {name: f for name, f in sides.items() if name in (*peers, "glass.grouped_gemm")}
    seconds = measure.interleaved(sides)
    mine, verdicts = seconds["glass.grouped_gemm"], []
    if "lax.ragged_dot" in peers:
        ratio, promise = seconds["lax.ragged_dot"] / mine, promises.get("lax.ragged_dot")
        verdicts.append(Verdict("lax.ragged_dot over ours", ratio, promise=promise, remark=remark))
    ratio = mine / seconds["PyTorch"]
    verdicts.append(Verdict("ours over torch._grouped_mm", ratio, promise=promises.get("PyTorch"), remark=remark))
    return Report(_title(shape, dtype), seconds, verdicts)


def _title(shape: Shape, dtype: str) -> str:
    return f"{dtype}, {shape.m} rows of {shape.groups} uneven groups, K {shape.k}, N {shape.n}"


def _operands(shape: Shape, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.standard_normal((shape.m, shape.k), np.float32)).astype(dtype)
    rhs = jnp.asarray(rng.standard_normal((shape.groups, shape.k, shape.n), np.float32)).astype(dtype)
    sizes = rng.multinomial(shape.m, rng.dirichlet(np.ones(shape.groups)))
    return lhs, rhs, jnp.asarray(sizes, jnp.int32)


def _torch(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array):
    import torch

    a, b = (torch.tensor(np.asarray(x.astype(jnp.float32))).to(getattr(torch, str(x.dtype))) for x in (lhs, rhs))
    ends = torch.tensor(np.cumsum(np.asarray(sizes)).astype(np.int32))
    return lambda: torch._grouped_mm(a, b, offs=ends).numel()
