"""Mixture of experts, as in DeepSeek-V2 (arXiv:2405.04434), V3 (arXiv:2412.19437) and V4."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from glass_jax.nn import experts
from glass_jax.nn.linear import SwiGLU, default_kernel_init, default_stacked_init
from glass_jax.nn.mesh import DEFAULT_AXES, MeshAxes, parameter
from glass_jax.primitives.gemm import gemm
from glass_jax.primitives.moe_gate import moe_gate


class GateBias(nnx.Variable):
    """What a gate adds to the scores of experts when it chooses; no gradient trains it, see :meth:`MoE.update_bias`."""


@dataclasses.dataclass(frozen=True)
class Gate:
    """How tokens choose experts: the options of :func:`glass_jax.moe_gate`.

    Attributes:
      k: experts that a token chooses.
      score: ``"softmax"`` (V2), ``"sigmoid"`` (V3) or ``"sqrt_softplus"`` (V4).
      num_groups: groups of experts.
      topk_groups: how many groups a token may choose experts of.
      route_scale: what the weights of the chosen experts are multiplied by.
      renormalize: divide a token's weights by their sum.
      use_bias: the gate has a bias by expert, which balances their load without a loss (arXiv:2408.15664).
    """

    k: int
    score: str = "sigmoid"
    num_groups: int = 1
    topk_groups: int = 1
    route_scale: float = 1.0
    renormalize: bool = True
    use_bias: bool = True

    def choose(self, logits: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Weights and indices, each ``[..., k]``, from ``logits`` ``[..., E]`` and ``bias`` ``[E]``."""
        return moe_gate(
            logits,
            bias,
            k=self.k,
            score=self.score,
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            route_scale=self.route_scale,
            renormalize=self.renormalize,
        )


