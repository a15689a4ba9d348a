"""The kernel of scaled_gemm: sound on the chips at the shapes of models, that it computes what it says, its tiles."""

import dataclasses
import functools
import json
import re

import interpreter
import jax
import ml_dtypes
import numpy as np
import pytest

import glass_jax as glass
import scaled_gemm_reference as reference
from benchmarks.shapes.scaled_gemm import SHAPES
from glass_jax import errors
from glass_jax.hw import chips, memory
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang.kernels.scaled_gemm import ScaledGemmKernel
from glass_jax.lowering.tiling import GemmTiles

CHIP = "950DT"


def function(shape):
    options = {"transpose_rhs": shape.transpose_rhs, "preferred_element_type": shape.dtype}
    return jax.jit(functools.partial(glass.scaled_gemm, implementation="ascend", **options))


FEW = {("1x2112x7168", "950DT"), ("128x7168x16384", "950PR"), ("4096x4096x7168", "950DT"), ("columns", "950PR"),
       ("odd", "950DT"), ("odd_mx", "950DT"), ("one", "950PR")}  # fmt: skip
CASES = [
    pytest.param(name, chip, marks=() if (name, chip) in FEW else pytest.mark.slow)
    for name in SHAPES
    for chip in ("950DT", "950PR")
]


@pytest.mark.parametrize(("name", "chip"), CASES)
def test_no_chip_of_its_kind_rejects_it(name, chip):
    assert glass.verify(function(SHAPES[name]), *SHAPES[name].arguments(), chip=chip) == []


