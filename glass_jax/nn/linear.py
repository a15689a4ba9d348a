"""Layers that are one matrix product or two: ``Linear`` and the gated feed-forward layer ``SwiGLU``."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from glass_jax.nn.mesh import DEFAULT_AXES, MeshAxes, Role, parameter
from glass_jax.primitives.gemm import gemm
from glass_jax.primitives.swiglu import swiglu

default_kernel_init = nnx.initializers.lecun_normal()
default_stacked_init = nnx.initializers.lecun_normal(batch_axis=0)  # of several kernels, ``[heads or experts, K, N]``


class Linear(nnx.Module):
    """``x @ kernel`` by :func:`glass_jax.gemm`, without a bias.

    Args:
      in_features: K, size of the last dimension of the input.
      out_features: N, size of the last dimension of the output.
      roles: what splits K and N of the kernel. ``(None, "tensor")`` splits the output, ``("tensor", None)`` the sum,
        which so ends in an all-reduce.
      dtype: type that is computed in; None: the input's.
      param_dtype: type of the kernel.
      kernel_init: initializer of the kernel.
      axes: mesh axes by role.
      rngs: random keys, ``params``.

    Attributes:
      kernel: ``[K, N]``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        roles: tuple[Role, Role] = (None, None),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable = default_kernel_init,
        axes: MeshAxes = DEFAULT_AXES,
        rngs: nnx.Rngs,
    ):
        self.dtype = dtype
        self.kernel = parameter(kernel_init, rngs, (in_features, out_features), param_dtype, axes, *roles)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., M, K]`` to ``[..., M, N]``."""
        dtype = self.dtype or x.dtype
        return gemm(x.astype(dtype), self.kernel[...].astype(dtype))


class SwiGLU(nnx.Module):
    """The feed-forward layer ``(silu(x @ gate) * (x @ up)) @ down`` (Shazeer, arXiv:2002.05202).

    On a mesh, hidden features are split over the tensor axis: one all-reduce at the end.

    Args:
      features: size of input and output.
      hidden_features: size between.
      dtype: type that is computed in; None: the input's.
      param_dtype: type of the kernels.
      kernel_init: initializer of the kernels.
      axes: mesh axes by role.
      rngs: random keys, ``params``.

    Attributes:
      gate, up: :class:`Linear`, ``[features, hidden_features]``.
      down: :class:`Linear`, ``[hidden_features, features]``.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable = default_kernel_init,
        axes: MeshAxes = DEFAULT_AXES,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init, "axes": axes, "rngs": rngs}
        self.gate = Linear(features, hidden_features, roles=(None, "tensor"), **options)
        self.up = Linear(features, hidden_features, roles=(None, "tensor"), **options)
        self.down = Linear(hidden_features, features, roles=("tensor", None), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., M, features]`` to the same shape."""
        return self.down(swiglu(self.gate(x), self.up(x)))
