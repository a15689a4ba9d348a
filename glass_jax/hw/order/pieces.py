"""Statements of cores that run at the same time, in pieces that end at a set or a wait, and an order of the pieces.

Cores are ordered by cross-core flags only. Each core's statements are cut into pieces at its sets and waits, and the
pieces put in an order in which every wait finds its flag set. Within a core statements run in program order, which is
right for the values; flags missing there are found by ``glass_jax.hw.order.ordering``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from glass_jax.errors import DeadlockError, UnsupportedError
from glass_jax.hw.ir import intervals
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.intervals import Interval
from glass_jax.hw.order import folding, sync
from glass_jax.hw.order.folding import Leaf, Node
from glass_jax.hw.order.sync import Core, CrossFlags
from glass_jax.hw.order.unrolling import Scope, Unrolling

Parts = Mapping[str, tuple[ir.Stmt, ...]]  # what the cores of each kind execute


@dataclasses.dataclass(frozen=True)
class Piece:
    """Statements that cores execute between two synchronizations. One without statements marks the start of a block.

    Attributes:
      units: the vector units that take part.
      bindings: the loops and Lets around them.
      statements: what is executed.
    """

    units: tuple[int, ...]
    bindings: tuple[ir.For | ir.Let, ...]
    statements: tuple[ir.Stmt, ...]

    @property
    def key(self) -> tuple:
        """Equal for two executions of the same statements."""
        return (self.units, tuple(map(id, self.bindings)), tuple(map(id, self.statements)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Thread:
    """Cores that go through one list of statements together: the cube, a vector unit, or both.

    Attributes:
      cores: the cores.
      units: the vector units whose memories its statements reach.
      statements: what they execute.
      values: what is known of the variables.
    """

    cores: tuple[Core, ...]
    units: tuple[int, ...]
    statements: tuple[ir.Stmt, ...]
    values: dict[str, Interval]


def ordered(program: ir.Program, parts: Parts, group: range) -> list[Node]:
    """The pieces of some blocks in an order that the flags allow; both vector units together if that is possible.

    Raises:
      DeadlockError: a core waits for a flag that nobody sets.
      UnsupportedError: what the cores wait for is known only when the kernel runs.
    """
    try:
        return list(_Schedule(program, parts, group, apart=False).nodes())
    except (DeadlockError, UnsupportedError):
        return list(_Schedule(program, parts, group, apart=True).nodes())


def groups(program: ir.Program, blocks: int) -> list[range]:
    """Blocks that an order is found for together: all if any of them waits for all cores, else each for itself."""
    return [range(blocks)] if sync.meets(program) else [range(block, block + 1) for block in range(blocks)]


def check_order(program: ir.Program, blocks: int) -> None:
    """Raises what :func:`ordered` raises for some blocks of the grid.

    Raises:
      DeadlockError: a core waits for a flag that nobody sets.
      UnsupportedError: what the cores wait for is known only when the kernel runs.
    """
    parts = sync.parts(program)
    for group in groups(program, blocks):
        ordered(program, parts, group)


class _Schedule:
    """Finds the order of the pieces of some blocks."""

    def __init__(self, program: ir.Program, parts: Parts, group: range, apart: bool):
        """``apart``: the vector units of a block are two threads, else one."""
        self._program = program
        self._threads = [thread for block in group for thread in _threads(program, parts, block, apart)]
        self._cores = [core for thread in self._threads for core in thread.cores]
        self._flags = CrossFlags(self._cores)
        self._whole = "" in parts  # a block is one thread: flags inside it have no effect

    def nodes(self) -> Iterator[Node]:
        """The pieces, each with the values of the loop variables and the block's number."""
        for block in dict.fromkeys(core.block for core in self._cores):
            yield Leaf(
                Piece(tuple(range(self._program.units)), (), ()), {self._program.block.name: folding.constant(block)}
            )
        streams = {thread: self._steps(thread) for thread in self._threads}
        heads = {thread: next(stream, None) for thread, stream in streams.items()}
        while any(head is not None for head in heads.values()):
            moved = False
            for thread, stream in streams.items():
                first = True  # all blocks get to a wait for all cores before one goes past it: they stay in step
                while (
                    (head := heads[thread]) is not None
                    and (first or not _meets(head[0]))
                    and self._goes_on(thread, *head)
                ):
                    if isinstance(head[0], Piece):
                        yield Leaf(*head)
                    heads[thread], moved, first = next(stream, None), True, False
            if not moved:
                raise self._deadlock(heads)

    def _steps(self, thread: _Thread) -> Iterator[tuple[Piece | ir.Op, dict]]:
        """The pieces and synchronizing operations of a thread, with the values of the variables there."""
        pending: list[ir.Stmt] = []
        scope = Scope(thread.values)
        opens = Unrolling(self._program, lambda stmt: sync.has((stmt,), sync.CROSS_CORE))
        for stmt, here in opens.leaves(thread.statements, scope):
            is_sync = isinstance(stmt, ir.Op) and stmt.name in sync.CROSS_CORE
            if pending and (is_sync or here.run != scope.run):
                if not all(isinstance(waiting, ir.Let) for waiting in pending):
                    yield self._piece(thread, scope, pending)
                pending = []
            if is_sync:
                yield stmt, here.values
            else:
                scope = scope if pending else here
                pending.append(stmt)
        if pending:
            yield self._piece(thread, scope, pending)

    def _piece(self, thread: _Thread, scope: Scope, statements: list[ir.Stmt]) -> tuple[Piece, dict]:
        names = [self._program.block.name, *(stmt.var.name for stmt in scope.bindings if isinstance(stmt, ir.For))]
        values = {name: folding.constant(scope.values[name][0]) for name in names}
        return Piece(thread.units, scope.bindings, tuple(statements)), values

    def _goes_on(self, thread: _Thread, step: Piece | ir.Op, values: dict) -> bool:
        """Does what a step does to the flags; False if it has to wait."""
        if isinstance(step, Piece):
            return True
        operation = sync.parse(step)
        if self._whole and operation.mode != sync.ALL_CORES:
            return True
        flags = [(core, operation.mode, self._flag(core, operation.id, step, values)) for core in thread.cores]
        if operation.kind == "cross_set":
            for flag in flags:
                self._flags.set(*flag)
            return True
        if not all(self._flags.ready(*flag) for flag in flags):
            return False
        for flag in flags:
            self._flags.take(*flag)
        return True

    def _flag(self, core: Core, number: int | ir.Expr, step: ir.Op, values: dict) -> int:
        unit = self._program.unit
        if unit is not None:
            values = values | {unit.name: (core.unit, core.unit)}
        found = intervals.value(number, values)
        if found is None:
            raise UnsupportedError(
                f"{step.loc or 'the kernel'}: the number of a cross-core flag is known only at run time"
            )
        return found

    def _deadlock(self, heads: dict[_Thread, tuple | None]) -> DeadlockError:
        stuck = [(thread.cores[0], *head) for thread, head in heads.items() if head is not None]
        waits = []
        for core, step, values in stuck:
            operation = sync.parse(step)
            flag = dataclasses.replace(operation, id=self._flag(core, operation.id, step, values))
            waits.append(sync.waiting(core, flag, step.loc))
        return DeadlockError(self._program.name, tuple(waits), stuck[0][1].loc)


def _meets(step: Piece | ir.Op) -> bool:
    """Whether a step waits for all cores."""
    operation = None if isinstance(step, Piece) else sync.parse(step)
    return operation is not None and operation.kind == "cross_wait" and operation.mode == sync.ALL_CORES


def _threads(program: ir.Program, parts: Parts, block: int, apart: bool) -> list[_Thread]:
    """The threads of one block; ``apart``: each vector unit is one."""
    values = {program.block.name: (block, block)}
    everywhere = tuple(range(program.units))
    units = tuple(Core(block, "vector", unit) for unit in everywhere)
    threads = []
    for kind, body in parts.items():
        if kind == "vector" and apart:
            for core in units:
                known = {program.unit.name: (core.unit, core.unit)} if program.unit else {}
                threads.append(_Thread((core,), (core.unit,), body, values | known))
        else:
            cores = (Core(block, "cube"),) if kind == "cube" else units
            threads.append(_Thread(cores, everywhere, body, values))
    return threads
