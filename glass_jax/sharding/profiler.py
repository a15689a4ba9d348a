"""Profiles of collectives: per collective and rank, bytes, steps, time, bandwidth and messages sent again.

On devices and processes a rank's clock is read by a callback when its part of a collective begins and when it ends, so
the time includes the wait for the slowest rank, and the callbacks' own. Nothing can be seen in between: what a rank
sends is what the schedule says. On a ``SimulatedMesh`` times come from the cost model, with the mesh's topology and
faults; they say nothing about the computer that simulates.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import os
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from glass_jax import errors, text
from glass_jax.sharding import report, simulate
from glass_jax.sharding.collective import Collective

MEASURED = "measured"
_SHOWN = 16  # ranks of a collective, and links, that a table lists

_instrumented = jax.make_user_context(default_value=False)  # part of the trace key, so functions are traced again
_lock = threading.Lock()
_active: list[Profile] = []


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One run of a collective, by one rank or several.

    Attributes:
      collective, algorithm, axes: what ran.
      clock: ``"measured"``, or the name of the topology that times come from.
      nbytes: bytes of a rank's input.
      steps: of the schedule; None for JAX's own collectives, which do not show them.
      ranks: ``[n]`` numbers of the ranks, of all of the mesh.
      sent: ``[n]`` bytes that each sent, or None.
      start: ``[n]`` seconds, of the clock.
      seconds: ``[n]`` from its beginning to its end on each rank; None for JAX's own on a simulated mesh.
      messages: on a simulated mesh, those of every pair of ranks; else None.
    """

    collective: str
    algorithm: str
    axes: tuple[str, ...]
    clock: str
    nbytes: int
    steps: int | None
    ranks: np.ndarray
    sent: np.ndarray | None
    start: np.ndarray
    seconds: np.ndarray | None
    messages: simulate.Messages | None = None


