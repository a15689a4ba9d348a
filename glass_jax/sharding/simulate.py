"""How long a schedule takes on a machine, message by message and link by link.

A message takes alpha seconds until its first byte arrives, and then the time that its busiest link needs for all bytes
that the step sends over it, its own and those of others: links are shared. A step ends when its last message has
arrived and been added, and the next begins (Thakur, Rabenseifner, Gropp 2005, with contention). Equal steps are costed
once, so that a ring of thousands of ranks takes as long as one step of it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from glass_jax import errors
from glass_jax.sharding.faults import Faults
from glass_jax.sharding.network import NO_LINK, Network, Routes
from glass_jax.sharding.schedule import REDUCE, Chunks, Phase, Schedule, Transfer, everywhere

_MOVES_PER_ADDED_BYTE = 3  # read two operands, write one result


def chunk_bytes(schedule: Schedule, phase: Phase, nbytes: int, widening: float = 1.0) -> float:
    """Bytes of a chunk as it travels in a phase: sums travel in the dtype that they are formed in."""
    sums = phase.transfers[0].op == REDUCE and not phase.concurrent
    return schedule.chunk_size(nbytes) * (widening if sums else 1.0)


def sent_bytes(schedule: Schedule, nbytes: int, widening: float = 1.0) -> np.ndarray:
    """Bytes that each rank sends in the course of a schedule: ``[P]``; arguments as of :func:`simulate`."""
    sent = np.zeros(schedule.ranks)
    for phase in schedule.phases:
        chunk = chunk_bytes(schedule, phase, nbytes, widening)
        for transfer in phase.transfers:
            src = _senders(transfer.dst)
            sent[src] += transfer.send.active_repeats(phase.repeat)[src] * transfer.count * chunk
    return sent


def _senders(dst: np.ndarray) -> np.ndarray:
    """The ranks that send to another one."""
    return np.flatnonzero((dst >= 0) & (dst != np.arange(len(dst))))


@dataclasses.dataclass(frozen=True, eq=False)
class Messages:
    """Messages between pairs of ranks of a machine.

    Attributes:
      src, dst: ``[n]`` ranks.
      times: ``[n]`` how many messages each pair exchanged.
      nbytes: ``[n]`` bytes in all of them together.
      seconds: ``[n]`` time that they took together, those sent again included.
      retries: ``[n]`` how many were sent again.
    """

    src: np.ndarray
    dst: np.ndarray
    times: np.ndarray
    nbytes: np.ndarray
    seconds: np.ndarray
    retries: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class PhaseTime:
    """How long the steps of a phase take.

    Attributes:
      steps: ``[steps]`` seconds of each.
      alpha: seconds in all of them until first bytes arrived.
      gamma: seconds in all of them that went into adding.
    """

    steps: np.ndarray
    alpha: float
    gamma: float


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """What became of a schedule on a machine.

    Attributes:
      schedule: the schedule.
      network: the machine.
      nbytes: bytes of a rank's input.
      phases: the times of its phases.
      link_bytes: ``[links]`` bytes that each link of the machine carried.
      messages: every pair's messages; None if only the times were asked for.
    """

    schedule: Schedule
    network: Network
    nbytes: int
    phases: tuple[PhaseTime, ...]
    link_bytes: np.ndarray
    messages: Messages | None

    @property
    def seconds(self) -> float:
        """From the start to the end of the last step."""
        return float(sum(phase.steps.sum() for phase in self.phases))

    @property
    def alpha(self) -> float:
        """Seconds in which messages were under way but no byte had arrived."""
        return sum(phase.alpha for phase in self.phases)

    @property
    def gamma(self) -> float:
        """Seconds that went into adding."""
        return sum(phase.gamma for phase in self.phases)

    @property
    def beta(self) -> float:
        """Seconds that went into the transfer of bytes."""
        return max(self.seconds - self.alpha - self.gamma, 0.0)


def _transfer(network: Network, routes: Routes, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds in which each of a step's messages is transferred, and its busiest link: all messages share the links."""
    taken = routes.links != NO_LINK
    loads = np.bincount(
        routes.links[taken], np.broadcast_to(sizes, taken.shape)[taken], minlength=len(network.bytes_per_second)
    )
    busy = np.where(taken, (loads / network.bytes_per_second)[routes.links], 0)
    hop = busy.argmax(axis=0)[None]
    return np.take_along_axis(busy, hop, 0)[0], np.take_along_axis(routes.links, hop, 0)[0]


