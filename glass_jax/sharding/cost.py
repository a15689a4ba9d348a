"""The cost of a schedule, and the choice of an algorithm.

A step that sends n bytes takes alpha + beta n, and gamma a byte that is added (Thakur, Rabenseifner, Gropp 2005).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from glass_jax.sharding import algorithms
from glass_jax.sharding.schedule import REDUCE, Schedule

MAX_UNROLLED = 64  # steps that are compiled one by one, where each has a permutation of its own


@dataclasses.dataclass(frozen=True)
class Links:
    """What a message costs.

    Attributes:
      alpha: seconds before its first byte arrives.
      beta: seconds a byte. Every rank sends and receives at this rate on each link that a step uses.
      gamma: seconds to add a byte of it.
      mesh: the largest number of ranks that all have links to one another.
    """

    alpha: float
    beta: float
    gamma: float
    mesh: int


# One node of 8 Ascend 910B: HCCS, every NPU linked to every other; 196 GB/s and 0.5 us are public profiles of the node's links
# taken together, 7 of them. Adding is bound by HBM: read twice, written once at 1.6 TB/s.
NODE_910B = Links(alpha=0.5e-6, beta=1 / 28e9, gamma=3 / 1.6e12, mesh=8)


def seconds(schedule: Schedule, nbytes: int, links: Links = NODE_910B) -> float:
    """Predicted time of a schedule, if every transfer of a step has a link of its own.

    Args:
      schedule: any.
      nbytes: bytes of a rank's input.
      links: the machine.
    """
    total, chunk = 0.0, schedule.chunk_size(nbytes)
    for phase in schedule.phases:
        largest = max(transfer.count for transfer in phase.transfers) * chunk
        added = sum(transfer.count for transfer in phase.transfers if transfer.op == REDUCE) * chunk
        together = phase.repeat if phase.concurrent else 1
        total += phase.steps * (links.alpha + links.beta * largest + links.gamma * added * together)
    return total


@dataclasses.dataclass(frozen=True)
class Choice:
    """The algorithm for a collective, and why.

    Attributes:
      algorithm: the fastest.
      seconds: predicted time of each algorithm that was considered.
    """

    algorithm: str
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        others = sorted(self.seconds.items(), key=lambda item: item[1])
        return f"{self.algorithm}: " + ", ".join(f"{name} {time * 1e6:.1f} us" for name, time in others)


@functools.lru_cache(maxsize=1024)
def choose(collective: str, nbytes: int, ranks: int, links: Links = NODE_910B) -> Choice:
    """The algorithm with the smallest predicted time.

    Left out are the full mesh above ``links.mesh`` ranks, algorithms that are not defined for the number of ranks, and those
    whose program would grow with it.

    Args:
      collective: one of those in ``algorithms.ALGORITHMS``.
      nbytes: bytes of a rank's input.
      ranks: P.
      links: the machine.
    """
    times = {}
    for algorithm in algorithms.ALGORITHMS[collective]:
        if algorithm == "mesh" and ranks > links.mesh or algorithm == "pairwise" and ranks > MAX_UNROLLED:
            continue
        if algorithms.defined(collective, algorithm, ranks):
            times[algorithm] = seconds(algorithms.build(collective, algorithm, ranks), nbytes, links)
    return Choice(min(times, key=times.__getitem__), times)
