"""The choice of an algorithm where a program leaves it open: the planner's, among those that compile fast."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax

from glass_jax.sharding import planner
from glass_jax.sharding import topology as topologies
from glass_jax.sharding.schedule import Schedule
from glass_jax.sharding.topology import Topology

MAX_UNROLLED = 64  # steps that are compiled one by one, where each has a permutation of its own

_assumed = jax.make_user_context(default_value="910b")  # part of the trace key, so functions are traced again


@contextlib.contextmanager
def use_topology(topology: str | Topology) -> Iterator[None]:
    """A block in which ``algorithm="auto"`` chooses for this machine, see :func:`planner.plan`; outside, for the 910B.

    Jitted functions are traced again. Simulated meshes and devices choose alike, so that they agree bit by bit.

    Raises:
      CollectiveError: there is no such machine.
    """
    with _assumed(topologies.get(topology)):
        yield


def choose(collective: str, nbytes: int, ranks: int, topology: str | Topology | None = None) -> planner.Plan:
    """What ``algorithm="auto"`` chooses, ``choose(...).algorithm``, and why: ``print(choose(...))``.

    Args:
      collective: one of those in ``algorithms.ALGORITHMS``.
      nbytes: bytes of a rank's input.
      ranks: P.
      topology: the machine, see :func:`planner.plan`; by default that of :func:`use_topology`.
    """
    return _choose(collective, nbytes, ranks, topologies.get(topology or _assumed.value))


@functools.lru_cache(maxsize=1024)
def _choose(collective: str, nbytes: int, ranks: int, topology: Topology) -> planner.Plan:
    whole = nbytes * ranks if collective == "all_gather" else nbytes
    found = planner.plan(collective, whole, topology, ranks=ranks)
    long = {row.algorithm for row in found.estimates if _unrolled(row.simulation.schedule) > MAX_UNROLLED}
    reason = f"each of its steps is compiled by itself, which is for at most {MAX_UNROLLED}"
    return dataclasses.replace(
        found,
        estimates=tuple(row for row in found.estimates if row.algorithm not in long),
        left_out=found.left_out | dict.fromkeys(sorted(long), reason),
    )


def _unrolled(schedule: Schedule) -> int:
    """Steps that are compiled one by one."""
    changing = [phase for phase in schedule.phases if any(transfer.turn for transfer in phase.transfers)]
    return sum(phase.steps for phase in changing)
