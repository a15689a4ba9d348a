"""Observers of a run, statement by statement: what memories hold at one moment, and which statement makes a NaN.

A program is observed with JAX's jit disabled, so that every value is known when a statement ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax.errors import HardwareConstraintError, NotANumberError
from glass_jax.hw.ir import printer
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.intervals import Interval
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model import executor
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.values import numerics
from glass_jax.hw.model.values.symbolic import Linear
from glass_jax.hw.order import pipes, unwritten
from glass_jax.hw.order.unrolling import REGIONS

Arrays = dict[str, np.ndarray]


class _SeenError(Exception):
    """Stops a run of which nothing more is wanted."""


def watch(
    program: ir.Program,
    args: Sequence[jax.Array],
    outputs: Sequence[int],
    names: Sequence[str],
    at: Mapping[str, int] | None = None,
) -> Arrays:
    """The contents of buffers at one moment.

    Args:
      program: the kernel.
      args: its arguments, as for ``executor.run``.
      outputs: positions of its results among its parameters.
      names: the buffers.
      at: values of loop variables, Lets or the block's number: the moment is the end of the first time that they all
        have these values. Default: the end of the first block.

    Returns:
      the contents by name; of a memory of the vector units with a leading axis, one entry a unit.

    Raises:
      HardwareConstraintError: there is no such buffer or variable, or the variables never have these values.
    """
    at = dict(at) if at else {program.block.name: 0}
    _check_names(program, names, at)
    watcher = _Watcher(names, at)
    try:
        with jax.disable_jit():
            executor.run(program, args, outputs, observe=watcher)
    except _SeenError:
        pass
    if watcher.seen is None:
        moment = ", ".join(f"{name} = {value}" for name, value in at.items())
        raise HardwareConstraintError(f"kernel {program.name} never has {moment}")
    return watcher.seen


def find_nan(program: ir.Program, args: Sequence[jax.Array], outputs: Sequence[int]) -> tuple[jax.Array, ...]:
    """The results of a kernel, which have no NaN.

    Raises:
      NotANumberError: a statement makes a NaN, or a result has one because a statement read what nobody had written;
        the message names the first such statement, its line, the element and the iteration.
    """
    with jax.disable_jit():
        results = executor.run(program, args, outputs, observe=_NanFinder(program))
    for position, result in zip(outputs, results, strict=True):
        if jnp.issubdtype(result.dtype, jnp.floating) and bool(jnp.isnan(result).any()):
            loc, why = next(
                unwritten.reads(program), (None, "a part of it was never written, or was copied from such a part")
            )
            index = tuple(int(i) for i in np.argwhere(np.isnan(np.asarray(result)))[0])
            text = f"result {program.params[position]} has NaN at {index}, which no statement makes: {why}"
            raise NotANumberError(f"{loc or program.name}: {text}", loc)
    return results


def _check_names(program: ir.Program, names: Sequence[str], at: Mapping[str, int]) -> None:
    if unknown := [name for name in names if name not in program.buffers]:
        raise HardwareConstraintError(
            f"kernel {program.name} has no buffer {', '.join(unknown)}; it has {', '.join(program.buffers)}"
        )
    bound = (stmt.var.name for stmt in ir.walk(program.body) if isinstance(stmt, ir.For | ir.Let))
    variables = [program.block.name, *dict.fromkeys(bound)]
    if unknown := [name for name in at if name not in variables]:
        raise HardwareConstraintError(
            f"kernel {program.name} has no variable {', '.join(unknown)}; it has {', '.join(variables)}"
        )


def _values(machine: Machine) -> dict[str, Interval]:
    """The values of the machine's integer variables, from the smallest to the largest of all lanes."""
    found = {}
    for name, value in machine.variables.items():
        numbers = np.asarray(value.traced() if isinstance(value, Linear) else value)
        if np.issubdtype(numbers.dtype, np.integer):
            found[name] = (int(numbers.min()), int(numbers.max()))
    return found


@dataclasses.dataclass
class _Watcher:
    """Keeps the contents of buffers at the end of each statement while variables have certain values."""

    names: Sequence[str]
    at: Mapping[str, int]
    seen: Arrays | None = None
    inside: bool = False

    def __call__(self, machine: Machine, stmt: ir.Stmt, step: Callable[[], None]) -> None:
        if self.inside:
            step()
            return
        if self.seen is not None and not self._matches(machine):
            raise _SeenError
        self.inside = isinstance(stmt, REGIONS)
        step()
        self.inside = False
        if self._matches(machine):
            self.seen = {name: np.asarray(_contents(machine, name)) for name in self.names}

    def _matches(self, machine: Machine) -> bool:
        values = _values(machine)
        return all(values.get(name) == (value, value) for name, value in self.at.items())


def _contents(machine: Machine, name: str) -> jax.Array:
    return numerics.from_bits(machine.memory.view(name), numerics.dtype(machine.memory.buffers[name].dtype))


class _NanFinder:
    """Raises after the first statement that leaves a NaN where there was none."""

    def __init__(self, program: ir.Program):
        self._program = program
        self._inside = False

    def __call__(self, machine: Machine, stmt: ir.Stmt, step: Callable[[], None]) -> None:
        if self._inside or (ir.blocks_of(stmt) and not isinstance(stmt, REGIONS)):
            step()
            return
        env = _values(machine)
        found = [access for made in pipes.instructions(stmt, env, self._program) for access in made.accesses]
        written = dict.fromkeys(access.buffer for access in found if access.write)
        before = {name: np.asarray(machine.memory.view(name)) for name in written}
        self._inside = True
        step()
        self._inside = False
        for name in written:
            values, bits = _contents(machine, name), np.asarray(machine.memory.view(name))
            if jnp.issubdtype(values.dtype, jnp.floating):
                changed = (_raw(bits) != _raw(before[name])).reshape(values.shape) & np.isnan(
                    np.asarray(values, np.float32)
                )
                if changed.any():
                    self._report(machine, stmt, name, np.argwhere(changed), found, before)

    def _report(
        self, machine: Machine, stmt: ir.Stmt, name: str, places: np.ndarray, found: list, before: Arrays
    ) -> None:
        index = tuple(int(i) for i in places[0])
        at = ", ".join(f"{var} = {low}" for var, (low, high) in _values(machine).items() if low == high)
        stmt = next((inner for inner in ir.walk((stmt,)) if pipes.destination(inner) == name), stmt)
        text = f"`{printer.head(stmt)}` leaves NaN in {name}, {len(places)} of them, the first at {index}; {at}"
        for access in found:
            if not access.write and access.buffer not in before:
                inner = _contents(machine, access.buffer)
                box = tuple(slice(low, high) for low, high in access.box)
                if jnp.issubdtype(inner.dtype, jnp.floating) and bool(jnp.isnan(inner[(..., *box)]).any()):
                    gm = self._program.buffers[access.buffer].space is Space.GM
                    text += f". It reads NaN from {access.buffer}" + (
                        "" if gm else ", a part of which nobody has written"
                    )
        raise NotANumberError(f"{stmt.loc or self._program.name}: {text}", stmt.loc)


def _raw(x: np.ndarray) -> np.ndarray:
    """The bits of each element."""
    return np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")
