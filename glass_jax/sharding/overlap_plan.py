"""How much of its communication a program hides behind its computation, on a machine that one need not have.

Computation and communication are two streams. Each takes its tasks in order; a task begins when its stream is free and
what it needs has ended. Communication takes what :func:`planner.plan` predicts, computation what the caller says
(``glass.estimate`` predicts that of a kernel); that both use the same memory is not modelled.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from typing import Literal

import numpy as np

from glass_jax import errors
from glass_jax.sharding import planner, report, simulate
from glass_jax.sharding import topology as topologies
from glass_jax.sharding.network import Network
from glass_jax.sharding.topology import Topology

COMPUTE, COMMUNICATE = "compute", "communicate"


@dataclasses.dataclass(frozen=True)
class Task:
    """A piece of work, and when it runs.

    Attributes:
      stream: ``"compute"`` or ``"communicate"``.
      name: what it does.
      seconds: how long it takes.
      start: when it begins, seconds.
    """

    stream: str
    name: str
    seconds: float
    start: float

    @property
    def end(self) -> float:
        """When it ends, seconds."""
        return self.start + self.seconds


class _Streams:
    """Places tasks on the two streams."""

    def __init__(self):
        self.tasks: list[Task] = []
        self._free = {COMPUTE: 0.0, COMMUNICATE: 0.0}

    def add(self, stream: str, name: str, seconds: float, *needs: Task | None) -> Task:
        """Adds a task that begins when its stream is free and ``needs`` have ended."""
        start = max([self._free[stream], *(task.end for task in needs if task is not None)])
        self.tasks.append(Task(stream, name, seconds, start))
        self._free[stream] = self.tasks[-1].end
        return self.tasks[-1]


@dataclasses.dataclass(frozen=True)
class GradientBuckets:
    """A backward pass whose gradients are all-reduced in buckets, as by ``all_reduce_buckets``.

    Attributes:
      layer_seconds: of the backward pass of each layer, in the order in which it takes place: the last layer first.
      layer_bytes: of each layer's gradients.
      bucket_bytes: a bucket is sent when it has this many, or at the end.
      algorithm: of the all-reduce.
    """

    layer_seconds: Sequence[float]
    layer_bytes: Sequence[int]
    bucket_bytes: int
    algorithm: str = "auto"

    def place(self, streams: _Streams, machine: Topology, ranks: int) -> None:
        """Puts the tasks on the streams."""
        if len(self.layer_seconds) != len(self.layer_bytes) or not self.layer_bytes:
            raise errors.CollectiveError(
                f"layer_seconds has {len(self.layer_seconds)} layers and layer_bytes {len(self.layer_bytes)}; need as "
                "many, at least one"
            )
        if self.bucket_bytes < 1:
            raise errors.CollectiveError(f"bucket_bytes={self.bucket_bytes} must be at least 1")
        filled, last = 0, len(self.layer_bytes) - 1
        for layer, (seconds, nbytes) in enumerate(zip(self.layer_seconds, self.layer_bytes, strict=True)):
            done = streams.add(COMPUTE, f"backward of layer {last - layer}", seconds)
            filled += nbytes
            if filled >= self.bucket_bytes or layer == last:
                taken = _collective_seconds("all_reduce", filled, machine, ranks, self.algorithm)
                streams.add(COMMUNICATE, f"all_reduce of {report.size(filled)}", taken, done)
                filled = 0


@dataclasses.dataclass(frozen=True)
class ChunkedMatmul:
    """``all_gather(x) @ w`` or ``reduce_scatter(x @ w)`` in chunks of rows, each chunk's collective posted.

    While a chunk is multiplied, the next is gathered, or the one before is scattered.

    Attributes:
      collective: ``"all_gather"`` or ``"reduce_scatter"``.
      seconds: of the whole product on one rank.
      nbytes: of the whole array that is gathered or scattered.
      chunks: how many.
      algorithm: of the collective.
    """

    collective: Literal["all_gather", "reduce_scatter"]
    seconds: float
    nbytes: int
    chunks: int
    algorithm: str = "auto"

    def place(self, streams: _Streams, machine: Topology, ranks: int) -> None:
        """Puts the tasks on the streams."""
        _check_collective(self.collective)
        if self.chunks < 1:
            raise errors.CollectiveError(f"chunks={self.chunks} must be at least 1")
        taken = _collective_seconds(self.collective, -(-self.nbytes // self.chunks), machine, ranks, self.algorithm)
        for chunk in range(self.chunks):
            if self.collective == "all_gather":
                arrived = streams.add(COMMUNICATE, f"all_gather of chunk {chunk}", taken)
                streams.add(COMPUTE, f"product of chunk {chunk}", self.seconds / self.chunks, arrived)
            else:
                done = streams.add(COMPUTE, f"product of chunk {chunk}", self.seconds / self.chunks)
                streams.add(COMMUNICATE, f"reduce_scatter of chunk {chunk}", taken, done)


@dataclasses.dataclass(frozen=True)
class RingMatmul:
    """``all_gather(x) @ w`` or ``reduce_scatter(x @ w)`` as ``all_gather_gemm`` and ``gemm_reduce_scatter`` do them.

    Every rank's block, or partial sums for it, travel around the ring both ways; in each step the blocks that are
    there are multiplied while others travel, and a step ends when both have ended.

    Attributes:
      collective: ``"all_gather"`` or ``"reduce_scatter"``.
      seconds: of the whole product on one rank.
      nbytes: of the whole array that is gathered or scattered.
    """

    collective: Literal["all_gather", "reduce_scatter"]
    seconds: float
    nbytes: int

    def place(self, streams: _Streams, machine: Topology, ranks: int) -> None:
        """Puts the tasks on the streams."""
        _check_collective(self.collective)
        block = self.seconds / ranks
        both, one = (_exchange_seconds(-(-self.nbytes // ranks), machine, ranks, ways) for ways in (2, 1))
        pairs, opposite = divmod(ranks - 1, 2)
        # Gathering begins with a rank's own block, and each message is of use a step later; scattering is the same
        # backwards.
        moves = [both] * pairs + [one] * opposite
        products = [block] + [2 * block] * pairs + [block] * opposite
        if self.collective == "reduce_scatter":
            moves, products = moves[::-1], products[::-1]
        before: tuple[Task | None, ...] = (None, None)
        for step, product in enumerate(products):
            move = (
                streams.add(COMMUNICATE, f"blocks of step {step}", moves[step], *before) if step < len(moves) else None
            )
            before = (move, streams.add(COMPUTE, f"products of step {step}", product, *before))


Work = GradientBuckets | ChunkedMatmul | RingMatmul


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What :func:`plan_overlap` found.

    Attributes:
      tasks: in the order of their streams.
    """

    tasks: tuple[Task, ...]

    @property
    def seconds(self) -> float:
        """From the start to the end."""
        return max(task.end for task in self.tasks)

    @property
    def compute_seconds(self) -> float:
        """What the computation alone takes."""
        return sum(task.seconds for task in self.tasks if task.stream == COMPUTE)

    @property
    def communication_seconds(self) -> float:
        """What the communication alone takes."""
        return sum(task.seconds for task in self.tasks if task.stream == COMMUNICATE)

    @property
    def exposed_seconds(self) -> float:
        """The time in which nothing is computed."""
        return max(self.seconds - self.compute_seconds, 0.0)

    @property
    def overlapped(self) -> float:
        """The part of the communication that is hidden behind computation, 0 to 1."""
        hidden = self.communication_seconds - self.exposed_seconds
        return max(hidden, 0.0) / self.communication_seconds if self.communication_seconds else 1.0

    def __str__(self) -> str:
        times = (self.seconds, self.compute_seconds, self.communication_seconds, self.exposed_seconds)
        total, compute, communication, exposed = map(report.microseconds, times)
        return (
            f"{self.overlapped:.1%} of the communication is hidden: {total} us for {compute} us of computation and "
            f"{communication} us of communication, of which {exposed} us are exposed"
        )

    def to_json(self) -> str:
        """The numbers and the tasks, as JSON; times in seconds."""
        names = ("seconds", "compute_seconds", "communication_seconds", "exposed_seconds", "overlapped")
        data = {name: getattr(self, name) for name in names} | {
            "tasks": [dataclasses.asdict(task) for task in self.tasks]
        }
        return json.dumps(data, indent=2)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the two streams as a timeline for Perfetto (https://ui.perfetto.dev)."""
        trace = report.Trace()
        for task in self.tasks:
            trace.add("a rank", task.stream, task.name, task.start, task.seconds)
        trace.save(path)


def plan_overlap(work: Work, topology: str | Topology, *, ranks: int) -> Overlap:
    """Predicts how much of the communication of ``work`` is hidden behind its computation.

    Args:
      work: a :class:`GradientBuckets`, :class:`ChunkedMatmul` or :class:`RingMatmul`.
      topology: the machine, see :func:`planner.plan`.
      ranks: P, its first ranks, at least 2.

    Raises:
      CollectiveError: an argument is out of range.
    """
    if ranks < 2:
        raise errors.CollectiveError(f"{ranks=}: there is communication among at least 2 ranks")
    streams = _Streams()
    work.place(streams, topologies.get(topology), ranks)
    return Overlap(tuple(streams.tasks))


def _check_collective(collective: str) -> None:
    if collective not in ("all_gather", "reduce_scatter"):
        raise errors.CollectiveError(
            f"products are overlapped with all_gather or reduce_scatter, not with {collective!r}"
        )


@functools.lru_cache(maxsize=256)
def _collective_seconds(collective: str, nbytes: int, machine: Topology, ranks: int, algorithm: str) -> float:
    return planner.plan(collective, nbytes, machine, ranks=ranks, algorithm=algorithm).seconds


def _exchange_seconds(nbytes: int, machine: Topology, ranks: int, ways: int) -> float:
    """Seconds of a step in which every rank sends ``nbytes`` to the next, and if ``ways`` is 2 to the one before."""
    step = simulate.one_step(*((np.arange(ranks) + distance) % ranks for distance in (1, -1)[:ways]))
    return simulate.simulate(step, nbytes, Network(machine, ranks)).seconds
