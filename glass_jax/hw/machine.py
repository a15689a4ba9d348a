"""The state of one block while its program is traced: memories, scalar variables, and the lanes being evaluated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax.errors import HardwareConstraintError, UnsupportedError
from glass_jax.hw import expressions, lanes, numerics, symbolic
from glass_jax.hw import program as ir
from glass_jax.hw.dataflow import Dataflow
from glass_jax.hw.lanes import Access, DependentLanes, Index
from glass_jax.hw.storage import Memory
from glass_jax.hw.symbolic import Linear, Symbol

if TYPE_CHECKING:
    from glass_jax.hw.kloop import WholeProduct

# Executes a statement on a machine, given the allocations whose contents are needed afterwards.
Handler = Callable[["Machine", ir.Stmt, frozenset[str]], None]


class Machine:
    """A block in execution.

    Attributes:
      program: the kernel.
      memory: contents of its memories.
      dataflow: what its statements read and write.
      variables: values of its scalar variables.
      lanes: extents of the lanes; the first axis is the vector units taking part, further ones parallel loops.
      active: the vector units taking part.
      mask: lanes that execute the statement, None for all.
      facts: upper bounds that hold here.
      products: products of whole arrays, by the id of the loop that needs tiles of them.
      log: accesses recorded so far, None while nobody asks.
    """

    def __init__(self, program: ir.Program, memory: Memory, execute: Callable[..., None]):
        """``execute(machine, statements, live)`` runs a block of statements."""
        self.program = program
        self.memory = memory
        self.dataflow = Dataflow(memory.buffers)
        self.variables: dict[str, Index] = {}
        self.active = tuple(range(program.units))
        self.lanes: tuple[int, ...] = (program.units,)
        self.mask: jax.Array | np.ndarray | None = None
        self.facts: dict = {}
        self.products: dict[int, WholeProduct] = {}
        self.log: list[Access] | None = None
        self._execute = execute
        self._name_units()

    def execute(self, statements: tuple[ir.Stmt, ...], live: frozenset[str]) -> None:
        """Runs ``statements``, whose variables end with them; ``live`` are the allocations needed afterwards."""
        with self.scope():
            self._execute(self, statements, live)

    # --- scopes -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Variables, lanes, mask and facts set inside end with the scope."""
        saved = (self.variables, self.active, self.lanes, self.mask, self.facts)
        self.variables, self.facts = dict(self.variables), dict(self.facts)
        try:
            yield
        finally:
            self.variables, self.active, self.lanes, self.mask, self.facts = saved

    @contextlib.contextmanager
    def unit(self, unit: int) -> Iterator[None]:
        """Only vector unit ``unit`` takes part."""
        with self.scope():
            self.active, self.lanes = (unit,), (1, *self.lanes[1:])
            self._name_units()
            yield

    def add_lanes(self, loops: Mapping[str, int]) -> None:
        """Appends a lane axis for each variable, which takes the values 0 to the extent less 1."""
        self.lanes += tuple(loops.values())
        rank = len(self.lanes)
        if self.mask is not None:
            self.mask = self.mask.reshape(self.mask.shape + (1,) * (rank - self.mask.ndim))
        for axis, (name, extent) in enumerate(loops.items(), rank - len(loops)):
            shape = [extent if axis == other else 1 for other in range(rank)]
            self.variables[name] = Linear(np.arange(extent).reshape(shape))

    def _name_units(self) -> None:
        if self.program.unit is not None:
            units = np.array(self.active).reshape(-1, *[1] * (len(self.lanes) - 1))
            self.variables[self.program.unit.name] = Linear(units if len(self.active) > 1 else self.active[0])

    # --- values -----------------------------------------------------------------------------------------------------

    def bind(self, var: ir.Var, value: ir.Expr) -> None:
        """Gives ``var`` the value of an expression."""
        self.variables[var.name] = expressions.index(self, value)

    def bind_symbol(self, name: str, value: jax.Array | int, low: float, high: float) -> Symbol:
        """Gives a variable a traced value between ``low`` and ``high``; an int is taken as known."""
        symbol = symbolic.fresh(value, low, high)
        self.variables[name] = Linear(value) if isinstance(value, int) else Linear.of(symbol)
        return symbol

    def scalar(self, expr: int | ir.Expr) -> Linear | None:
        """An integer expression if it is the same in every lane, else None."""
        found = expressions.index(self, expr)
        if isinstance(found, Linear) and found.pattern.size == 1:
            return Linear(found.pattern.reshape(()), found.terms)
        return None

    def constant(self, expr: int | ir.Expr, what: str) -> int:
        """The value of an expression that must be known when the program is traced."""
        found = self.scalar(expr)
        if found is None or found.static is None:
            raise UnsupportedError(f"the NPU model does not run {what} that is known only at run time yet")
        return found.static

    def varying(self, what: str) -> Exception:
        """What to raise where ``what`` is not the same in all lanes: lanes of a parallel loop can run one by one."""
        if len(self.lanes) > 1:
            return DependentLanes(what)
        return UnsupportedError(f"the NPU model does not run {what} differs between vector units yet")

    # --- elements ---------------------------------------------------------------------------------------------------

    def load(self, buffer: str, indices: Iterable[ir.Expr]) -> jax.Array:
        """``buffer[indices]`` in every lane: rank 0, or the lanes' rank."""
        place = self._place(buffer, indices)
        self._record(buffer, False, place, self.lanes[0])
        dtype = numerics.dtype(self.memory.buffers[buffer].dtype)
        bits = lanes.take(self.memory.view(buffer), place, numerics.poison(dtype), self.lanes, self.facts)
        return numerics.from_bits(bits, dtype)

    def store(self, buffer: str, indices: Iterable[ir.Expr], value: jax.Array) -> None:
        """``buffer[indices] = value`` in every lane of the mask."""
        place, mask, units = self._place(buffer, indices), self.mask, self.lanes[0]
        if units > 1 and not self.memory.lead(buffer) and not any(_varies(index, 0) for index in place):
            # Both units write one element: the second one's value stays.
            value, mask, units = _last(value), None if mask is None else _last(mask), 1
        self._record(buffer, True, place, units)
        bits, contents = numerics.to_bits(value), self.memory.view(buffer)
        self.memory.put_view(buffer, lanes.put(contents, place, bits, mask, self.lanes, self.facts))

    def _place(self, buffer: str, indices: Iterable[ir.Expr]) -> list[Index]:
        """Indices of an element in a memory's array: the leading axes, then the buffer's own."""
        place: list[Index] = []
        for axis, extent in enumerate(self.memory.lead(buffer)):
            numbers = np.array(self.active) if axis == 0 else np.arange(extent)
            shape = [-1 if axis == other else 1 for other in range(len(self.lanes))]
            place.append(Linear(numbers.reshape(shape) if len(numbers) > 1 else numbers[0]))
        place += [expressions.index(self, index) for index in indices]
        rank, shape = len(place) - len(self.memory.lead(buffer)), self.memory.buffers[buffer].shape
        if rank != len(shape):
            raise HardwareConstraintError(f"{buffer!r} of shape {shape} is indexed with {rank} indices")
        return place

    def _record(self, buffer: str, write: bool, place: list[Index], units: int) -> None:
        if self.log is not None:
            lanes_of_units = (units, *self.lanes[1:])
            self.log.append(Access(self.memory.storage(buffer), buffer, write, tuple(place), lanes_of_units))


def _varies(index: Index, axis: int) -> bool:
    pattern = index.pattern if isinstance(index, Linear) else index
    return pattern.ndim > axis and pattern.shape[axis] > 1


def _last(value: jax.Array) -> jax.Array:
    """The value of the last vector unit."""
    return value[-1:] if np.ndim(value) else jnp.asarray(value)
