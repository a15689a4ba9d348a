"""Which scalars of a program differ between vector units, or between threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space


@dataclasses.dataclass
class Varying:
    """Variables and allocations whose values differ, grown by :meth:`spread` until nothing is missing.

    Attributes:
      buffers: the program's buffers.
      variables: variables that differ.
      storages: allocations whose contents differ.
    """

    buffers: Mapping[str, ir.Buffer]
    variables: set[str]
    storages: set[str]

    def spread(self, body: tuple[ir.Stmt, ...]) -> Varying:
        """Adds what in ``body`` gets its value from something that differs, or where something that differs decides."""
        size = -1
        while size < (size := len(self.variables) + len(self.storages)):
            self._block(body, False)
        return self

    def depends(self, node: Any) -> bool:
        """Whether an expression, or one inside a region, or of a statement itself, differs."""
        return any(
            e.name in self.variables if isinstance(e, ir.Var) else self.buffers[e.buffer].storage in self.storages
            for e in ir.subexpressions(node)
            if isinstance(e, ir.Var | ir.Load)
        )

    def _block(self, body: tuple[ir.Stmt, ...], guarded: bool) -> None:
        for stmt in body:
            differs = self.depends(stmt)
            if isinstance(stmt, ir.Let | ir.For) and differs:
                self.variables.add(stmt.var.name)
            elif isinstance(stmt, ir.Store) and (differs or guarded):
                self._scalar(stmt.buffer)
            elif isinstance(stmt, ir.Fill) and (differs or guarded):
                self._scalar(stmt.dst.buffer)
            elif isinstance(stmt, ir.Op) and (result := ir.result_of(stmt)) is not None:
                self._scalar(result)
            for block in ir.blocks_of(stmt):
                self._block(block, guarded or (isinstance(stmt, ir.If | ir.While | ir.For) and differs))

    def _scalar(self, buffer: str) -> None:
        if self.buffers[buffer].space == Space.SCALAR:
            self.storages.add(self.buffers[buffer].storage)
