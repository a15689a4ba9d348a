"""Runs a :class:`~glass_jax.hw.ir.program.Program` as JAX.

Statements run in the order written, one block of the grid after the other. Loops stay loops, tiles are whole-array
operations and parallel iterations are evaluated together, so that the time to compile does not grow with the grid. What
the numbers do is stated in docs/numerics.md. Everything is ordinary JAX: it can be jitted, vmapped and used inside
``shard_map``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from glass_jax.errors import GlassError, HardwareConstraintError, UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.varying import Varying
from glass_jax.hw.model import concurrency, control, ops
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Handler, Machine, Observer
from glass_jax.hw.model.simd import regions
from glass_jax.hw.model.tiles import copies, cube
from glass_jax.hw.model.values import numerics
from glass_jax.hw.model.values.lanes import DependentLanes
from glass_jax.hw.model.values.storage import PER_UNIT, Memory, varying_axes
from glass_jax.hw.model.values.symbolic import Linear
from glass_jax.hw.model.vector import simt
from glass_jax.hw.order import ordering, sync

_HANDLERS: dict[type, Handler] = {
    ir.For: control.run_for,
    ir.If: control.run_if,
    ir.While: control.run_while,
    ir.Let: regions.run_let,
    ir.Store: regions.run_store,
    ir.Simd: regions.run_simd,
    ir.Simt: simt.run_simt,
    ir.Copy: copies.run_copy,
    ir.Fill: copies.run_fill,
    ir.Gemm: cube.run_gemm,
}

# Statements that work on a whole tile: inside a parallel loop they run once an iteration.
_TILE_STATEMENTS = (ir.Copy, ir.Fill, ir.Gemm)


def run(
    program: ir.Program,
    args: Sequence[jax.Array],
    outputs: Sequence[int],
    inputs: Sequence[int] | None = None,
    observe: Observer | None = None,
) -> tuple[jax.Array, ...]:
    """Executes a kernel.

    Args:
      program: the kernel.
      args: the arrays of the parameters in ``inputs``, in that order.
      outputs: positions in ``program.params`` of the parameters whose final contents are wanted.
      inputs: positions of the parameters that ``args`` are; by default all that are not in ``outputs``. The others hold
        poison at the start: NaN, or a large integer.
      observe: is given each statement to run, and sees the memories before and after it; loops that could be run as
        one product are then run as loops.

    Returns:
      the final contents of the parameters in ``outputs``, in that order.

    Raises:
      HardwareConstraintError: an argument has another shape or dtype than its parameter; the message names both.
      UnsupportedError: the program does something that the model does not run; the message names it and its place.
    """
    given = [position for position in range(len(program.params)) if position not in outputs]
    names = [program.params[position] for position in (given if inputs is None else inputs)]
    if len(args) != len(names):
        raise HardwareConstraintError(
            f"{program.name!r} takes {len(names)} arrays ({', '.join(names)}), not {len(args)}"
        )
    arrays = {name: jnp.asarray(array) for name, array in zip(names, args, strict=True)}
    dimensions = _dimensions(program, arrays)
    buffers = {name: _resolved(program.buffers[name], dimensions) for name in program.params}
    for name, array in arrays.items():
        _check_argument(program, buffers[name], array)
    axes = frozenset().union(*map(varying_axes, arrays.values()))
    contents = {}
    for name, array in arrays.items():
        contents[name] = numerics.to_bits(array)
    launch = program
    while launch is not None:
        contents = _launch(launch, axes, dimensions, contents, observe)
        launch = launch.next
    results = [buffers[program.params[position]] for position in outputs]
    return tuple(numerics.from_bits(contents[buffer.name], numerics.dtype(buffer.dtype)) for buffer in results)


def _launch(
    program: ir.Program,
    axes: frozenset[str],
    dimensions: Mapping[str, int],
    contents: Mapping[str, jax.Array],
    observe: Observer | None,
) -> dict[str, jax.Array]:
    """Runs one grid on the parameters' ``contents``, as stored, and returns their contents after it."""
    buffers = {name: _resolved(buffer, dimensions) for name, buffer in program.buffers.items()}
    memory = Memory(buffers, program.units, axes, _split_scalars(program))
    for name, bits in contents.items():
        memory.put_view(name, bits)
    machine = Machine(program, memory, _execute, observe)
    machine.variables.update({name: Linear(size) for name, size in dimensions.items()})
    ordering.check_progress(program)
    grid = concurrency if sync.is_concurrent(program) else control
    grid.run_grid(machine, expressions.constant(machine, program.blocks, "a grid with a number of blocks"))
    return {name: memory.view(name) for name in program.params}


