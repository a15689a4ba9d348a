"""Rules about transfers between memories."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from glass_jax.hw import memory as mem
from glass_jax.hw.chips import C0_BYTES
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.rules.base import Findings, Rule, Subject

MAX_ROWS = 4095
MAX_ROW_BYTES_PADDED = 2097151
MAX_ROW_BYTES = 65535 * C0_BYTES
MAX_ND_ROWS = 16384  # nValue, and the strides of the fractal destination
MAX_ND_COLUMNS = 65535  # dValue

_COMMON_PATHS = {
    (Space.GM, Space.L1), (Space.GM, Space.UB), (Space.UB, Space.GM), (Space.UB, Space.UB), (Space.L1, Space.L0A),
    (Space.L1, Space.L0B), (Space.L0C, Space.GM), (Space.L0C, Space.L1),
}  # fmt: skip
# The transfers each family has; those of the 910A are not published where the other numbers come from.
_PATHS = {
    "910B": _COMMON_PATHS | {(Space.GM, Space.L0A), (Space.GM, Space.L0B), (Space.L1, Space.GM)},
    "950": _COMMON_PATHS | {(Space.L0C, Space.UB), (Space.L1, Space.UB), (Space.UB, Space.L1)},
}
_DETOURS = {
    (Space.GM, Space.L0A): "Go through L1",
    (Space.GM, Space.L0B): "Go through L1",
    (Space.L1, Space.GM): "Go through UB",
    (Space.L0C, Space.UB): "Go through GM",
    (Space.L1, Space.UB): "Go through GM",
    (Space.UB, Space.L1): "Go through GM",
    (Space.GM, Space.GM): "Go through UB",
}
_MEMORIES = {Space.GM, *mem.ON_CHIP}


def _name(copy: ir.Copy) -> str:
    return f"copy {copy.src.buffer} -> {copy.dst.buffer}"


def _spaces(subject: Subject, copy: ir.Copy) -> tuple[Space, Space]:
    return subject.buffer(copy.src).space, subject.buffer(copy.dst).space


def _paths(subject: Subject) -> Findings:
    paths = _PATHS.get(subject.chip.family)
    for copy in subject.transfers:
        path = _spaces(subject, copy)
        if paths is not None and path not in paths and set(path) <= _MEMORIES:
            message = f"{_name(copy)}: {subject.chip.name} has no path {path[0].name} -> {path[1].name}"
            yield copy.loc, message, _DETOURS.get(path, "Go through a memory that has a path to both")


# --- rows of GM <-> UB transfers -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A transfer as the engine sees it: ``count`` rows of ``nbytes``, ``pitch`` bytes apart in UB; None if dynamic."""

    count: int | None
    nbytes: int | None
    pitch: int | None


def _runs(buffer: ir.Buffer, extents: Sequence[int | None]) -> list[tuple[int | None, int | None]]:
    """``(elements, stride)`` of a region, innermost first, dimensions that follow on from one another merged."""
    shape = [mem.static(extent) for extent in buffer.shape]
    strides: list[int | None] = [mem.static(stride) for stride in buffer.strides or ()]
    if not strides:
        stride: int | None = 1
        for extent in reversed(shape):
            strides.insert(0, stride)
            stride = None if stride is None or extent is None else stride * extent
    runs: list[tuple[int | None, int | None]] = []
    for extent, stride in zip(reversed(extents), reversed(strides), strict=True):
        if extent == 1:
            continue
        if runs and None not in (*runs[-1], stride) and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (None if extent is None else runs[-1][0] * extent, runs[-1][1])
        else:
            runs.append((extent, stride))
    if not runs or runs[0][1] != 1:
        runs.insert(0, (1, 1))  # no two elements are neighbours: every element is a row
    return runs


