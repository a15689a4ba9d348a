"""The vector units: parallel regions evaluated for all lanes at once, and stores of elements."""

from __future__ import annotations

import jax.numpy as jnp

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model.evaluation import elements, expressions
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.values import numerics, symbolic
from glass_jax.hw.model.values.lanes import Access, DependentLanes, check_independent


def run_store(machine: Machine, store: ir.Store, live: frozenset[str]) -> None:
    """Stores one element in every lane."""
    dtype = numerics.dtype(machine.memory.buffers[store.buffer].dtype)
    value = numerics.convert(jnp.asarray(expressions.value(machine, store.value)), dtype)
    elements.store(machine, store.buffer, expressions.indices(machine, store.indices), value)


def run_parallel(machine: Machine, loop: ir.For, extent: int, live: frozenset[str]) -> bool:
    """Runs a parallel loop nest for all iterations at once if that is the same as one after the other.

    Returns whether it did; if not, nothing has changed.
    """
    loops, body = _nest(loop, extent)
    start = expressions.scalar(machine, loop.start)
    if start is None:
        return False
    outer_log, outer_repeats, arrays = machine.log, machine.repeats, dict(machine.memory.arrays)
    log: list[Access] = []
    machine.log, machine.repeats = log, False
    try:
        since = symbolic.now()
        with machine.scope():
            machine.add_lanes(loops)
            machine.variables[loop.var.name] += start
            with machine.private(_own_scalars(machine, body, live), machine.lanes):
                machine.execute(body, live | machine.dataflow.live_before(body, frozenset()))
            check_independent(log, machine.lanes, since, in_order=not machine.repeats)
    except DependentLanes:
        machine.memory.arrays = arrays
        return False
    finally:
        machine.log, machine.repeats = outer_log, outer_repeats or machine.repeats
    if outer_log is not None:
        outer_log.extend(log)
    return True


def _nest(loop: ir.For, extent: int) -> tuple[dict[str, int], tuple[ir.Stmt, ...]]:
    """The extents of perfectly nested parallel loops, and the statements inside the last."""
    loops, body = {loop.var.name: extent}, loop.body
    while len(body) == 1 and isinstance(body[0], ir.For) and body[0].kind == "parallel":
        nested = body[0]
        if nested.start != ir.Const(0, nested.var.dtype) or not isinstance(nested.extent, ir.Const):
            break
        loops[nested.var.name] = nested.extent.value
        body = nested.body
    return loops, body


def _own_scalars(machine: Machine, body: tuple[ir.Stmt, ...], live: frozenset[str]) -> list[str]:
    """The scalars, and vector registers, that every lane writes before it reads them: it needs a copy of its own."""
    spaces = {Space.SCALAR, Space.FRAGMENT} if machine.in_simd else {Space.SCALAR}
    names = {buffer.storage for buffer in machine.memory.buffers.values() if buffer.space in spaces}
    # Of what is needed afterwards every lane must write all: a part that it leaves is another lane's.
    return sorted(names & machine.dataflow.writes(body) - machine.dataflow.live_before(body, live & frozenset(names)))
