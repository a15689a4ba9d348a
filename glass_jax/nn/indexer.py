"""The indexer of DeepSeek sparse attention (DeepSeek-V3.2): it chooses the tokens that each token attends to.

A few small heads score every pair of tokens, ``sum_h w_h * relu(q_h . k)``, and the largest scores win. The published
model turns queries and keys by a Hadamard matrix before it rounds them to 8 bits; that alone changes no score, and here
nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from glass_jax.nn import rope
from glass_jax.nn.linear import Linear, default_kernel_init
from glass_jax.nn.mesh import DEFAULT_AXES, MeshAxes
from glass_jax.nn.normalization import LayerNorm
from glass_jax.primitives.mqa_logits import mqa_logits
from glass_jax.primitives.topk import NO_INDEX, topk


class Indexer(nnx.Module):
    """Scores and choices of tokens, causal.

    On a mesh, heads are split over the tensor axis: one all-reduce of the scores.

    Args:
      features: size of the input.
      q_lora_rank: size of the latent of queries, which the attention has too.
      num_heads: H.
      head_dim: D, features of a head's queries and of the keys, which the heads share.
      qk_rope_head_dim: of those, the first so many are rotated.
      topk: how many tokens are chosen.
      rope_theta: base of the rotation's frequencies.
      yarn: the extension of the context, or None.
      rope_interleave: neighbouring features are rotated together, see :func:`glass_jax.nn.rope.rotate`.
      dtype: type that is computed in; None: the input's.
      param_dtype: type of the parameters.
      kernel_init: initializer of the kernels.
      axes: mesh axes by role.
      rngs: random keys, ``params``.

    Attributes:
      q: :class:`Linear`, from the latent of queries to the H heads' queries.
      k: :class:`Linear`, from the input to the keys.
      k_norm: :class:`LayerNorm` of the keys.
      weights: :class:`Linear`, from the input to the weight of each head.
    """

    def __init__(
        self,
        features: int,
        *,
        q_lora_rank: int,
        num_heads: int = 64,
        head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        topk: int = 2048,
        rope_theta: float = 10000.0,
        yarn: rope.YaRN | None = None,
        rope_interleave: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable = default_kernel_init,
        axes: MeshAxes = DEFAULT_AXES,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.head_dim, self.rope_features, self.topk = num_heads, head_dim, qk_rope_head_dim, topk
        self.rope_theta, self.yarn, self.rope_interleave = rope_theta, yarn, rope_interleave
        self.score_scale = (num_heads * head_dim) ** -0.5
        options = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init, "axes": axes, "rngs": rngs}
        self.q = Linear(q_lora_rank, num_heads * head_dim, roles=(None, "tensor"), **options)
        self.k = Linear(features, head_dim, **options)
        self.k_norm = LayerNorm(head_dim, param_dtype=param_dtype)
        self.weights = Linear(features, num_heads, roles=(None, "tensor"), **options)

    def __call__(
        self,
        x: jax.Array,
        q_latent: jax.Array,
        positions: jax.Array | None = None,
        keys: jax.Array | None = None,
        *,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """The tokens that each token attends to, itself and those before it among them; not differentiable.

        Args:
          x: ``[B, S, features]``.
          q_latent: ``[B, S, q_lora_rank]``, what queries come from.
          positions: int32 ``[B, S]``, what the rotation is by; None: 0, 1, 2 and so on.
          keys: what :meth:`keys` returns for ``x``, where it is there already.
          segment_ids: int32 ``[B, S]``: tokens choose among those of the same number. None: among all.

        Returns:
          int32 ``[B, S, min(topk, S)]``, numbers of tokens of the same sequence in no particular order; 2**31 - 1 where
          a token has fewer before it, and everywhere where it sees a NaN.
        """
        scores = self.scores(x, q_latent, positions, keys, segment_ids=segment_ids)
        return self.choose(scores, *seen(x.shape[:2], segment_ids))[0]

    def scores(
        self,
        x: jax.Array,
        q_latent: jax.Array,
        positions: jax.Array | None = None,
        keys: jax.Array | None = None,
        *,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """The scores of all pairs, float32 ``[B, S, S]``: what an indexer is trained by.

        Arguments are those of :meth:`__call__`; differentiable. Of later tokens and other segments they are -inf.
        """
        if positions is None:
            positions = seen(x.shape[:2])[1] - 1
        keys = self.keys(x, positions) if keys is None else keys
        scores = self.score(*self.queries(x, q_latent, positions), keys, *seen(x.shape[:2], segment_ids))
        if segment_ids is None:
            return scores
        return jnp.where(_same(segment_ids), scores, -jnp.inf)  # of others may lie between those of a segment

    @staticmethod
    def score(q: jax.Array, weights: jax.Array, keys: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
        """Scores ``[B, S, n]`` of ``keys`` ``[B, n, D]`` from ``starts`` to ``ends`` ``[B, S]``, -inf for others."""
        return mqa_logits(q.astype(keys.dtype), keys, None, weights, starts, ends)

    def queries(self, x: jax.Array, q_latent: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries ``[B, S, H, D]``, and the heads' weights, float32 ``[B, S, H]``."""
        q = self.q(q_latent)
        q = self._rotate(q.reshape(*q.shape[:2], self.num_heads, -1), positions[:, :, None])
        return q, self.weights(x).astype(jnp.float32) * self.score_scale

    def keys(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """The key of each token, ``[B, S, D]``: what a cache holds for later ones."""
        return self._rotate(self.k_norm(self.k(x)), positions)

    def choose(self, scores: jax.Array, starts: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The tokens of the largest scores ``[..., n]`` from ``starts`` to ``ends`` ``[...]``; as :meth:`__call__`.

        Returns:
          Their numbers, int32 ``[..., min(topk, n)]``, none of a score of -inf; and, bool ``[...]``, whether a NaN is
          among the scores, so that there are none.
        """
        k = min(self.topk, scores.shape[-1])
        values, chosen = topk(lax.stop_gradient(scores), k, start=starts, end=ends)
        return jnp.where(jnp.isneginf(values), NO_INDEX, chosen), jnp.isnan(values[..., 0])

    def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        turned, rest = jnp.split(x, [self.rope_features], axis=-1)
        turned = rope.embed(turned, positions, theta=self.rope_theta, yarn=self.yarn, interleave=self.rope_interleave)
        return jnp.concatenate([turned, rest], -1)


def seen(shape: tuple[int, int], segment_ids: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The first token that each one of ``[B, S]`` sees, of its own segment, and the first after those: int32."""
    ends = jnp.broadcast_to(jnp.arange(1, shape[1] + 1, dtype=jnp.int32), shape)
    if segment_ids is None:
        return jnp.zeros_like(ends), ends
    return jnp.argmax(_same(segment_ids), axis=-1).astype(jnp.int32), ends


def _same(segment_ids: jax.Array) -> jax.Array:
    """Which pairs of tokens have the same number, bool ``[B, S, S]``."""
    return segment_ids[:, :, None] == segment_ids[:, None, :]
