"""Which pipe of a core executes a statement, and which parts of which memories it reads and writes there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from glass_jax.hw import memory as mem
from glass_jax.hw.ir import intervals
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.intervals import Environment
from glass_jax.hw.ir.program import Space
from glass_jax.hw.order.unrolling import REGIONS

Box = tuple[tuple[int, int], ...]  # first element and the one behind the last, in each dimension

VECTOR_MEMORIES = frozenset({Space.UB})  # that each vector unit has for itself
_TRACKED = frozenset({Space.GM, *mem.ON_CHIP})

# Source: TileLang's table of pipes (src/ascend/transform/ascend_pipe.h) and the vendor's of transfers. Copies that are
# not here are made by the vector unit.
_COPY_PIPES = {
    (Space.GM, Space.UB): "MTE2", (Space.GM, Space.L1): "MTE2", (Space.GM, Space.L0A): "MTE2",
    (Space.GM, Space.L0B): "MTE2", (Space.UB, Space.GM): "MTE3", (Space.UB, Space.L1): "MTE3",
    (Space.L1, Space.L0A): "MTE1", (Space.L1, Space.L0B): "MTE1", (Space.L1, Space.UB): "MTE1",
    (Space.L0C, Space.UB): "FIX", (Space.L0C, Space.GM): "FIX", (Space.L0C, Space.L1): "FIX",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Access:
    """Elements of a buffer that an instruction reads or writes.

    Attributes:
      buffer: the buffer.
      box: the elements, all of them in the buffer.
      write: whether it writes them.
      certain: whether it does so whatever the data are.
      unit: the vector unit whose memory it is, if another core's instruction reaches it; None: the core's own.
    """

    buffer: str
    box: Box
    write: bool
    certain: bool = True
    unit: int | None = None


@dataclasses.dataclass(frozen=True)
class Instruction:
    """What one pipe does for a statement. A further instruction of the statement starts when this one has ended."""

    pipe: str
    accesses: tuple[Access, ...]


def instructions(stmt: ir.Stmt, env: Environment, program: ir.Program) -> tuple[Instruction, ...]:
    """The instructions of a statement other than a loop or branch, its variables being in the intervals of ``env``."""
    find = _Finder(program.buffers, program.units)
    loads = tuple(access for access in find.loads(stmt, env) if not isinstance(stmt, REGIONS))
    scalar = (Instruction("S", loads),) if loads else ()
    if isinstance(stmt, ir.Copy):
        path = tuple(program.buffers[region.buffer].space for region in (stmt.src, stmt.dst))
        accesses = (*find.region(stmt.src, env, False), *find.written_by_copy(stmt, env, path))
        return (*scalar, Instruction(_COPY_PIPES.get(path, "V"), accesses))
    if isinstance(stmt, ir.Gemm):
        return (*scalar, *_product(stmt, env, program, find))
    if isinstance(stmt, ir.Fill):
        pipe = "MTE2" if program.buffers[stmt.dst.buffer].space is Space.L1 else "S"
        return (*scalar, Instruction(pipe, find.region(stmt.dst, env, True)))
    if isinstance(stmt, ir.Store):
        return (Instruction("S", (*loads, *find.element(stmt.buffer, stmt.indices, env, True))),)
    if isinstance(stmt, REGIONS):
        return (Instruction("V", tuple(find.inside(stmt, env))),)
    if isinstance(stmt, ir.Op) and stmt.name in ("reduce", "scan"):
        source, target = stmt.args
        return (Instruction("V", (*find.region(source, env, False), *find.region(target, env, True))),)
    return scalar


def destination(stmt: ir.Stmt) -> str | None:
    """The buffer that a statement which makes one tile or element writes."""
    if isinstance(stmt, ir.Copy | ir.Fill):
        return stmt.dst.buffer
    if isinstance(stmt, ir.Gemm):
        return stmt.c.buffer
    if isinstance(stmt, ir.Op):
        named = [argument for argument in stmt.args if isinstance(argument, ir.Region | ir.Address)]
        return named[-1].buffer if named else None
    return stmt.buffer if isinstance(stmt, ir.Store) else None


def _product(gemm: ir.Gemm, env: Environment, program: ir.Program, find: _Finder) -> Iterator[Instruction]:
    """A product of operands in L1 first goes through L0, by MTE1; the flags between the two are the library's."""
    operands = (*find.region(gemm.a, env, False), *find.region(gemm.b, env, False))
    for scale in gemm.attrs.get("scales", ()):
        operands += find.region(scale, env, False)
    clears = intervals.value(gemm.clear, env)
    read = () if clears else find.region(gemm.c, env, False, certain=clears is not None)
    result = (*read, *find.region(gemm.c, env, True))
    if program.buffers[gemm.a.buffer].space is Space.L1:
        yield Instruction("MTE1", operands)
        yield Instruction("M", result)
    else:
        yield Instruction("M", (*operands, *result))


