"""scaled_gemm against NumPy: every implementation that runs here; scales of any layout; what the NPU cannot take."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import glass_jax as glass
import numpy_reference as ref
import scaled_gemm_reference as reference
from benchmarks.shapes.scaled_gemm import SHAPES
from glass_jax import errors

RUNS_HERE = ("xla", "npu_model")
# One rounding to the result's type; sums of float32 in any order.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}
GRANULES = {
    "tokens_and_tiles": ((1, 128), (128, 128)),
    "rows": ((1, 128), (1, 128)),
    "mx": ((1, 32), (1, 32)),
    "tiles": ((128, 128), (128, 32)),
    "mixed": ((1, 128), (1, 32)),
}


def random(*shape, seed=0):
    """Columns of different sizes, so that no scale is like another."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[-1]))).astype(np.float32)


def quantized(m, n, k, blocks, scale="e8m0", dtypes=("float8_e4m3fn",) * 2, batch=((), ())):
    """Two matrices, ``[*batch, m, k]`` and ``[*batch, n, k]``, and what the operation takes of them."""
    whole = random(*batch[0], m, k), random(*batch[1], n, k, seed=1)
    arguments = []
    for x, block, dtype in zip(whole, blocks, dtypes, strict=True):
        values, scales = reference.quantize(x, block, dtype, scale)
        arguments += [values, scales.astype(ml_dtypes.float8_e8m0fnu) if scale == "e8m0" else scales]
    return whole, tuple(arguments)


def columns(arguments):
    """Arguments for ``transpose_rhs=False``."""
    lhs, lhs_scale, rhs, rhs_scale = arguments
    return lhs, lhs_scale, np.swapaxes(rhs, -1, -2), np.swapaxes(rhs_scale, -1, -2)


def call(*arguments, **options):
    options = {"preferred_element_type": jnp.float32} | options
    return jax.jit(functools.partial(glass.scaled_gemm, **options))(*arguments)


def check(arguments, blocks, **options):
    out = call(*arguments, **options)
    given = arguments if options.get("transpose_rhs", True) else columns(arguments)
    ref.assert_close(out, reference.scaled_gemm(*given, *blocks), TOLERANCE[str(out.dtype)])
    return out


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("transpose_rhs", [True, False])
@pytest.mark.parametrize("granules", GRANULES)
def test_any_layout_of_scales(granules, transpose_rhs, implementation):
    blocks = GRANULES[granules]
    whole, arguments = quantized(130, 200, 320, blocks)
    given = arguments if transpose_rhs else columns(arguments)
    out = check(given, blocks, transpose_rhs=transpose_rhs, implementation=implementation)
    assert reference.calc_diff(out, whole[0] @ whole[1].T) < 1e-3


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(
    ("m", "n", "k", "granules", "transpose_rhs"),
    [
        (1, 1, 1, "tokens_and_tiles", True),
        (5, 70, 100, "tokens_and_tiles", False),
        (3, 33, 31, "mx", True),
        (17, 16, 33, "rows", False),
        (16, 20, 96, "mx", False),
        (1, 200, 64, "tokens_and_tiles", True),
        (40, 48, 1088, "mx", True),  # K ends in a part of a tile
        (16, 20, 1216, "tokens_and_tiles", False),
    ],
    ids=str,
)
def test_any_shape(m, n, k, granules, transpose_rhs, implementation):
    _, arguments = quantized(m, n, k, GRANULES[granules])
    given = arguments if transpose_rhs else columns(arguments)
    check(given, GRANULES[granules], implementation=implementation, transpose_rhs=transpose_rhs)


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float32"])
@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_the_largest_and_the_smallest_scales(implementation, dtype):
    """All that e8m0 has, 2**-127 to 2**127; those of rows and columns together leave float32's range or not."""
    _, (lhs, _, rhs, _) = quantized(16, 48, 96, GRANULES["mx"])
    lhs_exponents = np.linspace(-127, 127, 16).round()[:, None] + [0, 1, 2]
    rhs_exponents = np.linspace(127, -127, 48).round()[:, None] - [1, 0, 2]
    scales = [np.exp2(np.clip(x, -127, 127)) for x in (lhs_exponents, rhs_exponents)]
    given = [x.astype(np.float32).astype(getattr(ml_dtypes, dtype, np.float32)) for x in scales]
    out = call(lhs, given[0], rhs, given[1], implementation=implementation)
    want = reference.scaled_gemm(lhs, scales[0], rhs, scales[1], *GRANULES["mx"])
    inside = np.abs(want) <= np.finfo(np.float32).max
    assert np.isinf(out[~inside]).all() and 0 < inside.mean() < 1
    # Relative to what each element is a sum of; below float32's normal numbers a result is zero.
    magnitudes = (np.abs(reference.f64(x)) for x in (lhs, rhs))
    terms = reference.scaled_gemm(next(magnitudes), scales[0], next(magnitudes), scales[1], *GRANULES["mx"])
    error = np.abs(reference.f64(out)[inside] - want[inside])
    assert (error <= 1e-6 * terms[inside] + 2.0**-126).all()


