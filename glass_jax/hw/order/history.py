"""Accesses to memory in the order in which pipes are known to have made them: finds two that are not ordered."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from glass_jax.hw import memory as mem
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Allocation, Space
from glass_jax.hw.order.pipes import Access, Box, destination

Clock = tuple[int, ...]  # how many instructions of each pipe of each core are known to have ended


@dataclasses.dataclass(frozen=True)
class Event:
    """An access that was made.

    Attributes:
      access: what was accessed.
      stmt: by which statement.
      pipe: number of the pipe among those of all cores.
      count: how many instructions that pipe had then executed.
    """

    access: Access
    stmt: ir.Stmt
    pipe: int
    count: int


class History:
    """What has been accessed of every memory."""

    def __init__(self, program: ir.Program, memory: Sequence[Allocation]):
        self._buffers = program.buffers
        self._neighbours = _overlapping(memory)
        self._offsets = {allocation.buffer: allocation.offset for allocation in memory}
        self._events: dict[tuple[str, object], dict[tuple, Event]] = {}
        self._written: set[tuple[str, object]] = set()
        written = {destination(stmt) for stmt in ir.walk(program.body)}
        inputs = (b.name for b in program.buffers.values() if b.space is Space.GM and b.name not in written)
        self._constant = frozenset(inputs)

    def conflicts(self, access: Access, place: object, pipe: int, clock: Clock) -> Iterator[Event]:
        """Earlier accesses that ``access``, by a pipe that knows ``clock``, is not ordered after.

        ``place`` tells apart the memories of one name that several cores have. One of the two accesses is a write.
        """
        if access.buffer in self._constant:
            return
        storage = self._buffers[access.buffer].storage
        for other in (storage, *self._neighbours.get(storage, ())):
            for event in self._events.get((other, place), {}).values():
                ordered = event.pipe == pipe or event.count <= clock[event.pipe]
                if not ordered and (event.access.write or access.write) and self._overlap(event.access, access):
                    yield event

    def unwritten(self, access: Access, place: object) -> bool:
        """Whether a read of on-chip memory certainly finds what nobody has written."""
        buffer = self._buffers[access.buffer]
        if access.write or not access.certain or buffer.space is Space.GM:
            return False
        events = self._events.get((buffer.storage, place), {}).values()
        return not any(event.access.write and self._overlap(event.access, access, True) for event in events)

    def add(self, event: Event, place: object, clock: Clock) -> None:
        """Notes an access. What a write covers, and is ordered after, need not be remembered any longer."""
        access = event.access
        if access.buffer in self._constant:
            return
        events = self._events.setdefault((self._buffers[access.buffer].storage, place), {})
        if access.write and len(events) > 8:
            for key, old in list(events.items()):
                known = old.pipe == event.pipe or old.count <= clock[old.pipe]
                if known and old.access.buffer == access.buffer and _covers(access.box, old.access.box):
                    del events[key]
        events[event.pipe, id(event.stmt), access.box, access.write] = event

    def _overlap(self, one: Access, other: Access, unsure: bool = False) -> bool:
        """Whether two accesses touch one byte; ``unsure`` is the answer where that cannot be told."""
        if one.buffer == other.buffer:
            return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one.box, other.box, strict=True))
        first, second = self._bytes(one), self._bytes(other)
        if first is None or second is None:
            return unsure
        return max(first[0], second[0]) < min(first[1], second[1])

    def _bytes(self, access: Access) -> tuple[int, int] | None:
        """Addresses of an access in its memory, or None if they are not contiguous or not known."""
        buffer = self._buffers[access.buffer]
        shape = [mem.static(extent) for extent in buffer.shape]
        if None in shape or buffer.layout:
            return None
        whole = 2 if buffer.space in (Space.L1, Space.L0A, Space.L0B, Space.L0C) else 0  # a fractal matrix
        start, size, outer = 0, 1, False
        for axis in range(len(shape) - 1, -1, -1):
            low, high = access.box[axis]
            partial = (low, high) != (0, shape[axis])
            if (partial and axis >= len(shape) - whole) or (outer and high - low > 1):
                return None
            start += low * math.prod(shape[axis + 1 :])
            size *= high - low
            outer = outer or partial
        offset, bits = self._offsets.get(buffer.storage, 0), mem.bits(buffer.dtype)
        return (offset + start * bits // 8, offset + (start + size) * bits // 8)


def _covers(one: Box, other: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(one, other, strict=True))


def _overlapping(memory: Sequence[Allocation]) -> Mapping[str, list[str]]:
    """For each allocation those that the compiler has put in the same place."""
    found: dict[str, list[str]] = {}
    for one in memory:
        for other in memory:
            ends = one.offset + one.nbytes * one.versions, other.offset + other.nbytes * other.versions
            shared = one.space is other.space and max(one.offset, other.offset) < min(ends)
            if shared and one.buffer != other.buffer:
                found.setdefault(one.buffer, []).append(other.buffer)
    return found
