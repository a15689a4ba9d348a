"""Kernels with one mistake each, made from a good one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.order import sync
from tests.hw import programs as p

Change = Callable[[ir.Stmt], tuple[ir.Stmt, ...]]


def changed(program: ir.Program, target: ir.Stmt, change: Change) -> ir.Program:
    """``program`` with one statement replaced."""

    def block(statements: tuple[ir.Stmt, ...]) -> tuple[ir.Stmt, ...]:
        found: list[ir.Stmt] = []
        for stmt in statements:
            if stmt is target:
                found.extend(change(stmt))
                continue
            names = [name for name in ("body", "then", "orelse") if hasattr(stmt, name)]
            found.append(dataclasses.replace(stmt, **{n: block(getattr(stmt, n)) for n in names}) if names else stmt)
        return tuple(found)

    return dataclasses.replace(program, body=block(program.body))


def mutants(program: ir.Program) -> Iterator[tuple[str, ir.Program]]:
    """Each mistake with its description."""
    statements = [stmt for stmt in ir.walk(program.body) if not _in_region(program, stmt)]
    for number, stmt in enumerate(statements):
        if isinstance(stmt, ir.Op) and sync.parse(stmt) is not None:
            yield f"{number} drops {stmt.name} {stmt.args[0]}", changed(program, stmt, lambda stmt: ())
        elif isinstance(stmt, ir.Copy):
            for what, new in _copies(program, stmt):
                yield (
                    f"{number} {what} {stmt.src.buffer} -> {stmt.dst.buffer}",
                    changed(program, stmt, lambda _, n=new: (n,)),
                )
        elif isinstance(stmt, ir.Gemm):
            swapped = dataclasses.replace(stmt, transpose_b=not stmt.transpose_b)
            yield f"{number} swaps the layout of {stmt.b.buffer}", changed(program, stmt, lambda _, n=swapped: (n,))
    for buffer in program.buffers.values():
        if buffer.space is not Space.GM:
            shape = (*buffer.shape[:-1], buffer.shape[-1] // 2)
            smaller = dataclasses.replace(buffer, shape=shape)
            yield (
                f"shrinks {buffer.name}",
                dataclasses.replace(program, buffers=program.buffers | {buffer.name: smaller}),
            )


def _in_region(program: ir.Program, stmt: ir.Stmt) -> bool:
    regions = (outer for outer in ir.walk(program.body) if isinstance(outer, ir.Simt | ir.Simd))
    return any(inner is stmt for outer in regions for inner in ir.walk(outer.body))


def _copies(program: ir.Program, copy: ir.Copy) -> Iterator[tuple[str, ir.Copy]]:
    """A copy with a wrong address, a wrong length, or a wrong layout."""
    src, dst = (program.buffers[region.buffer] for region in (copy.src, copy.dst))
    for side, buffer in (("src", src), ("dst", dst)):
        region = getattr(copy, side)
        if buffer.space in (Space.UB, Space.L1):
            starts = (*region.starts[:-1], p.op("add", region.starts[-1], 1))
            yield (
                f"misaligns {buffer.name} in",
                dataclasses.replace(copy, **{side: dataclasses.replace(region, starts=starts)}),
            )
    longer = [dataclasses.replace(r, extents=(*r.extents[:-1], r.extents[-1] + 16)) for r in (copy.src, copy.dst)]
    yield "lengthens", dataclasses.replace(copy, src=longer[0], dst=longer[1])
    square = len(copy.src.extents) > 1 and copy.src.extents[-1] == copy.src.extents[-2]
    if square and "dual" not in copy.attrs:
        attrs = {name: value for name, value in copy.attrs.items() if name != "transpose"}
        attrs |= {} if "transpose" in copy.attrs else {"transpose": True}
        yield "transposes", dataclasses.replace(copy, attrs=attrs)
