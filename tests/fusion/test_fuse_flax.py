"""Flax modules, nnx and linen: their layers are found, their parameters get their gradients."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from fusing import arrays, operations

import glass_jax as glass

X = arrays((6, 16))[0]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


class Block(nnx.Module):
    """LayerNorm, GELU, Linear, then Linear, LayerNorm, GELU, then Linear and silu of something else."""

    def __init__(self, dtype=None, *, fast=True, bias=True):
        rngs = nnx.Rngs(0)
        options = {"dtype": dtype, "rngs": rngs}
        self.norm = nnx.LayerNorm(16, use_fast_variance=fast, use_bias=bias, use_scale=bias, **options)
        self.up = nnx.Linear(16, 24, use_bias=bias, **options)
        self.middle = nnx.Linear(24, 16, use_bias=bias, **options)
        self.norm2 = nnx.LayerNorm(16, use_fast_variance=fast, **options)
        self.out = nnx.Linear(16, 8, use_bias=bias, **options)

    def __call__(self, x):
        x = self.up(nnx.gelu(self.norm(x)))
        x = nnx.gelu(self.norm2(self.middle(x)))
        return nnx.silu(self.out(jnp.sin(x)))


@pytest.mark.parametrize("fast", [False, True], ids=["two-pass", "fast-variance"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_nnx(fast, bias):
    block = Block(fast=fast, bias=bias)
    fused = glass.fuse(lambda x: block(x))
    assert operations(fused, X) == {"ln_gelu_linear": 1, "linear_ln_gelu": 1, "gemm": 1}
    chex.assert_trees_all_close(fused(X), block(X), **TOLERANCE)


def test_nnx_in_bfloat16():
    block, x = Block(jnp.bfloat16), X.astype(jnp.bfloat16)
    fused = glass.fuse(lambda x: block(x))
    assert operations(fused, x) == {"ln_gelu_linear": 1, "linear_ln_gelu": 1, "gemm": 1}
    chex.assert_trees_all_close(fused(x).astype(jnp.float32), block(x).astype(jnp.float32), rtol=5e-2, atol=5e-2)


def test_gradients_of_an_nnx_module():
    """``nnx.grad`` of a fused loss, and a module as an argument under ``nnx.jit``."""
    block = Block()
    loss = lambda block, x: jnp.mean(block(x) ** 2)  # noqa: E731
    fused = glass.fuse(loss)
    assert operations(lambda x: fused(block, x), X) == {"ln_gelu_linear": 1, "linear_ln_gelu": 1, "gemm": 1}
    chex.assert_trees_all_close(nnx.jit(nnx.grad(fused))(block, X), nnx.jit(nnx.grad(loss))(block, X), **TOLERANCE)


def test_functional_nnx():
    graph, state = nnx.split(Block())
    fn = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    fused = jax.jit(glass.fuse(fn))
    assert operations(fused, state, X) == {"ln_gelu_linear": 1, "linear_ln_gelu": 1, "gemm": 1}
    chex.assert_trees_all_close(fused(state, X), fn(state, X), **TOLERANCE)


class LinenBlock(nn.Module):
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(24, dtype=self.dtype)(nn.gelu(nn.LayerNorm(dtype=self.dtype)(x)))
        x = nn.gelu(nn.LayerNorm(dtype=self.dtype, use_fast_variance=False)(nn.Dense(16, dtype=self.dtype)(x)))
        return nn.relu(nn.Dense(8, dtype=self.dtype, name="out")(jnp.sin(x)))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=str)
def test_linen(dtype):
    module, x = LinenBlock(dtype), X if dtype is None else X.astype(dtype)
    params = module.init(jax.random.key(0), x)
    fused = glass.fuse(module.apply)
    assert operations(fused, params, x) == {"ln_gelu_linear": 1, "linear_ln_gelu": 1, "gemm": 1}
    tolerance = TOLERANCE if dtype is None else {"rtol": 5e-2, "atol": 5e-2}
    wide = lambda v: v.astype(jnp.float32)  # noqa: E731
    chex.assert_trees_all_close(wide(fused(params, x)), wide(module.apply(params, x)), **tolerance)
    report = glass.fuse(module.apply, report=True)(params, x)
    assert [site.within for site in report.sites] == ["LinenBlock/Dense_0", "LinenBlock/Dense_1", "LinenBlock/out"]


def test_linen_scanned_layers():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(16)(nn.gelu(nn.LayerNorm()(x))), None

    scanned = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    params = scanned.init(jax.random.key(0), X, None)
    loss = lambda params: jnp.sum(scanned.apply(params, X, None)[0] ** 2)  # noqa: E731
    assert operations(glass.fuse(loss), params) == {"ln_gelu_linear": 1}
    fused, plain = (jax.jit(jax.grad(f))(params) for f in (glass.fuse(loss), loss))
    chex.assert_trees_all_close(fused, plain, rtol=1e-3, atol=1e-3)


def test_an_unchanged_model_reaches_the_npu():
    """Its layers are sound kernels, and the same on the model of the NPU."""
    block = Block()
    fused = jax.jit(glass.fuse(lambda x: block(x)))
    assert glass.verify(fused, jax.ShapeDtypeStruct(X.shape, X.dtype), chip="950DT") == []
    with glass.configure(implementation="npu_model"):
        chex.assert_trees_all_close(fused(X), block(X), **TOLERANCE)
