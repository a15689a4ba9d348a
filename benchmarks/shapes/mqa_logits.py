"""Shapes of an indexer's logits: those of DeepSeek-V3.2, small heads, and odd ones."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    Attributes:
      queries: tokens that choose.
      keys: tokens that they choose among.
      heads: heads of the indexer.
      d: elements of a head.
      dtype: type of queries and keys.
      batch: batch dimensions of all operands.
    """

    queries: int
    keys: int
    heads: int = 64
    d: int = 128
    dtype: str = "float8_e4m3fn"
    batch: tuple[int, ...] = ()

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Queries, keys, the keys' scales, weights, starts and ends."""
        shapes = (
            ((self.queries, self.heads, self.d), self.dtype),
            ((self.keys, self.d), self.dtype),
            ((self.keys,), "float32"),
            ((self.queries, self.heads), "float32"),
            ((self.queries,), "int32"),
            ((self.queries,), "int32"),
        )
        return tuple(jax.ShapeDtypeStruct((*self.batch, *shape), dtype) for shape, dtype in shapes)


SHAPES = {f"v3.2_{queries}x{keys}": Shape(queries, keys) for queries in (1, 128, 4096) for keys in (4096, 32768)} | {
    "v3.2_batch": Shape(2, 8192, batch=(32,)),
    "v3.2_ragged": Shape(1001, 33333),
    "v3.2_training": Shape(4096, 4096, dtype="bfloat16"),
    "heads_32": Shape(128, 4096, 32, 128, "float16"),
    "heads_16": Shape(128, 4096, 16, 64, "bfloat16"),
    "heads_8": Shape(128, 4096, 8, 32),
    "odd": Shape(5, 300, 12, 20, "float32", (3,)),
    "one": Shape(1, 1),
}
