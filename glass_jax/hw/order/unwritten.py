"""Reads of on-chip memory that certainly come before any write to it, in a kernel whose statements run in order."""

from __future__ import annotations

from collections.abc import Iterator

from glass_jax.hw.ir import intervals
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.order import pipes
from glass_jax.hw.order.unrolling import REGIONS


def reads(program: ir.Program) -> Iterator[tuple[str | None, str]]:
    """The place and the description of each read of an allocation that nobody has written by then.

    The first block is followed, and the first iteration of each loop. What happens only if the data say so is taken to
    write, and is not judged.
    """
    walker = _Walker(program)
    yield from walker.follow(program.body, {program.block.name: (0, 0)} | _units(program), certain=True)


def _units(program: ir.Program) -> dict[str, intervals.Interval]:
    return {program.unit.name: (0, program.units - 1)} if program.unit is not None else {}


class _Walker:
    def __init__(self, program: ir.Program):
        self._program = program
        self._written: set[str] = set()

    def follow(
        self, statements: tuple[ir.Stmt, ...], env: dict[str, intervals.Interval], certain: bool
    ) -> Iterator[tuple[str | None, str]]:
        """Goes through a block, whose variables are in the intervals of ``env``."""
        env = dict(env)
        for stmt in statements:
            if isinstance(stmt, ir.Let):
                yield from self._judge(stmt, env, certain)
                env[stmt.var.name] = intervals.bounds(stmt.value, env)
            elif isinstance(stmt, ir.For):
                start, extent = (intervals.bounds(expr, env) for expr in (stmt.start, stmt.extent))
                inner = env | {stmt.var.name: (start[0], start[0]) if start and start[0] == start[1] else None}
                yield from self.follow(stmt.body, inner, certain and extent is not None and extent[0] > 0)
            elif isinstance(stmt, ir.If):
                condition = intervals.value(stmt.condition, env)
                for block, holds in ((stmt.then, True), (stmt.orelse, False)):
                    if condition is None or bool(condition) == holds:
                        yield from self.follow(block, env, certain and condition is not None)
            elif ir.blocks_of(stmt) and not isinstance(stmt, REGIONS):
                for block in ir.blocks_of(stmt):
                    yield from self.follow(block, env, False)
            else:
                yield from self._judge(stmt, env, certain)

    def _judge(self, stmt: ir.Stmt, env: dict, certain: bool) -> Iterator[tuple[str | None, str]]:
        buffers = self._program.buffers
        for instruction in pipes.instructions(stmt, {k: v for k, v in env.items() if v is not None}, self._program):
            written = {buffers[access.buffer].storage for access in instruction.accesses if access.write}
            for access in instruction.accesses:
                buffer = buffers[access.buffer]
                unknown = buffer.storage not in self._written and buffer.space is not Space.GM
                if unknown and certain and access.certain and not access.write and buffer.storage not in written:
                    yield stmt.loc, f"{buffer.name} in {buffer.space.name} is read, and nobody has written it before"
            self._written |= written
        # Whatever else names a buffer may write it.
        self._written |= {buffers[name].storage for name in _named(stmt) if name in buffers}


def _named(stmt: ir.Stmt) -> Iterator[str]:
    """Buffers that the operations in a statement name and that are not known to be only read."""
    for inner in ir.walk((stmt,)):
        if isinstance(inner, ir.Op):
            for argument in inner.args:
                yield from (argument,) if isinstance(argument, str) else ()
                yield from (argument.buffer,) if isinstance(argument, ir.Region | ir.Address) else ()
        elif isinstance(inner, ir.Copy | ir.Fill):
            yield inner.dst.buffer
        elif isinstance(inner, ir.Store):
            yield inner.buffer
        elif isinstance(inner, ir.Gemm):
            yield inner.c.buffer
