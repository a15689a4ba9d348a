"""Tile sizes of the matrix product: which fit a chip's memories, and which of those take the least time.

The time is a model, good enough to rank tiles: every number comes from ``glass_jax.hw.chips``, cycles are those of one
core, and within a core the cube, the copies into it and the copies from global memory overlap, so the slowest of them
counts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from glass_jax import errors
from glass_jax.hw import chips
from glass_jax.hw.ir.program import REGISTER_BITS, Space
from glass_jax.hw.memory import bits

REGISTER_BYTES = REGISTER_BITS // 8  # of a vector register
LANES = REGISTER_BYTES // 4  # float32 elements of one
DTYPES = ("float32", "float16", "bfloat16")  # that the vector units compute with

SCALE_DEPTH = 32  # elements of K that share a scale of the MX formats, which the cube takes in pairs
MAD_HEAD_CYCLES = 6  # start of one cube instruction

_BLOCKS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_BLOCK_K_BYTES = (64, 128, 256, 512, 1024)
_STAGES = (4, 2)
_GM_FULL_RATE_BYTES = 512  # global memory gives its full rate to rows of this size
_GM_SHORT_ROW_RATE = 0.7  # and this part of it to the shortest
_COPY_HEAD_BYTES = (
    16 * 1024 // 10
)  # what the start of a copy costs: a transfer of 16 KiB reaches nine tenths of the rate
_EPILOGUE_VECTOR_OPS = 12  # vector instructions an epilogue costs for each register of accumulators, roughly


@dataclasses.dataclass(frozen=True, order=True)
class GemmTiles:
    """Tile sizes of a matrix product.

    Attributes:
      block_m, block_n: rows and columns of the result that a core computes at a time, multiples of 16.
      block_k: depth of the operand tiles in L1.
      stages: versions of the operand tiles in L1, at least 2 for copies to overlap the cube.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class GemmProblem:
    """What decides the tiles: ``[batch, m, k] x [batch, k, n]`` and what follows it.

    Attributes:
      batch, m, n, k: extents.
      operand_bytes, out_bytes: bytes of one element.
      cube_dtype: operand type, as ``Chip.cube_k`` names it.
      epilogue: whether the vector units work on the accumulators before they are stored.
      lhs_row, rhs_row: ``"m"`` or ``"k"``, ``"n"`` or ``"k"``: the dimension that is contiguous in global memory.
      scaled: whether operands have a byte of scale for :data:`SCALE_DEPTH` elements of K, loaded beside them.
    """

    batch: int
    m: int
    n: int
    k: int
    operand_bytes: int
    out_bytes: int
    cube_dtype: str
    epilogue: bool
    lhs_row: str = "k"
    rhs_row: str = "n"
    scaled: bool = False

    @property
    def k_unit(self) -> int:
        """What the depth of every tile of the operands is a multiple of: a block, or two of scales."""
        return 2 * SCALE_DEPTH if self.scaled else chips.C0_BYTES // self.operand_bytes


@dataclasses.dataclass(frozen=True)
class GemmPlan:
    """Tiles with how many versions of each buffer are kept.

    Attributes:
      tiles: the tile sizes.
      cores: number of blocks to launch.
      accumulators: versions of the accumulator tile in L0C; with 2 the cube starts the next tile while one is stored.
      vectors: versions of the epilogue's buffers in the unified buffer.
    """

    tiles: GemmTiles
    cores: int
    accumulators: int
    vectors: int


