"""The state of one block while its program is traced: memories, scalar variables, and the lanes being evaluated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.dataflow import Dataflow
from glass_jax.hw.model.evaluation.threads import Threads
from glass_jax.hw.model.values import symbolic
from glass_jax.hw.model.values.lanes import Access, DependentLanes, Index
from glass_jax.hw.model.values.products import WholeProduct
from glass_jax.hw.model.values.registers import Value
from glass_jax.hw.model.values.storage import Memory
from glass_jax.hw.model.values.symbolic import Linear, Symbol

# Executes a statement on a machine, given the allocations whose contents are needed afterwards.
Handler = Callable[["Machine", ir.Stmt, frozenset[str]], None]
# Is called with a machine, a statement and what runs it, which it has to call.
Observer = Callable[["Machine", ir.Stmt, Callable[[], None]], None]


class Machine:
    """A block in execution.

    Attributes:
      program: the kernel.
      memory: contents of its memories.
      variables: values of its scalar variables.
      registers: values of the variables that are vector registers.
      in_simd: whether it is in a SIMD region.
      lanes: extents of the lanes; the first axis is the vector units taking part, further ones parallel loops.
      active: the vector units taking part.
      mask: lanes that execute the statement, None for all.
      facts: upper bounds that hold here.
      products: products of whole arrays, by the id of the loop that needs tiles of them.
      log: accesses recorded so far, None while nobody asks.
      repeats: whether a loop has run since the log began: its accesses are logged once, however often it runs.
      observe: is called for each statement, None for nobody.
      threads: the threads of the SIMT region around, None outside of one.
    """

    def __init__(
        self, program: ir.Program, memory: Memory, execute: Callable[..., None], observe: Observer | None = None
    ):
        """``execute(machine, statements, live)`` runs a block of statements."""
        self.program = program
        self.memory = memory
        self._dataflow = {everywhere: Dataflow(memory.buffers, everywhere) for everywhere in (True, False)}
        self.variables: dict[str, Index] = {}
        self.registers: dict[str, Value] = {}
        self.in_simd = False
        self.active = tuple(range(program.units))
        self.lanes: tuple[int, ...] = (program.units,)
        self.mask: jax.Array | np.ndarray | None = None
        self.facts: dict = {}
        self.products: dict[int, WholeProduct] = {}
        self.log: list[Access] | None = None
        self.repeats = False
        self.threads: Threads | None = None
        self.observe = observe
        self._execute = execute
        self._name_units()

    def execute(self, statements: tuple[ir.Stmt, ...], live: frozenset[str]) -> None:
        """Runs ``statements``, whose variables end with them; ``live`` are the allocations needed afterwards."""
        with self.scope():
            self._execute(self, statements, live)

    @property
    def dataflow(self) -> Dataflow:
        """What statements read and write if the lanes and units of now execute them."""
        return self._dataflow[self.mask is None and len(self.active) == self.program.units]

    # --- scopes -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Variables, lanes, mask and facts set inside end with the scope."""
        saved = (self.variables, self.registers, self.in_simd, self.active, self.lanes, self.mask, self.facts)
        self.variables, self.registers, self.facts = dict(self.variables), dict(self.registers), dict(self.facts)
        try:
            yield
        finally:
            self.variables, self.registers, self.in_simd, self.active, self.lanes, self.mask, self.facts = saved

    @contextlib.contextmanager
    def unit(self, unit: int) -> Iterator[None]:
        """Only vector unit ``unit`` takes part, and each variable has that unit's value."""
        with self.scope():
            count, number = len(self.active), self.active.index(unit)
            self.variables = {name: _of_unit(value, count, number) for name, value in self.variables.items()}
            self.mask = None if self.mask is None else _of_unit(self.mask, count, number)
            self.active, self.lanes = (unit,), (1, *self.lanes[1:])
            self._name_units()
            yield

    def restrict(self, condition: jax.Array) -> None:
        """Only lanes in which ``condition`` holds execute what follows in this scope."""
        self.mask = condition if self.mask is None else self.mask & condition

    def add_lanes(self, loops: Mapping[str, int]) -> None:
        """Appends a lane axis for each variable, which takes the values 0 to the extent less 1."""
        self.lanes += tuple(loops.values())
        rank = len(self.lanes)
        if self.mask is not None:
            self.mask = self.mask.reshape(self.mask.shape + (1,) * (rank - self.mask.ndim))
        for axis, (name, extent) in enumerate(loops.items(), rank - len(loops)):
            shape = [extent if axis == other else 1 for other in range(rank)]
            self.variables[name] = Linear(np.arange(extent).reshape(shape))

    @contextlib.contextmanager
    def private(self, storages: Iterable[str], lanes: tuple[int, ...]) -> Iterator[None]:
        """Gives every lane of ``lanes`` its own copy of each allocation; afterwards the last lane's stays."""
        memory, saved = self.memory, self.memory.private
        leads = {name: memory.lead(name) for name in storages}
        inherited = {name: memory.arrays.pop(name) for name in leads if name in memory.arrays}
        memory.private = saved | dict.fromkeys(leads, lanes)
        for name, contents in inherited.items():
            if name not in saved:  # else it is written before it is read
                memory.put(name, _spread(contents, len(leads[name]), lanes))
        try:
            yield
        finally:
            memory.private = saved
        for name, lead in leads.items():
            contents = memory.get(name, lanes)
            last = contents[(slice(None), *(-1,) * (len(lanes) - 1))]  # of each vector unit
            memory.put(name, _spread(last, 1, lead) if lead else last[-1])

    def bind_symbol(self, name: str, value: jax.Array | int, low: float, high: float) -> Symbol:
        """Gives a variable a traced value between ``low`` and ``high``; an int is taken as known."""
        symbol = symbolic.fresh(value, low, high)
        self.variables[name] = Linear(value) if isinstance(value, int) else Linear.of(symbol)
        return symbol

    def _name_units(self) -> None:
        if self.program.unit is not None:
            units = np.array(self.active).reshape(-1, *[1] * (len(self.lanes) - 1))
            self.variables[self.program.unit.name] = Linear(units if len(self.active) > 1 else self.active[0])

    def varying(self, what: str) -> Exception:
        """The error for something that must be the same in all lanes and is not.

        Inside a parallel loop it is DependentLanes, upon which the loop runs its lanes one after the other.
        """
        if len(self.lanes) > 1:
            return DependentLanes(what)
        return UnsupportedError(f"the NPU model does not run {what} differs between vector units yet")


def _of_unit(value: Index, count: int, number: int) -> Index:
    """What unit ``number`` of ``count`` has of a value: its entry along the first axis, or all if they share it."""
    if isinstance(value, Linear):
        return Linear(_of_unit(value.pattern, count, number), value.terms)
    return value[number : number + 1] if count > 1 and value.ndim and value.shape[0] == count else value


def _spread(contents: jax.Array, axes: int, lanes: tuple[int, ...]) -> jax.Array:
    """A copy of ``contents`` for each of ``lanes``; it has ``axes`` leading axes so far: that of the units, or none."""
    own = contents.shape[axes:]
    units = contents.shape[:axes] or (1,)
    return jnp.broadcast_to(contents.reshape(*units, *[1] * (len(lanes) - 1), *own), lanes + own)
