"""K loops of matrix products, run as one product over all of K, and of all tiles where a kernel computes them all.

A loop ``copy A[m, k]; copy B[k, n]; c += a @ b`` over k is what nearly every kernel does to multiply. Its sum over k is
one product of a row of tiles and a column of tiles, and that is a part of the product of the whole arrays. One large
product is what XLA does best, so where the grid visits every tile it is computed once, before the grid. Either way the
numbers are those of the loop but for the order in which float32 terms are added; what lies beyond the end of an array
counts as zero.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence, Set

import jax
import numpy as np
from jax import lax

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.dataflow import is_whole
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.tiles import copies, cube
from glass_jax.hw.model.values import numerics
from glass_jax.hw.model.values.products import Pairing, WholeProduct
from glass_jax.hw.model.values.storage import read_tile
from glass_jax.hw.model.values.symbolic import Linear, Symbol


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
                expressions.bind(machine, stmt.var, stmt.value)
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
    """The statements of a K loop: two copies and a product, besides Lets, counted from 0. None for another loop."""
    stages = [stmt for stmt in loop.body if not isinstance(stmt, ir.Let)]
    if loop.start != ir.Const(0, loop.var.dtype) or [type(stmt) for stmt in stages] != [ir.Copy, ir.Copy, ir.Gemm]:
        return None
    *fetches, gemm = stages
    by_target = {copy.dst.buffer: copy for copy in fetches if set(copy.attrs) <= copies.HINTS | {"transpose"}}
    first = (loop.var, ir.Const(0, loop.var.dtype))
    at_first = gemm.clear in (ir.Binary("eq", *first, "bool"), ir.Binary("eq", *first[::-1], "bool"))
    never = gemm.clear == ir.Const(False, "bool")
    operands = {gemm.a.buffer, gemm.b.buffer}
    if gemm.attrs or len(by_target) < 2 or operands != set(by_target) or not (at_first or never):
        return None
    return _Stages(by_target[gemm.a.buffer], by_target[gemm.b.buffer], gemm, at_first)


def _operand(machine: Machine, copy: ir.Copy, region: ir.Region, k: Symbol, steps: int, axis: int) -> _Operand | None:
    """The operand that ``steps`` iterations of ``copy`` fetch in order of K, or None if they do something else.

    ``region`` is what the product reads of the copy's destination, ``axis`` the axis it sums over, ``k`` the loop
    index, for whose value 0 the indices are evaluated.
    """
    source, target = machine.memory.buffers[copy.src.buffer], machine.memory.buffers[copy.dst.buffer]
    if source.space != Space.GM or not (is_whole(copy.dst, target) and is_whole(region, target)):
        return None
    found = [expressions.scalar(machine, extent) for extent in copy.src.extents]
    if any(extent is None or extent.static is None for extent in found):
        return None
    extents = tuple(extent.static for extent in found)
    matrix = [dimension for dimension, extent in enumerate(extents) if extent != 1]
    transposed = bool(copy.attrs.get("transpose"))
    tile = tuple(extents[dimension] for dimension in matrix)
    if len(tile) != 2 or (tile[::-1] if transposed else tile) != target.shape:
        return None
    contracted = matrix[1 - axis if transposed else axis]
    starts = []
    for dimension, start in enumerate(copy.src.starts):
        found = expressions.scalar(machine, start)
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

    Only of those that multiply arrays that no statement writes, compute no fewer elements than the whole product has,
    and whose whole product is no larger than one of the kernel's arrays.
    """
    program, buffers = machine.program, machine.memory.buffers
    written = machine.dataflow.writes(program.body)
    largest = max(math.prod(buffers[name].shape) for name in program.params)
    found = {}
    for loop, trips in _loops(program.body, blocks):
        stages = _stages(loop)
        if stages is None or {machine.memory.storage(c.src.buffer) for c in (stages.a, stages.b)} & written:
            continue
        shapes = [buffers[copy.src.buffer].shape for copy in (stages.a, stages.b)]
        pairing = _pairing(loop, stages, shapes)
        elements = trips * math.prod(buffers[stages.gemm.c.buffer].shape)
        if pairing is not None and math.prod(pairing.of_product(*shapes)) <= min(largest, elements):
            found[id(loop)] = _multiply(machine, stages, pairing)
    return found