@pytest.mark.parametrize(
    ("transpose_rhs", "batch", "m", "scale"),
    [
        (True, ((), ()), 2, "e8m0"),
        (True, ((), ()), 9, "e8m0"),
        (True, ((), ()), 9, "float32"),
        (False, ((), ()), 9, "e8m0"),
        (False, ((2,), (2,)), 9, "float32"),
    ],
    ids=str,
)
def test_more_than_is_multiplied_out_at_a_time(transpose_rhs, batch, m, scale):
    """The parts that the formula takes of the right operand overlap at the end."""
    blocks = GRANULES["tokens_and_tiles"]
    _, arguments = quantized(m, 300, 16384, blocks, scale, batch=batch)
    given = arguments if transpose_rhs else columns(arguments)
    check(given, blocks, implementation="xla", transpose_rhs=transpose_rhs)


@pytest.mark.parametrize("granules", GRANULES)
def test_scales_that_are_no_powers_of_two(granules):
    whole, arguments = quantized(130, 200, 320, GRANULES[granules], scale="float32")
    out = check(arguments, GRANULES[granules])
    assert reference.calc_diff(out, whole[0] @ whole[1].T) < 1e-3


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_powers_of_two_in_float32_and_both_kinds_of_scales(implementation):
    blocks = GRANULES["tokens_and_tiles"]
    _, (lhs, lhs_scale, rhs, rhs_scale) = quantized(20, 40, 256, blocks)
    want = call(lhs, lhs_scale, rhs, rhs_scale, implementation=implementation)
    wide = lhs_scale.astype(np.float32), rhs_scale.astype(np.float32)
    for scales in ((wide[0], rhs_scale), (lhs_scale, wide[1]), wide):
        got = glass.scaled_gemm(
            lhs, scales[0], rhs, scales[1], preferred_element_type=jnp.float32, implementation=implementation
        )
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 128), (128, 32)], ids=str)
def test_two_sizes_of_blocks_that_make_as_many_are_the_same_blocks(sizes):
    """So that the shape of the scales says which block they are for."""
    for length in range(300):
        first, second = ([i // size for i in range(length)] for size in sizes)
        assert (len(set(first)) == len(set(second))) == (first == second)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", None])
def test_types_of_the_result(dtype, implementation):
    blocks = GRANULES["tokens_and_tiles"]
    _, arguments = quantized(20, 40, 256, blocks)
    out = check(arguments, blocks, preferred_element_type=dtype, implementation=implementation)
    assert out.dtype == (dtype or "float32")
    if dtype:  # rounded once
        wide = call(*arguments, implementation=implementation)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(wide.astype(dtype)))


def test_the_default_result_is_bfloat16():
    _, arguments = quantized(3, 4, 128, GRANULES["mx"])
    assert glass.scaled_gemm(*arguments).dtype == jnp.bfloat16


@pytest.mark.parametrize("scale", ["float32", "e8m0"])
@pytest.mark.parametrize("dtypes", [("float8_e5m2", "float8_e5m2"), ("float8_e4m3fn", "float8_e5m2")], ids=str)
def test_the_other_format(dtypes, scale):
    blocks = GRANULES["tokens_and_tiles"]
    _, arguments = quantized(20, 40, 256, blocks, scale, dtypes)
    check(arguments, blocks)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("batch", [((2,), ()), ((), (2,)), ((2,), (2,)), ((2, 3), (3,)), ((2, 1), (3,))], ids=str)
def test_batch_dimensions(batch, implementation):
    blocks = GRANULES["tokens_and_tiles"]
    _, arguments = quantized(5, 20, 130, blocks, batch=batch)
    check(columns(arguments), blocks, implementation=implementation, transpose_rhs=False)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_small_and_large_scales(implementation):
    """Powers of two multiply exactly: the result is that of the same values with scales of 1, times all of them."""
    _, (lhs, _, rhs, _) = quantized(4, 5, 96, GRANULES["mx"])
    left, right = np.exp2([[0.0], [-60], [50], [3]]), np.exp2([[0.0], [40], [-30], [7], [-1]])
    scales = [jnp.asarray(np.repeat(each, 3, axis=1), jnp.float8_e8m0fnu) for each in (left, right)]
    out = call(lhs, scales[0], rhs, scales[1], implementation=implementation)
    want = (reference.f64(lhs) @ reference.f64(rhs).T) * left * right.T
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=1e-4)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 128), (5, 0, 128), (5, 6, 0)])
def test_nothing_to_multiply(m, n, k, implementation):
    blocks = GRANULES["tokens_and_tiles"]
    _, arguments = quantized(m, n, k, blocks)
    np.testing.assert_array_equal(call(*arguments, implementation=implementation), np.zeros((m, n)))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_an_empty_batch(implementation):
    _, arguments = quantized(2, 3, 128, GRANULES["tokens_and_tiles"], batch=((0,), ()))
    assert call(*arguments, implementation=implementation).shape == (0, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("name", SHAPES)
def test_model_shapes(name, implementation):
    shape = SHAPES[name]
    blocks = shape.lhs_block, shape.rhs_block
    _, arguments = quantized(min(shape.m, 16), min(shape.n, 300), shape.k, blocks)
    given = arguments if shape.transpose_rhs else columns(arguments)
    options = {"transpose_rhs": shape.transpose_rhs, "preferred_element_type": shape.dtype}
    check(given, blocks, implementation=implementation, **options)


# --- what the NPU cannot take --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [3.0, 0.0, -1.0, np.inf, np.nan, 1e-39])
def test_a_scale_that_is_no_power_of_two(wrong):
    """Known, it raises; in jit, what it scales is NaN, and nothing else."""
    lhs, rhs = (quantized(4, 6, 256, GRANULES["rows"])[1][i] for i in (0, 2))
    lhs_scale, rhs_scale = (np.ones((rows, 2), np.float32) for rows in (4, 6))
    on_npu = functools.partial(glass.scaled_gemm, implementation="npu_model")
    lhs_scale[2, 1] = wrong
    with pytest.raises(errors.HardwareConstraintError, match=r"1 of 8 scales in lhs_scale.*at \(2, 1\).*e8m0"):
        on_npu(lhs, lhs_scale, rhs, rhs_scale)
    rhs_scale[5, 0] = wrong
    out = jax.jit(on_npu)(lhs, lhs_scale, rhs, rhs_scale)
    poisoned = np.zeros((4, 6), bool)
    poisoned[2] = poisoned[:, 5] = True
    np.testing.assert_array_equal(np.isnan(out), poisoned)
    lhs_scale[2, 1] = 1
    with pytest.raises(errors.HardwareConstraintError, match=r"1 of 12 scales in rhs_scale.*at \(5, 0\)"):
        on_npu(lhs, lhs_scale, rhs, rhs_scale)
    if np.isfinite(wrong):  # nothing is wrong with it elsewhere
        assert np.isfinite(glass.scaled_gemm(lhs, lhs_scale, rhs, rhs_scale, implementation="xla")).all()


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_scales_that_are_no_number(implementation):
    """quantize marks a block that holds a NaN or an infinity."""
    x = random(4, 256)
    x[1, 200] = np.inf
    rhs = glass.quantize(random(6, 256), block=(128, 128), scale="e8m0")
    out = call(*glass.quantize(x, scale="e8m0"), *rhs, implementation=implementation)
    np.testing.assert_array_equal(np.isnan(out).any(axis=1), [False, True, False, False])


def test_the_other_format_has_no_kernel():
    _, arguments = quantized(4, 6, 128, GRANULES["mx"], dtypes=("float8_e4m3fn", "float8_e5m2"))
    with pytest.raises(errors.UnsupportedError, match="rhs is float8_e5m2; the kernel takes float8_e4m3fn"):
        call(*arguments, implementation="npu_model")


@pytest.mark.parametrize("chip", ["910B3", "910A"])
def test_chips_without_a_kernel(chip):
    _, arguments = quantized(4, 6, 128, GRANULES["mx"])
    with glass.configure(chip=chip), pytest.raises(errors.UnsupportedError, match=f"{chip} .*950DT"):
        call(*arguments, implementation="npu_model")


def test_strict_alignment():
    with glass.configure(alignment="strict", implementation="npu_model"):
        for (m, n, k), dtype, match in (
            ((3, 20, 128), "bfloat16", "N is 20, not a multiple of 16 .*; the next valid size is 32"),
            ((3, 20, 128), "float32", "N is 20, not a multiple of 8"),
            ((3, 16, 96), "bfloat16", "K is 96, not a multiple of 64 .*pairs of scales.*; the next valid size is 128"),
        ):
            with pytest.raises(errors.HardwareConstraintError, match=match):
                call(*quantized(m, n, k, GRANULES["mx"])[1], preferred_element_type=dtype)
        check(quantized(3, 16, 128, GRANULES["mx"])[1], GRANULES["mx"])


def test_padding_is_said(capfd):
    with glass.configure(debug=True):
        call(*quantized(3, 20, 96, GRANULES["mx"])[1], implementation="npu_model")
    assert "scaled_gemm {'m': 3, 'n': 20, 'k': 96}: padding N 20 -> 24, K 96 -> 128" in capfd.readouterr().err


# --- errors --------------------------------------------------------------------------------------------------------


def arrays(lhs=(4, 256), lhs_scale=(4, 2), rhs=(6, 256), rhs_scale=(1, 2), dtypes=("float8_e4m3fn", "float32")):
    return [jnp.ones(shape, dtypes[i % 2]) for i, shape in enumerate((lhs, lhs_scale, rhs, rhs_scale))]


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        (arrays(dtypes=("bfloat16", "float32")), {}, "lhs is bfloat16; use float8_e4m3fn or float8_e5m2"),
        (arrays(dtypes=("float8_e4m3fn", "bfloat16")), {}, "lhs_scale is bfloat16; use float32 or float8_e8m0fnu"),
        (arrays(dtypes=("float8_e4m3fn", "int32")), {"implementation": "npu_model"}, "lhs_scale is int32"),
        (arrays(lhs=(256,)), {}, r"lhs has shape \(256,\); add a dimension"),
        (arrays(rhs=(256, 6)), {}, r"K of lhs \(4, 256\) is 256 and K of rhs \(256, 6\) is 6 .*transpose_rhs=False"),
        (arrays(lhs=(2, 4, 256), rhs=(3, 6, 256)), {}, r"batch dimensions \(2,\) of lhs and \(3,\) of rhs"),
        (arrays(lhs_scale=(4, 3)), {}, r"lhs_scale has shape \(4, 3\).*expected \[4 or 1, 2 or 8\]: .* 1 or 128 rows"),
        (arrays(rhs_scale=(6,)), {}, r"rhs_scale has shape \(6,\).*expected \[6 or 1, 2 or 8\]"),
        (
            arrays(rhs=(256, 6), rhs_scale=(6, 2)),
            {"transpose_rhs": False},
            r"rhs_scale has shape \(6, 2\); with rhs \(256, 6\) expected \[2 or 8, 6 or 1\]: .* 1 or 128 columns",
        ),
        (
            arrays(rhs=(256, 6), rhs_scale=()),
            {"transpose_rhs": False},
            r"rhs_scale has shape \(\); .*\[2 or 8, 6 or 1\]",
        ),
        (arrays(lhs=(2, 4, 256)), {}, r"lhs_scale has shape \(4, 2\).*expected \[2, 4 or 1, 2 or 8\]"),
        (arrays(), {"preferred_element_type": jnp.int32}, "preferred_element_type=int32 of float8_e4m3fn operands"),
    ],
)
def test_what_it_does_not_take(arguments, options, match):
    with pytest.raises(errors.HardwareConstraintError, match=match):
        glass.scaled_gemm(*arguments, **options)


def test_unknown_implementation():
    with pytest.raises(ValueError, match="implementation"):
        glass.scaled_gemm(*arrays(), implementation="cuda")
