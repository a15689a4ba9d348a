"""Tile sizes of a linear layer fused with a LayerNorm and a GELU: what fits a chip and takes the least time.

As in :mod:`glass_jax.lowering.tiling`, the time is a model that ranks tiles: cycles of one core, in which the cube, the
vector units and the copies overlap wherever a buffer has two versions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from glass_jax import errors
from glass_jax.hw import chips
from glass_jax.hw.ir.program import Space
from glass_jax.lowering.tiling import LANES, MAD_HEAD_CYCLES

_BLOCKS_N = (256, 128, 64)  # whole registers; of 256 columns L0C holds two versions with 128 rows
_MAX_BLOCK_M = 2 * LANES  # a vector unit keeps a number for each of its rows in one register
_MAX_STAGES = 4

# Vector instructions for a register of elements, roughly, loads and stores included; exp and division count as four.
_ACTIVATE = 30
_MOMENTS = 8
_ADD_BIAS = 5


@dataclasses.dataclass(frozen=True)
class Problem:
    """What decides the tiles: ``[m, k] x [k, n]``.

    Attributes:
      m, k, n: extents.
      operand_bytes: bytes of one element of the operands and the result.
      cube_dtype: their type, as ``Chip.cube_k`` names it.
      bias: whether a bias is added to the sums.
    """

    m: int
    k: int
    n: int
    operand_bytes: int
    cube_dtype: str
    bias: bool

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Rows and columns that a tile of the result may have."""
        rows = math.ceil(self.m / chips.CUBE_M) * chips.CUBE_M
        columns = math.ceil(self.n / LANES) * LANES
        blocks_m = range(chips.CUBE_M, min(_MAX_BLOCK_M, rows) + 1, chips.CUBE_M)
        yield from itertools.product(blocks_m, (size for size in _BLOCKS_N if size <= columns))


@dataclasses.dataclass(frozen=True)
class BeforePlan:
    """How ``ln_gelu_linear`` is cut.

    Attributes:
      block_m: rows whose activations lie in L1.
      block_n, block_k: columns and depth of a tile of weights.
      rows: rows that a vector unit normalizes at a time.
      chunks: how many times ``rows`` make a block, or all rows there are.
      splits: parts that the columns are cut into; for each, the rows are normalized anew.
      cores: number of blocks to launch.
      stages: versions of the tile of weights.
      activations, inputs, results: versions of the activations, of the rows read, of the tile that a bias is added to.
    """

    block_m: int
    block_n: int
    block_k: int
    rows: int
    chunks: int
    splits: int
    cores: int
    stages: int
    activations: int
    inputs: int
    results: int


@dataclasses.dataclass(frozen=True)
class AfterPlan:
    """How ``linear_ln_gelu`` is cut.

    Attributes:
      block_m, block_n, block_k: rows, columns and depth of a tile.
      resident: whether whole rows of sums stay in the unified buffers. Else they are computed a second time when their
        mean and variance are known.
      cores: number of blocks to launch.
      stages: versions of the operand tiles in L1.
    """

    block_m: int
    block_n: int
    block_k: int
    resident: bool
    cores: int
    stages: int


