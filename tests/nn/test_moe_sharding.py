"""A mixture of experts on meshes: the same numbers as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import random_modules
from glass_jax import errors
from glass_jax.nn import Gate, MeshAxes, MoE
from glass_jax.nn.mesh import DEFAULT_AXES

FEATURES, EXPERTS = 16, 8
MESHES = {
    "n1": (1, 1, 1),
    "n2_ep2": (1, 2, 1),
    "n4_dp2_ep2": (2, 2, 1),
    "n8_ep8": (1, 8, 1),
    "n8_dp2_ep2_tp2": (2, 2, 2),
}

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def make(axes=DEFAULT_AXES):
    gate = Gate(k=3, num_groups=4, topk_groups=2, route_scale=2.5)
    return MoE(
        FEATURES,
        8,
        num_experts=EXPERTS,
        gate=gate,
        num_shared=1,
        axes=axes,
        rngs=nnx.Rngs(0),
    )


def on_mesh(shape, kind):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, ("data", "expert", "tensor"), axis_types=(kind,) * 3, devices=devices)


@functools.cache
def parameters():
    return random_modules.random_values(make)


def on_current_mesh(axes=DEFAULT_AXES):
    return random_modules.build(lambda: make(axes), parameters())


def run(moe, x):
    """Output, load, and gradients by all parameters and the input."""

    @nnx.jit
    def step(moe, x):
        def loss(moe, x):
            out, load = moe.with_load(x)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)), (out, load)

        grads, (out, load) = nnx.grad(loss, argnums=(0, 1), has_aux=True)(moe, x)
        return out, load, grads

    out, load, (to_parameters, to_x) = step(moe, x)
    named = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(to_parameters)}
    return jax.device_get((out, load, named | {"x": to_x}))


@functools.cache
def on_one_device(tokens):
    return run(on_current_mesh(), inputs(tokens))


def inputs(tokens):
    return np.asarray(jax.random.normal(jax.random.key(1), (2, tokens, FEATURES)))


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        *[pytest.param(mesh, EXPLICIT, id=f"{mesh}_explicit") for mesh in MESHES],
        pytest.param("n8_dp2_ep2_tp2", AUTO, id="n8_dp2_ep2_tp2_auto"),
        *[pytest.param(mesh, AUTO, id=f"{mesh}_auto", marks=pytest.mark.slow) for mesh in list(MESHES)[:-1]],
    ],
)
def test_forward_and_gradients(mesh, kind):
    """Bitwise the same load; values up to the order in which products and the tensor axis are summed.

    7 tokens a sequence: on most meshes some have to be filled up with tokens that choose nothing.
    """
    want, want_load, want_grads = on_one_device(7)
    with jax.set_mesh(on_mesh(MESHES[mesh], kind)):
        moe = on_current_mesh()
        out, load, grads = run(moe, inputs(7))
    np.testing.assert_array_equal(load, want_load)
    np.testing.assert_allclose(out, want, atol=2e-6)
    for name, value in grads.items():
        np.testing.assert_allclose(value, want_grads[name], atol=1e-5, err_msg=name)


def test_experts_are_where_they_belong():
    with jax.set_mesh(on_mesh((2, 2, 2), EXPLICIT)):
        moe = on_current_mesh()
    assert {shard.data.shape for shard in moe.gate[...].addressable_shards} == {(4, FEATURES, 4)}
    assert {shard.data.shape for shard in moe.down[...].addressable_shards} == {(4, 4, FEATURES)}
    assert moe.router[...].sharding.is_fully_replicated


def test_axes_have_the_users_names():
    mesh = jax.make_mesh((2, 2), ("nodes", "cards"), axis_types=(EXPLICIT,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        moe = on_current_mesh(MeshAxes(data="nodes", expert="cards", tensor="none"))
        out, load, _ = run(moe, inputs(7))
    assert {shard.data.shape[0] for shard in moe.gate[...].addressable_shards} == {EXPERTS // 2}
    want, want_load, _ = on_one_device(7)
    np.testing.assert_array_equal(load, want_load)
    np.testing.assert_allclose(out, want, atol=2e-6)


def test_tokens_and_not_weights_travel():
    """Experts are exchanged with all-to-all; no collective moves as much as one device's experts hold."""
    with jax.set_mesh(on_mesh((1, 8, 1), EXPLICIT)):
        moe = on_current_mesh()
        graphdef, state = nnx.split(moe)
        x = jax.device_put(inputs(8), jax.NamedSharding(jax.sharding.get_mesh(), jax.P()))
        compiled = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(state, x).compile().as_text()
    assert "all-to-all" in compiled
    assert f"f32[{EXPERTS},{FEATURES},8]" not in compiled  # all experts' kernels, in one place


def test_indivisible_experts_are_an_error():
    with (
        jax.set_mesh(on_mesh((1, 8, 1), EXPLICIT)),
        pytest.raises(
            errors.HardwareConstraintError,
            match=r"dimension 0 .* does not split over 8 devices .*6 is no multiple of 8",
        ),
    ):
        MoE(FEATURES, 8, num_experts=6, gate=Gate(k=2), rngs=nnx.Rngs(0))
