"""K loops of matrix products, run as one product over all of K, and of all tiles where a kernel computes them all.

A loop ``copy A[m, k]; copy B[k, n]; c += a @ b`` over k is what nearly every kernel does to multiply. Its sum over k is one
product of a row of tiles and a column of tiles, and that is a part of the product of the whole arrays. One large product is
what XLA does best, so where the grid visits every tile it is computed once, before the grid. Either way the numbers are those
of the loop but for the order in which float32 terms are added; what lies beyond the end of an array counts as zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np

from glass_jax.hw import copies, cube, numerics
from glass_jax.hw import program as ir
from glass_jax.hw.dataflow import is_whole
from glass_jax.hw.program import Space
from glass_jax.hw.storage import read_tile
from glass_jax.hw.symbolic import Linear, Symbol

if TYPE_CHECKING:
    from glass_jax.hw.machine import Machine


@dataclasses.dataclass(frozen=True)
class _Stages:
    """The statements of a K loop: the copies that fetch a and b, and the product that adds or, at first, clears."""

    a: ir.Copy
    b: ir.Copy
    gemm: ir.Gemm
    clears: bool


@dataclasses.dataclass(frozen=True)
class _Operand:
    """One operand of a K loop over all of its iterations.

    Attributes:
      copy: the copy that fetches one step of it.
      starts: where it starts in GM.
      extents: its extents in GM.
      contracted: the dimension in GM that is summed over.
    """

    copy: ir.Copy
    starts: tuple[Linear, ...]
    extents: tuple[int, ...]
    contracted: int


@dataclasses.dataclass(frozen=True)
class WholeProduct:
    """The product of the whole arrays that a K loop multiplies tiles of.

    Attributes:
      value: dimensions of a and b that go together, then the others of a, then those of b, without the contracted ones.
      contracted: the dimension of a and of b that is summed over.
      batch: dimensions of a and of b that go together.
      free: the other dimensions of a and of b.
    """

    value: jax.Array
    contracted: tuple[int, int]
    batch: cube.Axes
    free: cube.Axes


def run_k_loop(machine: Machine, loop: ir.For, extent: int, live: frozenset[str]) -> bool:
    """Runs a K loop as one product, if ``loop`` is one and nobody needs its operand tiles afterwards.

    Returns whether it did.
    """
    stages = _stages(loop)
    if stages is None or live & {machine.memory.storage(copy.dst.buffer) for copy in (stages.a, stages.b)}:
        return False
    gemm = stages.gemm
    with machine.scope():
        k = machine.bind_symbol(loop.var.name, np.int32(0), 0, extent - 1)
        for stmt in loop.body:
            if isinstance(stmt, ir.Let):
                machine.bind(stmt.var, stmt.value)
        a = _operand(machine, stages.a, gemm.a, k, extent, 0 if gemm.transpose_a else 1)
        b = _operand(machine, stages.b, gemm.b, k, extent, 1 if gemm.transpose_b else 0)
    if a is None or b is None:
        return False
    product = _tile_of_whole(machine, machine.products.get(id(loop)), a, b)
    if product is None:
        product = _tile_product(machine, gemm, a, b)
    cube.accumulate_product(machine, dataclasses.replace(gemm, clear=ir.Const(stages.clears, "bool")), product)
    return True


# --- recognizing them -----------------------------------------------------------------------------------------------


def _stages(loop: ir.For) -> _Stages | None:
    """The statements of a K loop, or None if the loop is none: but for Lets, two copies and a product, from 0 on."""
    stages = [stmt for stmt in loop.body if not isinstance(stmt, ir.Let)]
    if loop.start != ir.Const(0, loop.var.dtype) or [type(stmt) for stmt in stages] != [ir.Copy, ir.Copy, ir.Gemm]:
        return None
    *fetches, gemm = stages
    by_target = {copy.dst.buffer: copy for copy in fetches if set(copy.attrs) <= {"transpose", "l2_cache_ctrl"}}
    first = (loop.var, ir.Const(0, loop.var.dtype))
    at_first = gemm.clear in (ir.Binary("eq", *first, "bool"), ir.Binary("eq", *first[::-1], "bool"))
    never = gemm.clear == ir.Const(False, "bool")
    if len(by_target) < 2 or {gemm.a.buffer, gemm.b.buffer} != set(by_target) or not (at_first or never):
        return None
    return _Stages(by_target[gemm.a.buffer], by_target[gemm.b.buffer], gemm, at_first)


def _operand(machine: Machine, copy: ir.Copy, region: ir.Region, k: Symbol, steps: int, axis: int) -> _Operand | None:
    """The operand that ``steps`` iterations of ``copy`` fetch in order of K, or None if they do something else.

    ``region`` is what the product reads of the copy's destination, ``axis`` the axis it sums over, ``k`` the loop index, for
    whose value 0 the indices are evaluated.
    """
    source, target = machine.memory.buffers[copy.src.buffer], machine.memory.buffers[copy.dst.buffer]
    if source.space != Space.GM or not (is_whole(copy.dst, target) and is_whole(region, target)):
        return None
    extents = copies.extents(machine, copy.src)
    matrix = [dimension for dimension, extent in enumerate(extents) if extent != 1]
    transposed = bool(copy.attrs.get("transpose"))
    tile = tuple(extents[dimension] for dimension in matrix)
    if len(tile) != 2 or (tile[::-1] if transposed else tile) != target.shape:
        return None
    contracted = matrix[1 - axis if transposed else axis]
    starts = []
    for dimension, start in enumerate(copy.src.starts):
        found = machine.scalar(start)
        factor, rest = (0, None) if found is None else found.split(k)
        if rest is None or rest.born >= k.born or factor != (extents[dimension] if dimension == contracted else 0):
            return None
        starts.append(rest)
    whole = tuple(n * steps if dimension == contracted else n for dimension, n in enumerate(extents))
    return _Operand(copy, tuple(starts), whole, contracted)


# --- one tile -------------------------------------------------------------------------------------------------------


def _tile_product(machine: Machine, gemm: ir.Gemm, a: _Operand, b: _Operand) -> jax.Array:
    """The product of a row of tiles and a column of tiles."""
    length = min(_length(machine, operand) for operand in (a, b))
    tiles, axes = [], []
    for operand in (a, b):
        extents = [length if d == operand.contracted else n for d, n in enumerate(operand.extents)]
        bits = read_tile(machine.memory.view(operand.copy.src.buffer), operand.starts, extents, machine.facts)
        tiles.append(_fetched(machine, operand.copy, bits))
        axes.append((operand.contracted,))
    return cube.matmul(*tiles, tuple(axes), _accumulator(machine, gemm))


def _length(machine: Machine, operand: _Operand) -> int:
    """How far K goes before the end of the array, beyond which there are zeros."""
    size = machine.memory.buffers[operand.copy.src.buffer].shape[operand.contracted]
    start, length = operand.starts[operand.contracted].static, operand.extents[operand.contracted]
    return length if start is None else max(min(length, size - start), 0)


def _fetched(machine: Machine, copy: ir.Copy, bits: jax.Array) -> jax.Array:
    """Elements of a copy's source as its destination has them."""
    source, target = (numerics.dtype(machine.memory.buffers[r.buffer].dtype) for r in (copy.src, copy.dst))
    return numerics.convert(numerics.from_bits(bits, source), target)


