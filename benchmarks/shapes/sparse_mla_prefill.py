"""Shapes of ``sparse_mla_prefill``: DeepSeek's models with sparse attention, and sizes that hardware does not like."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    Attributes:
      queries: queries.
      tokens: tokens to choose from.
      topk: how many are chosen for each query.
      heads: query heads.
      depth: numbers of a token.
      head_dim_v: how many of them are its value.
      dtype: element type.
    """

    queries: int
    tokens: int
    topk: int
    heads: int
    depth: int = 576
    head_dim_v: int = 512
    dtype: str = "bfloat16"

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, kv and indices."""
        return (
            jax.ShapeDtypeStruct((self.queries, self.heads, self.depth), self.dtype),
            jax.ShapeDtypeStruct((self.tokens, 1, self.depth), self.dtype),
            jax.ShapeDtypeStruct((self.queries, 1, self.topk), jnp.int32),
        )

    @property
    def options(self) -> dict[str, float | int]:
        """Keyword arguments of the call."""
        return {"head_dim_v": self.head_dim_v, "softmax_scale": self.depth**-0.5}


SHAPES = {
    "published": Shape(4096, 8192, 640, 64, depth=512),
    "v3_2": Shape(4096, 8192, 2048, 128),
    "v3_2_tensor_parallel": Shape(256, 8192, 2048, 16),
    "float16": Shape(62, 153, 256, 64, depth=512, dtype="float16"),
    "float32": Shape(16, 300, 128, 32, dtype="float32"),
    "small": Shape(1, 95, 128, 64),
    "odd": Shape(5, 41, 23, 5, depth=72, head_dim_v=40),
}
"""Sizes by name; ``published`` is that of which FlashMLA's time on the 950DT is known."""
