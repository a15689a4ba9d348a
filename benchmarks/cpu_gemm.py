"""``glass.gemm`` on the CPU against ``jnp.dot``."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp

import glass_jax as glass
from benchmarks import measure
from benchmarks.measure import Report, Verdict


def _compare(size: int, dtype: str, speedup: float, remark: str) -> Report:
    """Square matrices of ``size``, operands and result of ``dtype``, and the speedup that is promised."""
    keys = jax.random.split(jax.random.key(0))
    lhs, rhs = (jax.random.normal(key, (size, size), dtype) for key in keys)
    dot, gemm = jax.jit(jnp.dot), jax.jit(glass.gemm)
    seconds = measure.interleaved({"jnp.dot": lambda: dot(lhs, rhs), "glass.gemm": lambda: gemm(lhs, rhs)})
    ratio = seconds["jnp.dot"] / seconds["glass.gemm"]
    verdict = Verdict("jnp.dot over glass.gemm", ratio, promise=("at least", speedup), remark=remark)
    return Report(f"{dtype} {size}^3", seconds, [verdict])


def bfloat16() -> list[Report]:
    """bfloat16 in and out."""
    remark = "" if has_bfloat16() else "this machine has no avx512_bf16, which the promise needs"
    return [_compare(size, "bfloat16", 1.8, remark) for size in (1024, 2048)]


def float32() -> list[Report]:
    """float32 in and out: both sides are the same product of XLA's, so a twentieth is left to noise."""
    return [_compare(size, "float32", 0.95, "the same product, 5% left to noise") for size in (1024, 2048)]


def has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 by itself (Linux)."""
    info = pathlib.Path("/proc/cpuinfo")
    return info.exists() and "avx512_bf16" in info.read_text()