def _accumulator(machine: Machine, gemm: ir.Gemm) -> np.dtype:
    return numerics.dtype(machine.memory.buffers[gemm.c.buffer].dtype)


# --- all tiles ------------------------------------------------------------------------------------------------------


def whole_products(machine: Machine, blocks: int) -> dict[int, WholeProduct]:
    """The whole products of a program's K loops, by the ids of the loops.

    Only of those that multiply arrays that no statement writes, compute no fewer elements than the whole product has, and
    whose whole product is no larger than one of the kernel's arrays.
    """
    program, buffers = machine.program, machine.memory.buffers
    written = machine.dataflow.writes(program.body)
    largest = max(math.prod(buffers[name].shape) for name in program.params)
    found = {}
    for loop, trips in _loops(program.body, blocks):
        stages = _stages(loop)
        if stages is None or {machine.memory.storage(c.src.buffer) for c in (stages.a, stages.b)} & written:
            continue
        shape = _whole_shape(machine, loop, stages)
        elements = trips * math.prod(buffers[stages.gemm.c.buffer].shape)
        if shape is not None and math.prod(shape.dimensions) <= min(largest, elements):
            found[id(loop)] = _multiply(machine, stages, shape)
    return found


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What a whole product will be: its extents, and as in :class:`WholeProduct`."""

    dimensions: tuple[int, ...]
    contracted: tuple[int, int]
    batch: cube.Axes
    free: cube.Axes


def _loops(body: tuple[ir.Stmt, ...], trips: int) -> Iterator[tuple[ir.For, int]]:
    """Every loop with a known number of iterations outside it, and that number, guards not counted."""
    for stmt in body:
        inside = trips
        if isinstance(stmt, ir.For):
            yield stmt, trips
            if not isinstance(stmt.extent, ir.Const):
                continue
            inside = trips * stmt.extent.value
        for block in ir.blocks_of(stmt):
            yield from _loops(block, inside)


def _whole_shape(machine: Machine, loop: ir.For, stages: _Stages) -> _Shape | None:
    """The shape of a whole product, as far as the loop's text tells; None if it tells that there is none."""
    inside = {loop.var.name}
    for stmt in loop.body:
        if isinstance(stmt, ir.Let) and _mentions(stmt.value, inside):
            inside.add(stmt.var.name)
    regions = (stages.a.src, stages.b.src)
    shapes = [machine.memory.buffers[region.buffer].shape for region in regions]
    contracted = []
    for region in regions:
        moving = [dimension for dimension, start in enumerate(region.starts) if _mentions(start, inside)]
        if len(moving) != 1:
            return None
        contracted.append(moving[0])
    together = [
        (i, j)
        for i, start in enumerate(regions[0].starts)
        for j, other in enumerate(regions[1].starts)
        if start == other and not isinstance(start, ir.Const) and i != contracted[0] and j != contracted[1]
        and regions[0].extents[i] == regions[1].extents[j] == 1 and shapes[0][i] == shapes[1][j]
    ]  # fmt: skip
    batch = tuple(i for i, _ in together), tuple(j for _, j in together)
    if any(len(set(axes)) < len(axes) for axes in batch):
        return None
    free = tuple(
        tuple(d for d in range(len(shape)) if d != contracted[side] and d not in batch[side])
        for side, shape in enumerate(shapes)
    )
    dimensions = [shapes[0][d] for d in batch[0]] + [shapes[side][d] for side in (0, 1) for d in free[side]]
    return _Shape(tuple(dimensions), tuple(contracted), batch, free)


