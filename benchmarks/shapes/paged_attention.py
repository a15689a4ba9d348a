"""Shapes of ``paged_attention``: the heads of models that are served with paged caches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    Attributes:
      batch: sequences.
      heads, kv_heads: query heads, and key-value heads that they share.
      head_dim: numbers of a head.
      page: tokens of a page.
      table_pages: pages of the longest context that the table has room for.
      dtype: element type.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    table_pages: int
    dtype: str = "bfloat16"

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k_cache, v_cache, page_table and context_lens, the caches with room for all contexts."""
        cache = (self.batch * self.table_pages, self.page, self.kv_heads, self.head_dim)
        return (
            jax.ShapeDtypeStruct((self.batch, self.heads, self.head_dim), self.dtype),
            *(jax.ShapeDtypeStruct(cache, self.dtype) for _ in range(2)),
            jax.ShapeDtypeStruct((self.batch, self.table_pages), jnp.int32),
            jax.ShapeDtypeStruct((self.batch,), jnp.int32),
        )


SHAPES = {
    "llama_3_8b": Shape(8, 32, 8, 128, 16, 128),
    "llama_3_8b_page_64": Shape(8, 32, 8, 128, 64, 32),
    "llama_3_70b": Shape(4, 64, 8, 128, 64, 32),
    "qwen_2_5_7b": Shape(4, 28, 4, 128, 128, 16),
    "gemma_2_9b": Shape(2, 16, 8, 256, 64, 32),
    "falcon_7b": Shape(2, 71, 1, 64, 64, 32, "float16"),
    "multi_head": Shape(2, 16, 16, 64, 16, 64),
    "multi_head_float32": Shape(2, 4, 4, 128, 32, 16, "float32"),
    "pages_of_one": Shape(2, 8, 2, 128, 1, 300),
    "pages_of_576": Shape(2, 8, 2, 80, 576, 3),
    "one_token": Shape(1, 1, 1, 16, 16, 1),
}
