"""``glass.scaled_gemm`` on the CPU against the same written in plain JAX, and against PyTorch's ``_scaled_mm``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import glass_jax as glass
from benchmarks import cpu_gemm, measure
from benchmarks.measure import Report, Verdict
from benchmarks.shapes.scaled_gemm import SHAPES, Shape


def cpu() -> list[Report]:
    """Many tokens and one, by a layer of V3."""
    return [_compare(name, SHAPES[name]) for name in ("128x7168x2048", "1x7168x2048")]


def quantize() -> list[Report]:
    """Activations and weights, against the same in PyTorch's operations."""
    return [_quantize((4096, 2048), (1, 128)), _quantize((7168, 2048), (128, 128))]


def _compare(name: str, shape: Shape) -> Report:
    keys = jax.random.split(jax.random.key(0))
    whole = [jax.random.normal(key, (rows, shape.k)) for key, rows in zip(keys, (shape.m, shape.n), strict=True)]
    blocks = shape.lhs_block, shape.rhs_block
    operands = {
        scale: [
            x for pair in zip(whole, blocks, strict=True) for x in glass.quantize(pair[0], block=pair[1], scale=scale)
        ]
        for scale in ("float32", "e8m0")
    }
    ours, plain = jax.jit(glass.scaled_gemm), jax.jit(functools.partial(_plain, blocks=blocks))
    plain_bfloat16 = jax.jit(functools.partial(_plain, blocks=blocks, dtype=jnp.bfloat16))
    # Never ours right after PyTorch, whose threads spin for a while and hold the cores.
    sides = {
        "PyTorch, a scale for each row only": _torch(*operands["float32"]),
        "plain JAX in bfloat16, powers of two": functools.partial(plain_bfloat16, *operands["e8m0"]),
        "ours, powers of two": functools.partial(ours, *operands["e8m0"]),
        "plain JAX in float32": functools.partial(plain, *operands["float32"]),
        "ours": functools.partial(ours, *operands["float32"]),
    }
    seconds = measure.interleaved(sides)
    remark = "" if cpu_gemm.has_bfloat16() else "this machine has no avx512_bf16"
    pairs = [
        ("plain JAX in float32", "ours", ""),
        ("plain JAX in bfloat16, powers of two", "ours, powers of two", remark),
        ("ours", "ours, powers of two", remark),
        ("ours, powers of two", "PyTorch, a scale for each row only", "which is less work"),
    ]
    verdicts = [Verdict(f"{a} over {b}", seconds[a] / seconds[b], remark=remark) for a, b, remark in pairs]
    return Report(f"{name}: float8_e4m3fn, scales for 1x128 and 128x128", seconds, verdicts)


def _plain(lhs, lhs_scale, rhs, rhs_scale, *, blocks, dtype=jnp.float32):
    """As one writes it: every scale repeated for its block, and one product."""

    def multiplied_out(x, scale, block):
        scale = jnp.repeat(jnp.repeat(scale.astype(dtype), block[0], 0), block[1], 1)
        return x.astype(dtype) * scale[: x.shape[0], : x.shape[1]]

    left, right = multiplied_out(lhs, lhs_scale, blocks[0]), multiplied_out(rhs, rhs_scale, blocks[1])
    return jnp.dot(left, right.T).astype(jnp.bfloat16)


def _torch(lhs, lhs_scale, rhs, rhs_scale):
    """The CPU's ``_scaled_mm`` takes no blocks: each row has its first scale."""
    import torch

    a, b = (torch.tensor(np.asarray(x).view(np.uint8)).view(torch.float8_e4m3fn) for x in (lhs, rhs))
    left = torch.tensor(np.asarray(lhs_scale[:, :1]))
    right = torch.tensor(np.repeat(np.asarray(rhs_scale[:, :1]), 128, axis=0)[: len(b)].T)
    return lambda: torch._scaled_mm(a, b.T, scale_a=left, scale_b=right, out_dtype=torch.bfloat16).numel()


def _quantize(shape: tuple[int, int], block: tuple[int, int]) -> Report:
    import torch

    x = jax.random.normal(jax.random.key(0), shape)
    t = torch.tensor(np.asarray(x))
    ours = jax.jit(functools.partial(glass.quantize, block=block))

    def theirs():
        blocks = t.view(shape[0] // block[0], block[0], shape[1] // block[1], block[1])
        scales = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) / 448
        return (blocks / scales).to(torch.float8_e4m3fn).numel()

    seconds = measure.interleaved({"PyTorch": theirs, "glass.quantize": lambda: ours(x)}, seconds=0.5)
    verdict = Verdict("ours over PyTorch", seconds["glass.quantize"] / seconds["PyTorch"])
    return Report(f"float32 {shape[0]} x {shape[1]}, blocks of {block[0]} x {block[1]}", seconds, [verdict])
