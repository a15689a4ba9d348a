"""Loops and branches: what they carry, and guards that become trip counts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Handler, Machine
from glass_jax.hw.model.simd import regions
from glass_jax.hw.model.tiles import kloop
from glass_jax.hw.model.values import symbolic
from glass_jax.hw.model.values.symbolic import Linear
from glass_jax.hw.model.vector import parallel

Arrays = dict[str, jax.Array]


def run_grid(machine: Machine, blocks: int) -> None:
    """Runs every block of the grid. Its on-chip memories are poisoned at the start of each; global memory goes on."""
    program, memory = machine.program, machine.memory
    machine.products = kloop.whole_products(machine, blocks)
    written = machine.dataflow.writes(program.body)
    carried = frozenset(name for name in written if memory.space(name) == Space.GM)

    def block(number: jax.Array | int) -> None:
        machine.bind_symbol(program.block.name, number, 0, blocks - 1)
        machine.execute(program.body, carried)

    repeat(machine, blocks, block, written, carried)


def run_for(machine: Machine, loop: ir.For, live: frozenset[str]) -> None:
    """Runs a loop: parallel ones in one go, K loops of a matrix product as one product, others as loops."""
    extent = expressions.scalar(machine, loop.extent)
    if extent is None or expressions.scalar(machine, loop.start) is None:
        _run_uneven(machine, loop, live)
        return
    if extent.static == 0:
        return
    if extent.static is not None:
        in_order = regions.run_at_once if machine.in_simd else kloop.run_k_loop
        at_once = parallel.run_parallel if loop.kind == "parallel" else in_order
        watched = machine.observe is not None and at_once is kloop.run_k_loop
        if not watched and at_once(machine, loop, extent.static, live):
            return
    run_serial(machine, loop, extent, live)


def run_serial(machine: Machine, loop: ir.For, extent: Linear, live: frozenset[str]) -> None:
    """Runs a loop one iteration after the other."""
    start = expressions.scalar(machine, loop.start)
    trips, lets, guard, body = extent, (), None, loop.body
    guarded = _guarded_trips(machine, loop, extent)
    if guarded is not None:
        trips, lets, guard = guarded, loop.body[:-1], loop.body[-1]
        body = guard.then
    needed = machine.dataflow.live_before((*lets, *body), frozenset())
    highest = extent.bounds(machine.facts)[1] - 1

    def iteration(number: jax.Array | int) -> None:
        machine.bind_symbol(loop.var.name, number, 0, highest)
        machine.variables[loop.var.name] += start
        for let in lets:
            expressions.bind(machine, let.var, let.value)
        if guard is not None:
            assume(machine, guard.condition)
        machine.execute(body, live | needed)

    written = machine.dataflow.writes(body)
    count = trips.traced() if trips.static is None else trips.static
    repeat(machine, count, iteration, written, (live | needed) & written)


def _run_uneven(machine: Machine, loop: ir.For, live: frozenset[str]) -> None:
    """Runs a loop whose bounds differ between lanes: as often as the longest takes, those that are done masked."""
    if len(machine.lanes) == 1:
        _unit_by_unit(machine, loop, run_for, live)
        return
    start, extent = (jnp.asarray(expressions.value(machine, bound)) for bound in (loop.start, loop.extent))
    trips = jnp.max(extent if machine.mask is None else jnp.where(machine.mask, extent, 0))
    needed = machine.dataflow.live_before(loop.body, frozenset())

    def iteration(number: jax.Array | int) -> None:
        machine.variables[loop.var.name] = start + number
        machine.restrict(number < extent)
        machine.execute(loop.body, live | needed)

    written = machine.dataflow.writes(loop.body)
    repeat(machine, trips, iteration, written, (live | needed) & written)


def _unit_by_unit(machine: Machine, stmt: ir.Stmt, run: Handler, live: frozenset[str]) -> None:
    """Runs a statement for one vector unit after the other, because each goes its own way through it."""
    for unit in machine.active:
        with machine.unit(unit):
            run(machine, stmt, live | machine.dataflow.writes((stmt,)))


# --- carries --------------------------------------------------------------------------------------------------------


def repeat(
    machine: Machine,
    trips: int | jax.Array,
    iteration: Callable[[jax.Array | int], None],
    written: frozenset[str],
    carried: frozenset[str],
) -> None:
    """Runs ``iteration(number)`` for each trip, a single one without a loop; the iterations write ``written``."""
    step = _step(machine, written, carried)
    arrays = _carry(machine, carried)
    if isinstance(trips, int) and trips == 1:
        arrays = step(lambda: iteration(0), arrays)
    else:
        machine.repeats = True
        arrays = lax.fori_loop(0, trips, lambda number, arrays: step(lambda: iteration(number), arrays), arrays)
    _leave(machine, written, arrays)


def _carry(machine: Machine, names: frozenset[str]) -> Arrays:
    """The contents of allocations, as the carry of a loop."""
    return {name: machine.memory.get(name) for name in sorted(names)}


def _step(machine: Machine, written: frozenset[str], carried: frozenset[str]) -> Callable[..., Arrays]:
    """A function that runs a piece of program on given contents of ``carried`` and returns the new ones.

    What the piece writes and nobody carries is fresh at its start: it is overwritten before it is read.
    """

    def step(piece: Callable[[], None], arrays: Arrays) -> Arrays:
        memory = machine.memory
        saved = memory.arrays
        memory.arrays = {name: array for name, array in saved.items() if name not in written} | dict(arrays)
        try:
            with machine.scope():
                piece()
            return {name: memory.get(name) for name in sorted(carried)}
        finally:
            memory.arrays = saved

    return step


def _leave(machine: Machine, written: frozenset[str], arrays: Arrays) -> None:
    """The contents after a loop or branch; what it wrote and did not carry is not needed any more."""
    for name in written:
        machine.memory.arrays.pop(name, None)
    machine.memory.arrays |= arrays


# --- guards ---------------------------------------------------------------------------------------------------------


def _guarded_trips(machine: Machine, loop: ir.For, extent: Linear) -> Linear | None:
    """How many iterations pass the guard of a loop, if its body is one guard that once false stays false.

    The guard may come after Lets. None for other loops.
    """
    lets, guard = loop.body[:-1], loop.body[-1] if loop.body else None
    if not isinstance(guard, ir.If) or guard.orelse or not all(isinstance(stmt, ir.Let) for stmt in lets):
        return None
    if loop.start != ir.Const(0, loop.var.dtype) or extent.static is None:
        return None
    with machine.scope():
        k = machine.bind_symbol(loop.var.name, np.int32(0), 0, extent.static - 1)
        for let in lets:
            expressions.bind(machine, let.var, let.value)
        excess = _excess(machine, guard.condition)
    if excess is None:
        return None
    factor, rest = excess.split(k)
    if factor <= 0 or rest.born >= k.born:
        return None
    # excess = factor * k + rest stays at most 0 while k <= -rest / factor.
    trips = symbolic.divide(rest.scaled(-1) + Linear(factor), factor, machine.facts)
    return None if trips is None else symbolic.clamp(trips, extent.static)


def _excess(machine: Machine, condition: ir.Expr) -> Linear | None:
    """For a comparison of scalar integers, a number that is 0 or less if and only if it holds; else None."""
    if not isinstance(condition, ir.Binary) or condition.op not in ("lt", "le", "gt", "ge"):
        return None
    if condition.lhs.dtype not in ("int32", "int64"):
        return None
    lhs, rhs = expressions.scalar(machine, condition.lhs), expressions.scalar(machine, condition.rhs)
    if lhs is None or rhs is None:
        return None
    difference = lhs - rhs if condition.op in ("lt", "le") else rhs - lhs
    return difference + Linear(1) if condition.op in ("lt", "gt") else difference


def assume(machine: Machine, condition: ir.Expr) -> None:
    """Notes that a condition holds in this scope, for the bounds of indices."""
    excess = _excess(machine, condition)
    if excess is not None and excess.terms:
        machine.facts[excess.key] = min(-int(excess.pattern), machine.facts.get(excess.key, np.inf))


# --- branches -------------------------------------------------------------------------------------------------------


def run_if(machine: Machine, branch: ir.If, live: frozenset[str]) -> None:
    """Runs a branch: chosen now if its condition is known, as a mask if it varies by lane, else by ``lax.cond``."""
    condition = expressions.value(machine, branch.condition)
    known = expressions.decided(condition)
    if known is not None:
        machine.execute(branch.then if known else branch.orelse, live)
    elif np.size(condition) == 1:
        _run_cond(machine, branch, condition, live)
    elif len(machine.lanes) > 1:
        # First the lanes of one side, then those of the other: they are independent, which their region proves.
        entering = machine.dataflow.live_before(branch.orelse, frozenset())
        for block, mask in ((branch.then, condition), (branch.orelse, ~condition)):
            with machine.scope():
                machine.mask = mask if machine.mask is None else machine.mask & mask
                machine.execute(block, live | entering)
    else:
        for unit in machine.active:
            with machine.unit(unit):
                run_if(machine, branch, live | machine.dataflow.writes((branch,)))


def _run_cond(machine: Machine, branch: ir.If, condition: jax.Array, live: frozenset[str]) -> None:
    """Runs a branch on a scalar condition known only at run time."""
    written = machine.dataflow.writes((branch,))
    carried = written & live
    # Contents that only a branch itself needs still have to come in from outside.
    entering = written & (live | machine.dataflow.live_before((branch,), frozenset()))
    step = _step(machine, written, carried)

    def then() -> None:
        assume(machine, branch.condition)
        machine.execute(branch.then, live)

    def orelse() -> None:
        machine.execute(branch.orelse, live)

    arrays = lax.cond(
        jnp.reshape(condition, ()),
        lambda arrays: step(then, arrays),
        lambda arrays: step(orelse, arrays),
        _carry(machine, entering),
    )
    _leave(machine, written, arrays)


def run_while(machine: Machine, loop: ir.While, live: frozenset[str]) -> None:
    """Runs a loop while a condition holds; where it differs between lanes, those in which it does not are masked."""
    if np.size(expressions.value(machine, loop.condition)) != 1 and len(machine.lanes) == 1:
        _unit_by_unit(machine, loop, run_while, live)
        return
    written = machine.dataflow.writes(loop.body)
    carried = written & (live | machine.dataflow.live_before((loop,), frozenset()))
    step = _step(machine, written, carried)

    def holds(arrays: Arrays, active: jax.Array) -> jax.Array:
        """The lanes in which the loop goes on, among those that got so far, ``active``."""
        saved = machine.memory.arrays
        machine.memory.arrays = saved | dict(arrays)
        try:
            return active & expressions.value(machine, loop.condition)
        finally:
            machine.memory.arrays = saved

    def body(state: tuple[Arrays, jax.Array]) -> tuple[Arrays, jax.Array]:
        arrays, active = state

        def iteration() -> None:
            if active.size > 1:
                machine.restrict(active)
            machine.execute(loop.body, live | carried)

        arrays = step(iteration, arrays)
        return arrays, holds(arrays, active)

    arrays = _carry(machine, carried)
    here = jnp.asarray(True) if machine.mask is None else machine.mask
    active = holds(arrays, here)
    active = active.reshape(()) if active.size == 1 else jnp.broadcast_to(active, machine.lanes)
    machine.repeats = True
    arrays, _ = lax.while_loop(lambda state: jnp.any(state[1]), body, (arrays, active))
    _leave(machine, written, arrays)