def _split_scalars(program: ir.Program) -> frozenset[str]:
    """Scalar variables that differ between the vector units."""
    if program.units == 1:
        return frozenset()
    own = {buffer.storage for buffer in program.buffers.values() if buffer.space in PER_UNIT}
    units = {program.unit.name} if program.unit is not None else set()
    found = Varying(program.buffers, units, set(own)).spread(program.body)
    return frozenset(found.storages - own)


def _dimensions(program: ir.Program, arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Values of the variables that stand for a whole dimension or stride of a parameter, from the arguments."""
    found = {}
    for name, array in arrays.items():
        for extent, size in zip(program.buffers[name].shape, array.shape, strict=False):
            if isinstance(extent, ir.Var):
                found.setdefault(extent.name, size)
        for axis, stride in enumerate(program.buffers[name].strides or ()):
            if isinstance(stride, ir.Var):  # arrays are dense
                found.setdefault(stride.name, math.prod(array.shape[axis + 1 :]))
    return found


def _resolved(buffer: ir.Buffer, dimensions: Mapping[str, int]) -> ir.Buffer:
    """``buffer`` with ints for its extents."""
    sizes = {name: Linear(size) for name, size in dimensions.items()}

    def resolve(extent: int | ir.Expr) -> int:
        found = expressions.static(extent, sizes)
        if found is None:
            raise HardwareConstraintError(
                f"the shape {buffer.shape} of {buffer.name!r} names a dimension that no argument has: what is known is "
                f"{dict(dimensions)}"
            )
        return found

    shape = tuple(resolve(extent) for extent in buffer.shape)
    if buffer.strides is not None:
        dense = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        if tuple(resolve(stride) for stride in buffer.strides) != dense:
            raise UnsupportedError(
                f"the NPU model does not run {buffer.name!r} with strides {buffer.strides} yet, only {dense}"
            )
    return dataclasses.replace(buffer, shape=shape, strides=None)


def _check_argument(program: ir.Program, buffer: ir.Buffer, array: jax.Array) -> None:
    expected = numerics.dtype(buffer.dtype)
    if array.shape != buffer.shape or array.dtype != expected:
        raise HardwareConstraintError(
            f"parameter {buffer.name!r} of {program.name!r} is {expected.name}{list(buffer.shape)}, "
            f"the argument is {array.dtype.name}{list(array.shape)}: pass an array of that shape and dtype"
        )


def _execute(machine: Machine, statements: tuple[ir.Stmt, ...], live: frozenset[str]) -> None:
    """Runs statements one after the other, each told which allocations are needed after it."""
    for position, stmt in enumerate(statements):
        try:
            after = machine.dataflow.live_before(statements[position + 1 :], live)
            step = functools.partial(_run_statement, machine, stmt, after)
            step() if machine.observe is None else machine.observe(machine, stmt, step)
        except DependentLanes:
            if machine.log is not None:
                raise  # a parallel region around it runs its lanes one after the other
            what = "a statement on one element or tile by several threads or vector units"
            raise UnsupportedError(f"{_place(stmt)}: the NPU model does not run {what} yet") from None
        except (HardwareConstraintError, UnsupportedError) as error:
            if isinstance(error.__cause__, GlassError):
                raise  # the statement nested in this one has said where
            raise type(error)(f"{_place(stmt)}: {error}") from error


def _run_statement(machine: Machine, stmt: ir.Stmt, live: frozenset[str]) -> None:
    handler = _HANDLERS.get(type(stmt)) if not isinstance(stmt, ir.Op) else ops.HANDLERS.get(stmt.name)
    if handler is None:
        what = f"the operation {stmt.name!r}" if isinstance(stmt, ir.Op) else f"{type(stmt).__name__} regions"
        raise UnsupportedError(f"the NPU model does not run {what} yet")
    on_tiles = isinstance(stmt, _TILE_STATEMENTS) or (isinstance(stmt, ir.Op) and stmt.name not in ops.IN_LANES)
    own = isinstance(stmt, ir.Fill) and machine.memory.storage(stmt.dst.buffer) in machine.memory.private
    if on_tiles and not own and len(machine.lanes) > 1:
        raise DependentLanes
    if machine.threads is not None:
        simt.run_in_threads(machine, stmt, live, handler)
    else:
        handler(machine, stmt, live)


def _place(stmt: ir.Stmt) -> str:
    """Where a statement stands: its file and line if known, else what it is."""
    return stmt.loc or f"a {type(stmt).__name__} statement"
