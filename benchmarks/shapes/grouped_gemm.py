"""Shapes of the grouped products: the experts of mixture-of-experts models, and those that DeepGEMM is tested with."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    Attributes:
      groups: experts.
      m: rows of all groups together; of a masked product, the rows that each group has room for.
      n: columns of an expert's matrix.
      k: rows of an expert's matrix.
      masked: of ``masked_grouped_gemm``, else of ``grouped_gemm``.
      dtype: element type.
    """

    groups: int
    m: int
    n: int
    k: int
    masked: bool = False
    dtype: str = "bfloat16"

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """lhs, rhs, and group_sizes or masked_m."""
        rows = (self.groups, self.m) if self.masked else (self.m,)
        return (
            jax.ShapeDtypeStruct((*rows, self.k), self.dtype),
            jax.ShapeDtypeStruct((self.groups, self.k, self.n), self.dtype),
            jax.ShapeDtypeStruct((self.groups,), jnp.int32),
        )


SHAPES = {
    # V2-Lite: 64 experts of 2048 x 1408, top-6; 1024 tokens, and 8 that are decoded
    "v2_lite_up": Shape(64, 6 * 1024, 1408, 2048),
    "v2_lite_down": Shape(64, 6 * 1024, 2048, 1408),
    "v2_lite_decode": Shape(64, 6 * 8, 1408, 2048),
    # V3: 256 experts of 7168 x 2048, top-8; on one device 1024 tokens, on each of 32 8 experts of 4096 tokens' rows
    "v3_up": Shape(256, 8 * 1024, 2048, 7168),
    "v3_local_up": Shape(8, 4096, 2048, 7168),
    "v3_local_down": Shape(8, 4096, 7168, 2048),
    # DeepGEMM's tests
    "contiguous_4_up": Shape(4, 4 * 8192, 4096, 7168),
    "contiguous_4_down": Shape(4, 4 * 8192, 7168, 2048),
    "contiguous_8_up": Shape(8, 8 * 4096, 4096, 7168),
    "contiguous_8_down": Shape(8, 8 * 4096, 7168, 2048),
    "masked_32_up": Shape(32, 192, 4096, 7168, masked=True),
    "masked_32_down": Shape(32, 192, 7168, 2048, masked=True),
    "masked_6_up": Shape(6, 1024, 4096, 7168, masked=True),
    "masked_6_down": Shape(6, 1024, 7168, 2048, masked=True),
    "float8": Shape(8, 512, 2048, 1024, dtype="float8_e4m3fn"),
    "float32": Shape(32, 1024, 512, 512, dtype="float32"),
    "odd": Shape(5, 203, 70, 100, dtype="float16"),
    "odd_masked": Shape(3, 17, 33, 41, masked=True, dtype="float32"),
    "one_row": Shape(1, 1, 1, 1),
}
