"""SIMD regions: their statements, and loops whose iterations are evaluated together."""

from __future__ import annotations

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.simd import evaluate, stores
from glass_jax.hw.model.vector import parallel

# What an iteration may keep to itself: registers and scalar variables.
_PRIVATE = frozenset({Space.FRAGMENT, Space.SCALAR})


def run_simd(machine: Machine, simd: ir.Simd, live: frozenset[str]) -> None:
    """Runs a SIMD region in the order written."""
    with machine.scope():
        machine.in_simd = True
        machine.execute(simd.body, live)


def run_let(machine: Machine, let: ir.Let, live: frozenset[str]) -> None:
    """Binds a variable, a register's or another."""
    if evaluate.is_register(let.value):
        machine.registers[let.var.name] = evaluate.value(machine, let.value)
    else:
        expressions.bind(machine, let.var, let.value)


def run_store(machine: Machine, store: ir.Store, live: frozenset[str]) -> None:
    """Stores an element or a register."""
    if evaluate.is_register(store.value):
        stores.store_register(machine, store)
    else:
        parallel.run_store(machine, store, live)


def run_at_once(machine: Machine, loop: ir.For, extent: int, live: frozenset[str]) -> bool:
    """Runs a loop for all iterations at once if that is the same as one after the other.

    Returns whether it did; if not, nothing has changed.
    """
    carried = machine.dataflow.live_before(loop.body, frozenset()) & machine.dataflow.writes(loop.body)
    if any(machine.memory.space(name) in _PRIVATE for name in carried):
        return False  # an accumulator
    return parallel.run_parallel(machine, loop, extent, live)
