"""The cube unit: matrix products with float32 or int32 accumulation, and K loops run as one product."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.errors import HardwareConstraintError
from glass_jax.hw import copies, expressions, numerics
from glass_jax.hw import program as ir
from glass_jax.hw.dataflow import is_whole
from glass_jax.hw.program import Space
from glass_jax.hw.storage import read_tile
from glass_jax.hw.symbolic import Linear, Symbol

if TYPE_CHECKING:
    from glass_jax.hw.machine import Machine

# Products of int8 operands are at most 2**14 in magnitude: a float32 sum of this many is exact.
_EXACT_INT8_TERMS = 1024


def run_gemm(machine: Machine, gemm: ir.Gemm, live: frozenset[str]) -> None:
    """Executes ``c = a @ b``, or ``c += a @ b``, on operands in L1 or L0."""
    a, b = (_matrix(copies.read_region(machine, region)) for region in (gemm.a, gemm.b))
    accumulate = numerics.dtype(machine.memory.buffers[gemm.c.buffer].dtype)
    product = matmul(a, b, 0 if gemm.transpose_a else 1, 1 if gemm.transpose_b else 0, accumulate)
    _accumulate(machine, gemm, product)


def _matrix(tile: jax.Array) -> jax.Array:
    """The last two dimensions of a tile whose other dimensions are 1."""
    if any(n != 1 for n in tile.shape[:-2]):
        raise HardwareConstraintError(f"an operand of a matrix product has shape {tile.shape}: only two dimensions may exceed 1")
    return tile.reshape(tile.shape[-2:])


def _accumulate(machine: Machine, gemm: ir.Gemm, product: jax.Array) -> None:
    """Adds a product to its accumulator, or replaces it where the kernel says so."""
    buffer = machine.memory.buffers[gemm.c.buffer]
    shape = copies.extents(machine, gemm.c)
    if product.size != np.prod(shape):
        raise HardwareConstraintError(f"a product of shape {product.shape} does not fit the region {shape} of {buffer.name!r}")
    product = product.reshape(shape)
    clear = expressions.value(machine, gemm.clear)
    known = expressions.decided(clear)
    if known is not True:
        old = copies.read_region(machine, gemm.c)
        kept = old if known is False else jnp.where(clear, jnp.zeros_like(old), old)
        product = kept + product
    copies.write_region(machine, gemm.c, product)


def matmul(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, accumulate: np.dtype) -> jax.Array:
    """The product over axis ``a_axis`` of ``a`` and ``b_axis`` of ``b``, summed in ``accumulate`` (float32 or int32)."""
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    if a.dtype == jnp.int8:
        return _int8_matmul(a, b, a_axis, b_axis).astype(accumulate)
    if a.dtype.itemsize == 1:
        # Every 8-bit float is a bfloat16, for which XLA has fast products.
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=accumulate)


def _int8_matmul(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """An exact int32 product, as float32 products of pieces short enough to be exact: XLA has no fast one on a CPU."""
    total = None
    for start in range(0, a.shape[a_axis], _EXACT_INT8_TERMS):
        stop = min(start + _EXACT_INT8_TERMS, a.shape[a_axis])
        x = lax.slice_in_dim(a, start, stop, axis=a_axis).astype(jnp.float32)
        y = lax.slice_in_dim(b, start, stop, axis=b_axis).astype(jnp.float32)
        piece = lax.dot_general(x, y, (((a_axis,), (b_axis,)), ((), ())), precision=lax.Precision.HIGHEST)
        total = piece.astype(jnp.int32) if total is None else total + piece.astype(jnp.int32)
    return total


# --- K loops --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Operand:
    """One operand of a K loop read in one piece.

    Attributes:
      copy: the copy that fetches one step of it.
      starts: where it starts in GM.
      extents: its extents in GM.
      dimension: the dimension of GM that is contracted.
      axis: the axis of the matrix that is contracted.
    """

    copy: ir.Copy
    starts: tuple[Linear, ...]
    extents: tuple[int, ...]
    dimension: int
    axis: int


def run_k_loop(machine: Machine, loop: ir.For, extent: int, live: frozenset[str]) -> bool:
    """Runs a loop of the form ``copy A[.., k]; copy B[k, ..]; c += a @ b`` as one product over all of K, if it is one.

    The sum is the same but for the order in which float32 terms are added. Returns whether it did.
    """
    stages = _stages(loop)
    if stages is None:
        return False
    first, second, gemm = stages
    by_buffer = {first.dst.buffer: first, second.dst.buffer: second}
    if len(by_buffer) < 2 or {gemm.a.buffer, gemm.b.buffer} != set(by_buffer):
        return False
    if live & {machine.memory.storage(name) for name in by_buffer}:
        return False
    clears = _clears(loop, gemm)
    if clears is None:
        return False
    with machine.scope():
        k = machine.bind_symbol(loop.var.name, np.int32(0), 0, extent - 1)
        operands = [
            _operand(machine, by_buffer[region.buffer], region, k, extent, int(transposed != (side == 0)))
            for side, (region, transposed) in enumerate(((gemm.a, gemm.transpose_a), (gemm.b, gemm.transpose_b)))
        ]
    if None in operands:
        return False
    accumulate = numerics.dtype(machine.memory.buffers[gemm.c.buffer].dtype)
    a, b = _read_operands(machine, *operands)
    product = matmul(a, b, operands[0].axis, operands[1].axis, accumulate)
    _accumulate(machine, dataclasses.replace(gemm, clear=ir.Const(clears, "bool")), product)
    return True


def _stages(loop: ir.For) -> tuple[ir.Copy, ir.Copy, ir.Gemm] | None:
    """The two copies and the product that are the whole body of a loop from 0, if they are."""
    if loop.start != ir.Const(0, loop.var.dtype) or [type(stmt) for stmt in loop.body] != [ir.Copy, ir.Copy, ir.Gemm]:
        return None
    first, second, gemm = loop.body
    plain = all(set(copy.attrs) <= {"transpose", "l2_cache_ctrl"} for copy in (first, second))
    return (first, second, gemm) if plain else None


def _clears(loop: ir.For, gemm: ir.Gemm) -> bool | None:
    """True if the accumulator is cleared in the first iteration, False if never, None if anything else."""
    if isinstance(gemm.clear, ir.Const):
        return None if gemm.clear.value else False
    first = (loop.var, ir.Const(0, loop.var.dtype))
    return True if gemm.clear in (ir.Binary("eq", *first, "bool"), ir.Binary("eq", *first[::-1], "bool")) else None


def _operand(
    machine: Machine, copy: ir.Copy, region: ir.Region, k: Symbol, steps: int, contracted: int
) -> _Operand | None:
    """The operand that ``steps`` iterations of ``copy`` fetch in order of K, or None if they do something else.

    ``region`` is what the product reads of the copy's destination, ``contracted`` the axis it sums over, ``k`` the loop
    index, for whose value 0 the indices are evaluated.
    """
    source, target = machine.memory.buffers[copy.src.buffer], machine.memory.buffers[copy.dst.buffer]
    if source.space != Space.GM or not (is_whole(copy.dst, target) and is_whole(region, target)):
        return None
    extents = copies.extents(machine, copy.src)
    matrix = [dimension for dimension, extent in enumerate(extents) if extent != 1]
    if len(matrix) != 2 or len(target.shape) != 2:
        return None
    transposed = bool(copy.attrs.get("transpose"))
    tile = tuple(extents[dimension] for dimension in matrix)
    if (tile[::-1] if transposed else tile) != target.shape:
        return None
    axis = 1 - contracted if transposed else contracted
    dimension = matrix[axis]
    starts = []
    for position, start in enumerate(copy.src.starts):
        found = machine.scalar(start)
        factor, rest = (0, None) if found is None else found.split(k)
        if rest is None or rest.born >= k.born or factor != (extents[dimension] if position == dimension else 0):
            return None
        starts.append(rest)
    whole = tuple(n * steps if position == dimension else n for position, n in enumerate(extents))
    return _Operand(copy, tuple(starts), whole, dimension, axis)


def _read_operands(machine: Machine, *operands: _Operand) -> list[jax.Array]:
    """The operands as matrices, contracted over the same length: what lies beyond the end of either is zero."""
    ends = []
    for operand in operands:
        start, size = operand.starts[operand.dimension].static, machine.memory.buffers[operand.copy.src.buffer].shape
        length = operand.extents[operand.dimension]
        ends.append(length if start is None else max(min(length, size[operand.dimension] - start), 0))
    tiles = []
    for operand in operands:
        extents = [min(ends) if d == operand.dimension else n for d, n in enumerate(operand.extents)]
        tile = read_tile(machine.memory.view(operand.copy.src.buffer), operand.starts, extents, machine.facts)
        matrix = tile.reshape([n for n, whole in zip(extents, operand.extents, strict=True) if whole != 1])
        tiles.append(numerics.convert(matrix, numerics.dtype(machine.memory.buffers[operand.copy.dst.buffer].dtype)))
    return tiles
