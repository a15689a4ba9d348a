"""Which memories statements read, write and overwrite entirely: what a loop has to carry to its next iteration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space

Names = frozenset[str]
_NONE: Names = frozenset()


def is_whole(region: ir.Region, buffer: ir.Buffer) -> bool:
    """Whether a region is the whole of its buffer, evidently."""
    starts = all(isinstance(start, ir.Const) and start.value == 0 for start in region.starts)
    extents = tuple(extent.value if isinstance(extent, ir.Const) else extent for extent in region.extents)
    return starts and extents == buffer.shape


class Dataflow:
    """What statements of one program read and write, by name of the allocation. Its buffers' shapes must be ints."""

    def __init__(self, buffers: Mapping[str, ir.Buffer], everywhere: bool):
        """``everywhere``: all lanes and vector units execute the statements. Else none overwrites all of anything."""
        self._buffers = buffers
        self._everywhere = everywhere
        self._views = {}
        for buffer in buffers.values():
            self._views.setdefault(buffer.storage, set()).add((buffer.shape, buffer.dtype))

    def writes(self, statements: Iterable[ir.Stmt]) -> Names:
        """Allocations that any of the statements, or one nested in them, may write."""
        found: set[str] = set()
        for stmt in ir.walk(tuple(statements)):
            if isinstance(stmt, ir.Store):
                found.add(self._storage(stmt.buffer))
            elif isinstance(stmt, ir.Copy | ir.Fill):
                found.add(self._storage(stmt.dst.buffer))
            elif isinstance(stmt, ir.Gemm):
                found.add(self._storage(stmt.c.buffer))
            elif isinstance(stmt, ir.Op):
                found |= self._addressed(stmt) or self._named(stmt)
        return frozenset(found)

    def live_before(self, statements: tuple[ir.Stmt, ...], live: Names, first: frozenset[ir.Var] = _NONE) -> Names:
        """Allocations whose contents before ``statements`` may matter, if ``live`` matter afterwards.

        ``first`` are the loop variables known to be 0: the statements are then the loop's first iteration.
        """
        for stmt in reversed(statements):
            live = (live - self._overwrites(stmt, first)) | self._uses(stmt, first)
        return live

    def _uses(self, stmt: ir.Stmt, first: frozenset[ir.Var]) -> Names:
        """Allocations that a statement may read before it overwrites them. Writing a part of one is no reading."""
        used = self._loads(stmt)
        if isinstance(stmt, ir.For):
            start = first | {stmt.var} if stmt.start == ir.Const(0, stmt.var.dtype) else first
            later = self.live_before(stmt.body, _NONE, first) - self._overwrites(stmt, first)
            return used | self.live_before(stmt.body, _NONE, start) | later
        if isinstance(stmt, ir.Copy):
            return used | {self._storage(stmt.src.buffer)}
        if isinstance(stmt, ir.Gemm):
            kept = _NONE if _certainly(stmt.clear, first) else {self._storage(stmt.c.buffer)}
            scales = {self._storage(scale.buffer) for scale in stmt.attrs.get("scales", ())}
            return used | {self._storage(stmt.a.buffer), self._storage(stmt.b.buffer)} | scales | kept
        if isinstance(stmt, ir.Op) and not self._addressed(stmt):
            return used | (self._named(stmt) - self._overwrites(stmt, first))
        for block in ir.blocks_of(stmt):
            used |= self.live_before(block, _NONE, first)
        return used

    def _overwrites(self, stmt: ir.Stmt, first: frozenset[ir.Var]) -> Names:
        """Allocations that a statement certainly overwrites entirely, whatever they held before."""
        if not self._everywhere:
            return _NONE
        if isinstance(stmt, ir.Copy):
            return frozenset({self._storage(stmt.dst.buffer)}) if self._fills(stmt) else _NONE
        if isinstance(stmt, ir.Fill):
            return self._whole(stmt.dst)
        if isinstance(stmt, ir.Store):
            # A register is stored as a whole: its lanes have no index.
            stored = self._buffers[stmt.buffer].shape[: len(stmt.indices)]
            single = math.prod(stored) == 1 and self._alone(stmt.buffer)
            return frozenset({self._storage(stmt.buffer)}) if single else _NONE
        if isinstance(stmt, ir.Op) and (result := ir.result_of(stmt)) is not None:
            return frozenset({self._storage(result)})
        if isinstance(stmt, ir.Gemm):
            return self._whole(stmt.c) if _certainly(stmt.clear, first) else _NONE
        if isinstance(stmt, ir.Simt | ir.Simd):
            return self._overwritten_by(stmt.body, first)
        if isinstance(stmt, ir.If) and stmt.orelse:
            return self._overwritten_by(stmt.then, first) & self._overwritten_by(stmt.orelse, first)
        if isinstance(stmt, ir.For) and isinstance(stmt.extent, ir.Const) and stmt.extent.value > 0:
            at_zero = stmt.start == ir.Const(0, stmt.var.dtype)
            return self._overwritten_by(stmt.body, first | {stmt.var} if at_zero else first) | self._swept(stmt)
        return _NONE

    def _overwritten_by(self, statements: tuple[ir.Stmt, ...], first: frozenset[ir.Var]) -> Names:
        return frozenset().union(*(self._overwrites(stmt, first) for stmt in statements))

    def _swept(self, loop: ir.For) -> Names:
        """Allocations of which a nest of loops stores every element."""
        extents: dict[ir.Var, int] = {}
        body: tuple[ir.Stmt, ...] = (loop,)
        while len(body) == 1 and isinstance(body[0], ir.For):
            nested = body[0]
            if nested.start != ir.Const(0, nested.var.dtype) or not isinstance(nested.extent, ir.Const):
                return _NONE
            extents[nested.var] = nested.extent.value
            body = nested.body
        found: set[str] = set()
        for stmt in body:
            if isinstance(stmt, ir.Store) and len(set(stmt.indices)) == len(stmt.indices):
                shape = self._buffers[stmt.buffer].shape[: len(stmt.indices)]
                if tuple(extents.get(index) for index in stmt.indices) == shape and self._alone(stmt.buffer):
                    found.add(self._storage(stmt.buffer))
        return frozenset(found)

    def _fills(self, copy: ir.Copy) -> bool:
        """Whether a copy overwrites its destination entirely: what it leaves out beyond an array's end stays."""
        source = self._buffers[copy.src.buffer].space
        target = self._buffers[copy.dst.buffer]
        clamped = source == Space.GM and target.space != Space.L1
        return not clamped and target.space != Space.GM and bool(self._whole(copy.dst))

    def _whole(self, region: ir.Region) -> Names:
        buffer = self._buffers[region.buffer]
        return frozenset({buffer.storage}) if is_whole(region, buffer) and self._alone(region.buffer) else _NONE

    def _alone(self, buffer: str) -> bool:
        """Whether every view of the allocation has the same shape and type."""
        return len(self._views[self._storage(buffer)]) == 1

    def _loads(self, stmt: ir.Stmt) -> Names:
        """Allocations read by the statement's own expressions."""
        parts = [stmt]
        if isinstance(stmt, ir.Op):  # an address that is an argument itself is written
            parts = [(a.indices, a.offset) if isinstance(a, ir.Address) else a for a in (*stmt.args, stmt.attrs)]
        reads = (e for e in ir.subexpressions(parts) if isinstance(e, ir.Load | ir.Address))
        return frozenset(self._storage(e.buffer) for e in reads)

    def _addressed(self, op: ir.Op) -> Names:
        """Allocations that an operation writes by address; one that does writes nothing else."""
        return frozenset(self._storage(a.buffer) for a in op.args if isinstance(a, ir.Address))

    def _named(self, op: ir.Op) -> Names:
        """Allocations that an operation names, read or written."""
        regions = {self._storage(argument.buffer) for argument in op.args if isinstance(argument, ir.Region)}
        names = {
            self._storage(argument) for argument in op.args if isinstance(argument, str) and argument in self._buffers
        }
        return self._loads(op) | regions | names

    def _storage(self, buffer: str) -> str:
        return self._buffers[buffer].storage


def _certainly(condition: ir.Expr, first: frozenset[ir.Var]) -> bool:
    """Whether a condition holds when the variables ``first`` are 0."""
    if isinstance(condition, ir.Const):
        return bool(condition.value)
    if isinstance(condition, ir.Binary) and condition.op == "eq":
        sides = (condition.lhs, condition.rhs)
        zero = any(isinstance(side, ir.Const) and side.value == 0 for side in sides)
        return zero and any(side in first for side in sides)
    return False
