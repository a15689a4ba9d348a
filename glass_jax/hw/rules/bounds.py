"""Rules about what lies beyond the end of an on-chip buffer."""

from __future__ import annotations

from collections.abc import Iterator

from glass_jax.hw import memory as mem
from glass_jax.hw.ir import intervals
from glass_jax.hw.ir import program as ir
from glass_jax.hw.rules.base import Findings, Rule, Subject

_REMEDY = "Make the buffer larger, or the access smaller"


def _beyond(subject: Subject) -> Findings:
    yield from _walk(subject, subject.program.body, guarded=False)


def _walk(subject: Subject, statements: tuple[ir.Stmt, ...], guarded: bool) -> Findings:
    for stmt in statements:
        for buffer, what in (*_regions(subject, stmt), *(() if guarded else _elements(subject, stmt))):
            message = f"{what} of {buffer.name} in {buffer.space.name}, which is {list(buffer.shape)}"
            yield stmt.loc, message, _REMEDY
        for block in ir.blocks_of(stmt):
            yield from _walk(subject, block, guarded or isinstance(stmt, ir.If | ir.While))


def _regions(subject: Subject, stmt: ir.Stmt) -> Iterator[tuple[ir.Buffer, str]]:
    """Regions that a statement certainly takes beyond the end of their buffer."""
    values = [getattr(stmt, name) for name in ("src", "dst", "a", "b", "c") if hasattr(stmt, name)]
    for region in (*values, *(stmt.args if isinstance(stmt, ir.Op) else ())):
        if not isinstance(region, ir.Region) or subject.buffer(region).space not in mem.ON_CHIP:
            continue
        buffer = subject.buffer(region)
        for axis, (start, extent, size) in enumerate(zip(region.starts, region.extents, buffer.shape, strict=True)):
            first, length, size = intervals.bounds(start, subject.ranges), mem.static(extent), mem.static(size)
            if None not in (first, length, size) and first[0] + length > size:
                yield buffer, f"elements {first[0]} to {first[0] + length - 1} in dimension {axis}"
                break


def _elements(subject: Subject, stmt: ir.Stmt) -> Iterator[tuple[ir.Buffer, str]]:
    """Elements that a statement, which is executed for all values of its variables, reads or writes beyond the end."""
    predicated = any(isinstance(expr, ir.Select) for expr in ir.subexpressions(stmt))
    loads = [expr for expr in ir.subexpressions(stmt) if isinstance(expr, ir.Load) and not predicated]
    for access in (*loads, *([stmt] if isinstance(stmt, ir.Store) else [])):
        buffer = subject.program.buffers[access.buffer]
        if buffer.space not in mem.ON_CHIP:
            continue
        for axis, (index, size) in enumerate(zip(access.indices, buffer.shape, strict=False)):
            reach = intervals.bounds(index, subject.ranges) if isinstance(index, ir.Const | ir.Var) else None
            if reach is not None and mem.static(size) is not None and reach[1] >= size and _is_exact(subject, index):
                yield buffer, f"element {reach[1]} in dimension {axis}"
                break


def _is_exact(subject: Subject, index: ir.Const | ir.Var) -> bool:
    """Whether an index takes every value of its range: a constant, or the variable of a loop with a known extent."""
    return isinstance(index, ir.Const) or index.name in subject.loops


RULES = (
    Rule(
        "buffer-bounds",
        "Nothing stops a transfer at the end of an on-chip buffer: it goes on into the next one.",
        _beyond,
    ),
)