def block_count(problem: GemmProblem, tiles: GemmTiles) -> int:
    """Number of result tiles."""
    return problem.batch * -(-problem.m // tiles.block_m) * -(-problem.n // tiles.block_n)


def l0_depth(tiles: GemmTiles, operand_bytes: int, chip: chips.Chip) -> int:
    """Depth of the L0 tiles that a product of two L1 tiles is cut into, or 0 if none fits.

    It is the largest multiple of 32 bytes that divides ``block_k`` and leaves both L0 memories room for two versions.
    """
    c0 = chips.C0_BYTES // operand_bytes
    room_a = chip.capacity(Space.L0A) // 2 // (tiles.block_m * operand_bytes)
    room_b = chip.capacity(Space.L0B) // 2 // (tiles.block_n * operand_bytes)
    room = min(room_a, room_b, tiles.block_k) // c0
    return next((count * c0 for count in range(room, 0, -1) if tiles.block_k % (count * c0) == 0), 0)


def describe(problem: GemmProblem, plan: GemmPlan, chip: chips.Chip) -> str:
    """The tiling in one line, for people."""
    tiles, blocks = plan.tiles, block_count(problem, plan.tiles)
    return (
        f"tiles {tiles.block_m}x{tiles.block_n}x{tiles.block_k} ({tiles.stages} stages, L0 depth "
        f"{l0_depth(tiles, problem.operand_bytes, chip)}), {blocks} tiles on {plan.cores} cores in "
        f"{-(-blocks // plan.cores)} waves, {'double' if plan.accumulators == 2 else 'single'}-buffered accumulators"
    )


def _room(problem: GemmProblem, tiles: GemmTiles) -> dict[Space, int]:
    """Bytes of one version of what each memory holds; all stages of the operand tiles."""
    tile = tiles.block_m * tiles.block_n
    half_tile, row = tile // 2, tiles.block_n * 4  # each of the two vector units works on half of the rows
    row_bytes = tiles.block_k * problem.operand_bytes + (tiles.block_k // SCALE_DEPTH if problem.scaled else 0)
    return {
        Space.L1: tiles.stages * (tiles.block_m + tiles.block_n) * row_bytes,
        Space.L0C: tile * 4,
        Space.UB: half_tile * (4 + problem.out_bytes) + row if problem.epilogue else 0,
    }


def _capacity(problem: GemmProblem, chip: chips.Chip) -> dict[Space, int]:
    reserved = chip.simt_context_bytes if problem.epilogue else 0
    return {
        Space.L1: chip.capacity(Space.L1),
        Space.L0C: chip.capacity(Space.L0C),
        Space.UB: chip.capacity(Space.UB) - reserved,
    }


def plan(problem: GemmProblem, tiles: GemmTiles, chip: chips.Chip) -> GemmPlan:
    """How ``tiles`` are laid out on ``chip``.

    Raises:
      OutOfOnChipMemoryError: they do not fit.
      HardwareConstraintError: they are not what the cube takes.
    """
    for name, size, multiple in (
        ("block_m", tiles.block_m, chips.CUBE_M),
        ("block_n", tiles.block_n, chips.CUBE_N),
        ("block_k", tiles.block_k, problem.k_unit),
        ("stages", tiles.stages, 1),
    ):
        if size <= 0 or size % multiple:
            raise errors.HardwareConstraintError(f"gemm tiles: {name}={size} must be a positive multiple of {multiple}")
    need, have = _room(problem, tiles), _capacity(problem, chip)
    depth = l0_depth(tiles, problem.operand_bytes, chip)
    if depth % problem.k_unit:
        raise errors.OutOfOnChipMemoryError(
            f"gemm tiles {tiles.block_m}x{tiles.block_n}x{tiles.block_k}: the largest part of block_k that L0 of "
            f"{chip.name} has room for is {depth}, no multiple of {problem.k_unit}, which a pair of scales is for. "
            "Take a power of two as block_k"
        )
    if not depth:
        need[Space.L0A] = 2 * tiles.block_m * chips.C0_BYTES
        need[Space.L0B] = 2 * tiles.block_n * chips.C0_BYTES
        have |= {space: chip.capacity(space) for space in (Space.L0A, Space.L0B)}
    over = [f"{space.value} {need[space]} of {have[space]} bytes" for space in need if need[space] > have[space]]
    if over:
        raise errors.OutOfOnChipMemoryError(
            f"gemm tiles {tiles.block_m}x{tiles.block_n}x{tiles.block_k} with {tiles.stages} stages of "
            f"{problem.operand_bytes}-byte operands do not fit {chip.name}: {'; '.join(over)}. "
            "Take smaller tiles or fewer stages"
        )
    cores = min(chip.cube_cores, block_count(problem, tiles))
    several = block_count(problem, tiles) > cores  # a core that computes one tile has nothing to overlap its store with
    accumulators = 2 if several and 2 * need[Space.L0C] <= have[Space.L0C] else 1
    vectors = 2 if several and 2 * need[Space.UB] <= have[Space.UB] else 1
    return GemmPlan(tiles, cores, accumulators, vectors)


def _gm_cycles(rows: int, row_bytes: int, bytes_per_cycle: float) -> float:
    """Cycles to read or write ``rows`` rows of global memory at a peak rate of ``bytes_per_cycle``."""
    rate = _GM_SHORT_ROW_RATE + (1 - _GM_SHORT_ROW_RATE) * min(1.0, row_bytes / _GM_FULL_RATE_BYTES)
    return (rows * row_bytes / rate + _COPY_HEAD_BYTES) / bytes_per_cycle


def estimate_cycles(problem: GemmProblem, plan: GemmPlan, chip: chips.Chip) -> float:
    """Cycles that the product takes on ``chip``, for ranking tiles; ``glass_jax.hw`` has the timing model."""
    return max(_pipeline_cycles(problem, plan, chip), _memory_cycles(problem, chip))


def _memory_cycles(problem: GemmProblem, chip: chips.Chip) -> float:
    """Cycles to read each operand from global memory once and to write the result, however the tiles are cut."""
    once = problem.operand_bytes * (problem.m + problem.n) * problem.k + problem.out_bytes * problem.m * problem.n
    return problem.batch * once / chip.gm_bytes_per_second * chip.clock_mhz * 1e6


def _pipeline_cycles(problem: GemmProblem, plan: GemmPlan, chip: chips.Chip) -> float:
    """Cycles of one core: its tiles one after the other, the slowest pipe of each step counted."""
    tiles, size = plan.tiles, problem.operand_bytes
    depth = l0_depth(tiles, size, chip)
    squares = tiles.block_m // chips.CUBE_M * (tiles.block_n // chips.CUBE_N)
    cube = tiles.block_k // depth * (MAD_HEAD_CYCLES + squares * -(-depth // chip.cube_k[problem.cube_dtype]))
    fill = tiles.block_m * tiles.block_k * size / chip.bytes_per_cycle[Space.L1, Space.L0A]
    fill += tiles.block_n * tiles.block_k * size / chip.bytes_per_cycle[Space.L1, Space.L0B]

    # Operands come through L2, whose rate the cores share.
    l2_rate = chip.l2_bytes_per_second / chip.cube_cores / (chip.clock_mhz * 1e6)
    extent = {
        "m": min(tiles.block_m, problem.m),
        "n": min(tiles.block_n, problem.n),
        "k": min(tiles.block_k, problem.k),
    }
    lhs_rows, rhs_rows = extent["k" if problem.lhs_row == "m" else "m"], extent["k" if problem.rhs_row == "n" else "n"]
    load = _gm_cycles(lhs_rows, extent[problem.lhs_row] * size, l2_rate)
    load += _gm_cycles(rhs_rows, extent[problem.rhs_row] * size, l2_rate)
    if problem.scaled:
        pairs = extent["k"] // problem.k_unit
        load += sum(_gm_cycles(pairs, 2 * extent[dim], l2_rate) for dim in "mn")

    store = tiles.block_m * tiles.block_n * 4 / chip.bytes_per_cycle[Space.L0C, Space.UB]
    store += _gm_cycles(extent["m"], extent["n"] * problem.out_bytes, l2_rate)
    if problem.epilogue:
        store += _EPILOGUE_VECTOR_OPS * tiles.block_m * tiles.block_n * 4 / 2 / REGISTER_BYTES
    tile = load + -(-problem.k // tiles.block_k) * max(cube, fill, load)
    waves = -(-block_count(problem, tiles) // plan.cores)
    return waves * max(tile, store) + store if plan.accumulators == 2 else waves * (tile + store)


def _candidates(problem: GemmProblem) -> list[GemmTiles]:
    """Tiles no larger than the problem, the whole of a short K among the depths."""
    whole_k = -(-problem.k // problem.k_unit) * problem.k_unit

    def useful(sizes: set[int], limit: int) -> list[int]:
        return sorted(size for size in sizes if size <= limit) or [min(sizes)]

    depths = useful(
        {size // problem.operand_bytes for size in _BLOCK_K_BYTES} | {whole_k},
        min(whole_k, _BLOCK_K_BYTES[-1] // problem.operand_bytes),
    )
    rows = useful(set(_BLOCKS), -(-problem.m // chips.CUBE_M) * chips.CUBE_M)
    columns = useful(set(_BLOCKS), -(-problem.n // chips.CUBE_N) * chips.CUBE_N)
    return list(itertools.starmap(GemmTiles, itertools.product(rows, columns, depths, _STAGES)))


@functools.lru_cache(maxsize=1024)
def choose(problem: GemmProblem, chip_name: str) -> GemmTiles:
    """The tiles with the least estimated time for ``problem``.

    Among equals, which there are where global memory is the limit: the least time of a core, the most stages, the
    largest blocks.

    Raises:
      HardwareConstraintError: the cube of the chip does not take the operands.
      UnsupportedError: no code is generated for the chip.
    """
    chip = chips.get(chip_name)
    if not chip.has_generator:
        raise errors.UnsupportedError(
            f"gemm tiles are chosen for chips that code is generated for, not for {chip.name} ({chip.arch}): pass tiles"
        )
    if problem.cube_dtype not in chip.cube_k:
        raise errors.HardwareConstraintError(
            f"the cube of {chip.name} does not take {problem.cube_dtype}; it takes {', '.join(chip.cube_k)}"
        )
    memory = _memory_cycles(problem, chip)
    ranked = []
    for tiles in _candidates(problem):
        try:
            fitting = plan(problem, tiles, chip)
        except errors.OutOfOnChipMemoryError:
            continue
        cycles = _pipeline_cycles(problem, fitting, chip)
        ranked.append(
            (max(cycles, memory), cycles, -tiles.stages, -tiles.block_m * tiles.block_n, -tiles.block_k, tiles)
        )
    return min(ranked)[-1]


def itemsize(dtype: str) -> int:
    """Bytes of one element of ``dtype``."""
    return bits(dtype) // 8
