"""rms_norm and layer_norm under vmap, grad, jvp, checkpoint, scan, shard_map and on meshes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.test_util import check_grads

import glass_jax as glass
import normalization_reference
import numpy_reference as ref

RUNS_HERE = ("xla", "npu_model")
NORMS = ("rms_norm", "layer_norm")


def _operands(norm, *shape, dtype="float32", weights=()):
    rng = np.random.default_rng(0)
    vectors = [ref.random(rng, (*weights, shape[-1]), "float32") for _ in range(1 + (norm == "layer_norm"))]
    return [ref.random(rng, shape, dtype), *vectors]


def _norm(norm, implementation="xla"):
    return functools.partial(getattr(glass, norm), implementation=implementation)


def _expected(norm, *operands):
    return getattr(normalization_reference, norm)(*operands)


# --- vmap ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("x_axis", "weight_axis"), [(0, None), (1, None), (None, 0), (1, 0)])
def test_vmap(x_axis, weight_axis, norm, implementation):
    x, *weights = _operands(norm, *((3, 5, 24) if x_axis != 1 else (5, 3, 24)), weights=(3,) * (weight_axis == 0))
    x = x[0] if x_axis is None else x
    axes = (x_axis, *(weight_axis for _ in weights))
    out = jax.jit(jax.vmap(_norm(norm, implementation), axes))(x, *weights)
    rows = [x] * 3 if x_axis is None else list(np.moveaxis(np.asarray(x), x_axis, 0))
    vectors = [[w[i] if weight_axis == 0 else w for w in weights] for i in range(3)]
    ref.assert_close(out, np.stack([_expected(norm, row, *w) for row, w in zip(rows, vectors, strict=True)]))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_nested_vmap_over_different_operands(implementation):
    x, gamma, beta = _operands("layer_norm", 2, 3, 16, weights=(2,))
    norm = _norm("layer_norm", implementation)
    out = jax.jit(jax.vmap(jax.vmap(jax.vmap(norm, (None, None, 0)), (None, 0, None)), (0, None, None)))(x, gamma, beta)
    expected = [[[_expected("layer_norm", row, g, b) for b in beta] for g in gamma] for row in x]
    ref.assert_close(out, np.array(expected))


# --- derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_first_and_second_derivatives(norm):
    with jax.enable_x64(True):
        operands = [operand.astype(jnp.float64) for operand in _operands(norm, 2, 5)]
        check_grads(jax.jit(_norm(norm)), operands, order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("norm", NORMS)
def test_gradient_is_the_one_worked_out_by_hand(norm, implementation):
    operands = _operands(norm, 2, 3, 40)
    weight = ref.random(np.random.default_rng(1), (2, 3, 40), "float32")
    loss = lambda *operands: jnp.sum(_norm(norm, implementation)(*operands) * weight)  # noqa: E731
    gradients = jax.jit(jax.grad(loss, tuple(range(len(operands)))))(*operands)
    expected = getattr(normalization_reference, f"{norm}_gradients")(*operands, weight)
    for actual, each in zip(gradients, expected, strict=True):
        ref.assert_close(actual, each)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_keep_the_dtype_of_the_operands(dtype):
    x, gamma, beta = _operands("layer_norm", 6, 32, dtype=dtype)
    weight = ref.random(np.random.default_rng(1), (6, 32), dtype)
    loss = lambda x, gamma, beta: jnp.sum((glass.layer_norm(x, gamma, beta) * weight).astype(jnp.float32))  # noqa: E731
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(x, gamma.astype(dtype), beta)
    assert [g.dtype for g in gradients] == [dtype, dtype, jnp.float32]
    expected = normalization_reference.layer_norm_gradients(x, gamma.astype(dtype), beta, weight)
    for actual, each in zip(gradients, expected, strict=True):
        ref.assert_close(actual, each, tolerance=ref.TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_the_result_is_the_same_with_and_without_differentiation(implementation):
    x, gamma = _operands("rms_norm", 6, 32, dtype="bfloat16")
    f = lambda x: glass.rms_norm(x, gamma, implementation=implementation)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(f)(x), jax.jit(lambda x: jax.vjp(f, x)[0])(x))


def test_checkpoint_scan_and_jvp():
    x, gamma, beta = _operands("layer_norm", 4, 16, weights=(3,))
    step = lambda x, w: (x + glass.layer_norm(x, *w), None)  # noqa: E731
    scanned = lambda step: lambda *w: jnp.sum(jax.lax.scan(step, x, w)[0] ** 2)  # noqa: E731
    plain = lambda *w: jnp.sum(functools.reduce(lambda x, i: step(x, (w[0][i], w[1][i]))[0], range(3), x) ** 2)  # noqa: E731
    expected = jax.jit(jax.value_and_grad(plain, (0, 1)))(gamma, beta)
    for body in (step, jax.checkpoint(step)):
        actual = jax.jit(jax.value_and_grad(scanned(body), (0, 1)))(gamma, beta)
        chex.assert_trees_all_close(actual, expected, rtol=1e-4)
    _, tangent = jax.jit(lambda *w: jax.jvp(scanned(step), w, w))(gamma, beta)
    np.testing.assert_allclose(tangent, sum(jnp.vdot(g, w) for g, w in zip(expected[1], (gamma, beta))), rtol=1e-4)  # noqa: B905


# --- meshes --------------------------------------------------------------------------------------------------------


def _collectives(fn, *operands) -> list[str]:
    text = fn.lower(*operands).compile().as_text()
    return [name for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute") if f" {name}" in text]


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("spec", [jax.P("x", "y", None), jax.P(("x", "y"), None, None), jax.P("x", None, "y")], ids=str)
def test_rows_stay_on_their_devices(spec, axis_type, implementation):
    x, gamma, beta = _operands("layer_norm", 8, 2, 24)
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8], axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, spec)
        norm = jax.jit(_norm("layer_norm", implementation))
        out = norm(sharded, gamma, beta)
        ref.assert_close(out, _expected("layer_norm", x, gamma, beta))
        assert _collectives(norm, sharded, gamma, beta) == (["all-gather"] if spec[2] else [])
        if axis_type is AxisType.Explicit:
            assert jax.typeof(out).sharding.spec == jax.P(spec[0], spec[1], None)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
def test_gradients_on_a_mesh_reduce_those_of_the_weights_only(axis_type):
    x, gamma, beta = _operands("layer_norm", 8, 2, 24)
    weight = ref.random(np.random.default_rng(1), x.shape, "float32")
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices()[:8], axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        x, weight = (jax.device_put(operand, jax.P("x")) for operand in (x, weight))
        grad = jax.jit(jax.grad(lambda *operands: jnp.sum(glass.layer_norm(*operands) * weight), (0, 1, 2)))
        gradients = grad(x, gamma, beta)
        assert _collectives(grad, x, gamma, beta) == ["all-reduce"]
    expected = normalization_reference.layer_norm_gradients(x, gamma, beta, weight)
    for actual, each in zip(gradients, expected, strict=True):
        ref.assert_close(actual, each)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_shard_map(implementation):
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices()[:8], axis_types=(AxisType.Auto,))
    x, gamma = _operands("rms_norm", 16, 24)
    weight = ref.random(np.random.default_rng(1), x.shape, "float32")
    norm = jax.shard_map(
        _norm("rms_norm", implementation),
        mesh=mesh, in_specs=(jax.P("x"), jax.P()), out_specs=jax.P("x"), check_vma=True,
    )  # fmt: skip
    ref.assert_close(jax.jit(norm)(x, gamma), _expected("rms_norm", x, gamma))
    gradients = jax.jit(jax.grad(lambda x, gamma: jnp.sum(norm(x, gamma) * weight), (0, 1)))(x, gamma)
    for actual, each in zip(gradients, normalization_reference.rms_norm_gradients(x, gamma, weight), strict=True):
        ref.assert_close(actual, each)
