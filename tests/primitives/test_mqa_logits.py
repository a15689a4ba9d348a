"""mqa_logits against NumPy float64: every implementation that runs here, types, shapes, ranges, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glass_jax as glass
import mqa_logits_reference as reference
from benchmarks.shapes.mqa_logits import SHAPES
from glass_jax import errors

RUNS_HERE = ("xla", "npu_model")
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")
TOLERANCE = 3e-6  # sums of float32 in any order


def random(queries=5, keys=300, heads=16, d=64, dtype="float32", batch=()):
    """Operands of a call; every range another one, some of them empty and some beyond the ends."""
    rng = np.random.default_rng(0)
    q, kv = (rng.standard_normal((*batch, *shape)) for shape in ((queries, heads, d), (keys, d)))
    scale, weights = rng.uniform(0.5, 1, (*batch, keys)), rng.standard_normal((*batch, queries, heads))
    starts, ends = (rng.integers(low, high, (*batch, queries)) for low, high in ((-9, keys // 2 + 1), (-1, keys + 9)))
    floats = (x.astype(np.float32) for x in (scale, weights))
    return jnp.asarray(q, dtype), jnp.asarray(kv, dtype), *floats, starts, ends


def call(*arguments, **options):
    return jax.jit(functools.partial(glass.mqa_logits, **options))(*arguments)


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_types(dtype, implementation):
    arguments = random(dtype=dtype)
    out = call(*arguments, implementation=implementation)
    assert out.dtype == jnp.float32
    reference.assert_close(out, reference.mqa_logits(*arguments), TOLERANCE)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "d", "dtype"),
    [
        (1, 1, 1, 1, "float32"),
        (1, 5000, 64, 128, "float8_e4m3fn"),
        (3, 515, 12, 20, "bfloat16"),
        (65, 257, 32, 64, "float16"),
        (2, 70, 128, 33, "float32"),
        (33, 8, 65, 40, "float8_e4m3fn"),
    ],
    ids=str,
)
def test_any_shape(queries, keys, heads, d, dtype, implementation):
    arguments = random(queries, keys, heads, d, dtype)
    reference.assert_close(call(*arguments, implementation=implementation), reference.mqa_logits(*arguments), TOLERANCE)


@pytest.mark.parametrize(("queries", "keys"), [(70, 3000), (1, 9000), (33, 300)])
def test_blocks_of_the_formula_that_overlap_at_the_end(queries, keys):
    arguments = random(queries, keys, 64, 8)
    reference.assert_close(call(*arguments, implementation="xla"), reference.mqa_logits(*arguments), TOLERANCE)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(
    "ranges",
    [
        (np.zeros(40), np.arange(40) + 561),  # causal: the queries are the last ones
        (np.zeros(40), np.zeros(40)),
        (np.full(40, 600), np.full(40, 3)),
        (np.full(40, 255), np.full(40, 257)),
        (np.repeat([0, 256, 512, 100], 10), np.repeat([256, 512, 600, 90], 10)),  # packed sequences
        (np.full(40, -(2**31)), np.full(40, 2**31 - 1)),
    ],
    ids=["causal", "nothing", "beyond", "two_keys", "packed", "everything"],
)
def test_ranges(ranges, implementation):
    starts, ends = (np.asarray(x, np.int32) for x in ranges)
    arguments = (*random(40, 600, 8, 32)[:4], starts, ends)
    reference.assert_close(call(*arguments, implementation=implementation), reference.mqa_logits(*arguments), TOLERANCE)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_keys_that_are_not_seen_may_be_anything(implementation):
    q, kv, scale, weights, _, _ = random(20, 600, 8, 32)
    starts, ends = np.full(20, 10), np.full(20, 500)
    want = reference.mqa_logits(q, kv, scale, weights, starts, ends)
    kv, scale = kv.at[:10].set(jnp.nan).at[500:].set(jnp.inf), scale.copy()
    scale[:10], scale[500:] = np.inf, np.nan
    out = call(q, kv, scale, weights, starts, ends, implementation=implementation)
    reference.assert_close(out, want, TOLERANCE)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_a_nan_is_seen(implementation):
    q, kv, scale, weights, _, _ = random(3, 20, 8, 32)
    out = call(
        q, kv.at[4, 5].set(jnp.nan), scale, weights, np.zeros(3, int), np.full(3, 20), implementation=implementation
    )
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(np.arange(20) == 4, (3, 20)))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_keys_without_scales_and_other_types(implementation):
    q, kv, _, weights, starts, ends = random(dtype="bfloat16")
    starts, ends = starts.clip(0).astype(np.uint8), ends.astype(np.int16)  # a uint8 holds no 300, the number of keys
    arguments = q, kv, None, jnp.asarray(weights, jnp.bfloat16), starts, ends
    out = call(*arguments, implementation=implementation)
    reference.assert_close(out, reference.mqa_logits(*arguments))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(
    "batches", [((2,),) * 6, ((2,), (), (), (2,), (), (2,)), ((2, 1), (3,), (3,), (1, 1), (2, 3), ())], ids=str
)
def test_batch_dimensions(batches, implementation):
    whole = random(3, 300, 8, 32, batch=(2, 3))
    arguments = []
    for x, batch in zip(whole, batches, strict=True):
        x = x[(0,) * (2 - len(batch))] if len(batch) < 2 else x
        arguments.append(x[tuple(slice(0, size) for size in batch)])
    out = call(*arguments, implementation=implementation)
    batch = np.broadcast_shapes(*batches)
    full = [np.broadcast_to(x, (*batch, *x.shape[len(own) :])) for x, own in zip(arguments, batches, strict=True)]
    reference.assert_close(out, reference.batched(*full), TOLERANCE)


def test_float64():
    with jax.enable_x64(True):
        arguments = [jnp.asarray(x, jnp.float64) for x in random()[:4]] + list(random()[4:])
        out = glass.mqa_logits(*arguments)
        assert out.dtype == jnp.float64
        reference.assert_close(out, reference.mqa_logits(*arguments), 1e-14)
        with pytest.raises(errors.UnsupportedError, match="mqa_logits: the NPU computes no float64"):
            glass.mqa_logits(*arguments, implementation="npu_model")


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "d", "batch"),
    [(0, 9, 8, 32, ()), (3, 0, 8, 32, ()), (3, 9, 0, 32, ()), (3, 9, 8, 0, ()), (3, 9, 8, 32, (0,))],
    ids=str,
)
def test_nothing_to_multiply(queries, keys, heads, d, batch, implementation):
    arguments = random(queries, keys, heads, d, batch=batch)
    out = call(*arguments, implementation=implementation)
    want = reference.batched(*arguments) if batch != (0,) else np.zeros((0, queries, keys))
    np.testing.assert_array_equal(out, want)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("name", SHAPES)
def test_model_shapes(name, implementation):
    shape = SHAPES[name]
    queries, keys, batch = min(shape.queries, 40), min(shape.keys, 3000), tuple(min(n, 3) for n in shape.batch)
    arguments = random(queries, keys, shape.heads, shape.d, shape.dtype, batch)
    out = call(*arguments, implementation=implementation)
    reference.assert_close(out, reference.batched(*arguments), TOLERANCE)


# --- the hardware --------------------------------------------------------------------------------------------------


def test_strict_alignment():
    with glass.configure(alignment="strict", implementation="npu_model"):
        with pytest.raises(errors.HardwareConstraintError, match="HEADS is 12, not a multiple of 8 .* size is 16"):
            call(*random(3, 20, 12, 32))
        with pytest.raises(errors.HardwareConstraintError, match="D is 48, not a multiple of 32 .* size is 64"):
            call(*random(3, 20, 8, 48, "float8_e4m3fn"))
        arguments = random(3, 20, 8, 48, "bfloat16")
        reference.assert_close(call(*arguments), reference.mqa_logits(*arguments), TOLERANCE)


def test_padding_is_said(capfd):
    with glass.configure(debug=True):
        call(*random(3, 20, 12, 20), implementation="npu_model")
    assert "mqa_logits {'heads': 12, 'd': 20}: padding HEADS 12 -> 16, D 20 -> 24" in capfd.readouterr().err


def test_too_many_heads():
    with pytest.raises(errors.UnsupportedError, match="129 heads; the kernel takes at most 128.*two halves"):
        call(*random(2, 8, 129, 8), implementation="npu_model")


def test_a_head_that_does_not_fit():
    with pytest.raises(errors.OutOfOnChipMemoryError, match="l1 .* of 524288 bytes"):
        call(*random(2, 8, 8, 1024), implementation="npu_model")


@pytest.mark.parametrize("chip", ["910B3", "910A"])
def test_chips_without_a_kernel(chip):
    with glass.configure(chip=chip), pytest.raises(errors.UnsupportedError, match=chip):
        call(*random(), implementation="npu_model")


# --- errors --------------------------------------------------------------------------------------------------------


def changed(position, value):
    arguments = list(random(3, 20, 8, 32))
    arguments[position] = value
    return arguments


@pytest.mark.parametrize(
    ("position", "value", "match"),
    [
        (0, jnp.ones((3, 8, 32), jnp.int8), "q is int8; use float32"),
        (0, jnp.ones((3, 8, 32), jnp.float8_e5m2), "q is float8_e5m2; use float32, float16, bfloat16 or float8_e4m3fn"),
        (0, jnp.ones((3, 8, 32), jnp.bfloat16), "q is bfloat16 and kv is float32; cast q to float32"),
        (0, jnp.ones((3, 32)), r"q has shape \(3, 32\), expected \[..., Sq, H, D\]"),
        (1, jnp.ones((20, 64)), r"kv has shape \(20, 64\), expected \[..., Skv, D\] with D = 32 \(of q\)"),
        (2, jnp.ones(3), r"kv_scale has shape \(3,\), expected \[..., Skv\] with Skv = 20 \(of kv\)"),
        (2, jnp.ones(20, int), "kv_scale is int32; use float32"),
        (3, jnp.ones((8, 3)), r"weights has shape \(8, 3\), expected \[..., Sq, H\] with Sq = 3 \(of q\), H = 8"),
        (3, jnp.ones((3, 8), int), "weights is int32; use float32"),
        (4, jnp.ones(20, int), r"starts has shape \(20,\), expected \[..., Sq\] with Sq = 3 \(of q\)"),
        (4, jnp.ones(3), "starts is float32; use int32"),
        (5, jnp.ones(3), "ends is float32; use int32"),
    ],
)
def test_what_it_does_not_take(position, value, match):
    with pytest.raises(errors.HardwareConstraintError, match=f"mqa_logits: {match}"):
        glass.mqa_logits(*changed(position, value))


def test_batches_that_do_not_fit():
    arguments = random(3, 20, 8, 32, batch=(2,))
    with pytest.raises(
        errors.HardwareConstraintError, match=r"batch dimensions \(3,\), \(2,\), \(2,\), .* do not broadcast"
    ):
        glass.mqa_logits(jnp.ones((3, 3, 8, 32)), *arguments[1:])


def test_unknown_implementation():
    with pytest.raises(ValueError, match="implementation"):
        glass.mqa_logits(*random(), implementation="cuda")
