"""The small layers, initial parameters and mesh axes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import glass_jax as glass
import random_modules
from glass_jax.nn import MLA, Gate, Linear, MeshAxes, MoE, RMSNorm, SwiGLU


def test_rms_norm():
    norm, x = RMSNorm(6, eps=0.1), np.random.default_rng(0).standard_normal((3, 6))
    norm.scale[...] = jnp.arange(6.0)
    want = np.arange(6) * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 0.1)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), want, atol=1e-6)


def test_swiglu():
    layer, x = SwiGLU(5, 7, rngs=nnx.Rngs(0)), np.random.default_rng(0).standard_normal((2, 3, 5))
    gate, up, down = (np.asarray(part.kernel[...], np.float64) for part in (layer.gate, layer.up, layer.down))
    z = x @ gate
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), (z / (1 + np.exp(-z)) * (x @ up)) @ down, atol=1e-5)


def test_types_of_parameters_and_results():
    layer = Linear(4, 6, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert layer.kernel[...].dtype == jnp.float32
    assert layer(jnp.ones((2, 4))).dtype == jnp.bfloat16
    narrow = Linear(4, 6, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert narrow.kernel[...].dtype == jnp.bfloat16
    assert narrow(jnp.ones((2, 4))).dtype == jnp.float32


def test_initial_kernels_keep_the_scale_of_activations():
    """Kernels of all experts and heads are drawn with the variance of their own inputs, not of a stack."""
    moe = MoE(64, 96, num_experts=4, gate=Gate(k=1, use_bias=False), rngs=nnx.Rngs(0))
    mla = MLA(
        64, num_heads=4, kv_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, rngs=nnx.Rngs(0)
    )
    for kernels, inputs in ((moe.gate, 64), (moe.down, 96), (mla.k_up, 48), (mla.v_up, 48), (mla.q.kernel, 64)):
        assert float(jnp.std(kernels[...])) == pytest.approx(inputs**-0.5, rel=0.1)


def test_modules_split_merge_and_hash():
    """What static arguments of ``jax.jit`` and dictionaries of traces need."""
    modules = [
        random_modules.random_module(lambda: MoE(8, 4, num_experts=2, gate=Gate(k=1), rngs=nnx.Rngs(0)))
        for _ in range(2)
    ]
    graphdef, params, rest = nnx.split(modules[0], nnx.Param, ...)
    assert hash(graphdef) == hash(nnx.split(modules[1], nnx.Param, ...)[0])
    assert len(jax.tree.leaves(rest)) == 1
    out = jax.eval_shape(lambda params: nnx.merge(graphdef, params, rest)(jnp.ones((1, 3, 8))), params)
    assert out.shape == (1, 3, 8)


def test_axes_by_role():
    axes = MeshAxes(data="nodes", tensor="cards")
    assert axes.of("batch") == ()
    mesh = jax.make_mesh((2, 2), ("nodes", "cards"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        assert axes.spec("batch", None, "tensor", "expert") == jax.P("nodes", None, "cards", None)
        assert axes.size("batch") == axes.size("tensor") == 2
        assert axes.size("expert") == 1
        x = axes.constrain(jnp.ones((3, 4)), "batch", "tensor")
        assert x.sharding.spec == jax.P(None, "cards")  # 3 does not divide
        inside = jax.shard_map(lambda x: x * axes.size("tensor"), out_specs=jax.P("nodes"))
        x = jax.sharding.reshard(jnp.ones((2, 2)), jax.P("nodes"))
        np.testing.assert_array_equal(inside(x), np.ones((2, 2)))
    with jax.set_mesh(mesh):
        assert dataclasses.replace(axes, data="x").of("batch") == ()


@pytest.mark.parametrize("name", ["MLA", "MoE", "RMSNorm", "SwiGLU"])
def test_public_names(name):
    assert issubclass(getattr(glass.nn, name), nnx.Module)
