"""Runs a :class:`~glass_jax.hw.program.Program` as JAX.

Statements run in the order written, one block of the grid after the other. Loops stay loops, tiles are whole-array
operations and parallel iterations are evaluated together, so that the time to compile does not grow with the grid. What
the numbers do is stated in docs/numerics.md. Everything is ordinary JAX: it can be jitted, vmapped and used inside
``shard_map``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from glass_jax.errors import GlassError, HardwareConstraintError, UnsupportedError
from glass_jax.hw import control, copies, cube, numerics, ops, vector
from glass_jax.hw import program as ir
from glass_jax.hw.lanes import DependentLanes
from glass_jax.hw.machine import Handler, Machine
from glass_jax.hw.storage import Memory, varying_axes
from glass_jax.hw.symbolic import Linear

_HANDLERS: dict[type, Handler] = {
    ir.For: control.run_for,
    ir.If: control.run_if,
    ir.While: control.run_while,
    ir.Let: lambda machine, let, live: machine.bind(let.var, let.value),
    ir.Store: vector.run_store,
    ir.Simt: vector.run_simt,
    ir.Copy: copies.run_copy,
    ir.Fill: copies.run_fill,
    ir.Gemm: cube.run_gemm,
}


def run(program: ir.Program, args: Sequence[jax.Array], outputs: Sequence[int]) -> tuple[jax.Array, ...]:
    """Executes a kernel.

    Args:
      program: the kernel.
      args: the arrays of the parameters not in ``outputs``, in the order of ``program.params``.
      outputs: positions in ``program.params`` of the parameters whose final contents are wanted. They hold poison at
        the start: NaN, or a large integer.

    Returns:
      the final contents of the parameters in ``outputs``, in that order.

    Raises:
      HardwareConstraintError: an argument has another shape or dtype than its parameter; the message names both.
      UnsupportedError: the program does something that the model does not run; the message names it and its place.
    """
    inputs = [name for position, name in enumerate(program.params) if position not in outputs]
    if len(args) != len(inputs):
        raise HardwareConstraintError(
            f"{program.name!r} takes {len(inputs)} arrays ({', '.join(inputs)}), not {len(args)}"
        )
    arrays = {name: jnp.asarray(array) for name, array in zip(inputs, args, strict=True)}
    dimensions = _dimensions(program, arrays)
    buffers = {name: _resolved(buffer, dimensions) for name, buffer in program.buffers.items()}
    for name, array in arrays.items():
        _check_argument(program, buffers[name], array)
    memory = Memory(buffers, program.units, frozenset().union(*map(varying_axes, arrays.values())))
    for name, array in arrays.items():
        memory.put_view(name, numerics.to_bits(array))
    machine = Machine(program, memory, _execute)
    machine.variables.update({name: Linear(size) for name, size in dimensions.items()})
    blocks = machine.constant(program.blocks, "a grid with a number of blocks")
    control.run_grid(machine, blocks)
    results = [buffers[program.params[position]] for position in outputs]
    return tuple(numerics.from_bits(memory.view(buffer.name), numerics.dtype(buffer.dtype)) for buffer in results)


def _dimensions(program: ir.Program, arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Values of the variables that stand for a whole dimension in the parameters' shapes, from the arguments."""
    found = {}
    for name, array in arrays.items():
        for extent, size in zip(program.buffers[name].shape, array.shape, strict=False):
            if isinstance(extent, ir.Var):
                found.setdefault(extent.name, size)
    return found


def _resolved(buffer: ir.Buffer, dimensions: Mapping[str, int]) -> ir.Buffer:
    """``buffer`` with ints for its extents."""
    shape = tuple(
        dimensions.get(extent.name)
        if isinstance(extent, ir.Var)
        else extent.value
        if isinstance(extent, ir.Const)
        else extent
        for extent in buffer.shape
    )
    if not all(isinstance(extent, int) for extent in shape):
        raise UnsupportedError(
            f"the NPU model does not run {buffer.name!r} of shape {buffer.shape} yet: an extent is computed"
        )
    if buffer.strides is not None:
        dense = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        if buffer.strides != dense:
            raise UnsupportedError(
                f"the NPU model does not run {buffer.name!r} with strides {buffer.strides} yet, only {dense}"
            )
    return dataclasses.replace(buffer, shape=shape)


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
            _run_statement(machine, stmt, machine.dataflow.live_before(statements[position + 1 :], live))
        except DependentLanes:
            if machine.log is not None:
                raise  # a parallel region around it runs its lanes one after the other
            raise UnsupportedError(
                f"{_place(stmt)}: the NPU model does not run several threads or units writing one element yet"
            )
        except (HardwareConstraintError, UnsupportedError) as error:
            if isinstance(error.__cause__, GlassError):
                raise  # the statement nested in this one has said where
            raise type(error)(f"{_place(stmt)}: {error}") from error


def _run_statement(machine: Machine, stmt: ir.Stmt, live: frozenset[str]) -> None:
    handler = _HANDLERS.get(type(stmt)) if not isinstance(stmt, ir.Op) else ops.HANDLERS.get(stmt.name)
    if handler is None:
        what = f"the operation {stmt.name!r}" if isinstance(stmt, ir.Op) else f"{type(stmt).__name__} regions"
        raise UnsupportedError(f"the NPU model does not run {what} yet")
    handler(machine, stmt, live)


def _place(stmt: ir.Stmt) -> str:
    """Where a statement stands: its file and line if known, else what it is."""
    return stmt.loc or f"a {type(stmt).__name__} statement"
