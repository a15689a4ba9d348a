"""``glass.mla_decode`` on the CPU against the same written in JAX and in PyTorch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import glass_jax as glass
from benchmarks import cpu_gemm, measure
from benchmarks.measure import Report, Verdict
from benchmarks.shapes.mla_decode import SHAPES

SHAPE = SHAPES["v2_lite"]  # full sequences: 8 x 2048 tokens


def cpu() -> list[Report]:
    """Time, and memory beyond the operands."""
    q, cache, table, lengths = arguments()
    decode, written, cut_late = jax.jit(glass.mla_decode), jax.jit(plain), jax.jit(partial(plain, cut_values=False))
    seconds = measure.interleaved(
        {
            # PyTorch's threads spin for a while and hold the cores: what is promised does not follow right after it.
            "gather + einsum + softmax in PyTorch": in_torch(q, cache, table),
            "in JAX, values cut from the result": lambda: cut_late(q, cache, table, lengths),
            "the same in JAX": lambda: written(q, cache, table, lengths),
            "glass.mla_decode": lambda: decode(q, cache, table, lengths),
        }
    )
    in_pytorch, tuned, in_jax, mine = seconds.values()
    remark = "" if cpu_gemm.has_bfloat16() else "this machine has no avx512_bf16, which the promise needs"
    memory = [
        fn.lower(q, cache, table, lengths).compile().memory_analysis().temp_size_in_bytes for fn in (written, decode)
    ]
    verdicts = [
        Verdict("written in JAX over glass.mla_decode", in_jax / mine, promise=("at least", 3), remark=remark),
        Verdict("PyTorch over glass.mla_decode", in_pytorch / mine, promise=("at least", 1), remark=remark),
        Verdict("written in JAX, values cut from the result, over glass.mla_decode", tuned / mine),
        Verdict("memory of glass.mla_decode over that of the same in JAX", memory[1] / memory[0]),
    ]
    tokens = SHAPE.page * SHAPE.table_pages
    title = f"{SHAPE.dtype} B{SHAPE.batch} H{SHAPE.heads} D{SHAPE.depth} S{tokens} page {SHAPE.page}"
    return [Report(title, seconds, verdicts)]


def arguments() -> tuple[jax.Array, ...]:
    """Random operands of full sequences, their pages in any order."""
    q, cache, table, lengths = SHAPE.arguments()
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], q.shape, q.dtype),
        jax.random.normal(keys[1], cache.shape, cache.dtype),
        jax.random.permutation(keys[2], table.size).reshape(table.shape).astype(table.dtype),
        jnp.full(lengths.shape, SHAPE.page * SHAPE.table_pages, lengths.dtype),
    )


def plain(
    q: jax.Array, cache: jax.Array, table: jax.Array, lengths: jax.Array, *, cut_values: bool = True
) -> jax.Array:
    """The operation for one query a sequence as one would write it: tokens gathered, softmax between two products.

    With ``cut_values`` the values are cut out of the tokens, which XLA:CPU copies for it, and not out of the result.
    """
    batch, _, _, depth = q.shape
    kv = cache[table].reshape(batch, -1, depth)
    scores = jnp.einsum("bhd,bkd->bhk", q[:, 0], kv, preferred_element_type=jnp.float32) * depth**-0.5
    scores = jnp.where(jnp.arange(kv.shape[1]) < lengths[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(kv.dtype)
    values = kv[..., : SHAPE.head_dim_v] if cut_values else kv
    out = jnp.einsum("bhk,bkd->bhd", weights, values, preferred_element_type=jnp.float32)
    return out[:, None, :, : SHAPE.head_dim_v].astype(q.dtype)


def in_torch(q: jax.Array, cache: jax.Array, table: jax.Array):
    """The same in PyTorch; the sequences are full, so that there is nothing to mask."""
    import torch

    q, cache = (torch.tensor(np.asarray(x.astype(jnp.float32))).to(torch.bfloat16) for x in (q, cache))
    table = torch.tensor(np.asarray(table)).long()
    batch, _, _, depth = q.shape

    def decode():
        kv = cache[table].reshape(batch, -1, depth)
        scores = torch.einsum("bhd,bkd->bhk", q[:, 0], kv).float() * depth**-0.5
        weights = torch.softmax(scores, -1).to(kv.dtype)
        torch.einsum("bhk,bkd->bhd", weights, kv[..., : SHAPE.head_dim_v])

    return decode
