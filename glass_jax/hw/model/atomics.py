"""Atomics and contributions to reducers: elements join values, whatever the number of lanes that name one element."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model import expressions, lanes, numerics
from glass_jax.hw.model.joining import JOINS

if TYPE_CHECKING:
    from glass_jax.hw.model.machine import Machine


def run_atomic(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Joins a value to an element in every lane; with a result, one lane after the other."""
    element, value, *result = op.args
    kind = op.attrs["kind"]
    if kind not in JOINS:
        raise UnsupportedError(f"the NPU model does not run the atomic {kind!r} yet")
    memory = machine.memory
    dtype = numerics.dtype(memory.buffers[element.buffer].dtype)
    joined = numerics.convert(jnp.asarray(expressions.value(machine, value)), dtype)
    place = machine.place(element.buffer, element.starts)
    machine.record(element.buffer, True, place, machine.lanes[0], None if result else kind)
    contents = numerics.from_bits(memory.view(element.buffer), dtype)
    if result:
        contents, old = lanes.join_in_order(contents, place, joined, machine.mask, machine.lanes, JOINS[kind])
    else:
        contents = lanes.join(contents, place, joined, machine.mask, machine.lanes, machine.facts, JOINS[kind])
    memory.put_view(element.buffer, numerics.to_bits(contents))
    if result:
        machine.store(result[0], (ir.Const(0, "int32"),), old)
