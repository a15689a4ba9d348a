"""What the kernels of ``ln_gelu_linear`` and ``linear_ln_gelu`` have in common: their parameters and their identity."""

from __future__ import annotations

import dataclasses
import inspect
from typing import ClassVar

from glass_jax.lowering import artifact, norm_tiling, tiling
from glass_jax.lowering.tilelang.kernels import vectors


@dataclasses.dataclass(frozen=True)
class FusedLinearKernel:
    """A kernel for one shape, ``[m, k] x [k, n]``.

    Attributes:
      m, k, n: extents, K and N multiples of what the kernel's ``alignment`` says.
      columns: the normalized extent without padding: K of ``ln_gelu_linear``, N of ``linear_ln_gelu``.
      dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``: of the operands, of what the cube multiplies, and of the
        result. Everything else is float32.
      bias: whether a bias is added to the sums.
      eps: added to the variance.
      approximate: gelu in its tanh form, else with erf.
    """

    m: int
    k: int
    n: int
    columns: int
    dtype: str
    bias: bool
    eps: float
    approximate: bool

    operation: ClassVar[str]

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        flags = ("_bias" if self.bias else "") + ("" if self.approximate else "_erf")
        return f"{self.operation}_{self.dtype}{flags}_{self.m}x{self.k}x{self.n}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """The result is the last parameter."""
        return (5 if self.bias else 4,)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    @property
    def problem(self) -> norm_tiling.Problem:
        """What decides the tiles."""
        return norm_tiling.Problem(self.m, self.k, self.n, tiling.itemsize(self.dtype), self.dtype, self.bias)

    def fingerprint(self, chip: str) -> str:
        """The code of the kernel and everything that decides what it makes."""
        return artifact.fingerprint(self, self.plan(chip), inspect.getfile(type(self)), vectors.__file__)
