"""The gemm kernel: what it says of itself, that it computes what it says, and that the chip has room for it."""

import dataclasses

import interpreter
import numpy as np
import pytest

from glass_jax import errors
from glass_jax.hw import chips, memory
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache, tiling
from glass_jax.lowering.tilelang.kernels.gemm import GemmKernel, alignment
from glass_jax.lowering.tiling import GemmTiles

CHIP = "950DT"
SMALL = GemmTiles(16, 16, 32, 2)


def kernel(m, n, k, operand="float32", out=None, *, batch=1, **options) -> GemmKernel:
    batched = {"lhs_batched": batch > 1, "rhs_batched": False} | options
    out = out or {"int8": "int32", "float8_e4m3fn": "float32"}.get(operand, operand)
    return GemmKernel(batch=batch, m=m, n=n, k=k, operand_dtype=operand, out_dtype=out, **batched)


def operands(gemm: GemmKernel) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    lhs, rhs = (gemm.m, gemm.k), (gemm.k, gemm.n)
    lhs, rhs = lhs[::-1] if gemm.transpose_lhs else lhs, rhs[::-1] if gemm.transpose_rhs else rhs

    def array(batched, shape, dtype):
        shape = (gemm.batch if batched else 1, *shape)
        values = rng.integers(-9, 9, shape) if gemm.operand_dtype == "int8" else rng.standard_normal(shape)
        return values.astype(interpreter.dtype(dtype))

    arrays = [array(gemm.lhs_batched, lhs, gemm.operand_dtype), array(gemm.rhs_batched, rhs, gemm.operand_dtype)]
    sums = "int32" if gemm.operand_dtype == "int8" else "float32"
    return arrays + ([array(gemm.bias_batched, (gemm.n,), sums)] if gemm.bias else [])


def expected(gemm: GemmKernel, lhs, rhs, bias=None) -> np.ndarray:
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    z = (lhs.swapaxes(1, 2) if gemm.transpose_lhs else lhs) @ (rhs.swapaxes(1, 2) if gemm.transpose_rhs else rhs)
    z = z if bias is None else z + bias[:, None, :]
    match gemm.activation:
        case "relu":
            return np.maximum(z, 0)
        case "gelu":
            return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        case "silu":
            return z / (1 + np.exp(-z))
    return z


# A tail in every dimension, more tiles than cores (so that the loop over tiles runs twice), and every option.
CASES = [
    kernel(20, 24, 40),
    kernel(1, 8, 8),
    kernel(100, 112, 40, tiles=SMALL),
    kernel(20, 32, 48, "float16", bias=True, activation="relu", tiles=SMALL),
    kernel(20, 32, 48, "bfloat16", "float32", bias=True, activation="gelu"),
    kernel(24, 32, 40, activation="silu", transpose_lhs=True, tiles=SMALL),
    kernel(20, 24, 40, transpose_rhs=True, tiles=SMALL),
    kernel(20, 32, 96, "int8", bias=True, activation="relu"),
    kernel(20, 32, 96, "float8_e4m3fn", "float16", tiles=SMALL),
    kernel(20, 24, 40, batch=3, rhs_batched=True, bias=True, bias_batched=True, tiles=SMALL),
    kernel(20, 24, 40, batch=2, bias=True),
    kernel(20, 24, 40, batch=2, lhs_batched=False, rhs_batched=True),
]


