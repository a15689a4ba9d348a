"""The vector units: parallel regions evaluated for all lanes at once, and stores of elements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax.numpy as jnp

from glass_jax.errors import UnsupportedError
from glass_jax.hw import expressions, numerics, symbolic
from glass_jax.hw import program as ir
from glass_jax.hw.lanes import DependentLanes, check_independent
from glass_jax.hw.program import Space

if TYPE_CHECKING:
    from glass_jax.hw.machine import Machine


def run_store(machine: Machine, store: ir.Store, live: frozenset[str]) -> None:
    """Stores one element in every lane."""
    dtype = numerics.dtype(machine.memory.buffers[store.buffer].dtype)
    value = numerics.convert(jnp.asarray(expressions.value(machine, store.value)), dtype)
    machine.store(store.buffer, store.indices, value)


def run_simt(machine: Machine, simt: ir.Simt, live: frozenset[str]) -> None:
    """Runs a SIMT region: parallel loops as iteration spaces, what names a thread once a thread, the rest once.

    Threads advance together, statement by statement: what one reads of another's is there if a barrier lies between.
    """
    tainted = {thread.name for thread in simt.threads}
    for stmt in simt.body:
        if isinstance(stmt, ir.Let) and _mentions(stmt, tainted):
            tainted.add(stmt.var.name)
    if not any(_mentions(stmt, tainted) for stmt in ir.walk(simt.body)):
        machine.execute(simt.body, live)
        return
    if any(isinstance(stmt, ir.For) and stmt.kind == "parallel" for stmt in ir.walk(simt.body)):
        raise UnsupportedError("the NPU model does not run parallel loops beside code that names a thread yet")
    with machine.scope():
        machine.add_lanes({var.name: extent for var, extent in zip(simt.threads, simt.extents, strict=True)})
        machine.execute(simt.body, live)


def _mentions(stmt: ir.Stmt, names: set[str]) -> bool:
    return any(isinstance(e, ir.Var) and e.name in names for e in ir.subexpressions(stmt))


def run_parallel(machine: Machine, loop: ir.For, extent: int, live: frozenset[str]) -> bool:
    """Runs a parallel loop nest for all iterations at once if that is the same as one after the other.

    Returns whether it did; if not, nothing has changed.
    """
    loops, body = _nest(loop, extent)
    start = machine.scalar(loop.start)
    if start is None:
        return False
    outer_log, arrays = machine.log, dict(machine.memory.arrays)
    machine.log = log = []
    try:
        since = symbolic.now()
        with machine.scope():
            machine.add_lanes(loops)
            machine.variables[loop.var.name] += start
            with _private(machine, body):
                machine.execute(body, live | machine.dataflow.live_before(body, frozenset()))
            check_independent(log, machine.lanes, since)
    except DependentLanes:
        machine.memory.arrays = arrays
        return False
    finally:
        machine.log = outer_log
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


@contextlib.contextmanager
def _private(machine: Machine, body: tuple[ir.Stmt, ...]) -> Iterator[None]:
    """Gives every lane its own copy of the scalars that it writes before it reads them; the last lane's stays."""
    memory = machine.memory
    inherited = machine.dataflow.live_before(body, frozenset())
    names = {
        buffer.storage
        for buffer in memory.buffers.values()
        if buffer.space == Space.SCALAR and buffer.storage not in memory.private
    }
    names &= machine.dataflow.writes(body) - inherited
    saved = memory.private
    for name in names:
        memory.arrays.pop(name, None)
    memory.private = saved | dict.fromkeys(names, machine.lanes)
    try:
        yield
    finally:
        memory.private = saved
    for name in names:
        memory.put(name, memory.get(name)[(-1,) * len(machine.lanes)])
