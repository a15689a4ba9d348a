"""Shapes of ``topk``: the tokens that DeepSeek V3.2's indexer keeps, the public test sizes, and odd ones."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Shape(NamedTuple):
    """Rows, their length, how many elements of each are chosen, and the type."""

    rows: int
    columns: int
    k: int
    dtype: str

    def argument(self) -> jax.ShapeDtypeStruct:
        """The operand's shape and type."""
        return jax.ShapeDtypeStruct((self.rows, self.columns), self.dtype)


SHAPES = {
    "indexer_decode": Shape(8, 131072, 2048, "float32"),
    "indexer_prefill": Shape(4096, 8192, 2048, "float32"),
    "selection": Shape(8, 131072, 512, "bfloat16"),
    "selection_batch": Shape(64, 32768, 1024, "bfloat16"),
    "selection_1m": Shape(1, 1 << 20, 1024, "bfloat16"),
    "selection_short": Shape(6, 256, 512, "bfloat16"),
    "largest_k": Shape(2, 5000, 4096, "float16"),
    "odd": Shape(5, 1001, 37, "float16"),
}
