"""What a collective takes on a machine that one need not have: by algorithm, where time goes, and which is best."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from glass_jax import errors, text
from glass_jax.sharding import algorithms, checks, draw, report, simulate, timeline
from glass_jax.sharding import topology as machines
from glass_jax.sharding.network import Network
from glass_jax.sharding.schedule import Schedule
from glass_jax.sharding.topology import Topology

_SHOWN_SECONDS = 3  # fastest algorithms that an explanation names


@dataclasses.dataclass(frozen=True, eq=False)
class Estimate:
    """What one algorithm takes for one size.

    Attributes:
      simulation: the run that the numbers come from.
      nbytes: S, the bytes of the array, as ``plan`` takes them.
    """

    simulation: simulate.Simulation
    nbytes: int

    @property
    def algorithm(self) -> str:
        """Its name."""
        return self.simulation.schedule.algorithm

    @property
    def seconds(self) -> float:
        """From the start to the end."""
        return self.simulation.seconds

    @property
    def algorithm_bandwidth(self) -> float:
        """S / t, bytes a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """What links have to carry for it, whatever the algorithm: S / t times a factor of the collective, bytes a
        second.

        The factor is that of nccl-tests (doc/PERFORMANCE.md): 2 (P - 1) / P for all_reduce, (P - 1) / P for all_gather,
        reduce_scatter and all_to_all, 1 for the others.
        """
        ranks = self.simulation.schedule.ranks
        factor = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "send_recv": 1.0}
        return self.algorithm_bandwidth * factor.get(self.simulation.schedule.collective, (ranks - 1) / ranks)

    @functools.cached_property
    def busiest_link(self) -> tuple[str, int, float]:
        """The link that is busy longest: its name, the bytes it carries, and the part of the time it is busy."""
        simulation = self.simulation
        if not simulation.link_bytes.any():
            return "none", 0, 0.0
        busy = simulation.link_bytes / simulation.network.bytes_per_second
        link = int(busy.argmax())
        part = min(float(busy[link] / simulation.seconds), 1.0)
        return simulation.network.describe(link), int(simulation.link_bytes[link]), part

    def to_dict(self) -> dict[str, Any]:
        """The numbers, in bytes and seconds."""
        link, link_bytes, link_busy = self.busiest_link
        simulation = self.simulation
        return {
            "algorithm": self.algorithm,
            "nbytes": self.nbytes,
            "steps": simulation.schedule.steps,
            "seconds": self.seconds,
            "alpha_seconds": simulation.alpha,
            "beta_seconds": simulation.beta,
            "gamma_seconds": simulation.gamma,
            "algorithm_bytes_per_second": self.algorithm_bandwidth,
            "bus_bytes_per_second": self.bus_bandwidth,
            "busiest_link": {"name": link, "bytes": link_bytes, "busy": link_busy},
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What :func:`plan` found.

    Attributes:
      collective: its name.
      topology: the machine.
      ranks: P.
      estimates: every algorithm for every size, sizes in the order asked for, the fastest algorithm of each first.
      left_out: algorithms that were not considered, and why.
    """

    collective: str
    topology: Topology
    ranks: int
    estimates: tuple[Estimate, ...]
    left_out: dict[str, str]

    @property
    def chosen(self) -> dict[int, Estimate]:
        """The fastest algorithm for each size."""
        fastest: dict[int, Estimate] = {}
        for estimate in self.estimates:
            fastest.setdefault(estimate.nbytes, estimate)
        return fastest

    @property
    def algorithm(self) -> str:
        """The fastest algorithm for the largest size, which takes most of the time."""
        return self.chosen[max(self.chosen)].algorithm

    @property
    def seconds(self) -> float:
        """Its time."""
        return self.chosen[max(self.chosen)].seconds

    def table(self) -> str:
        """A row for every algorithm and size; times in us, rates in GB/s (1e9 bytes)."""
        head = (
            "size",
            "algorithm",
            "steps",
            "us",
            "alpha us",
            "beta us",
            "gamma us",
            "alg GB/s",
            "bus GB/s",
            "busiest link",
            "busy",
        )
        rows = [head]
        for estimate in self.estimates:
            simulation, (link, _, busy) = estimate.simulation, estimate.busiest_link
            times = (simulation.seconds, simulation.alpha, simulation.beta, simulation.gamma)
            rates = (estimate.algorithm_bandwidth, estimate.bus_bandwidth)
            rows.append(
                (
                    report.size(estimate.nbytes),
                    estimate.algorithm,
                    str(simulation.schedule.steps),
                    *map(report.microseconds, times),
                    *(f"{rate / 1e9:.4g}" for rate in rates),
                    link,
                    f"{busy:.0%}",
                )
            )
        return text.table(rows, left=(1, 9))

    def why(self) -> str:
        """The chosen algorithm of each size and what speaks for it, then the algorithms that were left out and why."""
        lines = []
        for nbytes, best in self.chosen.items():
            rows = [estimate for estimate in self.estimates if estimate.nbytes == nbytes]
            parts = {part: getattr(best.simulation, part) for part in ("alpha", "beta", "gamma")}
            bound = max(parts, key=parts.__getitem__)
            meaning = {"alpha": "the latency of its steps", "beta": "the transfer of bytes", "gamma": "adding"}[bound]
            share = parts[bound] / best.seconds if best.seconds else 0.0
            link, _, busy = best.busiest_link
            line = (
                f"{report.size(nbytes)}: {best.algorithm}, {report.microseconds(best.seconds)} us, {share:.0%} of "
                f"them for {meaning}; {link} is busy {busy:.0%} of the time"
            )
            others = ", ".join(
                f"{row.algorithm} {row.seconds / best.seconds:.2f}x" for row in rows[1:_SHOWN_SECONDS] if best.seconds
            )
            lines.append(f"{line}. Next: {others}" if others else line)
        lines += [f"left out: {algorithm}: {reason}" for algorithm, reason in self.left_out.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        title = f"{self.collective} of {self.ranks} ranks on {self.topology.name}: {self.topology.about}"
        return f"{title}\n\n{self.table()}\n\n{self.why()}"

    def to_json(self) -> str:
        """Everything, as JSON; times in seconds, rates in bytes a second."""
        data = {
            "collective": self.collective,
            "topology": self.topology.name,
            "ranks": self.ranks,
            "chosen": {str(nbytes): estimate.algorithm for nbytes, estimate in self.chosen.items()},
            "why": self.why(),
            "left_out": self.left_out,
            "estimates": [estimate.to_dict() for estimate in self.estimates],
        }
        return json.dumps(data, indent=2)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline of the chosen algorithms, message by message, for Perfetto (https://ui.perfetto.dev)."""
        trace = report.Trace()
        for nbytes, estimate in self.chosen.items():
            timeline.add(trace, f"{self.collective} {estimate.algorithm} {report.size(nbytes)}", estimate.simulation)
        trace.save(path)

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draws the schedule of :attr:`algorithm`, as a PNG, SVG or PDF by the name of the file.

        Raises:
          MissingDependencyError: matplotlib is not installed.
        """
        draw.save(self.chosen[max(self.chosen)].simulation, path)


def plan(
    collective: str,
    nbytes: int | Sequence[int],
    topology: str | Topology,
    *,
    ranks: int | None = None,
    algorithm: str = "auto",
) -> Plan:
    """Predicts what a collective takes on a machine, and which of its algorithms is best there.

    Each algorithm's schedule, the same that runs, is followed step by step: a message takes the latency of its way,
    and the time that its busiest link needs for all bytes of the step that go over it; adding takes the time that
    memory needs. Up to tens of thousands of ranks take seconds.

    Args:
      collective: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"``, ``"all_to_all"``, or
        ``"send_recv"``: every rank to the next.
      nbytes: S, or several: the bytes of the whole array, as nccl-tests count them: of a rank's input, but of
        ``all_gather`` a rank's result.
      topology: the machine: the name of a known one (:func:`topologies`), of a JSON file of the same form, or a
        ``Topology``.
      ranks: P, the machine's first ranks; by default all of them, at most 16384.
      algorithm: one, or ``"auto"`` for all that the number of ranks allows.

    Raises:
      CollectiveError: an argument is not one of those above, or the algorithm is not defined for the number of ranks.
    """
    machine = machines.get(topology)
    ranks = min(machine.ranks, 16384) if ranks is None else checks.integer(ranks, "ranks")
    sizes = _sizes(nbytes)
    if collective not in algorithms.ALGORITHMS:
        raise errors.CollectiveError(
            f"there is no collective {collective!r}; there are {', '.join(algorithms.ALGORITHMS)}"
        )
    network = Network(machine, ranks)
    schedules, left_out = _schedules(collective, algorithm, machine, ranks)
    estimates = []
    for size in sizes:
        rows = [
            Estimate(simulate.simulate(schedule, input_bytes(collective, size, ranks), network), size)
            for schedule in schedules
        ]
        estimates += sorted(rows, key=lambda row: row.seconds)
    return Plan(collective, machine, ranks, tuple(estimates), left_out)


def _sizes(nbytes: int | Sequence[int]) -> tuple[int, ...]:
    several = nbytes if isinstance(nbytes, Sequence | np.ndarray) and not isinstance(nbytes, str) else (nbytes,)
    sizes = tuple(checks.integer(size, "nbytes") for size in several)
    if not sizes or min(sizes) < 0 or len(set(sizes)) < len(sizes):
        raise errors.CollectiveError(f"{nbytes=}: need one size or several different ones, none below 0")
    return sizes


def input_bytes(collective: str, nbytes: int, ranks: int) -> int:
    """Bytes of a rank's input, if the whole array has ``nbytes``, see :func:`plan`."""
    return -(-nbytes // ranks) if collective == "all_gather" else nbytes


def _schedules(collective: str, algorithm: str, machine: Topology, ranks: int) -> tuple[list[Schedule], dict[str, str]]:
    """The schedules to consider, and why others are not."""
    known = algorithms.ALGORITHMS[collective]
    if algorithm not in ("auto", *known):
        raise errors.CollectiveError(f"{collective} has no algorithm {algorithm!r}; it has auto, {', '.join(known)}")
    if algorithm != "auto":
        return [_build(collective, algorithm, machine, ranks)], {}
    found, left_out = [], {}
    for name in known:
        if name == "mesh" and collective != "all_to_all" and not machine.linked(ranks):
            left_out[name] = (
                f"the {ranks} ranks are not all linked to one another; ask for it by name to see it share ports"
            )
            continue
        try:
            found.append(_build(collective, name, machine, ranks))
        except errors.CollectiveError as error:
            left_out[name] = str(error)
    return found, left_out


def _build(collective: str, algorithm: str, machine: Topology, ranks: int) -> Schedule:
    if collective == "send_recv":
        return simulate.one_step((np.arange(ranks) + 1) % ranks)  # a single rank's to itself, which takes no time
    levels = None
    if algorithm == "hierarchical":
        levels = machine.grid(ranks)
        if len(levels) == 1:
            raise errors.CollectiveError(
                f"'hierarchical' is a plain ring here: {ranks} ranks do not fill several groups of "
                f"{machine.levels[0].ranks} on {machine.name}"
            )
    return algorithms.build(collective, algorithm, ranks, levels=levels)
