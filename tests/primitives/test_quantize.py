"""quantize against NumPy, bit for bit; special values; transformations, meshes; errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import glass_jax as glass
import scaled_gemm_reference as reference
from glass_jax import errors

DTYPES = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
BLOCKS = [(1, 128), (128, 128), (1, 32), (7, 1000)]


def random(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-6, 4, shape)).astype(np.float32)


def bits(x):
    return np.asarray(x).view(np.uint8)


def check(x, block, dtype, scale, values, scales):
    """One matrix."""
    want_values, want_scales = reference.quantize(x, block, dtype, scale)
    np.testing.assert_array_equal(np.asarray(scales).astype(np.float32), want_scales)
    np.testing.assert_array_equal(bits(values), bits(want_values))


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["float32", "e8m0"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_any_block(block, dtype, scale):
    quantize = jax.jit(functools.partial(glass.quantize, block=block, dtype=dtype, scale=scale))
    for shape in ((5, 300), (256, 128), (1, 1), (130, 33)):
        x = random(*shape)
        values, scales = quantize(x)
        assert values.dtype == dtype and values.shape == shape
        assert scales.dtype == (jnp.float32 if scale == "float32" else jnp.float8_e8m0fnu)
        check(x, block, dtype, scale, values, scales)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_operands_of_any_float_type(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 200)), dtype)
    check(x, (1, 128), "float8_e4m3fn", "float32", *glass.quantize(x))


def test_double_precision_operands():
    with jax.enable_x64():
        x = np.random.default_rng(0).normal(size=(4, 200))
        values, scales = glass.quantize(jnp.asarray(x))
        assert scales.dtype == jnp.float32
        check(x, (1, 128), "float8_e4m3fn", "float32", values, scales)


def test_batch_dimensions():
    x = random(2, 3, 5, 200)
    values, scales = glass.quantize(x, block=(2, 64))
    assert scales.shape == (2, 3, 3, 4)
    for i, j in np.ndindex(2, 3):
        check(x[i, j], (2, 64), "float8_e4m3fn", "float32", values[i, j], scales[i, j])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", ["float32", "e8m0"])
def test_the_largest_of_a_block_is_kept(scale, dtype):
    """Nothing saturates, also where the largest is a power of two times the largest number of the type."""
    amax = reference.LARGEST[dtype] * np.exp2(np.arange(-20, 20.0))[:, None] * np.array([1, 1 + 2**-20, 1.5, 0.999])
    x = np.repeat(amax.reshape(-1, 1).astype(np.float32), 4, axis=1) * np.array([1, -1, 0.5, 0], np.float32)
    x = x[np.abs(x).max(1) >= 1e-4]
    values, scales = glass.quantize(x, block=(1, 4), dtype=dtype, scale=scale)
    got = reference.multiplied_out(values, np.asarray(scales).astype(np.float32), (1, 4))
    step = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "float4_e2m1fn": 2**-2}[dtype]  # half of one, relative
    np.testing.assert_allclose(got, x, rtol=step)
    if scale == "e8m0":
        exact = np.log2(np.asarray(scales).astype(np.float64)) - np.log2(np.abs(x).max(1, keepdims=True))
        assert (exact >= -np.log2(reference.LARGEST[dtype]) - 1e-6).all()
        assert (exact < 1 - np.log2(reference.LARGEST[dtype]) + 1e-6).all()


def test_zeros_have_a_scale():
    values, scales = glass.quantize(jnp.zeros((2, 256)))
    np.testing.assert_array_equal(np.asarray(values).astype(np.float32), 0)
    np.testing.assert_allclose(scales, 1e-4 / 448, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", ["float32", "e8m0"])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_visible(special, scale, dtype):
    x = random(2, 96)
    x[1, 40] = special
    values, scales = glass.quantize(x, block=(1, 32), dtype=dtype, scale=scale)
    got = reference.multiplied_out(values, np.asarray(scales).astype(np.float32), (1, 32))
    assert np.isnan(got[1, 32:64]).all()
    assert np.isfinite(got[0]).all() and np.isfinite(got[1, :32]).all() and np.isfinite(got[1, 64:]).all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 0, 4)])
def test_nothing(shape):
    values, scales = glass.quantize(jnp.zeros(shape))
    assert values.shape == shape and scales.shape == (*shape[:-1], -(-shape[-1] // 128))


# --- transformations and meshes ------------------------------------------------------------------------------------


def test_vmap():
    x = random(3, 5, 2, 130)
    want = glass.quantize(x)
    for got in (
        jax.vmap(glass.quantize)(x),
        jax.vmap(jax.vmap(glass.quantize))(x),
        jax.vmap(glass.quantize, in_axes=2, out_axes=2)(np.moveaxis(x, 0, 2)),
    ):
        for have, expected in zip(got, want, strict=True):
            if have.shape != expected.shape:
                have = jnp.moveaxis(have, 2, 0)
            np.testing.assert_array_equal(bits(have), bits(expected))


def test_it_has_no_derivative():
    x = jnp.asarray(random(2, 130))
    for differentiate in (
        jax.grad(lambda x: glass.quantize(x)[1].sum()),
        lambda x: jax.jvp(glass.quantize, (x,), (x,)),
    ):
        with pytest.raises(errors.UnsupportedError, match="quantize has no derivative.*stop_gradient"):
            differentiate(x)
    grad = jax.jit(jax.grad(lambda x: jnp.sum(glass.quantize(lax.stop_gradient(x))[1] * x[:, :2])))(x)
    np.testing.assert_array_equal(grad[:, :2], glass.quantize(x)[1])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("spec", [("x",), (None, "x"), (None, None, "x"), ("y", "x")], ids=str)
def test_whole_blocks_stay_where_they_are(spec, block, axis_type):
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=(axis_type,) * 2)
    x = random(4, 256, 512)
    with jax.set_mesh(mesh):
        quantize = jax.jit(functools.partial(glass.quantize, block=block, scale="e8m0"))
        given = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
        values, scales = quantize(given)
        compiled = quantize.lower(given).compile().as_text()
    assert "all-" not in compiled and "permute" not in compiled
    for out in (values, scales):
        assert out.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P(*spec)), 3)
    for one in zip(x, *map(np.asarray, (values, scales)), strict=True):
        check(one[0], block, "float8_e4m3fn", "e8m0", *one[1:])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("shape", [(8, 384), (24, 200)], ids=str)
def test_other_dimensions_are_made_whole(shape, axis_type):
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices()[:8], axis_types=(axis_type,))
    for spec in (("x",), (None, "x")):
        x = random(*shape)
        with jax.set_mesh(mesh):
            given = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
            check(
                x, (16, 128), "float8_e4m3fn", "float32", *jax.jit(lambda x: glass.quantize(x, block=(16, 128)))(given)
            )


def test_shard_map():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    x = random(8, 200)
    f = jax.shard_map(glass.quantize, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=True)
    check(x, (1, 128), "float8_e4m3fn", "float32", *jax.jit(f)(x))


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "options", "match"),
    [
        (np.ones(5, np.float32), {}, r"x has shape \(5,\), expected \[..., M, K\]"),
        (np.ones((2, 5), np.int32), {}, "x is int32"),
        (np.ones((2, 5), np.float32), {"dtype": "int8"}, "dtype=int8; use one of float8_e4m3fn, float8_e5m2"),
        (np.ones((2, 5), np.float32), {"scale": "bfloat16"}, "scale='bfloat16'; use one of float32, e8m0"),
        (np.ones((2, 5), np.float32), {"block": (0, 128)}, r"block=\(0, 128\); pass the rows and the columns"),
        (np.ones((2, 5), np.float32), {"block": (1, 2, 3)}, r"block=\(1, 2, 3\)"),
    ],
)
def test_what_it_does_not_take(x, options, match):
    with pytest.raises(errors.HardwareConstraintError, match=match):
        glass.quantize(x, **options)
