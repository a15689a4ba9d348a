"""Pictures of schedules: who sends to whom in which step, and how long the steps take."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from glass_jax import errors
from glass_jax.sharding import report, simulate

MAX_RANKS = 32
MAX_STEPS = 48
_DPI = 150


def save(simulation: simulate.Simulation, path: str | os.PathLike[str]) -> None:
    """Draws a simulated schedule: above, ranks against steps, a line for each message; below, the time of each step.

    Lines have a colour for each sort of link. Of large schedules the first 32 ranks and the first 48 steps are drawn.

    Args:
      simulation: of the schedule.
      path: a file whose name ends in .png, .svg or .pdf.

    Raises:
      MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise errors.MissingDependencyError(
            "drawing a schedule needs matplotlib: pip install matplotlib, or save its trace instead"
        ) from error
    schedule = simulation.schedule
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    messages, times = figure.subplots(2, 1, height_ratios=(4, 1), sharex=True)
    shown = _messages(messages, simulation)
    seconds = np.concatenate([phase.steps for phase in simulation.phases] or [np.zeros(0)])[:shown]
    times.bar(np.arange(len(seconds)) + 0.5, seconds * 1e6, width=0.9, color="0.6")
    times.set(xlabel="step", ylabel="us a step")
    part = f", the first {shown} of {schedule.steps} steps" if shown < schedule.steps else ""
    figure.suptitle(
        f"{schedule.collective} {schedule.algorithm}, {schedule.ranks} ranks on {simulation.network.topology.name}, "
        f"{report.microseconds(simulation.seconds)} us{part}"
    )
    figure.savefig(path, dpi=_DPI)


def _messages(axes: Any, simulation: simulate.Simulation) -> int:
    """Draws a line for each message; returns the number of steps that were drawn."""
    schedule = simulation.schedule
    ranks, step = min(schedule.ranks, MAX_RANKS), 0
    colours: dict[str, str] = {}
    for phase in schedule.phases:
        for t in range(min(phase.repeat, MAX_RANKS) if phase.concurrent else phase.repeat):
            if step >= MAX_STEPS:
                break
            moves = simulate.moves(simulation, phase, t)
            for i in np.flatnonzero((moves.src < ranks) | (moves.dst < ranks)):
                sort = simulation.network.sort(int(moves.links[i]))
                label = None if sort in colours else sort
                colour = colours.setdefault(sort, f"C{len(colours)}")
                axes.plot((step, step + 1), (moves.src[i], moves.dst[i]), color=colour, linewidth=1, label=label)
            step += not phase.concurrent
        step += phase.concurrent
    part = f" (the first {ranks} of {schedule.ranks})" if ranks < schedule.ranks else ""
    axes.set(ylabel=f"rank{part}", ylim=(ranks - 0.5, -0.5), xlim=(0, max(step, 1)))
    if colours:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), title="by way of")
    return step
