"""Shapes of ``ln_gelu_linear`` and ``linear_ln_gelu``: the linear layers of transformers, and sizes of no alignment."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Shape:
    """``[rows, inputs] x [inputs, outputs]``.

    Attributes:
      rows: M, the tokens.
      inputs: K.
      outputs: N.
      dtype: of the matrices; vectors are float32.
      bias: whether the layer has one.
    """

    rows: int
    inputs: int
    outputs: int
    dtype: str = "bfloat16"
    bias: bool = True

    @property
    def ln_gelu_linear(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """x, gamma, beta, w and b."""
        norm = jax.ShapeDtypeStruct((self.inputs,), "float32")
        return self._x, norm, norm, self._w, self._b

    @property
    def linear_ln_gelu(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """x, w, b, gamma and beta."""
        norm = jax.ShapeDtypeStruct((self.outputs,), "float32")
        return self._x, self._w, self._b, norm, norm

    @property
    def _x(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.inputs), self.dtype)

    @property
    def _w(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.inputs, self.outputs), self.dtype)

    @property
    def _b(self) -> jax.ShapeDtypeStruct | None:
        return jax.ShapeDtypeStruct((self.outputs,), "float32") if self.bias else None


SHAPES = {
    "promise": Shape(2048, 1024, 4096),
    "promise_float32": Shape(2048, 1024, 4096, "float32"),
    "gpt2": Shape(4096, 768, 3072),
    "bert_large_float16": Shape(512, 1024, 4096, "float16"),
    "one_row": Shape(1, 4096, 4096),
    "odd": Shape(333, 770, 1030),
    "odd_float32": Shape(333, 770, 1030, "float32", bias=False),
    "v2_lite": Shape(4096, 2048, 10944, bias=False),
    "v3": Shape(4096, 7168, 2048, bias=False),
    "v3_dense_float32": Shape(128, 7168, 18432, "float32"),
    "v3_out": Shape(128, 2048, 7168, "float32", bias=False),
}