class _Finder:
    """Finds accesses in statements of one program."""

    def __init__(self, buffers: Mapping[str, ir.Buffer], units: int):
        self._buffers = buffers
        self._units = units

    def region(self, region: ir.Region, env: Environment, write: bool, certain: bool = True) -> tuple[Access, ...]:
        """The access to a region; nothing if its place is not known or its memory is of no interest."""
        ranges = []
        for start, extent in zip(region.starts, region.extents, strict=True):
            first, size = intervals.bounds(start, env), intervals.bounds(extent, env)
            ranges.append(None if first is None or size is None else (first[0], first[1] + size[1]))
            certain = certain and first is not None and first[0] == first[1]
        return self._access(region.buffer, ranges, write, certain)

    def element(
        self, buffer: str, indices: tuple[ir.Expr, ...], env: Environment, write: bool, certain: bool = True
    ) -> tuple[Access, ...]:
        """The access to the elements that ``indices`` may name."""
        found = [intervals.bounds(index, env) for index in indices]
        ranges = [None if index is None else (index[0], index[1] + 1) for index in found]
        if len(indices) < len(self._buffers[buffer].shape):  # a whole register of an array of registers
            ranges += [(0, 1 << 62)] * (len(self._buffers[buffer].shape) - len(indices))
        return self._access(buffer, ranges, write, certain)

    def _access(self, buffer: str, ranges: list, write: bool, certain: bool) -> tuple[Access, ...]:
        declared = self._buffers[buffer]
        if declared.space not in _TRACKED or None in ranges:
            return ()
        shape = [mem.static(extent) for extent in declared.shape]
        box = tuple(
            (max(low, 0), high if size is None else min(high, size))
            for (low, high), size in zip(ranges, shape, strict=True)
        )
        return (Access(buffer, box, write, certain),) if all(low < high for low, high in box) else ()

    def written_by_copy(self, copy: ir.Copy, env: Environment, path: tuple[Space, Space]) -> tuple[Access, ...]:
        """What a copy writes: from L0C or L1 the memories of both vector units, or of one."""
        written = self.region(copy.dst, env, True)
        if path[1] not in VECTOR_MEMORIES or path[0] in (Space.GM, Space.UB):
            return written
        only = copy.attrs.get("unit")
        units = range(self._units) if "dual" in copy.attrs or only is None else (only,)
        return tuple(dataclasses.replace(access, unit=unit) for access in written for unit in units)

    def loads(self, stmt: ir.Stmt, env: Environment, certain: bool = True) -> Iterator[Access]:
        """Elements that the expressions of a statement read."""
        for expr in ir.subexpressions(stmt):
            if isinstance(expr, ir.Load):
                yield from self.element(expr.buffer, expr.indices, env, False, certain)

    def inside(self, stmt: ir.Stmt, env: Environment, certain: bool = True) -> Iterator[Access]:
        """Accesses of all threads, or all iterations, of a region of the vector unit."""
        env = dict(env)
        if isinstance(stmt, ir.Simt):
            env |= {var.name: (0, extent - 1) for var, extent in zip(stmt.threads, stmt.extents, strict=True)}
        if isinstance(stmt, ir.For):
            env[stmt.var.name] = _loop_bounds(stmt, env)
            certain = certain and env[stmt.var.name] is not None
        certain = certain and not isinstance(stmt, ir.If | ir.While)
        for block in ir.blocks_of(stmt):
            known = dict(env)
            for inner in block:
                yield from self._step(inner, known, certain)
                if isinstance(inner, ir.Let):
                    known[inner.var.name] = intervals.bounds(inner.value, known)

    def _step(self, stmt: ir.Stmt, env: Environment, certain: bool) -> Iterator[Access]:
        guarded = any(isinstance(expr, ir.Select) for expr in ir.subexpressions(stmt))
        yield from self.loads(stmt, env, certain and not guarded)
        yield from self._addresses(stmt, env)
        if isinstance(stmt, ir.Store):
            yield from self.element(stmt.buffer, stmt.indices, env, True, certain)
        elif isinstance(stmt, ir.Copy):
            yield from (*self.region(stmt.src, env, False, certain), *self.region(stmt.dst, env, True, certain))
        elif isinstance(stmt, ir.Fill):
            yield from self.region(stmt.dst, env, True, certain)
        elif isinstance(stmt, ir.Op):
            regions = [argument for argument in stmt.args if isinstance(argument, ir.Region)]
            for position, region in enumerate(regions):
                yield from self.region(region, env, position == len(regions) - 1, certain)
        yield from self.inside(stmt, env, certain)

    def _addresses(self, stmt: ir.Stmt, env: Environment) -> Iterator[Access]:
        """What SIMD operations reach from an address on: the rest of the row. A store names it as its own argument."""
        own = (
            [argument for argument in stmt.args if isinstance(argument, ir.Address)] if isinstance(stmt, ir.Op) else []
        )
        for expr in ir.subexpressions(stmt):
            if isinstance(expr, ir.Address):
                found = [intervals.bounds(index, env) for index in expr.indices]
                ranges = [None if index is None else (index[0], index[1] + 1) for index in found]
                if ranges and ranges[-1] is not None:
                    ranges[-1] = (ranges[-1][0], 1 << 62)
                yield from self._access(expr.buffer, ranges, any(expr is written for written in own), False)


def _loop_bounds(loop: ir.For, env: Environment) -> intervals.Interval | None:
    start, extent = intervals.bounds(loop.start, env), intervals.bounds(loop.extent, env)
    return None if start is None or extent is None else (start[0], start[1] + extent[1] - 1)
