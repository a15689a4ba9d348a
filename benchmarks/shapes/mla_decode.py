"""Shapes of ``mla_decode``: DeepSeek's models decoding, and sizes that hardware does not like."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    Attributes:
      batch: sequences.
      queries: new tokens of each; with more than one, as multi-token prediction makes them, the call is causal.
      heads: query heads.
      page: tokens of a page.
      table_pages: pages of the longest sequence that the table has room for.
      depth: numbers of a token.
      head_dim_v: how many of them are its value.
      dtype: element type.
    """

    batch: int
    queries: int
    heads: int
    page: int
    table_pages: int
    depth: int = 576
    head_dim_v: int = 512
    dtype: str = "bfloat16"

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, kv_cache, block_table and cache_seqlens, the cache with room for all sequences."""
        return (
            jax.ShapeDtypeStruct((self.batch, self.queries, self.heads, self.depth), self.dtype),
            jax.ShapeDtypeStruct((self.batch * self.table_pages, self.page, 1, self.depth), self.dtype),
            jax.ShapeDtypeStruct((self.batch, self.table_pages), jnp.int32),
            jax.ShapeDtypeStruct((self.batch,), jnp.int32),
        )

    @property
    def options(self) -> dict[str, bool | int]:
        """Keyword arguments of the call."""
        return {"head_dim_v": self.head_dim_v, "causal": self.queries > 1}


SHAPES = {
    "v2_lite": Shape(8, 1, 16, 64, 32),
    "v3": Shape(4, 1, 128, 64, 64),
    "v3_two_tokens": Shape(4, 2, 128, 64, 64),
    "pages_of_16": Shape(8, 1, 64, 16, 128, depth=512, dtype="float16"),
    "pages_of_1": Shape(2, 1, 16, 1, 300),
    "pages_of_576": Shape(2, 1, 16, 576, 4),
    "odd": Shape(3, 4, 5, 20, 7, depth=72, head_dim_v=40),
    "float32": Shape(2, 1, 16, 64, 8, dtype="float32"),
}
