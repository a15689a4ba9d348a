"""Kernels whose cores run at the same time: the cube and the vector units of a block, or all blocks of the grid.

What the flags between cores allow is found while the program is traced: pieces of the cores' statements in an order in
which every wait finds its flag set (``glass_jax.hw.order.pieces``). The order is then folded: what repeats with loop
variables that advance evenly becomes a loop again. So a kernel whose cores work in step becomes one loop, one whose
cores are some iterations apart a loop with a beginning and an end, and nothing about flags is left when it runs. Where
an order depends on the data, ``glass_jax.hw.model.stepping`` finds it while the kernel runs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import jax
from jax import lax

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.dataflow import Dataflow
from glass_jax.hw.model import control, stepping
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.values import symbolic
from glass_jax.hw.model.values.symbolic import Linear, Symbol
from glass_jax.hw.order import folding, pieces, sync
from glass_jax.hw.order.folding import Leaf, Loop, Node
from glass_jax.hw.order.pieces import Piece

Names = frozenset[str]
_NONE: Names = frozenset()


def run_grid(machine: Machine, blocks: int) -> None:
    """Runs every block of the grid of a concurrent kernel.

    Raises:
      DeadlockError: a core waits for a flag that nobody sets.
      UnsupportedError: which blocks wait for all cores depends on values known only at run time.
    """
    together = sync.meets(machine.program)
    parts = {kind: sync.without(body, sync.WITHIN_CORE) for kind, body in sync.parts(machine.program).items()}
    runner = _Runner(machine)
    runner.check_lets(machine.program.body)
    nodes: list[Node] = []
    try:
        for group in pieces.groups(machine.program, blocks):
            nodes += folding.fold(pieces.ordered(machine.program, parts, group))
    except UnsupportedError:
        if together:
            raise
        stepping.run_grid(machine, blocks, parts)
        return
    nodes = folding.fold(nodes)
    if together and blocks > 1:
        runner.keep_apart(nodes, blocks)
    runner.run(nodes, (), frozenset(machine.program.params))


class _Runner:
    """Runs folded pieces on a machine."""

    def __init__(self, machine: Machine):
        self._machine = machine
        self._block = machine.program.block.name
        self._on_chip = frozenset(b.storage for b in machine.program.buffers.values() if b.space is not ir.Space.GM)
        # Of an allocation that each block keeps while others run: the allocation that holds it of every block.
        self._banks: dict[str, str] = {}

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
                        expressions.bind(machine, stmt.var, stmt.value)
                machine.execute(piece.statements, live | frozenset(self._banks))

    @contextlib.contextmanager
    def _own_memory(self, block: Linear) -> Iterator[None]:
        """Brings in what ``block`` left on chip when it last ran, and keeps what it leaves for when it next runs."""
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
        """On-chip allocations whose contents a block may read after other blocks have run in between."""
        found = _NONE.union(*(self._kept(node.body) for node in nodes if isinstance(node, Loop)))
        leaves = (node for node in nodes if isinstance(node, Leaf) and node.item.statements)
        for _, group in itertools.groupby(leaves, key=lambda leaf: leaf.values[self._block]):
            found |= self._live_before(list(group), _NONE) & self._on_chip
        return found
