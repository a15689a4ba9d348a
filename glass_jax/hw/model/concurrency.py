"""Kernels whose cores run at the same time: the cube and the vector units of a block, or all blocks of the grid.

Cores are ordered by cross-core flags only. What flags allow is found while the program is traced: each core's
statements are cut into pieces at its sets and waits, and the pieces put in an order in which every wait finds its flag
set. The order is then folded: what repeats with loop variables that advance evenly becomes a loop again. So a kernel
whose cores work in step becomes one loop, one whose cores are some iterations apart a loop with a beginning and an end,
and nothing about flags is left when it runs. Where an order depends on the data, ``hw.model.stepping`` finds it
while the kernel runs. Within a core statements run in program order, which is right for the values; flags missing there
are found by ``glass_jax.hw.order.ordering``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from jax import lax

from glass_jax.errors import DeadlockError, UnsupportedError
from glass_jax.hw.ir import intervals, symbolic
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.dataflow import Dataflow
from glass_jax.hw.ir.intervals import Interval
from glass_jax.hw.ir.symbolic import Linear, Symbol
from glass_jax.hw.model import control, stepping
from glass_jax.hw.order import folding, sync
from glass_jax.hw.order.folding import Leaf, Loop, Node
from glass_jax.hw.order.sync import Core, CrossFlags
from glass_jax.hw.order.unrolling import Scope, Unrolling

if TYPE_CHECKING:
    from glass_jax.hw.model.machine import Machine

Names = frozenset[str]
_NONE: Names = frozenset()


@dataclasses.dataclass(frozen=True)
class Piece:
    """Statements that one thread executes between two synchronizations; none at the start of a block.

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


def is_concurrent(program: ir.Program) -> bool:
    """Whether statements of a kernel run at the same time in a way that the result may depend on."""
    return sync.is_split(program) or sync.meets(program)


def run_grid(machine: Machine, blocks: int) -> None:
    """Runs every block of the grid of a concurrent kernel.

    Raises:
      DeadlockError: a core waits for a flag that nobody sets.
      UnsupportedError: which blocks wait for all cores depends on values known only at run time.
    """
    together = sync.meets(machine.program)
    groups = [range(blocks)] if together else [range(block, block + 1) for block in range(blocks)]
    parts = {kind: sync.without(body, sync.WITHIN_CORE) for kind, body in sync.parts(machine.program).items()}
    runner = _Runner(machine)
    runner.check_lets(machine.program.body)
    nodes: list[Node] = []
    try:
        for group in groups:
            nodes += folding.fold(_ordered(machine.program, parts, group))
    except UnsupportedError:
        if together:
            raise
        stepping.run_grid(machine, blocks, parts)
        return
    nodes = folding.fold(nodes)
    if together and blocks > 1:
        runner.keep_apart(nodes, blocks)
    runner.run(nodes, (), frozenset(machine.program.params))


def check_order(program: ir.Program, blocks: int) -> None:
    """Raises what run_grid would raise if the flags between cores let no order of the pieces go on to the end."""
    parts = sync.parts(program)
    together = sync.meets(program)
    for group in [range(blocks)] if together else [range(block, block + 1) for block in range(blocks)]:
        _ordered(program, parts, group)


# --- order ----------------------------------------------------------------------------------------------------------


Parts = Mapping[str, tuple[ir.Stmt, ...]]  # what the cores of each kind execute


def _ordered(program: ir.Program, parts: Parts, group: range) -> list[Node]:
    """The pieces of some blocks in an order that the flags allow; both vector units together if that is possible."""
    try:
        return list(_Schedule(program, parts, group, apart=False).nodes())
    except (DeadlockError, UnsupportedError):
        return list(_Schedule(program, parts, group, apart=True).nodes())


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
                first = (
                    True  # all blocks get to a wait for all cores before one goes past it, so that they stay in step
                )
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


# --- execution ------------------------------------------------------------------------------------------------------