class _Simulator:
    """The running totals of one simulation.

    Args:
      network: the machine.
      groups: ``[G, P]``, the machine's ranks that play the schedule's, in each of the groups that run it at the same
        time.
      faults: of the machine.
      listed: whether to keep every pair's messages.
      widening: see :func:`simulate`.
    """

    def __init__(
        self,
        schedule: Schedule,
        nbytes: int,
        network: Network,
        groups: np.ndarray,
        faults: Faults,
        *,
        listed: bool,
        widening: float,
    ):
        self.schedule, self.network, self.groups, self.faults, self.listed = schedule, network, groups, faults, listed
        self.nbytes, self.widening = nbytes, widening
        self.link_bytes = np.zeros(len(network.bytes_per_second))
        self.pairs: list[tuple[np.ndarray, ...]] = []

    def phase(self, phase: Phase) -> PhaseTime:
        if phase.concurrent:
            return self._at_once(phase)
        if any(transfer.turn for transfer in phase.transfers):
            return self._turning(phase)
        if all(transfer.send.window() is None for transfer in phase.transfers):
            return self._repeated(phase)
        return self._pipeline(phase)

    def _chunk(self, phase: Phase) -> float:
        return chunk_bytes(self.schedule, phase, self.nbytes, self.widening)

    def _ends(self, transfer: Transfer, t: int) -> tuple[np.ndarray, np.ndarray]:
        """The machine's ranks between which the messages of repeat ``t`` travel, of a pipeline those of all repeats."""
        dst = transfer.destinations(t) if transfer.turn else transfer.dst
        src = _senders(dst)
        return self.groups[:, src].ravel(), self.groups[:, dst[src]].ravel()

    def _step(self, phase: Phase, t: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sources, destinations and bytes of the messages of repeat ``t``."""
        ends, chunk = [self._ends(transfer, t) for transfer in phase.transfers], self._chunk(phase)
        sizes = [
            np.full(len(src), transfer.count * chunk) for (src, _), transfer in zip(ends, phase.transfers, strict=True)
        ]
        src, dst = (np.concatenate(side) for side in zip(*ends, strict=True))
        return src, dst, np.concatenate(sizes)

    def _times(
        self, src: np.ndarray, dst: np.ndarray, sizes: np.ndarray, times: int | np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Alpha and transfer time of messages that travel at the same time; they are counted ``times`` times."""
        routes = self.network.routes(src, dst)
        transfer, _ = _transfer(self.network, routes, sizes)
        taken = routes.links != NO_LINK
        moved = np.broadcast_to(sizes * times, taken.shape)[taken]
        self.link_bytes += np.bincount(routes.links[taken], moved, minlength=len(self.link_bytes))
        return routes.alpha, transfer * self.faults.factors(src, dst)

    def _record(self, src, dst, sizes, times, cost) -> np.ndarray:
        """Keeps the messages of pairs if they are wanted; returns how often each had to be sent again."""
        retries = self.faults.retries(src, dst, times)
        if self.listed:
            times = np.broadcast_to(times, len(src))
            self.pairs.append((src, dst, times, sizes * times, cost * (times + retries), retries))
        return retries

    def _adding(self, phase: Phase, together: int = 1) -> float:
        """Seconds that the rank with most to add in a step needs for it."""
        chunks = np.zeros(self.schedule.ranks)
        for transfer in phase.transfers:
            if transfer.op == REDUCE:
                chunks += np.where(transfer.receivers(), transfer.count * together, 0)
        return chunks.max() * self._chunk(phase) * _MOVES_PER_ADDED_BYTE / self.network.topology.memory_bytes_per_second

    def _repeated(self, phase: Phase) -> PhaseTime:
        """Every repeat has the same messages."""
        src, dst, sizes = self._step(phase, 0)
        if not len(src):
            return PhaseTime(np.zeros(phase.steps), 0.0, 0.0)
        alpha, transfer = self._times(src, dst, sizes, phase.repeat)
        cost = alpha + transfer
        total = cost * (phase.repeat + self._record(src, dst, sizes, phase.repeat, cost))
        last, adding = total.argmax(), self._adding(phase)
        steps = np.full(phase.repeat, total[last] / phase.repeat + adding)
        return PhaseTime(steps, float(alpha[last] * total[last] / cost[last]), adding * phase.repeat)

    def _turning(self, phase: Phase) -> PhaseTime:
        """Every repeat has a permutation of its own; those that load the links alike are costed once."""
        steps, alphas, known = np.zeros(phase.repeat), np.zeros(phase.repeat), {}
        adding = self._adding(phase)
        for t in range(phase.repeat):
            key = t if self.listed else self._shift_class(phase, t)
            if key not in known:
                src, dst, sizes = self._step(phase, t)
                counted = (
                    0 if self._is_all_to_all(phase) else 1
                )  # all at once below, classes are not alike link by link
                alpha, transfer = self._times(src, dst, sizes, counted)
                cost = alpha + transfer
                total = cost * (1 + self._record(src, dst, sizes, 1, cost))
                known[key] = total.max() + adding, alpha[total.argmax()]
            steps[t], alphas[t] = known[key]
        if self._is_all_to_all(phase):
            self.link_bytes += self.network.all_to_all_loads() * phase.transfers[0].count * self._chunk(phase)
        return PhaseTime(steps, float(alphas.sum()), adding * phase.repeat)

    def _shift_class(self, phase: Phase, t: int) -> tuple | int:
        """What of repeat ``t`` decides how its messages load the links."""
        distances = []
        for transfer in phase.transfers:
            distance = (transfer.dst - np.arange(self.schedule.ranks)) % self.schedule.ranks
            if (distance != distance[0]).any():
                return t
            distances.append((int(distance[0]) + transfer.turn * t) % self.schedule.ranks)
        return tuple(self.network.shift_class(distance) for distance in distances)

    def _is_all_to_all(self, phase: Phase) -> bool:
        """Whether in the end every rank has sent one message to every other, in one group without faults."""
        alone = not self.listed and len(phase.transfers) == 1
        return alone and phase.transfers[0].turn == 1 and phase.repeat == self.schedule.ranks - 1

    def _at_once(self, phase: Phase) -> PhaseTime:
        """All repeats travel at the same time."""
        adding = self._adding(phase, phase.repeat)
        if self._is_all_to_all(phase):
            loads = self.network.all_to_all_loads() * phase.transfers[0].count * self._chunk(phase)
            self.link_bytes += loads
            everybody = np.arange(self.schedule.ranks)
            alpha = self.network.routes(np.zeros_like(everybody), everybody).alpha.max()
            longest = alpha + (loads / self.network.bytes_per_second).max()
        else:
            parts = [self._step(phase, t) for t in range(phase.repeat)]
            src, dst, sizes = (np.concatenate(part) for part in zip(*parts, strict=True))
            alphas, transfer = self._times(src, dst, sizes, 1)
            cost = alphas + transfer
            total = cost * (1 + self._record(src, dst, sizes, 1, cost))
            alpha, longest = alphas[total.argmax()], total.max()
        return PhaseTime(np.array([longest + adding]), float(alpha), adding)

    def _pipeline(self, phase: Phase) -> PhaseTime:
        """Ranks take part in a window of the repeats; a step takes as long as its slowest message.

        Links are taken to be shared by all messages of the phase, as they are once the pipeline is full.
        """
        src, dst, sizes = self._step(phase, 0)
        first, last, times = (
            np.concatenate(part)
            for part in zip(*(self._windows(t, phase.repeat) for t in phase.transfers), strict=True)
        )
        alpha, transfer = self._times(src, dst, sizes, times)
        cost = alpha + transfer
        again = self._record(src, dst, sizes, times, cost) * cost
        steps, alphas = np.zeros(phase.repeat), np.zeros(phase.repeat)
        for value in np.unique(cost)[::-1]:
            which = (cost == value) & (times > 0)
            change = np.zeros(phase.repeat + 1)
            np.add.at(change, first[which], 1)
            np.add.at(change, last[which] + 1, -1)
            covered = (np.cumsum(change[:-1]) > 0) & (steps == 0)
            steps[covered], alphas[covered] = value, alpha[which].max(initial=0)
        adding = self._adding(phase)
        return PhaseTime(
            steps + adding + again.max(initial=0) / phase.repeat, float(alphas.sum()), adding * phase.repeat
        )

    def _windows(self, transfer: Transfer, repeat: int) -> tuple[np.ndarray, ...]:
        """The first and last repeat in which each message travels, and how many there are."""
        src = _senders(transfer.dst)
        first, last = (repeats[src] for repeats in transfer.send.window())
        first, last = np.clip(first, 0, repeat), np.clip(last, -1, repeat - 1)
        times = transfer.send.active_repeats(repeat)[src]
        return tuple(np.tile(values, len(self.groups)) for values in (first, last, times))


def simulate(
    schedule: Schedule,
    nbytes: int,
    network: Network,
    *,
    groups: np.ndarray | None = None,
    faults: Faults | None = None,
    widening: float = 1.0,
) -> Simulation:
    """Runs a schedule on a machine.

    Args:
      schedule: any.
      nbytes: bytes of a rank's input.
      network: the machine; without ``groups``, of as many ranks as the schedule.
      groups: ``[G, P]`` ranks of the machine: G groups run the schedule at the same time. With groups, every pair's
        messages are listed, which takes time and memory in P**2 where everybody sends to everybody.
      faults: of the machine; they need ``groups``.
      widening: how many times as many bytes partial sums have as inputs; 2 where 16-bit inputs are summed in float32.

    Raises:
      CollectiveError: the machine has too few or too many ranks, or faults come without groups.
    """
    if groups is None and (faults is not None or network.ranks != schedule.ranks):
        raise errors.CollectiveError(
            f"a schedule of {schedule.ranks} ranks on {network.ranks} ranks of {network.topology.name}"
            f"{' with faults' if faults else ''}: say by groups=[[...]] which of them run it"
        )
    listed = groups is not None
    groups = groups if listed else np.arange(schedule.ranks)[None, :]
    faults = faults or Faults((), network.ranks)
    simulator = _Simulator(schedule, nbytes, network, groups, faults, listed=listed, widening=widening)
    phases = tuple(simulator.phase(phase) for phase in schedule.phases)
    empty = [(np.zeros(0, np.int64),) * 4 + (np.zeros(0), np.zeros(0, np.int64))]
    messages = Messages(*map(np.concatenate, zip(*(simulator.pairs or empty), strict=True))) if listed else None
    return Simulation(schedule, network, nbytes, phases, simulator.link_bytes, messages)


@dataclasses.dataclass(frozen=True, eq=False)
class Moves:
    """The messages of one repeat of a phase, for a timeline or a picture.

    Attributes:
      src, dst: ``[n]`` ranks.
      nbytes: ``[n]`` bytes.
      seconds: ``[n]`` from when the first byte is sent to when the last arrives.
      links: ``[n]`` the link that each takes longest on.
    """

    src: np.ndarray
    dst: np.ndarray
    nbytes: np.ndarray
    seconds: np.ndarray
    links: np.ndarray


def moves(simulation: Simulation, phase: Phase, t: int) -> Moves:
    """The messages of repeat ``t`` of a phase of a schedule that one group runs without faults."""
    chunk, ends = simulation.schedule.chunk_size(simulation.nbytes), []
    for transfer in phase.transfers:
        dst = transfer.destinations(t)
        src = _senders(dst)
        ends.append((src, dst[src], np.full(len(src), transfer.count * chunk)))
    src, dst, sizes = (np.concatenate(part) for part in zip(*ends, strict=True))
    routes = simulation.network.routes(src, dst)
    seconds, links = _transfer(simulation.network, routes, sizes)
    return Moves(src, dst, sizes, routes.alpha + seconds, links)


def one_step(*destinations: np.ndarray) -> Schedule:
    """The schedule in which every rank sends its array to each of ``destinations``, ``[P]``, at once; -1 is nobody."""
    ranks = len(destinations[0])
    whole = Chunks((everywhere(1, ranks),))
    phase = Phase(tuple(Transfer(np.asarray(dst), whole, whole) for dst in destinations))
    return Schedule("send_recv", "direct", ranks, 1, (phase,), whole, whole)
