"""Atomics and contributions to reducers: elements join values, whatever the number of lanes that name one element."""

from __future__ import annotations

import jax.numpy as jnp

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.evaluation import elements, expressions
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.values import lanes, numerics
from glass_jax.hw.model.values.joining import JOINS
from glass_jax.hw.model.values.symbolic import Linear


def run_atomic(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Joins a value to an element in every lane; with a result, one lane after the other."""
    element, value, *result = op.args
    kind = op.attrs["kind"]
    if kind not in JOINS:
        raise UnsupportedError(f"the NPU model does not run the atomic {kind!r} yet")
    memory = machine.memory
    dtype = numerics.dtype(memory.buffers[element.buffer].dtype)
    joined = numerics.convert(jnp.asarray(expressions.value(machine, value)), dtype)
    place = elements.place_of(machine, element.buffer, expressions.indices(machine, element.starts))
    elements.record(machine, element.buffer, True, place, machine.lanes[0], None if result else kind)
    contents = numerics.from_bits(memory.view(element.buffer), dtype)
    if result:
        contents, old = lanes.join_in_order(contents, place, joined, machine.mask, machine.lanes, JOINS[kind])
    else:
        contents = lanes.join(contents, place, joined, machine.mask, machine.lanes, machine.facts, JOINS[kind])
    memory.put_view(element.buffer, numerics.to_bits(contents))
    if result:
        elements.store(machine, result[0], (Linear(0),), old)