class Profile:
    """What :func:`profile` records.

    Attributes:
      runs: in the order in which they ended.
    """

    def __init__(self):
        self.runs: list[Run] = []
        self._begun: dict[tuple[Collective, int], collections.deque[float]] = collections.defaultdict(collections.deque)
        self._now: dict[str, float] = collections.defaultdict(float)  # of each simulated clock

    # --- recording, by callbacks ---

    def begin(self, call: Collective, rank: int, now: float) -> None:
        """A rank's part of a collective begins."""
        self._begun[call, rank].append(now)

    def end(self, call: Collective, nbytes: int, widening: float, rank: int, member: int, now: float) -> None:
        """It ends."""
        if not self._begun[call, rank]:  # it began before the profile did
            return
        start, schedule = self._begun[call, rank].popleft(), call.schedule()
        sent = None if schedule is None else simulate.sent_bytes(schedule, nbytes, widening)[[member]]
        steps = None if schedule is None else schedule.steps
        what = (call.name, call.algorithm, call.over.axes, MEASURED, nbytes, steps)
        self.runs.append(Run(*what, np.array([rank]), sent, np.array([start]), np.array([now - start])))

    def simulated(self, call: Collective, nbytes: int, widening: float) -> None:
        """A collective ran on a simulated mesh."""
        mesh, schedule = call.mesh, call.schedule()
        machine, groups = mesh.topology, mesh.groups(call.over.axes)
        ranks = groups.ravel()
        start = np.full(len(ranks), self._now[machine.name])
        what = (call.name, call.algorithm, call.over.axes, machine.name, nbytes)
        if schedule is None:
            self.runs.append(Run(*what, None, ranks, None, start, None))
            return
        done = simulate.simulate(schedule, nbytes, mesh.network, groups=groups, faults=mesh.faults, widening=widening)
        sent = np.tile(simulate.sent_bytes(schedule, nbytes, widening), len(groups))
        seconds = np.full(len(ranks), done.seconds)
        self._now[machine.name] += done.seconds
        self.runs.append(Run(*what, schedule.steps, ranks, sent, start, seconds, done.messages))

    # --- reading ---

    def unfinished(self) -> list[tuple[Collective, int, float]]:
        """Collectives that have begun on a rank of this process and not ended: the call, the rank, and when, seconds of
        ``time.perf_counter``.
        """
        return [(call, rank, start) for (call, rank), starts in list(self._begun.items()) for start in starts]

    def rows(self) -> list[dict[str, Any]]:
        """A row for every collective and rank: ``collective``, ``algorithm``, ``axes``, ``clock``, ``rank``, ``calls``,
        ``steps``, ``sent_bytes``, ``seconds``, ``bytes_per_second`` (sent, while in the collective) and ``retries``;
        None where it cannot be known.
        """
        rows: dict[tuple, dict[str, Any]] = {}
        for run in self.runs:
            retries = None if run.messages is None else _retries(run.messages)
            for i, rank in enumerate(run.ranks.tolist()):
                key = {
                    "collective": run.collective,
                    "algorithm": run.algorithm,
                    "axes": run.axes,
                    "clock": run.clock,
                    "rank": rank,
                }
                empty = {"calls": 0, "steps": 0, "sent_bytes": 0, "seconds": 0.0, "retries": 0}
                row = rows.setdefault(tuple(key.values()), key | empty)
                row["calls"] += 1
                row["seconds"] = _plus(row["seconds"], None if run.seconds is None else float(run.seconds[i]))
                row["steps"] = _plus(row["steps"], run.steps)
                row["sent_bytes"] = _plus(row["sent_bytes"], None if run.sent is None else int(run.sent[i]))
                row["retries"] = _plus(row["retries"], None if retries is None else int(retries.get(rank, 0)))
        for row in rows.values():
            known = row["sent_bytes"] is not None and row["seconds"]
            row["bytes_per_second"] = row["sent_bytes"] / row["seconds"] if known else None
        return list(rows.values())

    def links(self) -> list[dict[str, Any]]:
        """A row for every pair of simulated ranks that exchanged messages, the slowest first: ``src``, ``dst``,
        ``messages``, ``bytes``, ``seconds`` (of messages under way), ``bytes_per_second`` and ``retries``.
        """
        found = [run.messages for run in self.runs if run.messages is not None]
        if not found:
            return []
        ends = np.concatenate([np.stack([messages.src, messages.dst]) for messages in found], axis=1)
        pairs, place = np.unique(ends, axis=1, return_inverse=True)
        times, nbytes, seconds, retries = (
            np.bincount(place.ravel(), np.concatenate([getattr(messages, field) for messages in found]))
            for field in ("times", "nbytes", "seconds", "retries")
        )
        rows = []
        for i in np.lexsort((pairs[1], pairs[0], -seconds)):
            row = {"src": int(pairs[0, i]), "dst": int(pairs[1, i]), "messages": int(times[i]), "bytes": int(nbytes[i])}
            rate = float(nbytes[i] / seconds[i])
            rows.append(row | {"seconds": float(seconds[i]), "bytes_per_second": rate, "retries": int(retries[i])})
        return rows

    def table(self) -> str:
        """Two tables: the slowest 16 ranks of each collective, and the slowest 16 links of simulated meshes."""
        rows = self.rows()
        if not rows:
            return "no collective ran inside the profile"
        lines = [
            ("collective", "algorithm", "axes", "rank", "calls", "steps", "sent", "us", "GB/s", "retries", "times are")
        ]
        grouped: dict[tuple, list[dict[str, Any]]] = collections.defaultdict(list)
        for row in rows:
            grouped[row["collective"], row["algorithm"], row["axes"], row["clock"]].append(row)
        notes = []
        for what, ranks in grouped.items():
            for row in sorted(ranks, key=lambda row: (-(row["seconds"] or 0), row["rank"]))[:_SHOWN]:
                lines.append(_cells(row))
            if len(ranks) > _SHOWN:
                notes.append(f"{what[0]} {what[1]}: {len(ranks) - _SHOWN} more ranks took no longer")
        links = [("link", "messages", "sent", "us", "GB/s", "retries")]
        for row in self.links()[:_SHOWN]:
            cells = (report.size(row["bytes"]), report.microseconds(row["seconds"]), _rate(row["bytes_per_second"]))
            links.append((f"{row['src']} -> {row['dst']}", str(row["messages"]), *cells, str(row["retries"])))
        parts = [text.table(lines, left=(0, 1, 2, 10)), *notes]
        return "\n".join([*parts, "", text.table(links, left=(0,))] if len(links) > 1 else parts)

    def to_json(self) -> str:
        """:meth:`rows` and :meth:`links`, as JSON."""
        return json.dumps({"collectives": self.rows(), "links": self.links()}, indent=2)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes every run, on a track for each rank, for Perfetto (https://ui.perfetto.dev)."""
        trace = report.Trace()
        for run in self.runs:
            process = "devices" if run.clock == MEASURED else f"simulated, {run.clock}"
            name = f"{run.collective} {run.algorithm}"
            for i, rank in enumerate(run.ranks.tolist()):
                if run.seconds is not None:
                    details = {"input bytes": run.nbytes, "sent bytes": None if run.sent is None else int(run.sent[i])}
                    trace.add(process, f"rank {rank}", name, float(run.start[i]), float(run.seconds[i]), **details)
        trace.save(path)


def _plus(total: float | None, value: float | None) -> float | None:
    """A sum that is unknown once a part of it is."""
    return None if total is None or value is None else total + value


def _retries(messages: simulate.Messages) -> dict[int, float]:
    """How many messages each rank had to send again."""
    ranks, place = np.unique(messages.src, return_inverse=True)
    return dict(zip(ranks.tolist(), np.bincount(place, messages.retries, minlength=len(ranks)), strict=True))


def _rate(bytes_per_second: float | None) -> str:
    return "?" if bytes_per_second is None else f"{bytes_per_second / 1e9:.4g}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def shown(value: Any, how: Any = str) -> str:
        return "?" if value is None else how(value)

    return (
        row["collective"],
        row["algorithm"],
        ", ".join(row["axes"]),
        str(row["rank"]),
        str(row["calls"]),
        shown(row["steps"]),
        shown(row["sent_bytes"], report.size),
        shown(row["seconds"], report.microseconds),
        _rate(row["bytes_per_second"]),
        shown(row["retries"]),
        row["clock"] if row["clock"] == MEASURED else f"of {row['clock']}",
    )


class profile:  # noqa: N801 - a function to its users
    """Records the collectives that run inside ``with glass.sharding.profile() as p:``.

    Jitted functions are traced again inside, with marks in their collectives, and run without them again outside. Wait
    for results (``jax.block_until_ready``) inside, since what runs later is not seen. Recorded are the collectives of
    ``glass.sharding``, those of derivatives included; JAX's own (``algorithm="xla"``) with their time only; and on a
    ``SimulatedMesh`` without one.

    Returns:
      (``as p``) a :class:`Profile`: ``p.table()``, ``p.to_json()``, ``p.save_trace(path)``, ``p.rows()``,
      ``p.links()``.

    Raises:
      UnsupportedError: (of a program inside) its ``shard_map`` leaves axes of the mesh to the compiler.
    """

    def __enter__(self) -> Profile:
        self._profile, self._context = Profile(), _instrumented(True)
        self._context.__enter__()
        with _lock:
            _active.append(self._profile)
        return self._profile

    def __exit__(self, *exc_info: object) -> None:
        with _lock:
            _active.remove(self._profile)
        self._context.__exit__(*exc_info)


# --- marks, in the programs of collectives ---


def is_active() -> bool:
    """Whether programs that are traced now are to have marks."""
    return _instrumented.value


def marked_simulated(x: jax.Array, call: Collective, simulated: tuple[str | None, ...]) -> jax.Array:
    """``x``, by way of a mark; the ranks are those of its leading dimensions that have names in ``simulated``."""
    others = [size for size, name in zip(x.shape, simulated, strict=False) if name is None]  # other axes, and batches
    batch = max(math.prod(others) * call.over.ranks // call.mesh.size, 1)
    nbytes = math.prod(x.shape[len(simulated) :]) * batch * x.dtype.itemsize
    _ = call.mesh.network  # if the topology has too few ranks, raises here and not in the callback
    return _passed(x, functools.partial(_simulated, call, nbytes, _widening(x, call)))


def marked(program: Any, x: jax.Array, call: Collective) -> jax.Array:
    """``program(x)``, a rank's part of ``call``, between two marks that its values pass through, which orders them."""
    if not x.size:
        return program(x)
    member = call.over.devices().index()
    mesh = jax.sharding.get_abstract_mesh()
    if automatic := sorted(set(mesh.axis_names) - set(mesh.manual_axes)):
        raise errors.UnsupportedError(
            f"a profile cannot look into a shard_map that leaves axes to the compiler, here {', '.join(automatic)}: "
            f"JAX has no callbacks there. Make all axes of the mesh manual, or run {call.name} outside of the profile"
        )
    rank = lax.axis_index(tuple(mesh.manual_axes))
    nbytes = x.size * x.dtype.itemsize
    x = _passed(x, functools.partial(_begin, call), rank)
    return _passed(program(x), functools.partial(_end, call, nbytes, _widening(x, call)), rank, member)


def _widening(x: jax.Array, call: Collective) -> float:
    return jnp.dtype(call.accumulate).itemsize / x.dtype.itemsize


def _passed(x: jax.Array, callback: Any, *numbers: jax.Array) -> jax.Array:
    """``x``, available only after ``callback`` has run, which runs only once ``x`` is there."""
    if not x.size:
        return x
    zero = io_callback(callback, jax.ShapeDtypeStruct((), jnp.int32), *numbers, x.ravel()[0])
    return jnp.where(zero == 0, x, jnp.zeros_like(x))


def _simulated(call: Collective, nbytes: int, widening: float, _: np.ndarray) -> np.int32:
    _deliver("simulated", call, nbytes, widening)
    return np.int32(0)


def _begin(call: Collective, rank: np.ndarray, _: np.ndarray) -> np.int32:
    _deliver("begin", call, int(rank), time.perf_counter())
    return np.int32(0)


def _end(
    call: Collective, nbytes: int, widening: float, rank: np.ndarray, member: np.ndarray, _: np.ndarray
) -> np.int32:
    now = time.perf_counter()
    _deliver("end", call, nbytes, widening, int(rank), int(member), now)
    return np.int32(0)


def _deliver(event: str, *details: Any) -> None:
    with _lock:
        for one in _active:
            getattr(one, event)(*details)