def _product_cycles(problem: Problem, block_m: int, block_n: int, loaded: int, chip: chips.Chip) -> float:
    """Cycles of one tile, for which ``loaded`` rows of K elements come from L2, whose rate the cores share."""
    size = problem.operand_bytes
    depth = _depth(problem, chip)
    squares = block_m // chips.CUBE_M * (block_n // chips.CUBE_N)
    mad = MAD_HEAD_CYCLES + squares * -(-depth // chip.cube_k[problem.cube_dtype])
    l2_rate = chip.l2_bytes_per_second / chip.cube_cores / (chip.clock_mhz * 1e6)
    return max(-(-problem.k // depth) * mad, loaded * problem.k * size / l2_rate)


def _depth(problem: Problem, chip: chips.Chip) -> int:
    """Depth of a tile of which L0B holds two versions."""
    return chip.capacity(Space.L0B) // 2 // (_BLOCKS_N[0] * problem.operand_bytes)


def _vector_cycles(block_m: int, columns: int, instructions: int) -> float:
    """Cycles of a vector unit for its half of ``block_m`` rows."""
    return block_m / 2 * columns / LANES * instructions


def _with_generator(name: str, chip_name: str) -> chips.Chip:
    chip = chips.get(chip_name)
    if not chip.has_generator:
        raise errors.UnsupportedError(
            f"{name}: no code is generated for {chip.name} ({chip.arch}), so there are no tiles; use a chip of the 950 "
            "family"
        )
    return chip


def _fastest(plans: list[tuple[float, Any]]) -> Any:
    """The plan that takes the fewest cycles; of several, the one with the largest tiles."""
    return min(plans, key=lambda entry: (entry[0], -entry[1].block_m, -entry[1].block_n))[1]


# --- ln_gelu_linear ------------------------------------------------------------------------------------------------


def _before_rows(problem: Problem, block_m: int, block_n: int, chip: chips.Chip) -> tuple[int, int, int, int] | None:
    """``rows, chunks, inputs, results`` with the most versions and then the most rows that fit, or None."""
    row = problem.k * problem.operand_bytes
    half = min(block_m, math.ceil(problem.m / 2) * 2) // 2
    tile = block_m // 2 * block_n * (4 + problem.operand_bytes) + block_n * 4 if problem.bias else 0
    room = chip.capacity(Space.UB) - 2 * problem.k * 4 - 2 * LANES * 4
    for inputs, results in ((2, 2), (2, 1), (1, 1)):
        for chunks in (count for count in range(1, half + 1) if half % count == 0):
            rows = half // chunks
            if inputs * rows * row + (rows + 1) * row + results * tile <= room:
                return rows, chunks, inputs, results
    return None


def _before_plans(problem: Problem, chip: chips.Chip) -> Iterator[tuple[float, BeforePlan]]:
    """Every plan that fits, with its cycles."""
    size, block_k = problem.operand_bytes, _depth(problem, chip)
    for block_m, block_n in problem.blocks():
        vector = _before_rows(problem, block_m, block_n, chip)
        most = min(math.ceil(problem.n / block_n), chip.cube_cores)
        for activations, splits in itertools.product((2, 1), range(1, most + 1)):
            free = chip.capacity(Space.L1) - activations * block_m * problem.k * size
            stages = min(_MAX_STAGES, free // (block_n * block_k * size))
            items = math.ceil(problem.m / block_m) * splits
            cores = min(items, chip.cube_cores)
            # A core that does one item only has nothing to normalize meanwhile.
            if vector is not None and stages >= 2 and (activations == 1 or items > cores):
                rows, chunks, inputs, results = vector
                plan = BeforePlan(
                    block_m, block_n, block_k, rows, chunks, splits, cores, stages, activations, inputs, results
                )
                yield _before_cycles(problem, plan, chip), plan


def _before_cycles(problem: Problem, plan: BeforePlan, chip: chips.Chip) -> float:
    tiles = math.ceil(math.ceil(problem.n / plan.block_n) / plan.splits)
    normalize = _vector_cycles(2 * plan.rows * plan.chunks, problem.k, _MOMENTS + _ACTIVATE)
    add = _vector_cycles(plan.block_m, plan.block_n, _ADD_BIAS) if problem.bias else 0
    product = tiles * _product_cycles(problem, plan.block_m, plan.block_n, plan.block_n, chip)
    waves = math.ceil(math.ceil(problem.m / plan.block_m) * plan.splits / plan.cores)
    if plan.activations == 1:
        return waves * (normalize + max(product, tiles * add))
    return normalize + waves * max(product, normalize + tiles * add)


@functools.lru_cache(maxsize=1024)
def before(problem: Problem, chip_name: str) -> BeforePlan:
    """The plan of ``ln_gelu_linear`` with the least estimated time.

    Raises:
      OutOfOnChipMemoryError: 16 rows of activations do not fit.
      UnsupportedError: no code is generated for the chip.
    """
    chip = _with_generator("ln_gelu_linear", chip_name)
    plans = list(_before_plans(problem, chip))
    if plans:
        return _fastest(plans)
    row = problem.k * problem.operand_bytes
    raise errors.OutOfOnChipMemoryError(
        f"ln_gelu_linear: K = {problem.k} does not fit {chip.name}: {chips.CUBE_M} rows of activations take "
        f"{chips.CUBE_M * row} of {chip.capacity(Space.L1)} bytes of L1, which two tiles of weights share; gamma, beta "
        f"and 3 rows take {2 * problem.k * 4 + 3 * row} of {chip.capacity(Space.UB)} bytes of a unified buffer. Use "
        "glass.layer_norm, jax.nn.gelu and glass.gemm one after the other"
    )


# --- linear_ln_gelu ------------------------------------------------------------------------------------------------


def _after_plans(problem: Problem, chip: chips.Chip) -> Iterator[tuple[float, AfterPlan]]:
    """Every plan that fits, with its cycles."""
    size, block_k = problem.operand_bytes, 2 * _depth(problem, chip)
    for block_m, block_n in problem.blocks():
        half = block_m // 2
        whole = math.ceil(problem.n / block_n) * block_n
        stages = min(_MAX_STAGES, chip.capacity(Space.L1) // ((block_m + block_n) * block_k * size))
        cores = min(math.ceil(problem.m / block_m), chip.cube_cores)
        # Two versions of a tile's sums and result, of its bias, gamma and beta; four numbers a row.
        room = chip.capacity(Space.UB) - 2 * block_n * (half * (4 + size) + 3 * 4) - 4 * LANES * 4
        for resident in (True, False):
            if room >= (half * whole * 4 if resident else 0):
                plan = AfterPlan(block_m, block_n, block_k, resident, cores, stages)
                yield _after_cycles(problem, plan, chip), plan


def _after_cycles(problem: Problem, plan: AfterPlan, chip: chips.Chip) -> float:
    product = _product_cycles(problem, plan.block_m, plan.block_n, plan.block_m + plan.block_n, chip)
    moments = _vector_cycles(plan.block_m, plan.block_n, _MOMENTS + _ADD_BIAS)
    finish = _vector_cycles(plan.block_m, plan.block_n, _ACTIVATE)
    tile = max(product, moments) + (finish if plan.resident else max(product, finish))
    return math.ceil(math.ceil(problem.m / plan.block_m) / plan.cores) * math.ceil(problem.n / plan.block_n) * tile


@functools.lru_cache(maxsize=1024)
def after(problem: Problem, chip_name: str) -> AfterPlan:
    """The plan of ``linear_ln_gelu`` with the least estimated time; there always is one.

    Raises:
      UnsupportedError: no code is generated for the chip.
    """
    return _fastest(list(_after_plans(problem, _with_generator("linear_ln_gelu", chip_name))))
