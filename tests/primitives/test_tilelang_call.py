"""A user's kernel as a JAX operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glass_jax as glass

N = 256


@functools.cache
def scale_add_kernel():
    import tilelang.ascend.language as T

    @T.prim_func
    def scale_add(
        x: T.Tensor((N,), "float32"),
        y: T.Tensor((N,), "float32"),
        total: T.Tensor((N,), "float32"),
        low: T.Tensor((N,), "float16"),
    ):
        with T.Kernel(2) as block:
            a = T.alloc_shared((N // 2,), "float32")
            b = T.alloc_shared((N // 2,), "float32")
            c = T.alloc_shared((N // 2,), "float16")
            T.copy(x[block * (N // 2) : (block + 1) * (N // 2)], a)
            T.copy(y[block * (N // 2) : (block + 1) * (N // 2)], b)
            with T.SimtVF(threads=128):
                for i in T.Parallel(N // 2):
                    b[i] = 2.0 * a[i] + b[i]
                    c[i] = T.cast(b[i], "float16")
            T.copy(b, total[block * (N // 2) : (block + 1) * (N // 2)])
            T.copy(c, low[block * (N // 2) : (block + 1) * (N // 2)])

    return scale_add


def scale_add():
    shapes = (jax.ShapeDtypeStruct((N,), jnp.float32), jax.ShapeDtypeStruct((N,), jnp.float16))
    return glass.tilelang_call(scale_add_kernel(), out_shape=shapes)


def _operands(*lead):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(-9, 9, (*lead, N)), jnp.float32) for _ in range(2)]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_results_in_order(transform):
    x, y = _operands()
    total, low = transform(scale_add())(x, y)
    np.testing.assert_array_equal(total, 2 * np.asarray(x) + np.asarray(y))
    np.testing.assert_array_equal(low, (2 * np.asarray(x) + np.asarray(y)).astype(np.float16))


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 1)], ids=str)
def test_vmap(in_axes):
    x, y = _operands(3)
    args = [v if axis == 0 else v[0] if axis is None else v.T for v, axis in zip((x, y), in_axes, strict=True)]
    total, low = jax.jit(jax.vmap(scale_add(), in_axes))(*args)
    rows = [np.asarray(v) if axis is not None else np.asarray(v)[0] for v, axis in zip((x, y), in_axes, strict=True)]
    np.testing.assert_array_equal(total, 2 * rows[0] + rows[1])
    assert low.shape == (3, N)


def test_inside_shard_map():
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    x, y = (v.reshape(-1) for v in _operands(4))
    f = jax.jit(jax.shard_map(scale_add(), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"), check_vma=True))
    np.testing.assert_array_equal(f(x, y)[0], 2 * np.asarray(x) + np.asarray(y))


def test_output_in_the_middle():
    total_only = jax.ShapeDtypeStruct((N,), jnp.float32)
    # `low` stays an operand here, which the kernel overwrites: only what out_idx names comes back.
    f = glass.tilelang_call(scale_add_kernel(), out_shape=total_only, out_idx=2)
    x, y = _operands()
    np.testing.assert_array_equal(f(x, y, jnp.zeros(N, jnp.float16)), 2 * np.asarray(x) + np.asarray(y))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f, x: f(x), ValueError, r"takes 2 arrays \(x, y\), got 1"),
        (lambda f, x: f(x, x[:8]), ValueError, r"parameter y is float32\[256\], the array is float32\[8\]"),
        (lambda f, x: f(x, x.astype(jnp.int32)), ValueError, r"the array is int32\[256\]"),
        (lambda f, x: jax.grad(lambda v: f(v, v)[0].sum())(x), NotImplementedError, "custom_vjp"),
    ],
)
def test_errors_of_a_call(call, error, message):
    with pytest.raises(error, match=message):
        call(scale_add(), jnp.zeros(N))


def test_errors_of_the_signature():
    with pytest.raises(
        glass.errors.HardwareConstraintError, match=r"parameter low is float16\[256\], out_shape is float32"
    ):
        glass.tilelang_call(scale_add_kernel(), out_shape=jax.ShapeDtypeStruct((N,), jnp.float32))


def test_a_kernel_has_no_formula():
    with glass.configure(implementation="xla"), pytest.raises(glass.errors.UnsupportedError, match="no formula"):
        scale_add()(*_operands())


def test_lowers_for_ascend_as_a_typed_ffi_call():
    lowered = jax.jit(scale_add()).trace(*_operands()).lower(lowering_platforms=("ascend",))
    (call,) = [line for line in lowered.as_text(dialect="hlo").splitlines() if "glass_tilelang_call" in line]
    assert "api_version=API_VERSION_TYPED_FFI" in call
    assert 'entry = "scale_add' in call
    assert "f32[256]" in call
    assert "f16[256]" in call


def test_operands_that_the_kernel_updates():
    import tilelang.ascend.language as T

    @T.prim_func
    def accumulate(x: T.Tensor((64, 32), "float32"), total: T.Tensor((32, 32), "float32")):
        with T.Kernel(2) as bx:
            tile = T.alloc_shared((32, 32), "float32")
            T.copy(x[bx * 32, 0], tile)
            T.set_atomic("add", "float32")
            T.copy(tile, total)
            T.set_atomic_none()

    out = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    f = glass.tilelang_call(accumulate, out_shape=out, update_idx=[1])
    x, start = jnp.arange(64 * 32, dtype=jnp.float32).reshape(64, 32), jnp.ones((32, 32))
    np.testing.assert_array_equal(jax.jit(f)(x, start), 1 + x[:32] + x[32:])
    with pytest.raises(glass.errors.HardwareConstraintError, match="update_idx"):
        glass.tilelang_call(accumulate, out_shape=out, update_idx=[0])


def test_dynamic_shapes_and_scalars():
    import tilelang.ascend.language as T

    rows = T.dynamic("rows")

    @T.prim_func
    def scale(x: T.Tensor((rows, 32), "float32"), factor: T.float32, y: T.Tensor((rows, 32), "float32")):
        with T.Kernel(T.ceildiv(rows, 16)) as bx:
            tile = T.alloc_shared((16, 32), "float32")
            T.copy(x[bx * 16, 0], tile)
            with T.SimtVF(threads=128):
                for i, j in T.Parallel(16, 32):
                    tile[i, j] = tile[i, j] * factor
            T.copy(tile, y[bx * 16, 0])

    for size in (16, 40):
        f = glass.tilelang_call(scale, out_shape=jax.ShapeDtypeStruct((size, 32), jnp.float32))
        x = jnp.arange(size * 32, dtype=jnp.float32).reshape(size, 32)
        np.testing.assert_array_equal(jax.jit(f)(x, 0.5), x / 2)
        with pytest.raises(glass.errors.HardwareConstraintError, match=r"parameter x is float32\[\?, 32\]"):
            f(x[:, :16], 0.5)
