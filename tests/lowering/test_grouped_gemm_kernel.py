"""The grouped kernels: sound on the chips at the shapes of models, that they compute what they say, and their tiles."""

import dataclasses
import json

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glass_jax as glass
from benchmarks.shapes.grouped_gemm import SHAPES
from glass_jax import errors
from glass_jax.hw import chips, memory
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang.kernels.grouped_gemm import GroupedGemmKernel, KGroupedGemmKernel
from glass_jax.lowering.tiling import GemmTiles

CHIP = "950DT"
SMALL = GemmTiles(16, 16, 32, 2)


def function(shape, transformation="value"):
    operation = glass.masked_grouped_gemm if shape.masked else glass.grouped_gemm

    def value(lhs, rhs, sizes):
        return operation(lhs, rhs, sizes, implementation="ascend")

    def gradients(lhs, rhs, sizes):
        return jax.vjp(lambda a, b: value(a, b, sizes), lhs, rhs)[1](value(lhs, rhs, sizes))

    return jax.jit(value if transformation == "value" else gradients)


def swept(names, *few):
    """Every name on every chip, those other than ``few`` in slow sweeps."""
    marks = {True: [], False: pytest.mark.slow}
    pairs = [(name, chip) for name in names for chip in ("950DT", "950PR")]
    cases = [pytest.param(*pair, marks=marks[pair in few]) for pair in pairs]
    return pytest.mark.parametrize(("name", "chip"), cases)


@swept(
    SHAPES,
    ("v2_lite_up", "950DT"), ("v2_lite_up", "950PR"), ("v2_lite_decode", "950DT"), ("v3_local_down", "950PR"),
    ("contiguous_4_up", "950PR"), ("masked_32_up", "950DT"), ("float8", "950DT"), ("odd", "950DT"),
)  # fmt: skip
def test_no_chip_of_its_kind_rejects_it(name, chip):
    assert glass.verify(function(SHAPES[name]), *SHAPES[name].arguments(), chip=chip) == []


GRADIENTS = [name for name, shape in SHAPES.items() if not shape.dtype.startswith("float8")]


@swept(GRADIENTS, ("v2_lite_up", "950DT"), ("v3_local_down", "950PR"), ("odd_masked", "950DT"))
def test_no_chip_of_its_kind_rejects_the_gradients(name, chip):
    assert glass.verify(function(SHAPES[name], "gradients"), *SHAPES[name].arguments(), chip=chip) == []


