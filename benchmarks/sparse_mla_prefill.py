"""``glass.sparse_mla_prefill`` on the CPU against the same written in JAX and in PyTorch."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import glass_jax as glass
from benchmarks import cpu_gemm, measure
from benchmarks.measure import Report, Verdict
from benchmarks.shapes.sparse_mla_prefill import SHAPES

SHAPE = dataclasses.replace(SHAPES["published"], queries=64)


def cpu() -> list[Report]:
    """Time, memory beyond the operands, and the time of a gradient."""
    operands = arguments()
    mine = jax.jit(lambda *operands: glass.sparse_mla_prefill(*operands, **SHAPE.options)[0])
    written, cut_late = jax.jit(plain), jax.jit(partial(plain, cut_values=False))
    seconds = measure.interleaved(
        {
            "gather + einsum + softmax in PyTorch": in_torch(*operands),
            "in JAX, values cut from the result": lambda: cut_late(*operands),
            "the same in JAX": lambda: written(*operands),
            "glass.sparse_mla_prefill": lambda: mine(*operands),
        }
    )
    in_pytorch, tuned, in_jax, own = seconds.values()
    remark = "" if cpu_gemm.has_bfloat16() else "this machine has no avx512_bf16"
    temporary = [f.lower(*operands).compile().memory_analysis().temp_size_in_bytes for f in (written, mine)]
    verdicts = [
        Verdict("written in JAX over glass.sparse_mla_prefill", in_jax / own, remark=remark),
        Verdict("PyTorch over glass.sparse_mla_prefill", in_pytorch / own, remark=remark),
        Verdict("written in JAX, values cut from the result, over glass.sparse_mla_prefill", tuned / own),
        Verdict("memory of glass.sparse_mla_prefill over that of the same in JAX", temporary[1] / temporary[0]),
    ]
    title = f"{SHAPE.dtype} Sq{SHAPE.queries} H{SHAPE.heads} D{SHAPE.depth} topk{SHAPE.topk} of {SHAPE.tokens} tokens"
    return [Report(title, seconds, verdicts), gradient(title, operands)]


def gradient(title: str, operands: tuple[jax.Array, ...]) -> Report:
    """Gradients of the queries and the tokens."""

    def gradients(f, q, kv, indices):
        return jax.grad(lambda q, kv: f(q, kv, indices).astype(jnp.float32).sum(), (0, 1))(q, kv)

    own = jax.jit(partial(gradients, lambda *operands: glass.sparse_mla_prefill(*operands, **SHAPE.options)[0]))
    written = jax.jit(partial(gradients, plain))
    sides = {
        "the same in JAX": lambda: written(*operands),
        "glass.sparse_mla_prefill": lambda: own(*operands),
    }
    seconds = measure.interleaved(sides)
    in_jax, mine = seconds.values()
    verdict = Verdict("gradient: written in JAX over glass.sparse_mla_prefill", in_jax / mine)
    return Report(f"gradient of {title}", seconds, [verdict])


def arguments() -> tuple[jax.Array, ...]:
    """Random operands; each query names different tokens, in any order."""
    q, kv, indices = SHAPE.arguments()
    keys = jax.random.split(jax.random.key(0), 3)
    orders = [
        jax.random.permutation(key, SHAPE.tokens)[: SHAPE.topk] for key in jax.random.split(keys[2], SHAPE.queries)
    ]
    return (
        jax.random.normal(keys[0], q.shape, q.dtype),
        jax.random.normal(keys[1], kv.shape, kv.dtype),
        jnp.stack(orders).reshape(indices.shape).astype(indices.dtype),
    )


def plain(q: jax.Array, kv: jax.Array, indices: jax.Array, *, cut_values: bool = True) -> jax.Array:
    """The operation as one would write it: tokens gathered, softmax between two products.

    With ``cut_values`` the values are cut out of the tokens, which XLA:CPU copies for it, and not out of the result.
    """
    chosen = indices[:, 0]
    seen = (chosen >= 0) & (chosen < kv.shape[0])
    tokens = kv[jnp.where(seen, chosen, 0), 0]
    scores = jnp.einsum("qhd,qkd->qhk", q, tokens, preferred_element_type=jnp.float32) * SHAPE.depth**-0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1).astype(kv.dtype)
    values = tokens[..., : SHAPE.head_dim_v] if cut_values else tokens
    out = jnp.einsum("qhk,qkd->qhd", weights, values, preferred_element_type=jnp.float32)
    return out[..., : SHAPE.head_dim_v].astype(q.dtype)


def in_torch(q: jax.Array, kv: jax.Array, indices: jax.Array):
    """The same in PyTorch; all indices name a token, so that there is nothing to mask."""
    import torch

    q, kv = (torch.tensor(np.asarray(x.astype(jnp.float32))).to(torch.bfloat16) for x in (q, kv[:, 0]))
    chosen = torch.tensor(np.asarray(indices[:, 0])).long()

    def prefill():
        tokens = kv[chosen]
        scores = torch.einsum("qhd,qkd->qhk", q, tokens).float() * SHAPE.depth**-0.5
        weights = torch.softmax(scores, -1).to(kv.dtype)
        torch.einsum("qhk,qkd->qhd", weights, tokens[..., : SHAPE.head_dim_v])

    return prefill
