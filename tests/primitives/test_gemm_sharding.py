"""gemm under jit on meshes: values, and which collectives of how many bytes the compiled program has."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import glass_jax as glass
import numpy_reference as ref

M, N, K = 16, 32, 64
_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "s8": 1, "pred": 1}
_COLLECTIVE = re.compile(
    r"= \(?(\w+)\[([\d,]*)\]\S* (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(compiled) -> dict[str, int]:
    """Bytes of the result of each kind of collective in the compiled program."""
    found: dict[str, int] = {}
    for dtype, dims, kind in _COLLECTIVE.findall(compiled.as_text()):
        size = math.prod(int(d) for d in dims.split(",") if d) * _BYTES[dtype]
        found[kind] = found.get(kind, 0) + size
    return found


def _mesh(shape, axis_type):
    count = math.prod(shape)
    return jax.make_mesh(shape, ("x", "y"), devices=jax.devices()[:count], axis_types=(axis_type,) * 2)


CASES = {
    # name: specs of lhs and rhs, the collectives that the product needs on a 4x2 mesh
    "m": (("x", None), (None, None), {}),
    "n": ((None, None), (None, "y"), {}),
    "m_n": (("x", None), (None, "y"), {}),
    "k": ((None, "x"), ("x", None), {"all-reduce": M * N * 4}),
    "m_k": (("x", "y"), ("y", None), {"all-reduce": M * N * 4 // 4}),
    "k_n": ((None, "x"), ("x", "y"), {"all-reduce": M * N * 4 // 2}),
    "mm": ((("x", "y"), None), (None, None), {}),
    "k_of_lhs_only": ((None, "x"), (None, None), {"all-reduce": M * N * 4}),
}


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("case", CASES)
def test_operands_stay_where_they_are(case, axis_type, implementation):
    lhs_spec, rhs_spec, expected = CASES[case]
    rng = np.random.default_rng(0)
    mesh = _mesh((4, 2), axis_type)
    lhs = jax.device_put(ref.random(rng, (M, K), "float32"), jax.NamedSharding(mesh, jax.P(*lhs_spec)))
    rhs = jax.device_put(ref.random(rng, (K, N), "float32"), jax.NamedSharding(mesh, jax.P(*rhs_spec)))
    bias = ref.random(rng, (N,), "float32")
    with jax.set_mesh(mesh):
        bias = jax.device_put(bias, jax.P(rhs_spec[1]))
        f = jax.jit(lambda a, b, c: glass.gemm(a, b, bias=c, activation="silu", implementation=implementation))
        compiled = f.lower(lhs, rhs, bias).compile()
        out = f(lhs, rhs, bias)
    ref.assert_close(out, ref.gemm(lhs, rhs, bias, "silu"))
    if (case, implementation) == ("k_of_lhs_only", "xla"):
        # XLA's own choice where one operand is whole: it gathers the other. The tile kernel's split slices instead.
        expected = {"all-gather": M * K * 4}
    assert collectives(compiled) == expected
    if axis_type is AxisType.Explicit:
        assert jax.typeof(out).sharding.spec == jax.P(lhs_spec[0], rhs_spec[1])


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
@pytest.mark.parametrize("devices", [(1, 1), (2, 1), (2, 2), (4, 2)], ids=str)
def test_a_training_step_reduces_gradients_only(devices, implementation):
    """Data and tensor parallel: the forward needs nothing, the weight's gradient one all-reduce over the data axis."""
    rng = np.random.default_rng(0)
    mesh = _mesh(devices, AxisType.Auto)
    lhs = jax.device_put(ref.random(rng, (M, K), "float32"), jax.NamedSharding(mesh, jax.P("x", None)))
    rhs = jax.device_put(ref.random(rng, (K, N), "float32"), jax.NamedSharding(mesh, jax.P(None, "y")))
    weight = ref.random(rng, (M, N), "float32")

    loss = lambda b, a: jnp.sum(glass.gemm(a, b, implementation=implementation) * weight)  # noqa: E731
    f = jax.jit(jax.grad(loss), out_shardings=rhs.sharding)
    ref.assert_close(f(rhs, lhs), ref.f64(lhs).T @ ref.f64(weight))
    expected = {"all-reduce": K * N * 4 // devices[1]} if devices[0] > 1 else {}
    assert collectives(f.lower(rhs, lhs).compile()) == expected


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
def test_gradients_on_a_mesh(axis_type):
    rng = np.random.default_rng(0)
    mesh = _mesh((4, 2), axis_type)
    lhs_whole, rhs_whole = ref.random(rng, (2, M, K), "float32"), ref.random(rng, (K, N), "float32")
    with jax.set_mesh(mesh):
        lhs = jax.device_put(lhs_whole, jax.P(None, "x", None))
        rhs = jax.device_put(rhs_whole, jax.P(None, "y"))
        loss = lambda a, b: jnp.sum(glass.gemm(a, b, activation="silu"))  # noqa: E731
        grads = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
    z = ref.gemm(lhs_whole, rhs_whole)
    s = 1 / (1 + np.exp(-z))
    dz = s * (1 + z * (1 - s))
    ref.assert_close(grads[0], dz @ ref.f64(rhs_whole).T)
    ref.assert_close(grads[1], np.einsum("bmk,bmn->kn", ref.f64(lhs_whole), dz))


def test_two_dimensions_over_one_axis_is_an_error_under_an_explicit_mesh():
    mesh = _mesh((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        lhs = jax.device_put(jnp.ones((M, K)), jax.P("x", None))
        rhs = jax.device_put(jnp.ones((K, N)), jax.P(None, "x"))
        with pytest.raises(glass.errors.HardwareConstraintError, match="reshard"):
            jax.jit(glass.gemm)(lhs, rhs)


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
def test_batch_sharded(implementation):
    rng = np.random.default_rng(0)
    mesh = _mesh((4, 2), AxisType.Auto)
    lhs = jax.device_put(ref.random(rng, (8, 6, 16), "float32"), jax.NamedSharding(mesh, jax.P("x")))
    for shape, spec in [((8, 16, 10), jax.P("x", None, "y")), ((16, 10), jax.P(None, "y")), ((8, 16, 10), jax.P())]:
        rhs = jax.device_put(ref.random(rng, shape, "float32"), jax.NamedSharding(mesh, spec))
        f = jax.jit(lambda a, b: glass.gemm(a, b, implementation=implementation))
        ref.assert_close(f(lhs, rhs), ref.gemm(lhs, rhs))
        assert collectives(f.lower(lhs, rhs).compile()) == {}
