"""A simulated schedule as a trace: a track for each rank, an event for each message that it sends."""

from __future__ import annotations

import numpy as np

from glass_jax.sharding import report, simulate
from glass_jax.sharding.schedule import Phase

MAX_RANKS = 64  # tracks
MAX_STEPS = 64  # steps of a phase that are shown one by one


def add(trace: report.Trace, process: str, simulation: simulate.Simulation) -> None:
    """Adds a simulation to ``trace``.

    The first 64 ranks get tracks, and the first 64 steps of each phase events of their own; the steps that follow
    become one.
    """
    shown, start = min(simulation.schedule.ranks, MAX_RANKS), 0.0
    for number, (phase, times) in enumerate(zip(simulation.schedule.phases, simulation.phases, strict=True)):
        if phase.concurrent:
            _at_once(trace, process, simulation, phase, float(start), float(times.steps.sum()), shown)
            start += times.steps.sum()
            continue
        for t, seconds in enumerate(times.steps[:MAX_STEPS]):
            _step(trace, process, simulation, phase, t, float(start), shown)
            trace.add(process, "steps", f"phase {number} step {t}", float(start), float(seconds))
            start += seconds
        rest = times.steps[MAX_STEPS:]
        if len(rest):
            trace.add(process, "steps", f"phase {number}: {len(rest)} more steps", float(start), float(rest.sum()))
            start += rest.sum()


def _step(
    trace: report.Trace, process: str, simulation: simulate.Simulation, phase: Phase, t: int, start: float, shown: int
) -> None:
    moves = simulate.moves(simulation, phase, t)
    for i in np.flatnonzero(moves.src < shown):
        src, dst = int(moves.src[i]), int(moves.dst[i])
        details = {"bytes": int(moves.nbytes[i]), "busiest link": simulation.network.describe(int(moves.links[i]))}
        trace.add(process, f"rank {src}", f"to {dst}", start, float(moves.seconds[i]), **details)


def _at_once(
    trace: report.Trace,
    process: str,
    simulation: simulate.Simulation,
    phase: Phase,
    start: float,
    seconds: float,
    shown: int,
) -> None:
    """Messages to many ranks at the same time are one event."""
    nbytes = sum(transfer.count for transfer in phase.transfers) * simulation.schedule.chunk_size(simulation.nbytes)
    for rank in range(shown):
        trace.add(process, f"rank {rank}", f"to {phase.repeat} ranks at once", start, seconds, bytes_each=nbytes)
    trace.add(process, "steps", f"{phase.repeat} messages a rank at once", start, seconds)
