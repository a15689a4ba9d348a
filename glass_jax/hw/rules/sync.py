"""Rules about cores that wait for one another."""

from __future__ import annotations

from glass_jax.hw import memory as mem
from glass_jax.hw import program as ir
from glass_jax.hw.program import Space
from glass_jax.hw.rules.base import Findings, Rule, Subject

ALL_CORES = 0  # mode of a cross-core flag that every core takes part in
_OF_THE_CUBE = (Space.L1, Space.L0A, Space.L0B, Space.L0C)


def _cores(subject: Subject) -> int:
    """How many blocks run at once: a kernel that uses no cube has the vector units to itself."""
    cube = any(buffer.space in _OF_THE_CUBE for buffer in subject.program.buffers.values())
    return subject.chip.cube_cores if cube else subject.chip.vector_cores or subject.chip.cube_cores


def _grid(subject: Subject) -> Findings:
    blocks, cores = mem.static(subject.program.blocks), _cores(subject)
    waits = [
        op
        for op in subject.of(ir.Op)
        if op.name.endswith("cross_core_wait_flag") and mem.static(op.args[0]) == ALL_CORES
    ]
    if waits and blocks is not None and blocks > cores:
        message = (
            f"{blocks} blocks wait for one another and {subject.chip.name} runs {cores} at a time: they never meet"
        )
        yield waits[0].loc, message, f"Launch at most {cores} blocks, each taking several tiles (T.Persistent)"


RULES = (
    Rule(
        "grid-size",
        "A block that waits for all others keeps its core, so that more blocks than cores never meet.",
        _grid,
    ),
)
