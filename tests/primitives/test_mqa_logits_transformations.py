"""mqa_logits under JAX's transformations: derivatives, vmap, meshes and the collectives of the compiled program."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.test_util import check_grads

import glass_jax as glass
import mqa_logits_reference as reference
from compiled import collectives
from glass_jax import errors

RUNS_HERE = ("xla", "npu_model")
AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
SIZES = 4, 64, 16, 8  # queries, keys, heads, d
TOLERANCE = 3e-6


def operands(batch=(), dtype="float32"):
    rng, (queries, keys, heads, d) = np.random.default_rng(0), SIZES
    shapes = (queries, heads, d), (keys, d), (keys,), (queries, heads)
    floats = [rng.standard_normal((*batch, *shape)).astype(np.float32) for shape in shapes]
    ranges = [rng.integers(low, high, (*batch, queries)) for low, high in ((0, 30), (20, 65))]
    return [*(jnp.asarray(x, dtype) for x in floats[:2]), *map(jnp.asarray, (*floats[2:], *ranges))]


def logits(implementation):
    return functools.partial(glass.mqa_logits, implementation=implementation)


# --- derivatives ---------------------------------------------------------------------------------------------------


def weighted(f, weight, *arguments):
    """A sum of what is finite of the logits."""
    out = f(*arguments)
    return jnp.sum(jnp.where(jnp.isfinite(out), out * weight, 0))


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_derivatives_in_float64(batch):
    with jax.enable_x64(True):
        q, kv, scale, weights, starts, ends = operands(batch)
        moving = [x.astype(jnp.float64) for x in (q, kv, scale, weights)]
        moving[1] = moving[1][:1] if batch else moving[1]  # keys that the batch shares
        weight = jnp.asarray(np.random.default_rng(1).standard_normal((*batch, *SIZES[:2])))

        def f(*moving):
            return weighted(glass.mqa_logits, weight, *moving, starts, ends)

        check_grads(jax.jit(f), moving, order=1 if batch else 2, modes=("fwd", "rev"), eps=1e-6)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_worked_out_by_hand(dtype, implementation):
    arguments = operands(dtype=dtype)
    weight = np.random.default_rng(1).standard_normal(SIZES[:2])
    loss = functools.partial(weighted, logits(implementation), weight)
    found = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arguments)
    expected = reference.gradients(*map(np.asarray, arguments), weight)
    for got, want, x in zip(found, expected, arguments, strict=False):
        assert got.dtype == x.dtype
        error = np.linalg.norm(reference.f64(got) - want) / np.linalg.norm(want)
        assert error <= (2**-8 if x.dtype == jnp.bfloat16 else 1e-6)


@pytest.mark.parametrize("moving", [0, 1, 2, 3])
def test_forward_mode_of_one_operand(moving):
    arguments = operands()
    direction = jax.random.normal(jax.random.key(0), arguments[moving].shape)

    def f(x):
        out = glass.mqa_logits(*arguments[:moving], x, *arguments[moving + 1 :])
        return jnp.where(jnp.isfinite(out), out, 0)

    out, out_dot = jax.jvp(f, (arguments[moving],), (direction,))
    reverse = jax.grad(lambda x: jnp.vdot(f(x), out))(arguments[moving])
    np.testing.assert_allclose(jnp.vdot(out, out_dot), jnp.vdot(reverse, direction), rtol=1e-4)


def test_what_is_hidden_has_no_gradient():
    q, kv, scale, weights, _, _ = operands()
    starts, ends = jnp.full(4, 10), jnp.full(4, 20)
    gradient = jax.grad(lambda kv: weighted(glass.mqa_logits, 1.0, q, kv, scale, weights, starts, ends))(kv)
    assert gradient[10:20].any() and not gradient[:10].any() and not gradient[20:].any()


def test_the_gradient_never_has_the_scores_of_all_heads():
    queries, keys, heads, d = 64, 2048, 64, 16
    q, kv, weights = (jnp.ones(shape) for shape in ((queries, heads, d), (keys, d), (queries, heads)))
    starts, ends = jnp.zeros(queries, int), jnp.full(queries, keys)

    def loss(q, kv, weights):
        return weighted(glass.mqa_logits, 1.0, q, kv, None, weights, starts, ends)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, kv, weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * queries * keys * heads / 4


def test_fp8_has_no_derivative():
    arguments = operands(dtype="float8_e4m3fn")
    loss = lambda scale: weighted(glass.mqa_logits, 1.0, *arguments[:2], scale, *arguments[3:])  # noqa: E731
    for differentiate in (jax.grad(loss), jax.jit(jax.grad(loss)), lambda x: jax.jvp(loss, (x,), (x,))):
        with pytest.raises(errors.UnsupportedError, match="no derivative where q is float8_e4m3fn.*bfloat16"):
            differentiate(arguments[2])
    assert not jax.grad(lambda scale: loss(lax.stop_gradient(scale)))(arguments[2]).any()


# --- vmap and the others -------------------------------------------------------------------------------------------


MAPPED = [mapped for mapped in itertools.product((True, False), repeat=6) if any(mapped)]
ON_NPU = [(True,) * 6, (True, False, False, True, True, True), (False, True, False, False, False, False)]


@pytest.mark.parametrize(
    ("mapped", "implementation"),
    [*((mapped, "xla") for mapped in MAPPED[::3]), *((mapped, "npu_model") for mapped in ON_NPU)],
    ids=str,
)
def test_any_operand_is_mapped_or_not(mapped, implementation):
    arguments = [x if yes else x[0] for x, yes in zip(operands((2,)), mapped, strict=True)]
    out = jax.jit(jax.vmap(logits(implementation), in_axes=[0 if yes else None for yes in mapped]))(*arguments)
    whole = [x if yes else np.stack([x] * 2) for x, yes in zip(arguments, mapped, strict=True)]
    reference.assert_close(out, reference.batched(*whole), TOLERANCE)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_nested_vmap_over_other_axes(implementation):
    whole = operands((2, 3))
    q, kv, *others = whole
    inner = jax.vmap(logits(implementation), in_axes=(1, 0, 0, 0, 0, 0), out_axes=2)
    out = jax.vmap(inner)(jnp.moveaxis(q, 1, 2), kv, *others)
    reference.assert_close(jnp.moveaxis(out, 3, 1), reference.batched(*whole), TOLERANCE)
    shared = jax.vmap(jax.vmap(logits(implementation), in_axes=(0, None, None, 0, 0, 0)))
    out = shared(q, kv[:, 0], others[0][:, 0], *others[1:])
    whole[1:3] = [np.broadcast_to(x[:, :1], x.shape) for x in (kv, others[0])]
    reference.assert_close(out, reference.batched(*whole), TOLERANCE)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_scan_and_checkpoint(implementation):
    """Prefill in chunks of queries, with a gradient through them."""
    whole = operands((3,))
    q, kv, scale, weights, starts, ends = whole

    def chunks(kv):
        step = jax.checkpoint(lambda _, chunk: (None, logits(implementation)(chunk[0], kv, scale[0], *chunk[1:])))
        return lax.scan(step, None, (q, weights, starts, ends))[1]

    whole[1:3] = [np.broadcast_to(x[:1], x.shape) for x in (kv, scale)]
    reference.assert_close(jax.jit(chunks)(kv[0]), reference.batched(*whole), TOLERANCE)
    gradient = jax.jit(jax.grad(lambda kv: weighted(chunks, 1.0, kv)))(kv[0])
    ones = np.ones(SIZES[:2])
    want = sum(reference.gradients(*(np.asarray(x[i]) for x in whole), ones)[1] for i in range(3))
    np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-4)


# --- meshes --------------------------------------------------------------------------------------------------------


def mesh_of(axis_type):
    return jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=(axis_type,) * 2)


def put(mesh, x, *spec):
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))


CASES = {
    # specs of q, kv, its scales, weights, starts, ends; what is reduced; the result's spec
    "queries": ((("x",), (), (), ("x",), ("x",), ("x",)), {}, ("x", None)),
    "keys": (((), ("y",), ("y",), (), (), ()), {}, (None, "y")),
    "keys_over_both": (((), (("x", "y"),), (("x", "y"),), (), (), ()), {}, (None, ("x", "y"))),
    "queries_keys": ((("x",), ("y",), ("y",), ("x",), ("x",), ("x",)), {}, ("x", "y")),
    "heads": (((None, "x"), (), (), (None, "x"), (), ()), {"all-reduce": 4 * 64}, (None, None)),
    "heads_keys": (((None, "x"), ("y",), ("y",), (None, "x"), (), ()), {"all-reduce": 4 * 32}, (None, "y")),
    "values_only": ((("x",), ("y",), (), (), (), ()), {}, ("x", "y")),
}


@AXIS_TYPES
@pytest.mark.parametrize(
    ("case", "implementation"),
    [*((case, "xla") for case in CASES), ("queries_keys", "npu_model"), ("heads_keys", "npu_model")],
)
def test_operands_stay_where_they_are(case, implementation, axis_type):
    specs, reduced, out_spec = CASES[case]
    whole, mesh = operands(), mesh_of(axis_type)
    with jax.set_mesh(mesh):
        arguments = [put(mesh, x, *spec) for x, spec in zip(whole, specs, strict=True)]
        f = jax.jit(logits(implementation))
        out = f(*arguments)
        assert collectives(f.lower(*arguments).compile()) == reduced
    reference.assert_close(out, reference.mqa_logits(*whole), TOLERANCE)
    if axis_type is AxisType.Explicit:
        assert jax.typeof(out).sharding.spec == jax.P(*out_spec)


@AXIS_TYPES
@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_batches_stay_where_they_are(implementation, axis_type):
    whole, mesh = operands((2,)), mesh_of(axis_type)
    with jax.set_mesh(mesh):
        arguments = [put(mesh, x, "x") for x in whole]
        f = jax.jit(logits(implementation))
        out = f(*arguments)
        assert collectives(f.lower(*arguments).compile()) == {}
    reference.assert_close(out, reference.batched(*whole), TOLERANCE)


@AXIS_TYPES
@pytest.mark.parametrize("case", ["queries_keys", "heads"])
def test_gradients_over_a_mesh(case, axis_type):
    whole, mesh = operands(), mesh_of(axis_type)
    weight = np.random.default_rng(1).standard_normal(SIZES[:2]).astype(np.float32)
    with jax.set_mesh(mesh):
        arguments = [put(mesh, x, *spec) for x, spec in zip(whole, CASES[case][0], strict=True)]
        loss = functools.partial(weighted, glass.mqa_logits, put(mesh, weight, *CASES[case][2]))
        found = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arguments)
    for got, want in zip(found, reference.gradients(*map(np.asarray, whole), weight), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_shard_map(implementation):
    """Queries over one axis, and the gradient of keys that every device has."""
    whole, mesh = operands(), mesh_of(AxisType.Auto)
    specs = jax.P("x"), jax.P(), jax.P(), jax.P("x"), jax.P("x"), jax.P("x")
    f = jax.jit(jax.shard_map(logits(implementation), mesh=mesh, in_specs=specs, out_specs=jax.P("x"), check_vma=True))
    reference.assert_close(f(*whole), reference.mqa_logits(*whole), TOLERANCE)
    found = jax.jit(jax.grad(functools.partial(weighted, f, 1.0), (0, 1, 2, 3)))(*whole)
    for got, want in zip(found, reference.gradients(*map(np.asarray, whole), np.ones(SIZES[:2])), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