class MoE(nnx.Module):
    """A sum of the experts that a gate chooses for each token, and of shared ones that all tokens have.

    On a mesh tokens are split over the data and expert axes, experts over the expert axis, and their hidden features
    over the tensor axis: tokens travel to their experts (:mod:`glass_jax.sharding.expert_parallel`), none is dropped,
    and the result is the same as without a mesh, up to the order of sums over the tensor axis.

    Args:
      features: size of input and output.
      expert_features: hidden size of an expert.
      num_experts: E, experts to choose from.
      gate: how they are chosen.
      num_shared: shared experts; together they are one :class:`SwiGLU` of so many times the hidden size.
      dtype: type that is computed in; None: the input's. The gate is always float32.
      param_dtype: type of the parameters; the gate's are float32.
      kernel_init: initializer of the kernels of gate and shared experts.
      expert_init: initializer of the routed experts' kernels.
      axes: mesh axes by role.
      rngs: random keys, ``params``.

    Attributes:
      rule: ``gate``, as it was given.
      router: ``[features, E]`` float32.
      bias: :class:`GateBias`, ``[E]`` float32, or None.
      gate, up: ``[E, features, expert_features]``.
      down: ``[E, expert_features, features]``.
      shared: :class:`SwiGLU`, or None.
    """

    def __init__(
        self,
        features: int,
        expert_features: int,
        *,
        num_experts: int,
        gate: Gate,
        num_shared: int = 0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable = default_kernel_init,
        expert_init: Callable = default_stacked_init,
        axes: MeshAxes = DEFAULT_AXES,
        rngs: nnx.Rngs,
    ):
        self.num_experts, self.rule, self.dtype, self.axes = num_experts, gate, dtype, axes
        self.router = parameter(kernel_init, rngs, (features, num_experts), jnp.float32, axes, None, None)
        self.bias = GateBias(jnp.zeros(num_experts)) if gate.use_bias else None

        def kernel(rows: int, columns: int, *roles: str | None) -> nnx.Param:
            shape = (num_experts, rows, columns)
            return parameter(expert_init, rngs, shape, param_dtype, axes, "expert", *roles)

        self.gate = kernel(features, expert_features, None, "tensor")
        self.up = kernel(features, expert_features, None, "tensor")
        self.down = kernel(expert_features, features, "tensor", None)
        options = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init, "axes": axes, "rngs": rngs}
        self.shared = SwiGLU(features, num_shared * expert_features, **options) if num_shared else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, S, features]`` to the same shape."""
        return self.with_load(x)[0]

    def with_load(self, x: jax.Array, valid: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """As :meth:`__call__`, and how many tokens chose each expert.

        Args:
          x: ``[B, S, features]``.
          valid: bool ``[B, S]``: other tokens, as those that fill up a batch, choose no expert. None: all are.

        Returns:
          ``[B, S, features]``, and int32 ``[E]``, which :meth:`update_bias` and :func:`load_statistics` take.
        """
        dtype = self.dtype or x.dtype
        x = self.axes.constrain(x.astype(dtype), "batch", *[None] * (x.ndim - 1))
        tokens = x.reshape(-1, x.shape[-1])
        mask = jnp.ones(len(tokens), bool) if valid is None else valid.reshape(-1)
        y, load = self._routed(tokens, mask)
        if x.shape[0] % self.axes.size("batch"):  # tokens of one sequence are on several devices: bring them together
            y = self.axes.constrain(y, None, None)[: len(tokens)]
        y = self.axes.constrain(y.reshape(x.shape), "batch", *[None] * (x.ndim - 1))
        return (y if self.shared is None else y + self.shared(x)), load

    def update_bias(self, load: jax.Array, rate: float = 1e-3) -> None:
        """Moves the bias of each expert by ``rate``, up if it had less than the mean load and down if more.

        Args:
          load: int32 ``[E]``, of a training step's batch.
          rate: the step.
        """
        if self.bias is None:
            raise ValueError("this MoE has no bias to update: its gate was made with use_bias=False")
        self.bias[...] = balanced(self.bias[...], load, rate)

    def _routed(self, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The routed experts' part of the result, and their load, on the current mesh.

        The result has rows for all of ``tokens`` ``[T, features]``, and for the ones that they are filled up with to
        divide evenly among the devices.
        """
        bias = None if self.bias is None else self.bias[...]
        parameters = (self.router[...], bias, self.gate[...], self.up[...], self.down[...])
        batch, expert, tensor = (self.axes.of(role) for role in ("batch", "expert", "tensor"))
        if not (batch or tensor):
            return self._on_device(tokens, mask, *parameters)
        if missing := -len(tokens) % self.axes.size("batch"):
            tokens, mask = jnp.pad(tokens, ((0, missing), (0, 0))), jnp.pad(mask, (0, missing))
        tokens, mask = self.axes.constrain(tokens, "batch", None), self.axes.constrain(mask, "batch")

        split, whole = self.axes.spec("batch"), self.axes.spec()
        wide, narrow = self.axes.spec("expert", None, "tensor"), self.axes.spec("expert", "tensor", None)
        return jax.shard_map(
            functools.partial(self._on_device, batch=batch, expert=expert, tensor=tensor),
            in_specs=(split, split, whole, whole, wide, wide, narrow),
            out_specs=(split, whole),
            axis_names={*batch, *tensor},
        )(tokens, mask, *parameters)

    def _on_device(
        self,
        tokens: jax.Array,
        mask: jax.Array,
        router: jax.Array,
        bias: jax.Array | None,
        *kernels: jax.Array,
        batch: tuple[str, ...] = (),
        expert: tuple[str, ...] = (),
        tensor: tuple[str, ...] = (),
    ) -> tuple[jax.Array, jax.Array]:
        """What a device does with its tokens and its part of the parameters, by the Manual axes of each role."""
        weights, indices = self.rule.choose(gemm(tokens.astype(jnp.float32), router), bias)
        indices = jnp.where(mask[:, None], indices, -1)
        y = experts.routed(tokens, indices, weights, kernels, num_experts=self.num_experts, axes=expert)
        if tensor:
            y = jax.lax.psum(y.astype(jnp.float32), tensor).astype(y.dtype)
        load = experts.counts(indices, self.num_experts)
        return y, jax.lax.psum(load, batch) if batch else load


def balanced(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """A gate's ``bias`` ``[..., E]`` one step towards equal ``load`` ``[..., E]`` (arXiv:2408.15664, Algorithm 1)."""
    load = load.astype(jnp.float32)
    return bias + rate * jnp.sign(load.mean(axis=-1, keepdims=True) - load)


def load_statistics(load: jax.Array) -> dict[str, jax.Array]:
    """What there is to say of the load of experts.

    Args:
      load: ``[..., E]``, tokens of each expert.

    Returns:
      ``fractions`` ``[..., E]``: each expert's load as a multiple of the mean; ``max_violation`` ``[...]``: how much
      the busiest expert has above the mean, as a fraction of it; ``unused`` int32 ``[...]``: experts with no token.
    """
    mean = jnp.maximum(jnp.mean(load.astype(jnp.float32), axis=-1, keepdims=True), 1e-20)
    fractions = load / mean
    return {
        "fractions": fractions,
        "max_violation": fractions.max(axis=-1) - 1,
        "unused": jnp.sum(load == 0, axis=-1, dtype=jnp.int32),
    }