@pytest.mark.parametrize("gemm", CASES, ids=lambda gemm: gemm.name)
def test_program_computes_the_product(gemm):
    made = cache.compile(gemm, CHIP)
    arrays = operands(gemm)
    (out,) = interpreter.run(made.program, *arrays, outputs=gemm.outputs)
    assert str(out.dtype) == gemm.out_dtype
    tolerance = {"int32": 0, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[gemm.out_dtype]
    assert interpreter.relative_error(out, expected(gemm, *arrays)) <= tolerance


@pytest.mark.parametrize("gemm", CASES, ids=lambda gemm: gemm.name)
def test_signature_is_that_of_the_arrays(gemm):
    made = cache.compile(gemm, CHIP)
    assert [a.shape for a in made.arguments if not a.output] == [x.shape for x in operands(gemm)]
    assert [a.name for a in made.arguments if a.output] == ["out"]
    assert made.arguments[gemm.outputs[0]].shape == (gemm.batch, gemm.m, gemm.n)


@pytest.mark.parametrize(
    "gemm",
    [
        kernel(128, 2112, 7168, "bfloat16"),
        kernel(100, 576, 7168, "float32", bias=True),
        kernel(4096, 7168, 7168, "bfloat16"),
        kernel(4096, 7168, 7168, "int8", bias=True),
        kernel(1, 7168, 7168, "float8_e4m3fn", bias=True, transpose_rhs=True),
    ],
    ids=lambda gemm: gemm.name,
)
def test_compiled_kernel_fits_the_chip(gemm):
    made = cache.compile(gemm, CHIP)
    chip = chips.get(CHIP)
    for space in (Space.L1, Space.L0A, Space.L0B, Space.L0C, Space.UB):
        assert memory.used(made.memory, space) <= chip.capacity(space)
    assert made.block_dim <= chip.cube_cores
    assert min(a.versions for a in made.memory if a.space is Space.L1) >= 2


def test_large_products_are_double_buffered_everywhere():
    made = cache.compile(kernel(4096, 7168, 7168, "bfloat16", bias=True, activation="gelu"), CHIP)
    assert {"a", "b", "c", "sums", "result", "row"} <= {a.buffer for a in made.memory}
    assert {a.buffer: a.versions for a in made.memory if a.versions < 2} == {}


def test_explicit_tiles_are_taken():
    gemm = kernel(256, 256, 256, "float16", tiles=GemmTiles(128, 128, 64))
    program = cache.compile(gemm, CHIP).program
    assert program.buffers["a"].shape == (128, 64)
    assert program.buffers["b"].shape == (128, 64)
    assert program.buffers["c"].shape == (128, 128)
    assert "128x128x64" in gemm.describe(CHIP)


def test_tiles_that_do_not_fit_say_so():
    gemm = kernel(4096, 4096, 4096, "float32", bias=True, tiles=GemmTiles(256, 256, 512))
    with pytest.raises(errors.OutOfOnChipMemoryError, match=r"l1 2097152 of 524288 bytes.*ub"):
        gemm.build(CHIP)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"k": 20}, "k=20 must be a positive multiple of 16"),
        ({"n": 0}, "n=0"),
        ({"operand_dtype": "float8_e5m2"}, "operand_dtype='float8_e5m2'"),
        ({"operand_dtype": "int8", "k": 32, "n": 32}, "int8 goes with int32"),
        ({"operand_dtype": "int8", "out_dtype": "int32", "activation": "gelu"}, "activation='gelu'"),
        ({"activation": "tanh"}, "activation='tanh'"),
    ],
)
def test_what_the_kernel_does_not_take(change, match):
    good = kernel(16, 32, 32, "float16")
    with pytest.raises(errors.HardwareConstraintError, match=match):
        dataclasses.replace(good, **change)


def test_alignment_is_rows_of_32_bytes():
    plain = {"transpose_lhs": False, "transpose_rhs": False}
    assert alignment("bfloat16", "bfloat16", **plain) == {"m": 1, "n": 16, "k": 16}
    assert alignment("float32", "bfloat16", **plain) == {"m": 1, "n": 16, "k": 8}
    assert alignment("int8", "int32", **plain) == {"m": 1, "n": 32, "k": 32}
    assert alignment("int8", "int32", transpose_lhs=True, transpose_rhs=True) == {"m": 32, "n": 8, "k": 32}


def test_fingerprint_follows_what_the_code_depends_on():
    gemm = kernel(128, 256, 512, "float16")
    same = kernel(128, 256, 512, "float16")
    assert gemm == same and hash(gemm) == hash(same) and gemm.fingerprint(CHIP) == same.fingerprint(CHIP)
    others = [
        dataclasses.replace(gemm, m=256),
        dataclasses.replace(gemm, bias=True),
        dataclasses.replace(gemm, tiles=GemmTiles(16, 16, 64)),
    ]
    assert len({gemm.fingerprint(CHIP), *(other.fingerprint(CHIP) for other in others)}) == 4
    assert gemm.plan(CHIP).tiles == tiling.choose(gemm.problem, CHIP)