def _rows(subject: Subject, copy: ir.Copy) -> _Rows:
    """The rows of a transfer between GM and UB: as long as both sides are contiguous."""
    loading = subject.buffer(copy.src).space is Space.GM
    gm_region, ub_region = (copy.src, copy.dst) if loading else (copy.dst, copy.src)
    gm, ub = subject.buffer(gm_region), subject.buffer(ub_region)
    gm_extents = [mem.static(extent) for extent in gm_region.extents]
    ub_extents = [mem.static(extent) for extent in ub_region.extents]
    if copy.attrs.get("dual"):  # each vector unit moves its half of the tile
        rank = min(len(gm_extents), len(ub_extents), 2)
        gm_extents[-rank:] = ub_extents[-rank:]
    gm_runs, ub_runs = _runs(gm, gm_extents), _runs(ub, ub_extents)
    size = mem.bits(ub.dtype) / 8
    total = None if None in ub_extents else math.prod(ub_extents)
    lengths = [runs[0][0] for runs in (gm_runs, ub_runs) if len(runs) > 1]
    if not lengths:
        return _Rows(1, None if total is None else int(total * size), None)
    pitch = ub_runs[1][1] if len(ub_runs) > 1 else lengths[0]
    if None in (*lengths, pitch):
        return _Rows(None, None, None)
    return _Rows(None if total is None else total // min(lengths), int(min(lengths) * size), int(pitch * size))


def _gm_ub(subject: Subject) -> list[ir.Copy]:
    """The transfers between GM and a row-major buffer in UB."""
    pairs = ((Space.GM, Space.UB), (Space.UB, Space.GM))
    copies = [copy for copy in subject.transfers if _spaces(subject, copy) in pairs]
    return [copy for copy in copies if not any(subject.buffer(region).layout for region in (copy.src, copy.dst))]


def _row_alignment(subject: Subject) -> Findings:
    for copy in _gm_ub(subject):
        rows = _rows(subject, copy)
        if rows.count == 1 or rows.nbytes is None:
            continue
        element = mem.bits(subject.buffer(copy.dst).dtype) / 8
        wide = int(-(-rows.nbytes // C0_BYTES) * C0_BYTES / element)
        loading = _spaces(subject, copy)[0] is Space.GM
        if rows.pitch % C0_BYTES:
            message = f"{_name(copy)}: rows stand {rows.pitch} bytes apart in UB, not a multiple of {C0_BYTES}"
            padding = " and pass pad_value=" if loading and rows.nbytes % C0_BYTES else ""
            yield copy.loc, message, f"Make the UB buffer {wide} elements wide{padding}"
        elif loading and rows.nbytes % C0_BYTES and "pad" not in copy.attrs:
            message = f"{_name(copy)}: rows of {rows.nbytes} bytes, not a multiple of {C0_BYTES}, leave stale tails"
            yield copy.loc, message, "Pass pad_value="


def _start(subject: Subject) -> Findings:
    for copy in subject.transfers:
        src, dst = _spaces(subject, copy)
        if src is dst or not {src, dst} <= _MEMORIES:
            continue  # moved through registers, element by element
        for region in (copy.src, copy.dst):
            step = _misaligned_step(subject, region)
            if step is not None:
                buffer = subject.buffer(region)
                where = f"{buffer.name} is addressed in steps of {step:g} bytes, {buffer.space.name} in {C0_BYTES}"
                yield copy.loc, f"{_name(copy)}: {where}", f"Start the region at a multiple of {C0_BYTES} bytes"


def _misaligned_step(subject: Subject, region: ir.Region) -> float | None:
    """Bytes of a step of the region's address that is certainly no multiple of a block, or None."""
    buffer = subject.buffer(region)
    shape = [mem.static(extent) for extent in buffer.shape]
    if buffer.layout or buffer.space not in (Space.UB, Space.L1) or None in shape[1:]:
        return None
    stride = mem.bits(buffer.dtype)
    bad = []
    for start, extent in reversed(list(zip(region.starts, shape, strict=True))):
        factor, exact = subject.multiple_of(start)
        if factor * stride % (C0_BYTES * 8):
            bad.append((factor * stride / 8, exact))
        if buffer.space is Space.L1:
            break  # the fractal layout: the next row is one block further
        stride *= extent or 1
    return bad[0][0] if bad and all(exact for _, exact in bad) else None


def _limits(subject: Subject) -> Findings:
    for copy in _gm_ub(subject):
        rows = _rows(subject, copy)
        # The 950 has the byte-granular engine only; on the others it is the one that pads.
        byte_granular = subject.chip.family == "950" or "pad" in copy.attrs
        longest = MAX_ROW_BYTES_PADDED if byte_granular else MAX_ROW_BYTES
        if rows.count is not None and rows.count > MAX_ROWS:
            yield copy.loc, f"{_name(copy)}: {rows.count} rows, one transfer takes {MAX_ROWS}", "Copy in several steps"
        if rows.nbytes is not None and rows.nbytes > longest:
            message = f"{_name(copy)}: rows of {rows.nbytes} bytes, one transfer takes {longest}"
            yield copy.loc, message, "Copy in several steps"
    for copy in subject.transfers:
        if _spaces(subject, copy) != (Space.GM, Space.L1) or len(copy.dst.extents) < 2:
            continue
        rows, columns = (mem.static(extent) for extent in copy.dst.extents[-2:])
        for extent, limit, what in ((rows, MAX_ND_ROWS, "rows"), (columns, MAX_ND_COLUMNS, "columns")):
            if extent is not None and extent > limit:
                message = f"{_name(copy)}: {extent} {what}, the conversion to the fractal layout takes {limit}"
                yield copy.loc, message, "Copy in several steps"


def _within_ub(subject: Subject) -> Findings:
    for copy in subject.transfers:
        if _spaces(subject, copy) == (Space.UB, Space.UB):
            message = f"{_name(copy)} within the unified buffer is a loop of the scalar unit, which waits for nothing"
            yield copy.loc, message, "Put the copy into T.SimtVF or T.SimdVF"


RULES = (
    Rule("copy-path", "Each pair of memories either has a copy pipe or none.", _paths),
    Rule(
        "copy-rows",
        "UB rows start at multiples of 32 bytes; a shorter row moves into its neighbour or leaves a stale tail.",
        _row_alignment,
    ),
    Rule(
        "copy-start", "UB and L1 are addressed in blocks of 32 bytes; the low bits of an address are dropped.", _start
    ),
    Rule("copy-unordered", "The scalar unit reads and writes memory as soon as it gets there.", _within_ub),
    Rule("copy-limits", "The counts and lengths of a transfer are numbers of 12 to 21 bits.", _limits),
)
