"""SIMT regions: what each thread does for itself, and what the threads do together.

Threads advance together, statement by statement. A statement that differs between threads runs in lanes, one a thread;
a parallel loop shares its iterations out, whoever runs them; an operation on a tile, and what is the same in all
threads, runs once. Where threads write one element, the last one's value stays.
"""

from __future__ import annotations

import dataclasses

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.ir.varying import Varying
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Handler, Machine
from glass_jax.hw.model.evaluation.threads import Threads

# What all threads do together; reductions and scans too.
_COLLECTIVE = (ir.Copy, ir.Gemm, ir.Simd)
_COLLECTIVE_OPS = ("reduce", "scan")


def run_simt(machine: Machine, simt: ir.Simt, live: frozenset[str]) -> None:
    """Runs a SIMT region."""
    extents = {var.name: extent for var, extent in zip(simt.threads, simt.extents, strict=True) if extent > 1}
    buffers = machine.memory.buffers
    states = {buffers[state].storage for state in _random_states(simt.body)}
    varying = Varying(buffers, set(extents), states).spread(simt.body)
    machine.threads = Threads(extents, varying)
    try:
        with machine.scope():
            for var, extent in zip(simt.threads, simt.extents, strict=True):
                if extent == 1:
                    expressions.bind(machine, var, ir.Const(0, var.dtype))
            with machine.private(sorted(varying.storages), (*machine.lanes, *extents.values())):
                machine.execute(simt.body, live)
    finally:
        machine.threads = None


def run_in_threads(machine: Machine, stmt: ir.Stmt, live: frozenset[str], handler: Handler) -> None:
    """Runs a statement of the SIMT region around it: once, or in lanes."""
    threads = machine.threads
    if threads.shared:
        handler(machine, stmt, live)
    elif _is_parallel(stmt):
        _check_parallel(machine, stmt)
        with threads.sharing():
            handler(machine, stmt, live)
    elif not _differs(threads.varying, stmt):
        handler(machine, stmt, live)
    elif _is_collective(stmt):
        if not isinstance(stmt, ir.For | ir.While | ir.If) or threads.varying.depends(_head(stmt)):
            raise UnsupportedError("the NPU model does not run an operation on a tile by some of the threads only")
        handler(machine, stmt, live)  # its statements come here again
    else:
        _run_in_lanes(machine, stmt, live, handler)


def _run_in_lanes(machine: Machine, stmt: ir.Stmt, live: frozenset[str], handler: Handler) -> None:
    bound = None
    with machine.scope(), machine.threads.sharing():
        machine.add_lanes(machine.threads.extents)
        handler(machine, stmt, live)
        if isinstance(stmt, ir.Let):
            bound = machine.variables[stmt.var.name]
    if bound is not None:
        machine.variables[stmt.var.name] = bound


def _differs(varying: Varying, stmt: ir.Stmt) -> bool:
    """Whether a statement, or one inside it, is not the same in all threads."""
    if _is_parallel(stmt):
        return False
    if isinstance(stmt, ir.Op) and stmt.name in ("atomic", "random", "random_init"):
        return True
    if varying.depends(_head(stmt)) or _written(varying, stmt) in varying.storages:
        return True
    return any(_differs(varying, nested) for block in ir.blocks_of(stmt) for nested in block)


def _written(varying: Varying, stmt: ir.Stmt) -> str | None:
    """The allocation that a store or a fill writes."""
    if isinstance(stmt, ir.Store):
        return varying.buffers[stmt.buffer].storage
    return varying.buffers[stmt.dst.buffer].storage if isinstance(stmt, ir.Fill) else None


def _check_parallel(machine: Machine, loop: ir.For) -> None:
    """Raises if a parallel loop needs to know which thread runs an iteration."""
    varying = machine.threads.varying
    buffers = varying.buffers
    inherited = machine.dataflow.live_before((loop,), frozenset())
    own = {name for name in inherited if machine.memory.space(name) == Space.SCALAR}
    own &= varying.storages | machine.dataflow.writes((loop,))
    own -= {buffers[state].storage for state in _random_states((loop,))}
    bound = {stmt.var.name for stmt in ir.walk((loop,)) if isinstance(stmt, ir.Let | ir.For)}
    used = {e.name for stmt in ir.walk((loop,)) for e in ir.subexpressions(_head(stmt)) if isinstance(e, ir.Var)}
    if names := sorted(own | (used & varying.variables - bound)):
        raise UnsupportedError(
            f"the NPU model does not run a parallel loop with what a thread has for itself, {', '.join(names)}: "
            "which thread runs an iteration is the compiler's choice. Use T.get_thread_binding for all of it, or a "
            "fragment or reducer"
        )


def _head(stmt: ir.Stmt) -> ir.Stmt:
    """A statement without those nested in it."""
    if isinstance(stmt, ir.If):
        return dataclasses.replace(stmt, then=(), orelse=())
    return dataclasses.replace(stmt, body=()) if ir.blocks_of(stmt) else stmt


def _is_parallel(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, ir.For) and stmt.kind == "parallel"


def _is_collective(stmt: ir.Stmt) -> bool:
    """Whether a statement is, or holds, one that all threads do together."""
    return any(
        _is_parallel(nested)
        or isinstance(nested, _COLLECTIVE)
        or (isinstance(nested, ir.Op) and nested.name in _COLLECTIVE_OPS)
        for nested in ir.walk((stmt,))
    )


def _random_states(body: tuple[ir.Stmt, ...]) -> set[str]:
    """The buffers that random generators keep their state in."""
    return {stmt.args[0] for stmt in ir.walk(body) if isinstance(stmt, ir.Op) and stmt.name == "random"}
