"""What the parts of the decoder know of it: the names of a kernel, the place in its source, and its expressions."""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import AbstractContextManager
from typing import Any, Protocol

import tilelang  # noqa: F401 - brings tvm, which is not importable before it
from tvm import tirx

from glass_jax.hw.ir import program as ir
from glass_jax.lowering.tilelang.modes import Modes
from glass_jax.lowering.tilelang.pointers import Pointers


class Decoding(Protocol):
    """A kernel that is being decoded.

    Attributes:
      loc: ``file:line`` of the statement that is being decoded, if known.
      where: the same for messages: ``loc``, or the kernel's name.
      modes: the hardware's modes at this place.
      pointers: where pointers point at this place.
      reducers: how the buffers that are reducers combine values.
    """

    loc: str | None
    modes: Modes
    pointers: Pointers
    reducers: dict[tirx.Var, str]

    @property
    def where(self) -> str: ...  # noqa: D102 - an attribute, see above

    # --- names ---

    def bind(self, var: tirx.Var) -> ir.Var:
        """Makes ``var`` known."""

    def variable(self, var: tirx.Var) -> ir.Var:
        """The variable that ``var`` is."""

    def buffer(self, buffer: tirx.Buffer) -> str:
        """The name of ``buffer``."""

    def space(self, buffer: str) -> ir.Space:
        """The memory of the buffer of that name."""

    def dtype(self, buffer: str) -> str:
        """The element type of the buffer of that name."""

    def temporary(self, dtype: str) -> str:
        """The name of a new scalar variable, for what an operation returns."""

    def state(self, name: str, dtype: str, size: int) -> str:
        """The name of a buffer that each thread keeps the state of an operation in."""

    # --- expressions and regions ---

    def expr(self, expr: Any) -> ir.Expr:
        """``expr`` as an expression of the program."""

    def region(self, call: Any) -> ir.Region:
        """The access region that a call of ``tl.region`` stands for."""

    def element(self, pointer: Any) -> ir.Region:
        """The element that an access pointer, or a load in the place of one, points to."""

    def argument(self, arg: Any) -> ir.Expr | ir.Region | str:
        """An argument of an operation: a region, a string, or an expression."""

    def attributes(self, annotations: Mapping[str, Any], hints: Set[str] = frozenset()) -> dict[str, Any]:
        """Annotations as plain data."""

    def before(self, stmt: ir.Stmt) -> None:
        """Puts ``stmt`` before the statement whose expressions are being decoded."""

    def pure(self, what: str) -> AbstractContextManager[None]:
        """Expressions decoded inside must not do anything, since ``what`` does not always evaluate them once."""
