"""On-chip memory of a kernel: sizes, addresses, and the map that shows what takes the room."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from glass_jax.hw.chips import Chip
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Allocation, Space

ON_CHIP = (Space.L1, Space.L0A, Space.L0B, Space.L0C, Space.UB)

# Address alignment of each memory, bytes, by the vendor's documentation; a product's destination needs MAD_ALIGNMENT.
ALIGNMENT = {Space.L1: 32, Space.UB: 32, Space.L0A: 512, Space.L0B: 512, Space.L0C: 64}
MAD_ALIGNMENT = 1024

SIMT_CONTEXTS = "(thread contexts)"  # name of the allocation that SIMT regions need, which no buffer has

_BAR = 20  # characters of the bar that shows how full a memory is


def bits(dtype: str) -> int:
    """Bits of one element of ``dtype``, packed types as they are stored: 4 for ``"int4"`` and ``"float4_e2m1fn"``.

    A vector type such as ``"float32x64"`` counts all its lanes.
    """
    match = re.fullmatch(r"(?:bool|[a-z]+(\d+))(?:_[a-z0-9]+?)?(?:x(\d+))?", dtype)
    if match is None:
        raise ValueError(f"{dtype!r} is not an element type")
    return int(match[1] or 8) * int(match[2] or 1)


def static(value: int | ir.Expr) -> int | None:
    """``value`` as an int if it is one, else None: the extent or index is known only when the kernel runs."""
    if isinstance(value, ir.Const):
        value = value.value
    return value if isinstance(value, int) else None


def nbytes(buffer: ir.Buffer) -> int | None:
    """Bytes of ``buffer``, or None where its shape is dynamic."""
    extents = [static(extent) for extent in buffer.shape]
    return None if None in extents else math.ceil(math.prod(extents) * bits(buffer.dtype) / 8)


def kib(size: int) -> str:
    """``size`` in bytes, written in KiB, or in bytes if it is less than one."""
    return f"{size / 1024:.1f} KiB" if size >= 1024 else f"{size} B"


def allocations(program: ir.Program) -> tuple[Allocation, ...]:
    """An upper bound of what ``program`` allocates: for kernels whose memory map the compiler has not made.

    Every storage counts for the whole kernel, ``num_stages`` times if a copy fills it in a pipelined loop. Addresses
    follow one another, each aligned as its memory demands. Dynamic shapes are left out.
    """
    versions: dict[str, int] = {}
    for loop in ir.walk(program.body):
        stages = loop.attrs.get("num_stages") if isinstance(loop, ir.For) else None
        for stmt in ir.walk(loop.body) if stages else ():
            if isinstance(stmt, ir.Copy):
                storage = program.buffers[stmt.dst.buffer].storage
                versions[storage] = max(versions.get(storage, 1), int(stages))
    sizes: dict[tuple[Space, str], int] = {}
    for buffer in program.buffers.values():
        size = nbytes(buffer)
        if buffer.space in ON_CHIP and size is not None:
            key = (buffer.space, buffer.storage)
            sizes[key] = max(sizes.get(key, 0), size)
    ends: dict[Space, int] = {}
    result = []
    for (space, storage), size in sizes.items():
        align = MAD_ALIGNMENT if space is Space.L0C else ALIGNMENT[space]
        offset = math.ceil(ends.get(space, 0) / align) * align
        count = 1 if space is Space.L0C else versions.get(storage, 1)
        ends[space] = offset + size * count
        result.append(Allocation(storage, space, offset, size, count))
    return tuple(result)


def with_thread_contexts(memory: Sequence[Allocation], program: ir.Program, chip: Chip) -> tuple[Allocation, ...]:
    """``memory`` and, if ``program`` has a SIMT region, the contexts of its threads, which stand in UB."""
    if not chip.simt_context_bytes or not any(isinstance(stmt, ir.Simt) for stmt in ir.walk(program.body)):
        return tuple(memory)
    align = ALIGNMENT[Space.UB]
    start = math.ceil(used(memory, Space.UB) / align) * align
    return (*memory, Allocation(SIMT_CONTEXTS, Space.UB, start, chip.simt_context_bytes, 1))


def used(memory: Sequence[Allocation], space: Space) -> int:
    """Bytes of ``space`` that ``memory`` takes: the highest address, which counts buffers that share room once."""
    return max((a.offset + a.nbytes * a.versions for a in memory if a.space is space), default=0)


def memory_map(memory: Sequence[Allocation], chip: Chip) -> str:
    """A picture of ``memory`` on ``chip``: used and total bytes of each memory, a bar, every buffer with its address.

    The unified buffer is that of one vector unit; the other memories are those of one cube core.
    """
    lines = []
    for space in ON_CHIP:
        here = sorted((a for a in memory if a.space is space), key=lambda a: (a.offset, a.buffer))
        total = chip.capacity(space)
        if not here or total is None:
            continue
        end = used(here, space)
        filled = min(_BAR, math.ceil(_BAR * end / total))
        over = f"  over by {kib(end - total)}" if end > total else ""
        bar = "#" * filled + "." * (_BAR - filled)
        lines.append(f"{space.name:<4}{kib(end):>11} of {kib(total):>10} [{bar}] {end / total:4.0%}{over}")
        width = max(len(a.buffer) for a in here)
        for a in here:
            lines.append(f"      {a.offset:#08x}  {a.buffer:<{width}}  {a.versions} x {kib(a.nbytes)}")
    return "\n".join(lines) or "no on-chip buffers"
