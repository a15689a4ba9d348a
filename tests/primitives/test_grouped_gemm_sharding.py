"""grouped_gemm on meshes: values, which collectives the compiled program has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import glass_jax as glass
import grouped_gemm_reference as reference
import numpy_reference as ref
from compiled import collectives

RUNS_HERE = ("xla", "npu_model")
AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
G, M, N, K = 8, 48, 32, 64
SIZES = np.array([7, 0, 11, 3, 0, 9, 5, 6], np.int32)  # 41 of 48 rows


def mesh_of(axis_type):
    return jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8], axis_types=(axis_type,) * 2)


def put(mesh, x, *spec):
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))


def operands(lhs_shape=(M, K), dtype="float32"):
    rng = np.random.default_rng(0)
    return ref.random(rng, lhs_shape, dtype), ref.random(rng, (G, K, N), dtype)


CASES = {
    # specs of lhs, rhs and sizes, what is reduced, and the result's spec under Explicit axes
    "n": ((), (None, None, "y"), (), {}, jax.P(None, "y")),
    "experts": ((), ("x",), (), {"all-reduce": M * N}, jax.P(None, None)),
    "experts_n": ((), ("x", None, "y"), (), {"all-reduce": M * N // 2}, jax.P(None, "y")),
    "k": ((None, "x"), (None, "x"), (), {"all-reduce": M * N}, jax.P(None, None)),
    "experts_k": ((None, "y"), ("x", "y"), (), {"all-reduce": M * N}, jax.P(None, None)),
    "all_experts": ((), (("x", "y"),), (), {"all-reduce": M * N}, jax.P(None, None)),
}


@AXIS_TYPES
@pytest.mark.parametrize(
    ("case", "implementation"), [*((case, "xla") for case in CASES), ("n", "npu_model"), ("experts_k", "npu_model")]
)
def test_operands_stay_where_they_are(case, implementation, axis_type):
    lhs_spec, rhs_spec, sizes_spec, expected, out_spec = CASES[case]
    mesh = mesh_of(axis_type)
    whole = operands()
    args = [put(mesh, x, *spec) for x, spec in zip((*whole, SIZES), (lhs_spec, rhs_spec, sizes_spec), strict=True)]
    with jax.set_mesh(mesh):
        f = jax.jit(functools.partial(glass.grouped_gemm, implementation=implementation))
        out = f(*args)
        compiled = f.lower(*args).compile()
    ref.assert_close(out, reference.grouped_gemm(*whole, SIZES))
    found = collectives(compiled)
    if axis_type is AxisType.Auto:  # XLA may share out the sizes, too, then gathers those, and passes one on
        assert found.pop("all-gather", 0) in (0, G)
        assert found.pop("collective-permute", 0) in (0, 1)
    assert found == expected
    if axis_type is AxisType.Explicit:
        assert jax.typeof(out).sharding.spec == out_spec


@AXIS_TYPES
def test_sharded_rows_and_sizes_are_made_whole(axis_type):
    mesh = mesh_of(axis_type)
    whole = operands()
    args = [put(mesh, x, *spec) for x, spec in zip((*whole, SIZES), (("x",), ("x",), ("x",)), strict=True)]
    with jax.set_mesh(mesh):
        out = jax.jit(glass.grouped_gemm)(*args)
    ref.assert_close(out, reference.grouped_gemm(*whole, SIZES))


@AXIS_TYPES
@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_masked_experts_need_no_communication(implementation, axis_type):
    mesh = mesh_of(axis_type)
    whole = (*operands((G, 6, K)), np.array([6, 0, 3, 1, 9, 2, 5, 4], np.int32))
    args = [put(mesh, x, *spec) for x, spec in zip(whole, (("x",), ("x", None, "y"), ("x",)), strict=True)]
    with jax.set_mesh(mesh):
        f = jax.jit(functools.partial(glass.masked_grouped_gemm, implementation=implementation))
        out = f(*args)
        assert collectives(f.lower(*args).compile()) == {}
    ref.assert_close(out, reference.masked_grouped_gemm(*whole))


@AXIS_TYPES
@pytest.mark.parametrize(
    ("implementation", "lhs_spec", "rhs_spec"),
    [
        ("xla", (), ("x",)),
        ("npu_model", (), ("x",)),
        ("xla", (), (None, None, "y")),
        ("xla", (None, "x"), (None, "x")),
        ("xla", (), (None, "x")),
        ("xla", ("x",), ("y",)),
    ],
    ids=str,
)
def test_gradients_stay_where_their_operands_are(implementation, lhs_spec, rhs_spec, axis_type):
    """The matrices' gradient needs no communication; that of the rows is reduced over the devices of the experts."""
    mesh = mesh_of(axis_type)
    whole = operands()
    weight = ref.random(np.random.default_rng(1), (M, N), "float32")
    lhs, rhs, sizes, weights = (
        put(mesh, x, *spec) for x, spec in zip((*whole, SIZES, weight), (lhs_spec, rhs_spec, (), ()), strict=True)
    )
    with jax.set_mesh(mesh):

        def loss(a, b):
            return jnp.sum(glass.grouped_gemm(a, b, sizes, implementation=implementation) * weights)

        grads = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
        matrices_only = jax.jit(jax.grad(loss, 1), out_shardings=rhs.sharding).lower(lhs, rhs).compile()
    expected = reference.gradients(*whole, SIZES, weight)
    ref.assert_close(grads[0], expected[0])
    ref.assert_close(grads[1], expected[1])
    if axis_type is AxisType.Explicit:
        assert [jax.typeof(x).sharding for x in grads] == [jax.typeof(x).sharding for x in (lhs, rhs)]
    found = collectives(matrices_only)
    rows = M * K if lhs_spec[:1] == ("x",) else 0  # which every expert may need
    assert found.pop("all-gather", 0) in (rows, rows + G)
    if axis_type is AxisType.Auto:
        assert found.pop("collective-permute", 0) in (0, 1)  # a size, see above
    assert found == {}


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_shard_map_of_columns(implementation):
    mesh = mesh_of(AxisType.Auto)
    lhs, rhs = operands()

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(jax.P(), jax.P(None, None, "x"), jax.P()), out_specs=jax.P(None, "x"),
        check_vma=True,
    )  # fmt: skip
    def f(lhs, rhs, sizes):
        return glass.grouped_gemm(lhs, rhs, sizes, implementation=implementation)

    ref.assert_close(f(lhs, rhs, SIZES), reference.grouped_gemm(lhs, rhs, SIZES))
    # The invariant operand's gradient is summed over the axis.
    grad = jax.grad(lambda a: f(a, rhs, SIZES).sum())(lhs)
    ref.assert_close(grad, reference.gradients(lhs, rhs, SIZES, np.ones((M, N)))[0])