def test_it_is_exported(tmp_path):
    shape = SHAPES["mx"]
    glass.export(function(shape), *shape.arguments(), path=tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    (kernel,) = manifest["kernels"].values()
    assert kernel["entry"].startswith("scaled_gemm_float8_e4m3fn_bfloat16_transpose_rhs_128x4096x7168")
    assert [argument["dtype"] for argument in kernel["launches"][0]["arguments"]] == [
        "float8_e4m3fn", "uint16", "float8_e4m3fn", "uint16", "bfloat16",
    ]  # fmt: skip


def kernel(out_dtype="float32", **changes) -> ScaledGemmKernel:
    sizes = {"batch": 1, "lhs_batched": False, "rhs_batched": False, "m": 50, "n": 48, "k": 256}
    return ScaledGemmKernel(out_dtype=out_dtype, **(sizes | changes))


TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


# Tails in every dimension, more tiles than cores (so that the loop over tiles runs twice), and every option.
@pytest.mark.parametrize(
    "kernel",
    [
        kernel(),
        kernel("bfloat16", tiles=GemmTiles(16, 16, 128, 2), m=200, n=80, k=320),
        kernel("float16", tiles=GemmTiles(48, 32, 1024, 2), k=1088),
        kernel(transpose_rhs=False, tiles=GemmTiles(16, 64, 64, 4), n=96),
        kernel(batch=2, lhs_batched=True),
        kernel(batch=2, rhs_batched=True, lhs_batched=True, transpose_rhs=False, n=32),
    ],
    ids=lambda kernel: kernel.name,
)
def test_products_of_scaled_operands(kernel):
    """What stands beyond M, N and K in the scales is of no matter, but that beyond K no one may be NaN."""
    rng, made = np.random.default_rng(0), cache.compile(kernel, CHIP)
    given, wide = [], []
    for batched, rows, (batches, pairs, places), by_columns in zip(
        (kernel.lhs_batched, kernel.rhs_batched), (kernel.m, kernel.n), kernel.scale_shapes,
        (False, not kernel.transpose_rhs), strict=True,
    ):  # fmt: skip
        assert batches == (kernel.batch if batched else 1)
        x = rng.standard_normal((batches, rows, kernel.k)).astype(ml_dtypes.float8_e4m3fn)
        exponents = rng.integers(120, 129, (batches, places, pairs * 2)).astype(np.uint8)
        exponents[:, rows:] = 255
        scales = np.exp2(exponents[:, :rows, : kernel.k // 32].astype(np.float64) - 127)
        wide.append(reference.multiplied_out(x, scales, (1, 32)))
        words = np.ascontiguousarray(np.swapaxes(exponents.view(np.uint16), 1, 2))
        given += [np.ascontiguousarray(np.swapaxes(x, 1, 2)) if by_columns else x, words]
    (out,) = interpreter.run(made.program, *given, outputs=kernel.outputs)
    want = wide[0] @ np.swapaxes(wide[1], 1, 2)
    assert out.shape == want.shape and interpreter.relative_error(out, want) <= TOLERANCE[kernel.out_dtype]


@pytest.mark.parametrize("name", ["1x4096x7168", "128x7168x2048", "4096x4096x7168", "mx_float32", "columns"])
def test_models_kernels_are_double_buffered(name):
    shape, chip = SHAPES[name], chips.get(CHIP)
    made = cache.compile(kernel(shape.dtype, m=shape.m, n=shape.n, k=shape.k, transpose_rhs=shape.transpose_rhs), CHIP)
    versions = {a.buffer: a.versions for a in made.memory}
    assert set(versions) == {"a", "b", "a_scale", "b_scale", "c"}
    assert min(versions[buffer] for buffer in ("a", "b", "a_scale", "b_scale")) >= 2
    assert made.workspace_bytes == 0
    for space in (Space.L1, Space.L0C):
        assert memory.used(made.memory, space) <= chip.capacity(space)


@pytest.mark.parametrize("name", SHAPES)
def test_parts_of_a_product_have_whole_pairs_of_scales(name):
    """The depth that the compiler cuts a tile into, as it says itself, is a multiple of the 64 that a pair is for."""
    shape = SHAPES[name]
    n, k = -(-shape.n // 32) * 32, -(-shape.k // 64) * 64
    made = cache.compile(kernel(shape.dtype, m=shape.m, n=n, k=k, transpose_rhs=shape.transpose_rhs), CHIP)
    (sizes,) = re.findall(r"ascend_blockscaled_gemm_l1<(\d+), (\d+), (\d+), (\d+), ", made.source)
    _, block_k, _, depth = map(int, sizes)
    assert depth % 64 == 0 and block_k % depth == 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"k": 96}, "k=96 must be a positive multiple of 64"),
        ({"n": 20}, "n=20 must be a positive multiple of 8"),
        ({"n": 40, "transpose_rhs": False}, "n=40 must be a positive multiple of 32"),
        ({"m": 0}, "m=0"),
        ({"out_dtype": "int32"}, "out_dtype='int32'"),
        ({"tiles": GemmTiles(16, 16, 2048)}, "block_k=2048; use at most 1024"),
    ],
)
def test_what_the_kernel_does_not_take(change, match):
    with pytest.raises(errors.HardwareConstraintError, match=match):
        dataclasses.replace(kernel(), **change)


@pytest.mark.parametrize(
    ("tiles", "match"),
    [
        (GemmTiles(256, 256, 512, 4), "l1 1081344 of 524288 bytes"),
        (
            GemmTiles(256, 256, 192),
            "the largest part of block_k that L0 of 950DT has room for is 96, no multiple of 64",
        ),
    ],
)
def test_tiles_that_do_not_fit_say_so(tiles, match):
    with pytest.raises(errors.OutOfOnChipMemoryError, match=match):
        kernel(m=4096, n=4096, k=4096, tiles=tiles).build(CHIP)


def test_tiles_that_part_a_pair_of_scales_say_so():
    with pytest.raises(errors.HardwareConstraintError, match="block_k=96 must be a positive multiple of 64"):
        kernel(tiles=GemmTiles(16, 16, 96)).build(CHIP)


def test_fingerprint_follows_what_the_code_depends_on():
    changes = ({"m": 51}, {"n": 96}, {"k": 64}, {"out_dtype": "bfloat16"}, {"tiles": GemmTiles(16, 16, 64)})
    others = [dataclasses.replace(kernel(), **change).fingerprint(CHIP) for change in changes]
    assert len({kernel().fingerprint(CHIP), *others}) == 6
    assert kernel().fingerprint(CHIP) == kernel().fingerprint(CHIP)