class _Runner:
    """Runs folded pieces on a machine."""

    def __init__(self, machine: Machine):
        self._machine = machine
        self._block = machine.program.block.name
        self._on_chip = frozenset(b.storage for b in machine.program.buffers.values() if b.space is not ir.Space.GM)
        self._banks: dict[str, str] = {}  # what blocks keep on chip while others run: where each one's contents are

    def run(self, nodes: Sequence[Node], symbols: tuple[Symbol, ...], live: Names) -> None:
        """Runs nodes one after the other, inside loops whose numbers are ``symbols``; ``live`` is needed afterwards."""
        for position, node in enumerate(nodes):
            needed = self._live_before(nodes[position + 1 :], live)
            if isinstance(node, Loop):
                self._loop(node, symbols, needed)
            elif node.item.statements:
                self._piece(node, symbols, needed)
            else:
                for name in self._on_chip:  # a block begins: nothing has been written yet
                    self._machine.memory.arrays.pop(name, None)

    def _loop(self, loop: Loop, symbols: tuple[Symbol, ...], live: Names) -> None:
        needed = live | self._live_before(loop.body, _NONE)

        def iteration(number: jax.Array | int) -> None:
            symbol = symbolic.fresh(number, 0, loop.trips - 1)
            self.run(loop.body, (*symbols, symbol), needed)

        written = self._writes(loop.body)
        control.repeat(self._machine, loop.trips, iteration, written, written & needed)

    def _piece(self, leaf: Leaf, symbols: tuple[Symbol, ...], live: Names) -> None:
        machine, piece = self._machine, leaf.item
        with self._taking_part(piece):
            for name, value in leaf.values.items():
                index = Linear(value.base)
                for stride, symbol in zip(value.strides, reversed(symbols), strict=True):
                    index += Linear.of(symbol).scaled(stride)
                machine.variables[name] = index
            with self._own_memory(machine.variables[self._block]):
                for stmt in piece.bindings:
                    if isinstance(stmt, ir.Let):
                        machine.bind(stmt.var, stmt.value)
                machine.execute(piece.statements, live | frozenset(self._banks))

    @contextlib.contextmanager
    def _own_memory(self, block: Linear) -> Iterator[None]:
        """A block finds on chip what it left there, and leaves there what it will find."""
        memory = self._machine.memory
        for storage, bank in self._banks.items():
            memory.put(storage, lax.dynamic_index_in_dim(memory.get(bank), block.traced(), keepdims=False))
        yield
        for storage, bank in self._banks.items():
            memory.put(bank, lax.dynamic_update_index_in_dim(memory.get(bank), memory.get(storage), block.traced(), 0))

    def _taking_part(self, piece: Piece) -> contextlib.AbstractContextManager[None]:
        everybody = len(piece.units) == self._machine.program.units
        return self._machine.scope() if everybody else self._machine.unit(*piece.units)

    # --- what is read and written ---

    def _writes(self, nodes: Sequence[Node]) -> Names:
        found = (
            self._writes(n.body) if isinstance(n, Loop) else self._flow(n).writes(n.item.statements) for n in nodes
        )
        return frozenset(self._banks.values()).union(*found)

    def _flow(self, leaf: Leaf) -> Dataflow:
        with self._taking_part(leaf.item):
            return self._machine.dataflow

    def _live_before(self, nodes: Sequence[Node], live: Names) -> Names:
        """Allocations whose contents before ``nodes`` may matter, if ``live`` matter afterwards."""
        live |= frozenset(self._banks.values())
        for node in reversed(nodes):
            if isinstance(node, Loop):
                live = self._live_before(node.body, live | self._live_before(node.body, _NONE))
            elif node.item.statements:
                lets = tuple(stmt for stmt in node.item.bindings if isinstance(stmt, ir.Let))
                live = self._flow(node).live_before((*lets, *node.item.statements), live)
            else:
                live -= self._on_chip
        return live

    # --- what survives a synchronization ---

    def check_lets(self, statements: tuple[ir.Stmt, ...]) -> None:
        """Raises if a Let would have another value where it is bound again after a synchronization."""
        flow = self._machine.dataflow
        for position, stmt in enumerate(statements):
            rest = statements[position + 1 :]
            if isinstance(stmt, ir.Let) and sync.has(rest, sync.CROSS_CORE):
                changed = flow.live_before((stmt,), _NONE) & flow.writes(rest)
                if changed:
                    raise UnsupportedError(
                        f"{stmt.loc or stmt.var.name}: the NPU model does not run a value read from "
                        f"{', '.join(sorted(changed))}, written before the value is last used, across a cross-core flag"
                    )
            for block in ir.blocks_of(stmt):
                self.check_lets(block)

    def keep_apart(self, nodes: Sequence[Node], blocks: int) -> None:
        """Gives each block its own copy of what it keeps on chip while it waits for all cores."""
        for storage in sorted(self._kept(nodes)):
            self._banks[storage] = self._machine.memory.add_bank(storage, blocks)

    def _kept(self, nodes: Sequence[Node]) -> Names:
        """On-chip allocations in which a block may find what it left there before other blocks ran."""
        found = _NONE.union(*(self._kept(node.body) for node in nodes if isinstance(node, Loop)))
        leaves = (node for node in nodes if isinstance(node, Leaf) and node.item.statements)
        for _, group in itertools.groupby(leaves, key=lambda leaf: leaf.values[self._block]):
            found |= self._live_before(list(group), _NONE) & self._on_chip
        return found
