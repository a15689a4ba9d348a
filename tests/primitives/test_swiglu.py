"""swiglu against NumPy float64: implementations, dtypes, shapes, transformations, meshes, the chips."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.test_util import check_grads

import glass_jax as glass
import normalization_reference
import numpy_reference as ref
from benchmarks.shapes import swiglu as shapes

RUNS_HERE = ("xla", "npu_model")


def _operands(shape, dtype="float32"):
    rng = np.random.default_rng(0)
    return 3 * ref.random(rng, shape, dtype), ref.random(rng, shape, dtype)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1,), "float32"), ((3, 5, 7), "bfloat16"), ((33, 1001), "float16"), ((130, 1408), "float32"), ((), "bfloat16")],
    ids=str,
)
def test_any_shape(shape, dtype, implementation):
    gate, up = _operands(shape, dtype)
    out = jax.jit(functools.partial(glass.swiglu, implementation=implementation))(gate, up)
    assert out.dtype == dtype
    ref.assert_close(out, normalization_reference.swiglu(gate, up))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "width"), [*itertools.product(shapes.TOKENS[:2], shapes.WIDTHS), (4096, "v2_lite_expert")], ids=str
)
def test_model_shapes(tokens, width, dtype, implementation):
    gate, up = _operands((tokens, shapes.WIDTHS[width]), dtype)
    ref.assert_close(glass.swiglu(gate, up, implementation=implementation), normalization_reference.swiglu(gate, up))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_gates(dtype, implementation):
    gate = jnp.array([-1e30, -200.0, -90.0, -30.0, 0.0, 90.0, 200.0, 1e30], dtype)
    out = glass.swiglu(gate, jnp.full(8, 2, dtype), implementation=implementation)
    expected = normalization_reference.swiglu(gate, jnp.full(8, 2, dtype))
    # exp(90) is the largest that float32 holds, so that smaller numbers than this become 0.
    np.testing.assert_allclose(ref.f64(out), expected, rtol=2.0**-8 if dtype == "bfloat16" else 1e-6, atol=1e-35)


def test_float64():
    with jax.enable_x64(True):
        gate, up = (x.astype(jnp.float64) for x in _operands((4, 9)))
        ref.assert_close(glass.swiglu(gate, up), normalization_reference.swiglu(gate, up))
        check_grads(jax.jit(glass.swiglu), (gate, up), order=2, modes=("fwd", "rev"))
        with pytest.raises(glass.errors.UnsupportedError, match="float64"):
            glass.swiglu(gate, up, implementation="npu_model")


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)], ids=str)
def test_empty(shape, implementation):
    assert glass.swiglu(jnp.ones(shape), jnp.ones(shape), implementation=implementation).shape == shape


# --- transformations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("in_axes", [(0, 0), (1, None), (None, 2)], ids=str)
def test_vmap(in_axes, implementation):
    gate, up = _operands((3, 3, 3))
    gate, up = (x if axis is not None else x[0] for x, axis in zip((gate, up), in_axes, strict=True))
    out = jax.jit(jax.vmap(functools.partial(glass.swiglu, implementation=implementation), in_axes))(gate, up)
    moved = [x[None] if axis is None else np.moveaxis(x, axis, 0) for x, axis in zip((gate, up), in_axes, strict=True)]
    ref.assert_close(out, normalization_reference.swiglu(*np.broadcast_arrays(*moved)))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_is_the_one_worked_out_by_hand(dtype, implementation):
    gate, up = _operands((5, 24), dtype)
    weight = ref.random(np.random.default_rng(1), gate.shape, dtype)
    swiglu = functools.partial(glass.swiglu, implementation=implementation)
    out, pullback = jax.vjp(jax.jit(swiglu), gate, up)
    np.testing.assert_array_equal(out, jax.jit(swiglu)(gate, up))
    for actual, each in zip(pullback(weight), normalization_reference.swiglu_gradients(gate, up, weight), strict=True):
        assert actual.dtype == dtype
        ref.assert_close(actual, each)


def test_checkpoint_and_scan():
    gate, up = _operands((3, 8))
    step = lambda x, u: (glass.swiglu(x, u), None)  # noqa: E731
    loss = lambda step: lambda x: jnp.sum(jax.lax.scan(step, x, up)[0] ** 2)  # noqa: E731
    plain = lambda x: jnp.sum(functools.reduce(glass.swiglu, up, x) ** 2)  # noqa: E731
    expected = jax.jit(jax.grad(plain))(gate[0])
    for body in (step, jax.checkpoint(step)):
        np.testing.assert_allclose(jax.jit(jax.grad(loss(body)))(gate[0]), expected, rtol=1e-5)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("spec", [jax.P("x", "y"), jax.P(None, ("x", "y"))], ids=str)
def test_every_dimension_stays_sharded(spec, axis_type, implementation):
    gate, up = _operands((8, 64))
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8], axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(gate, spec), jax.device_put(up, spec)
        swiglu = jax.jit(functools.partial(glass.swiglu, implementation=implementation))
        out, text = swiglu(*sharded), swiglu.lower(*sharded).compile().as_text()
        assert not [name for name in ("all-gather", "all-reduce", "all-to-all") if name in text]
        assert out.sharding.is_equivalent_to(sharded[0].sharding, 2)
    ref.assert_close(out, normalization_reference.swiglu(gate, up))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
def test_an_axis_shards_one_dimension(axis_type):
    """The second operand has the axis elsewhere, where the result cannot have it too."""
    gate, up = _operands((8, 8))
    with jax.set_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(axis_type,))):
        out = jax.jit(glass.swiglu)(jax.device_put(gate, jax.P("x", None)), jax.device_put(up, jax.P(None, "x")))
        assert out.sharding.shard_shape((8, 8)) == (2, 8)
    ref.assert_close(out, normalization_reference.swiglu(gate, up))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_shard_map(implementation):
    gate, up = _operands((16, 24))
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices()[:8], axis_types=(AxisType.Auto,))
    swiglu = jax.shard_map(
        functools.partial(glass.swiglu, implementation=implementation),
        mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=True,
    )  # fmt: skip
    ref.assert_close(jax.jit(swiglu)(gate, up), normalization_reference.swiglu(gate, up))


# --- on the chips --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", ["950DT", pytest.param("950PR", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tokens", shapes.TOKENS)
@pytest.mark.parametrize("width", shapes.WIDTHS)
def test_the_chips_take_every_model_shape(width, tokens, chip):
    x = jax.ShapeDtypeStruct((tokens, shapes.WIDTHS[width]), "float32" if tokens == 128 else "bfloat16")
    assert glass.verify(glass.swiglu, x, x, chip=chip) == []


def test_export_and_debug(tmp_path, capsys):
    x = jax.ShapeDtypeStruct((5, 77), "bfloat16")
    with glass.configure(debug=True):
        glass.export(glass.swiglu, x, x, path=tmp_path / "bundle")
    (source,) = (tmp_path / "bundle" / "kernels").glob("*.asc")
    assert "swiglu_bfloat16_385" in source.read_text()
    assert "7 tiles of 64 elements on 7 vector units in 1 waves" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: glass.swiglu(jnp.ones((2, 3)), jnp.ones((2, 4))),
            r"shape \(2, 3\) and up is .* shape \(2, 4\)",
        ),
        (lambda: glass.swiglu(jnp.ones(3), jnp.ones(3, jnp.bfloat16)), r"gate is float32 .* up is bfloat16"),
        (lambda: glass.swiglu(jnp.ones(3, int), jnp.ones(3, int)), r"gate is int32; use float32"),
    ],
)
def test_errors(call, message):
    with pytest.raises(glass.errors.HardwareConstraintError, match=message):
        call()