def _loops(body: tuple[ir.Stmt, ...], trips: int, loaded: frozenset[str] = frozenset()) -> Iterator[tuple[ir.For, int]]:
    """The loops that certainly run, and how often each does, but for guards on block and loop indices.

    Loops under a condition that depends on memory, or in loops of unknown length, are left out: they may run far less
    often. ``loaded`` are the variables that depend on memory.
    """
    for stmt in body:
        if isinstance(stmt, ir.Let) and _depends(stmt.value, loaded):
            loaded |= {stmt.var.name}
        if isinstance(stmt, ir.While) or (isinstance(stmt, ir.If) and _depends(stmt.condition, loaded)):
            continue
        inside = trips
        if isinstance(stmt, ir.For):
            yield stmt, trips
            if not isinstance(stmt.extent, ir.Const):
                continue
            inside = trips * stmt.extent.value
        for block in ir.blocks_of(stmt):
            yield from _loops(block, inside, loaded)


def _depends(expr: ir.Expr, loaded: frozenset[str]) -> bool:
    return _mentions(expr, loaded) or any(isinstance(e, ir.Load) for e in ir.subexpressions(expr))


def _pairing(loop: ir.For, stages: _Stages, shapes: Sequence[tuple[int, ...]]) -> Pairing | None:
    """How a K loop multiplies its arrays, as far as its text tells; None if the text shows that it does not."""
    inside = {loop.var.name}
    for stmt in loop.body:
        if isinstance(stmt, ir.Let) and _mentions(stmt.value, inside):
            inside.add(stmt.var.name)
    a, b = stages.a.src, stages.b.src
    moving = [[d for d, start in enumerate(region.starts) if _mentions(start, inside)] for region in (a, b)]
    if [len(dimensions) for dimensions in moving] != [1, 1]:
        return None
    (k_a,), (k_b,) = moving
    pairs = [
        (i, j)
        for i, j in itertools.product(range(len(a.starts)), range(len(b.starts)))
        if i != k_a and j != k_b and a.extents[i] == b.extents[j] == 1 and shapes[0][i] == shapes[1][j]
        if a.starts[i] == b.starts[j] and not isinstance(a.starts[i], ir.Const)
    ]
    batch = tuple(i for i, _ in pairs), tuple(j for _, j in pairs)
    if any(len(set(dimensions)) < len(dimensions) for dimensions in batch):
        return None
    free = (
        tuple(d for d in range(len(a.starts)) if d != k_a and d not in batch[0]),
        tuple(d for d in range(len(b.starts)) if d != k_b and d not in batch[1]),
    )
    return Pairing((k_a, k_b), batch, free)


def _mentions(expr: ir.Expr, names: Set[str]) -> bool:
    return any(isinstance(e, ir.Var) and e.name in names for e in ir.subexpressions(expr))


def _multiply(machine: Machine, stages: _Stages, pairing: Pairing) -> WholeProduct:
    """Computes a whole product; without free dimensions of size 1, for which XLA would lay it out in another order."""
    fetches = (stages.a, stages.b)
    views = [machine.memory.view(copy.src.buffer) for copy in fetches]
    length = min(view.shape[d] for view, d in zip(views, pairing.contracted, strict=True))
    arrays, axes, batch = [], [], []
    for side, (copy, view) in enumerate(zip(fetches, views, strict=True)):
        part = lax.slice_in_dim(view, 0, length, axis=pairing.contracted[side])
        dropped = [d for d in pairing.free[side] if view.shape[d] == 1]
        kept = [d for d in range(view.ndim) if d not in dropped]
        arrays.append(lax.squeeze(_fetched(machine, copy, part), dropped))
        axes.append((kept.index(pairing.contracted[side]),))
        batch.append(tuple(kept.index(d) for d in pairing.batch[side]))
    value = cube.matmul(*arrays, tuple(axes), _accumulator(machine, stages.gemm), tuple(batch))
    return WholeProduct(value.reshape(pairing.of_product(*(view.shape for view in views))), pairing)


def _tile_of_whole(machine: Machine, whole: WholeProduct | None, a: _Operand, b: _Operand) -> jax.Array | None:
    """A tile of a whole product; None if there is no whole product or a K loop does not sum over all of it."""
    if whole is None or (a.contracted, b.contracted) != whole.pairing.contracted:
        return None
    if any(o.starts[o.contracted].static != 0 for o in (a, b)):
        return None
    whole_length = min(machine.memory.buffers[o.copy.src.buffer].shape[o.contracted] for o in (a, b))
    if min(o.extents[o.contracted] for o in (a, b)) < whole_length:
        return None
    batch = whole.pairing.batch
    together = [(a.starts[i], b.starts[j]) for i, j in zip(*batch, strict=True)]
    if any(i.key != j.key or i.pattern != j.pattern for i, j in together):
        return None
    starts, extents = whole.pairing.of_product(a.starts, b.starts), whole.pairing.of_product(a.extents, b.extents)
    return read_tile(whole.value, starts, extents, machine.facts)
