"""Shapes of the products of quantized matrices: those that DeepGEMM is tested with, and odd ones."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    Attributes:
      m: rows of the left operand: tokens.
      n: rows of the right one: what a layer makes of a token.
      k: columns of both.
      lhs_block, rhs_block: rows and columns that share a scale.
      transpose_rhs: whether the right operand is ``[n, k]``.
      dtype: type of the result.
    """

    m: int
    n: int
    k: int
    lhs_block: tuple[int, int] = (1, 128)
    rhs_block: tuple[int, int] = (128, 128)
    transpose_rhs: bool = True
    dtype: str = "bfloat16"

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Operands and their scales, which are powers of two."""
        operands = []
        for rows, block, transposed in (
            (self.m, self.lhs_block, False),
            (self.n, self.rhs_block, not self.transpose_rhs),
        ):
            shapes = (rows, self.k), (-(-rows // block[0]), -(-self.k // block[1]))
            for shape, dtype in zip(shapes, (jnp.float8_e4m3fn, jnp.float8_e8m0fnu), strict=True):
                operands.append(jax.ShapeDtypeStruct(shape[::-1] if transposed else shape, dtype))
        return tuple(operands)


_LAYERS = ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
_MX = {"lhs_block": (1, 32), "rhs_block": (1, 32)}

SHAPES = {f"{m}x{n}x{k}": Shape(m, n, k) for m in (1, 128, 4096) for n, k in _LAYERS} | {
    "mx": Shape(128, 4096, 7168, **_MX),
    "mx_float32": Shape(4096, 2112, 7168, **_MX, dtype="float32"),
    "columns": Shape(128, 4096, 7168, transpose_rhs=False),
    "v2_lite_dense": Shape(128, 2048, 10944),  # a K of 85.5 blocks
    "odd": Shape(5, 70, 100, dtype="float16"),
    "odd_mx": Shape(203, 33, 1088, **_MX, transpose_rhs=False, dtype="float32"),
    "one": Shape(1, 1, 1),
}
