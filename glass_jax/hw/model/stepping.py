"""Kernels split by hand whose cores synchronize as their data say: the cores step by step, while the kernel runs.

Each core's statements become a list of steps: pieces without synchronization, sets, waits, and jumps. The state of a
block is its memories, for each core the number of its next step and the counters of its loops, and the counts of the
flags. In turn each core takes the step that is next, unless it has to wait. It costs many times what an order known in
advance costs (``glass_jax.hw.model.concurrency``), which is taken whenever there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.hw.ir import program as ir
from glass_jax.hw.model import control
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.values import numerics
from glass_jax.hw.order import sync
from glass_jax.hw.order.steps import Step, flatten
from glass_jax.hw.order.sync import Core

State = dict[str, dict[str, jax.Array] | jax.Array]


def run_grid(machine: Machine, blocks: int, parts: Mapping[str, tuple[ir.Stmt, ...]]) -> None:
    """Runs every block; ``parts`` is what the cores of each kind execute.

    A block that never ends leaves poison in everything that the kernel writes.
    """
    written = machine.dataflow.writes(machine.program.body)
    carried = frozenset(name for name in written if machine.memory.space(name) is ir.Space.GM)

    def block(number: jax.Array | int) -> None:
        machine.bind_symbol(machine.program.block.name, number, 0, blocks - 1)
        _Block(machine, parts, written).run()

    control.repeat(machine, blocks, block, written, carried)


class _Block:
    """One block in execution."""

    def __init__(self, machine: Machine, parts: Mapping[str, tuple[ir.Stmt, ...]], written: frozenset[str]):
        self._machine = machine
        self._written = sorted(written)
        self._cores: list[Core] = []
        self._steps: list[list[Step]] = []
        for kind, body in sorted(parts.items()):
            for unit in range(machine.program.units if kind == "vector" else 1):
                self._cores.append(Core(0, kind, unit))
                self._steps.append(flatten(body))

    def run(self) -> None:
        """Runs the block to its end, or until no core goes on."""
        memory, count = self._machine.memory, len(self._cores)
        loops = {step.stmt.var.name: 0 for steps in self._steps for step in steps if step.kind == "enter"}
        zero = memory.vary(jnp.int32(0))
        state: State = {
            "memory": {name: memory.get(name) for name in self._written},
            "next": [zero] * count,
            "loops": [dict.fromkeys(loops, zero) for _ in range(count)],
            "ends": [dict.fromkeys(loops, zero) for _ in range(count)],
            "flags": memory.vary(jnp.zeros((3, count, count, 2 * sync.FLAG_IDS), jnp.int32)),
            "moved": memory.vary(jnp.bool_(True)),
        }
        state = lax.while_loop(lambda state: state["moved"], self._round, state)
        ends = [next_ == len(steps) for next_, steps in zip(state["next"], self._steps, strict=True)]
        ended = jnp.stack(ends).all()
        for name, contents in state["memory"].items():
            poison = numerics.poison(numerics.dtype(memory.buffers[name].dtype))
            memory.put(name, jnp.where(ended, contents, poison))

    def _round(self, state: State) -> State:
        """Every core takes the step that is next, if it can."""
        before = state["next"]
        for number in range(len(self._cores)):
            takes = [self._taking(number, position) for position in range(len(self._steps[number]))]
            state = lax.switch(state["next"][number], [*takes, lambda state: state], state)
        moved = jnp.stack([a != b for a, b in zip(before, state["next"], strict=True)]).any()
        return state | {"moved": moved}

    def _taking(self, number: int, position: int) -> Callable[[State], State]:
        step = self._steps[number][position]
        core = self._cores[number]

        def take(state: State) -> State:
            machine = self._machine
            state = {key: list(value) if isinstance(value, list) else value for key, value in state.items()}
            saved = machine.memory.arrays
            machine.memory.arrays = saved | state["memory"]
            try:
                with machine.unit(core.unit) if core.kind == "vector" else machine.scope():
                    self._bind(step, state["loops"][number])
                    goes_on = self._do(step, number, state, position)
                state["memory"] = {name: machine.memory.get(name) for name in self._written}
            finally:
                machine.memory.arrays = saved
            state["next"][number] = machine.memory.vary(jnp.asarray(goes_on, jnp.int32))
            return state

        return take

    def _bind(self, step: Step, loops: Mapping[str, jax.Array]) -> None:
        for stmt in step.bindings:
            if isinstance(stmt, ir.For):
                self._machine.bind_symbol(stmt.var.name, loops[stmt.var.name], 0, float("inf"))
            else:
                expressions.bind(self._machine, stmt.var, stmt.value)

    def _do(self, step: Step, number: int, state: State, position: int) -> jax.Array | int:
        """Does a step; returns the number of the step that is next."""
        machine, following = self._machine, position + 1
        if step.kind == "piece":
            machine.execute(step.statements, frozenset(self._written))
            return following
        if step.kind == "skip":
            return step.target
        if step.kind == "sync":
            return jnp.where(self._sync(step.stmt, number, state), following, position)
        if step.kind == "if":
            return jnp.where(self._scalar(step.stmt.condition), following, step.target)
        name, loops, ends = step.stmt.var.name, dict(state["loops"][number]), dict(state["ends"][number])
        state["loops"][number], state["ends"][number] = loops, ends
        if step.kind == "enter":
            loops[name] = self._scalar(step.stmt.start)
            ends[name] = loops[name] + self._scalar(step.stmt.extent)
        elif step.kind == "next":
            loops[name] = loops[name] + 1
        else:
            return jnp.where(loops[name] < ends[name], following, step.target)
        return following if step.kind == "enter" else step.target

    def _scalar(self, expr: ir.Expr) -> jax.Array:
        value = jnp.asarray(expressions.value(self._machine, expr))
        if value.size != 1:
            raise self._machine.varying("synchronization that")
        value = jnp.reshape(value, ())
        return self._machine.memory.vary(value if value.dtype == jnp.bool_ else value.astype(jnp.int32))

    def _sync(self, op: ir.Op, number: int, state: State) -> jax.Array | bool:
        """Sets a flag, or takes one if it is set: whether the core goes on.

        ``flags[mode, receiver, sender, number]`` counts what was set and not yet taken; in mode 4 the sender is 0.
        """
        operation, core, flags = sync.parse(op), self._cores[number], state["flags"]
        flag = self._scalar(operation.id)
        mode = {sync.UNITS: 0, sync.BLOCK: 1, sync.ONE_UNIT: 2}[operation.mode]
        alike = [i for i, other in enumerate(self._cores) if other.kind == core.kind]
        opposite = [i for i, other in enumerate(self._cores) if other.kind != core.kind]
        setting = operation.kind == "cross_set"
        if operation.mode == sync.ONE_UNIT:
            if core.kind == "vector":
                flag = flag % sync.FLAG_IDS + (sync.FLAG_IDS * core.unit if setting else 0)
                places = [(receiver, 0, flag) for receiver in opposite] if setting else [(number, 0, flag)]
            elif setting:
                units = jnp.asarray(opposite)[flag // sync.FLAG_IDS]
                places = [(units, 0, flag % sync.FLAG_IDS)]
            else:
                places = [(number, 0, flag)]
        else:
            others = alike if operation.mode == sync.UNITS else opposite
            places = [(other, number, flag) if setting else (number, other, flag) for other in others]
        if setting:
            for place in places:
                flags = flags.at[(mode, *place)].add(1)
            state["flags"] = flags
            return True
        ready = jnp.stack([flags[(mode, *place)] > 0 for place in places]).all()
        for place in places:
            flags = flags.at[(mode, *place)].add(-ready.astype(jnp.int32))
        state["flags"] = flags
        return ready