def _mentions(expr: ir.Expr, names: set[str]) -> bool:
    return any(isinstance(e, ir.Var) and e.name in names for e in ir.subexpressions(expr))


def _multiply(machine: Machine, stages: _Stages, shape: _Shape) -> WholeProduct:
    """Computes a whole product, without the free dimensions of size 1, for which XLA would lay it out in another order."""
    fetches = (stages.a, stages.b)
    views = [machine.memory.view(copy.src.buffer) for copy in fetches]
    length = min(view.shape[axis] for view, axis in zip(views, shape.contracted, strict=True))
    arrays, axes, batch = [], [], []
    for side, (copy, view) in enumerate(zip(fetches, views, strict=True)):
        part = jax.lax.slice_in_dim(view, 0, length, axis=shape.contracted[side])
        dropped = [d for d in shape.free[side] if view.shape[d] == 1]
        kept = [d for d in range(view.ndim) if d not in dropped]
        arrays.append(jax.lax.squeeze(_fetched(machine, copy, part), dropped))
        axes.append((kept.index(shape.contracted[side]),))
        batch.append(tuple(kept.index(d) for d in shape.batch[side]))
    value = cube.matmul(*arrays, tuple(axes), _accumulator(machine, stages.gemm), tuple(batch))
    return WholeProduct(value.reshape(shape.dimensions), shape.contracted, shape.batch, shape.free)


def _tile_of_whole(machine: Machine, whole: WholeProduct | None, a: _Operand, b: _Operand) -> jax.Array | None:
    """A tile of a whole product; None if there is no whole product or a K loop does not sum over all of it."""
    if whole is None or (a.contracted, b.contracted) != whole.contracted:
        return None
    sizes = [machine.memory.buffers[operand.copy.src.buffer].shape[operand.contracted] for operand in (a, b)]
    if any(o.starts[o.contracted].static != 0 or o.extents[o.contracted] < min(sizes) for o in (a, b)):
        return None
    together = [(a.starts[i], b.starts[j]) for i, j in zip(*whole.batch, strict=True)]
    if any(i.key != j.key or i.pattern != j.pattern for i, j in together):
        return None
    picked = [(a, d) for d in (*whole.batch[0], *whole.free[0])] + [(b, d) for d in whole.free[1]]
    starts = [operand.starts[d] for operand, d in picked]
    return read_tile(whole.value, starts, [operand.extents[d] for operand, d in picked], machine.facts)
