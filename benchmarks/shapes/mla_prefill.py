"""Shapes of ``mla_prefill``: DeepSeek's models reading a prompt or training, and sizes of no alignment."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    Attributes:
      batch: sequences.
      length: queries of each.
      heads: heads, of keys too.
      keys: keys of each sequence, None for as many as queries.
      d: numbers of a query and of a key.
      dv: numbers of a value.
      dtype: element type.
      causal: whether queries see no later keys.
      segments: whether sequences are packed.
    """

    batch: int
    length: int
    heads: int
    keys: int | None = None
    d: int = 192
    dv: int = 128
    dtype: str = "bfloat16"
    causal: bool = True
    segments: bool = False

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k, v and, if sequences are packed, segment_ids."""
        keys = self.length if self.keys is None else self.keys
        sizes = ((self.length, self.d), (keys, self.d), (keys, self.dv))
        arrays = [jax.ShapeDtypeStruct((self.batch, n, self.heads, width), self.dtype) for n, width in sizes]
        return (*arrays, *([jax.ShapeDtypeStruct((self.batch, self.length), jnp.int32)] if self.segments else []))


SHAPES = {
    "promise": Shape(1, 1024, 8),
    "v2_lite": Shape(1, 4096, 16),
    "v3": Shape(1, 4096, 128),
    "v3_heads_of_a_device": Shape(2, 4096, 16, segments=True),
    "later_part_of_a_prompt": Shape(1, 512, 16, keys=4096),
    "multi_head_128": Shape(8, 1024, 1, d=128, causal=False),
    "float32": Shape(1, 1024, 16, dtype="float32"),
    "odd": Shape(3, 213, 5, keys=95, d=72, dv=40, dtype="float16"),
}
