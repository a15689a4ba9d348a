"""scaled_gemm under JAX's transformations and over meshes: values, and which collectives the compiled program has."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import glass_jax as glass
import numpy_reference as ref
import scaled_gemm_reference as reference
from compiled import collectives
from glass_jax import errors

RUNS_HERE = ("xla", "npu_model")
AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
BLOCKS = (1, 128), (128, 128)


def quantized(*shape, block, seed=0):
    x = np.random.default_rng(seed).standard_normal(shape) * np.exp(np.arange(shape[-1]) / shape[-1])
    values, scales = reference.quantize(x, block)
    return values, np.exp2(np.ceil(np.log2(scales))).astype(ml_dtypes.float8_e8m0fnu)


def operands(m=24, n=256, k=256, batch=((), ())):
    lhs = quantized(*batch[0], m, k, block=BLOCKS[0])
    return (*lhs, *quantized(*batch[1], n, k, block=BLOCKS[1], seed=1))


def product(implementation, **options):
    return functools.partial(
        glass.scaled_gemm, preferred_element_type=jnp.float32, implementation=implementation, **options
    )


def expected(arguments):
    return reference.scaled_gemm(*arguments, *BLOCKS)


# --- vmap and the others -------------------------------------------------------------------------------------------


MAPPED = [mapped for mapped in itertools.product((True, False), repeat=4) if any(mapped)]
ON_NPU = [mapped for mapped in MAPPED if sum(mapped) in (1, 4)]


@pytest.mark.parametrize(
    ("mapped", "implementation"),
    [*((mapped, "xla") for mapped in MAPPED), *((mapped, "npu_model") for mapped in ON_NPU)],
    ids=str,
)
def test_any_operand_is_mapped_or_not(mapped, implementation):
    batched = operands(3, 20, 130, batch=((2,), (2,)))
    arguments = [x if yes else x[0] for x, yes in zip(batched, mapped, strict=True)]
    out = jax.jit(jax.vmap(product(implementation), in_axes=[0 if yes else None for yes in mapped]))(*arguments)
    whole = [x if yes else np.stack([x] * 2) for x, yes in zip(arguments, mapped, strict=True)]
    ref.assert_close(out, expected(whole))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_nested_vmap(implementation):
    lhs, lhs_scale, rhs, rhs_scale = operands(3, 20, 130, batch=((2, 3), (3,)))
    inner = jax.vmap(product(implementation), in_axes=(0, 0, 0, 0))
    out = jax.vmap(inner, in_axes=(0, 0, None, None), out_axes=1)(lhs, lhs_scale, rhs, rhs_scale)
    ref.assert_close(jnp.moveaxis(out, 1, 0), expected((lhs, lhs_scale, rhs, rhs_scale)))
    other = jax.vmap(product(implementation, transpose_rhs=False), in_axes=(1, 1, 2, 2))
    out = other(*(np.moveaxis(x[0], 0, 1) for x in (lhs, lhs_scale)), *(x.T for x in (rhs, rhs_scale)))
    ref.assert_close(out, expected((lhs[0], lhs_scale[0], rhs, rhs_scale)))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_scan_and_checkpoint(implementation):
    """A stack of layers, each of which quantizes what it gets."""
    _, _, rhs, rhs_scale = operands(1, 128, 128, batch=((), (3,)))
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)

    @jax.checkpoint
    def layer(x, weights):
        return product(implementation)(*glass.quantize(x, scale="e8m0"), *weights) / 12, None

    out, _ = jax.jit(lambda x: lax.scan(layer, x, (rhs, rhs_scale)))(x)
    for weights in zip(rhs, rhs_scale, strict=True):
        values, scales = glass.quantize(x, scale="e8m0")
        x = np.asarray(expected((values, scales, *weights)) / 12, np.float32)
    ref.assert_close(out, x, 0.05)  # a last digit moves a value to the next one of 8 bits


def test_it_has_no_derivative():
    lhs, lhs_scale, rhs, rhs_scale = (jnp.asarray(x) for x in operands(3, 20, 130))
    wide = lhs_scale.astype(jnp.float32)

    def loss(scale):
        return glass.scaled_gemm(lhs, scale, rhs, rhs_scale).sum()

    for differentiate in (jax.grad(loss), lambda scale: jax.jvp(loss, (scale,), (scale,)), jax.jit(jax.grad(loss))):
        with pytest.raises(errors.UnsupportedError, match="scaled_gemm has no derivative.*custom_vjp"):
            differentiate(wide)
    assert not jax.grad(lambda scale: loss(lax.stop_gradient(scale)))(wide).any()


def test_a_derivative_of_ones_own():
    """Quantized forward, the product of the operands themselves backward."""

    @jax.custom_vjp
    def f(x, w):
        return product("xla")(*glass.quantize(x), *glass.quantize(w, block=(128, 128)))

    f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda saved, g: (g @ saved[1], g.T @ saved[0]))
    x, w = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((3, 130), (20, 130)))
    grads = jax.jit(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)))(x, w)
    ref.assert_close(grads[0], np.ones((3, 20)) @ w)
    ref.assert_close(grads[1], np.ones((20, 3)) @ x)


# --- meshes --------------------------------------------------------------------------------------------------------


def mesh_of(axis_type):
    return jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=(axis_type,) * 2)


def put(mesh, x, *spec):
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))


CASES = {
    # specs of lhs, its scales, rhs, its scales; what is reduced; the result's spec
    "m": ((("x",), ("x",), (), ()), {}, ("x", None)),
    "m_of_values_only": ((("x",), (), (), ()), {}, ("x", None)),
    "n": (((), (), ("y",), ("y",)), {}, (None, "y")),
    "n_of_values_only": (((), (), ("y",), ()), {}, (None, "y")),
    "m_n": ((("x",), ("x",), ("y",), ("y",)), {}, ("x", "y")),
    "k": ((((None, "x"),) * 4), {"all-reduce": 24 * 256}, (None, None)),
    "m_k": ((("y", "x"), ("y", "x"), (None, "x"), (None, "x")), {"all-reduce": 12 * 256}, ("y", None)),
}


@AXIS_TYPES
@pytest.mark.parametrize(
    ("case", "implementation"), [*((case, "xla") for case in CASES), ("m_n", "npu_model"), ("k", "npu_model")]
)
def test_operands_stay_where_they_are(case, implementation, axis_type):
    specs, reduced, out_spec = CASES[case]
    whole, mesh = operands(), mesh_of(axis_type)
    with jax.set_mesh(mesh):
        arguments = [put(mesh, x, *spec) for x, spec in zip(whole, specs, strict=True)]
        f = jax.jit(product(implementation))
        out = f(*arguments)
        assert collectives(f.lower(*arguments).compile()) == reduced
    ref.assert_close(out, expected(whole))
    if axis_type is AxisType.Explicit:
        assert jax.typeof(out).sharding.spec == jax.P(*out_spec)


@AXIS_TYPES
@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_batches_stay_where_they_are(implementation, axis_type):
    whole, mesh = operands(5, 20, 130, batch=((2,), (2,))), mesh_of(axis_type)
    with jax.set_mesh(mesh):
        arguments = [put(mesh, x, "x") for x in whole]
        f = jax.jit(product(implementation))
        out = f(*arguments)
        assert collectives(f.lower(*arguments).compile()) == {}
    ref.assert_close(out, expected(whole))


@AXIS_TYPES
@pytest.mark.parametrize(
    ("sizes", "specs"),
    [
        ((24, 192, 256), ((), (), ("x",), ())),  # half of a block of rows on a device
        ((24, 256, 320), ((None, "x"), (), (None, "x"), ())),  # two blocks and a half of K
        ((24, 200, 256), ((), (), ("x",), ("x",))),  # the last block of rows is smaller
    ],
    ids=str,
)
def test_other_operands_are_made_whole(sizes, specs, axis_type):
    whole, mesh = operands(*sizes), mesh_of(axis_type)
    with jax.set_mesh(mesh):
        out = jax.jit(product("xla"))(*(put(mesh, x, *spec) for x, spec in zip(whole, specs, strict=True)))
    ref.assert_close(out, expected(whole))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_columns_over_a_mesh(implementation):
    whole, mesh = operands(), mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        lhs = [put(mesh, x, "x") for x in whole[:2]]
        rhs = [put(mesh, np.ascontiguousarray(x.T), None, "y") for x in whole[2:]]
        out = jax.jit(product(implementation, transpose_rhs=False))(*lhs, *rhs)
    ref.assert_close(out, expected(whole))
    assert jax.typeof(out).sharding.spec == jax.P("x", "y")


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_shard_map(implementation):
    whole, mesh = operands(), mesh_of(AxisType.Auto)
    specs = jax.P("x"), jax.P("x"), jax.P("y"), jax.P("y")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=jax.P("x", "y"), check_vma=True)
    def f(*arguments):
        return product(implementation)(*arguments)

    ref.assert_close(f(*whole), expected(whole))


def test_a_scale_that_is_no_power_of_two_is_seen_on_every_device():
    lhs, lhs_scale, rhs, rhs_scale = operands()
    lhs_scale = lhs_scale.astype(np.float32)
    lhs_scale[5, 1] = 3
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        arguments = [put(mesh, x, None, "x") for x in (lhs, lhs_scale, rhs, rhs_scale)]
        out = jax.jit(product("npu_model"))(*arguments)
    np.testing.assert_array_equal(np.isnan(out).all(axis=1), np.arange(24) == 5)
    assert np.isnan(out).sum() == 256