def test_it_is_exported(tmp_path):
    shape = SHAPES["v2_lite_up"]
    glass.export(function(shape, "gradients"), *shape.arguments(), path=tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    entries = sorted(kernel["entry"] for kernel in manifest["kernels"].values())
    assert len(entries) == 3 and entries[2].startswith("k_grouped_gemm_bfloat16")
    assert "transpose_rhs" in entries[1]


def grouped(dtype="float32", out=None, **changes) -> GroupedGemmKernel:
    sizes = {"lists": 1, "lhs_lists": 1, "rhs_lists": 1, "groups": 3, "m": 50, "n": 48, "k": 64}
    return GroupedGemmKernel(operand_dtype=dtype, out_dtype=out or dtype, **(sizes | changes))


def k_grouped(dtype="float32", out=None, **changes) -> KGroupedGemmKernel:
    sizes = {"groups": 3, "rows": 50, "m": 48, "n": 32}
    return KGroupedGemmKernel(operand_dtype=dtype, out_dtype=out or dtype, **(sizes | changes))


def random(shape, dtype):
    values = np.random.default_rng(0).standard_normal(shape)
    return (values * 4 if dtype == "int8" else values).astype(interpreter.dtype(dtype))


TOLERANCE = {"int32": 0, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


# Tails in every dimension, more tiles than cores (so that the loop over tiles runs twice), and every option.
@pytest.mark.parametrize(
    "kernel",
    [
        grouped(),
        grouped("bfloat16", "float32", tiles=SMALL, n=176, k=48),
        grouped("float16", transpose_rhs=True, tiles=SMALL, k=80),
        grouped("int8", "int32", n=64),
        grouped("float8_e4m3fn", "bfloat16", n=64),
        grouped(lists=2, lhs_lists=2, tiles=SMALL),
        grouped(lists=2, rhs_lists=2, m=26),
    ],
    ids=lambda kernel: kernel.name,
)
def test_rows_of_tiles_times_their_matrices(kernel):
    """Tiles that begin anywhere, of as few rows as one, in any order; rows that are in none stay as they were."""
    made, bm = cache.compile(kernel, CHIP), kernel.plan(CHIP).tiles.block_m
    length, rows = kernel.row_tiles(bm), kernel.lists * kernel.m
    lhs_rows, matrices = kernel.lhs_lists * kernel.m, kernel.rhs_lists * kernel.groups
    spans = [(3, min(bm, 13)), (17, 1), (kernel.m - 5, 5)]
    table = np.zeros((length, 4), np.int32)
    for i, (row, count) in enumerate(spans):
        table[i] = row + lhs_rows - kernel.m, (2 * i + 1) % matrices, row + rows - kernel.m, count
    assert len(spans) <= length
    shape = (kernel.n, kernel.k) if kernel.transpose_rhs else (kernel.k, kernel.n)
    lhs, rhs = random((lhs_rows, kernel.k), kernel.operand_dtype), random((matrices, *shape), kernel.operand_dtype)
    (out,) = interpreter.run(
        made.program, lhs, rhs, table, np.array([len(spans)], np.int32), outputs=kernel.outputs
    )  # fmt: skip
    written = np.zeros(rows, bool)
    for row, matrix, place, count in table[: len(spans)]:
        b = rhs[matrix].astype(np.float64)
        want = lhs[row : row + count].astype(np.float64) @ (b.T if kernel.transpose_rhs else b)
        assert interpreter.relative_error(out[place : place + count], want) <= TOLERANCE[kernel.out_dtype]
        written[place : place + count] = True
    if kernel.out_dtype != "int32":
        assert np.isnan(out[~written].astype(np.float64)).all()


@pytest.mark.parametrize(
    "kernel",
    [
        k_grouped(),
        k_grouped("bfloat16", "float32", tiles=GemmTiles(16, 16, 16, 2), m=176),
        k_grouped("bfloat16"),
        k_grouped("float16", tiles=SMALL, m=80, n=48),
    ],
    ids=lambda kernel: kernel.name,
)
def test_products_over_the_rows_of_each_group(kernel):
    made, bk = cache.compile(kernel, CHIP), kernel.plan(CHIP).tiles.block_k
    places = kernel.places(bk)
    total = places // bk
    blocks = np.array([1, total - 2, 1], np.int32)  # of which the last is all zeros, as for a group without rows
    first = (np.cumsum(blocks) - blocks) * bk
    lhs, rhs = random((places, kernel.m), kernel.operand_dtype), random((places, kernel.n), kernel.operand_dtype)
    lhs[first[2] :] = rhs[first[2] :] = 0
    table = np.stack([first, blocks], axis=1).astype(np.int32)
    (out,) = interpreter.run(made.program, lhs, rhs, table, outputs=kernel.outputs)
    for group, (start, count) in enumerate(table):
        rows = slice(start, start + count * bk)
        want = lhs[rows].astype(np.float64).T @ rhs[rows].astype(np.float64)
        assert interpreter.relative_error(out[group], want) <= TOLERANCE[kernel.out_dtype]


@pytest.mark.parametrize("name", ["v2_lite_up", "v3_local_down", "masked_6_up"])
def test_models_kernels_are_double_buffered(name):
    shape = SHAPES[name]
    lists, groups = (shape.groups, 1) if shape.masked else (1, shape.groups)
    sizes = {"lists": lists, "lhs_lists": lists, "rhs_lists": lists, "groups": groups}
    kernels = [grouped(shape.dtype, m=shape.m, n=shape.n, k=shape.k, **sizes)]
    kernels.append(k_grouped(shape.dtype, groups=shape.groups, rows=lists * shape.m, m=shape.k, n=shape.n))
    chip = chips.get(CHIP)
    for kernel in kernels:
        made = cache.compile(kernel, CHIP)
        assert {a.buffer for a in made.memory} >= {"a", "b", "c"}
        assert min(a.versions for a in made.memory) >= 2
        assert made.block_dim == chip.cube_cores and made.workspace_bytes == 0
        for space in (Space.L1, Space.L0A, Space.L0B, Space.L0C):
            assert memory.used(made.memory, space) <= chip.capacity(space)


def test_tiles_follow_the_rows_of_a_group():
    block_m = lambda **changes: grouped("bfloat16", n=1408, k=2048, **changes).plan(CHIP).tiles.block_m  # noqa: E731
    assert block_m(groups=64, m=48) == 16  # no group is likely to have more
    assert block_m(groups=64, m=64 * 24) == 48
    assert block_m(groups=8, m=8 * 4096) == 128
    assert block_m(groups=1, m=5) == 16


def test_depth_wastes_little_of_the_last_tile():
    depth = lambda rows: k_grouped("bfloat16", groups=8, rows=8 * rows, m=2048, n=1408).plan(CHIP).tiles.block_k  # noqa: E731
    assert depth(16) == 16
    assert depth(64) <= 32
    assert depth(4096) >= 64


@pytest.mark.parametrize(
    ("kernel", "change", "match"),
    [
        (grouped(), {"k": 20}, "k=20 must be a positive multiple of 8"),
        (grouped(), {"n": 0}, "n=0"),
        (grouped(), {"groups": 0}, "groups=0"),
        (grouped(), {"operand_dtype": "float8_e5m2"}, "operand_dtype='float8_e5m2'"),
        (grouped(), {"out_dtype": "float64"}, "out_dtype='float64'"),
        (k_grouped(), {"m": 20}, "m=20 must be a positive multiple of 8"),
        (k_grouped(), {"rows": 0}, "rows=0"),
    ],
)
def test_what_the_kernels_do_not_take(kernel, change, match):
    with pytest.raises(errors.HardwareConstraintError, match=match):
        dataclasses.replace(kernel, **change)


def test_tiles_that_do_not_fit_say_so():
    with pytest.raises(errors.OutOfOnChipMemoryError, match="l1"):
        grouped("float32", m=4096, n=4096, k=4096, tiles=GemmTiles(256, 256, 512)).build(CHIP)


def test_fingerprint_follows_what_the_code_depends_on():
    for kernel, change in ((grouped(), {"m": 51}), (k_grouped(), {"rows": 51})):
        same, other = dataclasses.replace(kernel), dataclasses.replace(kernel, **change)
        tiled = dataclasses.replace(kernel, tiles=GemmTiles(16, 16, 64))
        assert kernel == same and kernel.fingerprint(CHIP) == same.fingerprint(CHIP)
        assert len({x.fingerprint(CHIP) for x in (kernel, other, tiled)}) == 3


def test_a_product_of_nothing_launches_no_kernel():
    exported = jax.ShapeDtypeStruct((0, 16), jnp.float32), jax.ShapeDtypeStruct((3, 16, 8), jnp.float32)
    f = jax.jit(lambda *args: glass.grouped_gemm(*args, implementation="ascend"))
    assert glass.verify(f, *exported, jax.ShapeDtypeStruct((3,), jnp.int32)) == []
