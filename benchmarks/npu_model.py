"""The NPU model against XLA's own product, and against the interpreter of Pallas on the same tiles."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from benchmarks import measure
from benchmarks.measure import Report, Verdict
from glass_jax.hw.model import executor
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang.kernels.gemm import GemmKernel
from glass_jax.lowering.tiling import GemmTiles

SIZE = 1024
BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
CHIP = "950DT"


def kernel() -> GemmKernel:
    """float16, 1024 cubed, in tiles of 128 x 128 x 64."""
    return GemmKernel(
        batch=1,
        lhs_batched=False,
        rhs_batched=False,
        m=SIZE,
        n=SIZE,
        k=SIZE,
        operand_dtype="float16",
        out_dtype="float16",
        tiles=GemmTiles(BLOCK_M, BLOCK_N, BLOCK_K),
    )


def gemm() -> list[Report]:
    """The NPU model, XLA's dot and interpreted Pallas on the same arrays."""
    keys = jax.random.split(jax.random.key(0))
    lhs, rhs = (jax.random.normal(key, (SIZE, SIZE), jnp.float16) for key in keys)
    gemm_kernel = kernel()
    program = cache.compile(gemm_kernel, CHIP).program
    model = jax.jit(lambda lhs, rhs: executor.run(program, (lhs[None], rhs[None]), gemm_kernel.outputs)[0][0])
    dot, pallas = jax.jit(jnp.dot), jax.jit(pallas_gemm)
    dot32 = jax.jit(lambda lhs, rhs: jnp.dot(lhs, rhs, preferred_element_type=jnp.float32))
    start = time.perf_counter()
    model.lower(lhs, rhs).compile()
    compilation = time.perf_counter() - start
    seconds = measure.interleaved(
        {
            "XLA dot": lambda: dot(lhs, rhs),
            "XLA dot, float32 result": lambda: dot32(lhs, rhs),
            "NPU model": lambda: model(lhs, rhs),
            "Pallas interpreted": lambda: pallas(lhs, rhs),
        }
    )
    seconds["NPU model, traced and compiled"] = compilation
    over_dot = seconds["NPU model"] / seconds["XLA dot"]
    over_pallas = seconds["Pallas interpreted"] / seconds["NPU model"]
    verdicts = [
        Verdict("NPU model over XLA dot", over_dot, promise=("at most", 1.5)),
        Verdict("NPU model faster than interpreted Pallas by", over_pallas, promise=("at least", 8)),
    ]
    return [Report(f"float16 {SIZE}^3 in tiles of {BLOCK_M}x{BLOCK_N}x{BLOCK_K}", seconds, verdicts)]


def pallas_gemm(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """``[M, K] @ [K, N]`` as an interpreted Pallas kernel with the same tiles, accumulated in float32."""
    (m, k), n = lhs.shape, rhs.shape[1]

    def body(lhs_ref, rhs_ref, out_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        out_ref[...] += jnp.dot(lhs_ref[...], rhs_ref[...], preferred_element_type=jnp.float32)

    product = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(m // BLOCK_M, n // BLOCK_N, k // BLOCK_K),
        in_specs=[
            pl.BlockSpec((BLOCK_M, BLOCK_K), lambda i, j, k: (i, k)),
            pl.BlockSpec((BLOCK_K, BLOCK_N), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((BLOCK_M, BLOCK_N), lambda i, j, k: (i, j)),
        interpret=True,
    )
    return product(lhs, rhs).astype(lhs.dtype)
