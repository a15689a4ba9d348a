"""``glass.paged_attention`` on the CPU against gathering the context in plain JAX, and in PyTorch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import glass_jax as glass
from benchmarks import measure
from benchmarks.measure import Report, Verdict
from benchmarks.shapes.paged_attention import SHAPES, Shape


def cpu() -> list[Report]:
    """Llama 3 8B, eight full contexts of 2048 tokens, in pages of 16 and 64."""
    return [_compare(name, SHAPES[name]) for name in ("llama_3_8b", "llama_3_8b_page_64")]


def _compare(name: str, shape: Shape) -> Report:
    rng = np.random.default_rng(0)
    q, k_cache, v_cache, table, lengths = shape.arguments()
    arrays = [jnp.asarray(rng.standard_normal(x.shape, np.float32)).astype(x.dtype) for x in (q, k_cache, v_cache)]
    arrays.append(jnp.asarray(rng.permutation(k_cache.shape[0]).reshape(table.shape), jnp.int32))
    arrays.append(jnp.full(lengths.shape, shape.page * shape.table_pages, jnp.int32))
    ours, theirs = jax.jit(glass.paged_attention), jax.jit(plain)
    sides = {
        "JAX, gathered, einsum": functools.partial(theirs, *arrays),
        "PyTorch, gathered, einsum": _torch(*arrays),
        "glass.paged_attention": functools.partial(ours, *arrays),
    }
    seconds = measure.interleaved(sides)
    mine = seconds["glass.paged_attention"]
    verdicts = [Verdict(f"{side} over ours", seconds[side] / mine) for side in list(sides)[:2]]
    tokens = shape.page * shape.table_pages
    return Report(f"{name}: {shape.dtype}, {shape.batch} x {tokens} tokens, pages of {shape.page}", seconds, verdicts)


def plain(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
    """The operation as one would write it: the context gathered, masked softmax between two products."""
    batch, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    k, v = (x[table].reshape(batch, -1, kv_heads, dim) for x in (k_cache, v_cache))
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("bhgd,bkhd->bhgk", grouped, k, preferred_element_type=jnp.float32) * dim**-0.5
    scores = jnp.where(jnp.arange(k.shape[1]) < lengths[:, None, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return (
        jnp.einsum("bhgk,bkhd->bhgd", weights, v, preferred_element_type=jnp.float32).astype(q.dtype).reshape(q.shape)
    )


def _torch(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, table: jax.Array, lengths: jax.Array):
    """The same in PyTorch; the contexts are full, so that there is nothing to mask."""
    import torch

    def tensor(x):
        return torch.tensor(np.asarray(x.astype(jnp.float32))).to(getattr(torch, str(x.dtype)))

    q, k_cache, v_cache = map(tensor, (q, k_cache, v_cache))
    table = torch.tensor(np.asarray(table)).long()
    batch, heads, dim = q.shape
    kv_heads = k_cache.shape[2]

    def attention():
        k, v = (x[table].reshape(batch, -1, kv_heads, dim) for x in (k_cache, v_cache))
        grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("bhgd,bkhd->bhgk", grouped, k).float() * dim**-0.5
        return torch.einsum("bhgk,bkhd->bhgd", torch.softmax(scores, -1).to(v.dtype), v)

    return attention
