"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads from one short latent row.

With ``c`` the latent of a token and ``r`` its rotated key, shared by the heads, head h has the key ``[c @ k_up[h], r]``
and the value ``c @ v_up[h]``. The plain form computes them, and attention on them. The absorbed form turns that around,

    q_nope . (c @ k_up[h]) + q_pe . r  =  [q_nope @ k_up[h].T, q_pe] . [c, r]
    sum(p * (c @ v_up[h]))             =  sum(p * c) @ v_up[h]

so that attention is on the rows ``[c, r]`` themselves, which is all that the cache holds.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from glass_jax.nn import latent_cache, rope
from glass_jax.nn.linear import Linear, default_kernel_init, default_stacked_init
from glass_jax.nn.mesh import DEFAULT_AXES, MeshAxes, parameter
from glass_jax.nn.normalization import RMSNorm
from glass_jax.primitives.gemm import gemm
from glass_jax.primitives.mla_decode import mla_decode
from glass_jax.primitives.mla_prefill import mla_prefill

_LATENT_EPS = 1e-6  # of the norms of both latents, whatever the other norms of a model have


class MLA(nnx.Module):
    """Multi-head latent attention, causal.

    On a mesh, heads are split over the tensor axis: one all-reduce at the end.

    Args:
      features: size of input and output.
      num_heads: H.
      kv_lora_rank: C, size of the latent of keys and values.
      q_lora_rank: size of the latent of queries; None: queries come straight from the input.
      qk_nope_head_dim: features of a head's queries and keys that are not rotated.
      qk_rope_head_dim: R, features that are.
      v_head_dim: features of a head's values.
      rope_theta: base of the rotation's frequencies.
      yarn: the extension of the context, or None.
      rope_interleave: neighbouring features are rotated together, see :func:`glass_jax.nn.rope.rotate`.
      dtype: type that is computed in; None: the input's.
      param_dtype: type of the parameters.
      kernel_init: initializer of the kernels.
      up_init: initializer of ``k_up`` and ``v_up``.
      axes: mesh axes by role.
      rngs: random keys, ``params``.

    Attributes:
      q: :class:`Linear`, to the H heads' queries ``[nope, rope]``; from the latent of ``q_down`` and ``q_norm``, if
        there is one.
      kv_down: :class:`Linear`, to ``[latent, rope]``.
      kv_norm: :class:`RMSNorm` of the latent.
      k_up, v_up: ``[H, C, qk_nope_head_dim]`` and ``[H, C, v_head_dim]``.
      out: :class:`Linear`, from the heads' results.
    """

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        kv_lora_rank: int = 512,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        rope_theta: float = 10000.0,
        yarn: rope.YaRN | None = None,
        rope_interleave: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable = default_kernel_init,
        up_init: Callable = default_stacked_init,
        axes: MeshAxes = DEFAULT_AXES,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.rope_features, self.latent_features = num_heads, qk_rope_head_dim, kv_lora_rank
        self.rope_theta, self.yarn, self.rope_interleave = rope_theta, yarn, rope_interleave
        self.dtype, self.axes = dtype, axes
        self.softmax_scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 * (yarn.score_scale if yarn else 1.0)

        options = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init, "axes": axes, "rngs": rngs}
        if q_lora_rank is not None:
            self.q_down = Linear(features, q_lora_rank, **options)
            self.q_norm = RMSNorm(q_lora_rank, eps=_LATENT_EPS, param_dtype=param_dtype)
        query_features = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        self.q = Linear(q_lora_rank or features, query_features, roles=(None, "tensor"), **options)
        self.kv_down = Linear(features, kv_lora_rank + qk_rope_head_dim, **options)
        self.kv_norm = RMSNorm(kv_lora_rank, eps=_LATENT_EPS, param_dtype=param_dtype)
        up_shapes = ((num_heads, kv_lora_rank, size) for size in (qk_nope_head_dim, v_head_dim))
        self.k_up, self.v_up = (
            parameter(up_init, rngs, shape, param_dtype, axes, "tensor", None, None) for shape in up_shapes
        )
        self.out = Linear(num_heads * v_head_dim, features, roles=("tensor", None), **options)

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, *, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Attention of each token to itself and those before it, in the plain form.

        Args:
          x: ``[B, S, features]``.
          positions: int32 ``[B, S]``, what the rotation is by; None: 0, 1, 2 and so on.
          segment_ids: int32 ``[B, S]``: tokens attend only to those of the same number. None: to all.

        Returns:
          ``[B, S, features]``.
        """
        return self.prefill(x, positions, segment_ids=segment_ids)[0]

    def prefill(
        self, x: jax.Array, positions: jax.Array | None = None, *, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """As :meth:`__call__`; returns also the rows ``[B, S, C + R]`` that belong in the cache."""
        x = self.axes.constrain(x, "batch", None, None)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        q_nope, q_pe = self._queries(x, positions)
        rows = self._rows(x, positions)
        latent, k_pe = jnp.split(rows, [self.latent_features], axis=-1)
        k_nope, v = self._expand(latent, self.k_up), self._expand(latent, self.v_up)
        k_pe = jnp.broadcast_to(k_pe[:, :, None], (*k_nope.shape[:3], self.rope_features))
        q = jnp.concatenate([q_nope, q_pe], axis=-1)
        k = jnp.concatenate([k_nope, self.axes.constrain(k_pe, "batch", None, "tensor", None)], axis=-1)
        out, _ = mla_prefill(q, k, v, softmax_scale=self.softmax_scale, segment_ids=segment_ids)
        return self.out(out.reshape(*x.shape[:2], -1)), rows

    def decode(
        self, x: jax.Array, cache: jax.Array, block_table: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Attention of new tokens to themselves and what the cache holds, in the absorbed form.

        Args:
          x: ``[B, S, features]``, the next S tokens of each sequence.
          cache: from :meth:`empty_cache`.
          block_table: int32 ``[B, n]``, the pages of each sequence in order, with room for the new tokens.
          lengths: int32 ``[B]``, tokens of each sequence that the cache holds; -1: the sequence does not exist, and its
            result is zero.

        Returns:
          ``[B, S, features]``, and the cache with the new tokens.

        Raises:
          HardwareConstraintError: the sequences do not split over the mesh as the pages do.
        """
        batch, new, _ = x.shape
        x = self.axes.constrain(x, "batch", None, None)
        positions = jnp.where(lengths[:, None] < 0, -1, lengths[:, None] + jnp.arange(new, dtype=jnp.int32))
        q_nope, q_pe = self._queries(x, positions)
        cache = self.store(cache, self._rows(x, positions), block_table, positions)
        q = jnp.concatenate([self._by_head(q_nope, self.k_up, transpose=True), q_pe], axis=-1)

        def attend(cache, block_table, q, seen):
            out, _ = mla_decode(
                q.astype(cache.dtype),
                cache,
                block_table,
                seen,
                head_dim_v=self.latent_features,
                softmax_scale=self.softmax_scale,
                causal=True,
            )
            return out.astype(q.dtype)

        by_head = ("batch", None, "tensor", None)
        operands = (q, by_head), (positions[:, -1] + 1, ("batch",))
        out = latent_cache.on_each_device(attend, cache, block_table, *operands, result=by_head, axes=self.axes)
        out = self._by_head(out, self.v_up, transpose=False)
        return self.out(out.reshape(batch, new, -1)), cache

    def empty_cache(self, pages: int, page_size: int, dtype: DTypeLike) -> jax.Array:
        """A cache that holds nothing, ``[pages, page_size, 1, C + R]``.

        On a mesh it is split, see :mod:`glass_jax.nn.latent_cache`.
        """
        return latent_cache.empty(pages, page_size, self.latent_features + self.rope_features, dtype, self.axes)

    def store(self, cache: jax.Array, rows: jax.Array, block_table: jax.Array, positions: jax.Array) -> jax.Array:
        """``cache`` with the rows of new tokens.

        Args:
          cache: from :meth:`empty_cache`.
          rows: ``[B, S, C + R]``, from :meth:`prefill`.
          block_table: int32 ``[B, n]``, the pages of each sequence in order.
          positions: int32 ``[B, S]``, where in its sequence each token is; -1: its row is not stored.
        """
        return latent_cache.write(cache, block_table, rows, positions, self.axes)

    def _queries(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The part of the queries that is not rotated, ``[B, S, H, nope]``, and the rotated one ``[B, S, H, R]``."""
        if hasattr(self, "q_down"):
            x = self.q_norm(self.q_down(x))
        q = self.q(x)
        q = q.reshape(*q.shape[:2], self.num_heads, -1)
        q_nope, q_pe = jnp.split(q, [q.shape[-1] - self.rope_features], axis=-1)
        return q_nope, self._rotate(q_pe, positions[:, :, None])

    def _rows(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """``[latent, rotated key]`` of each token: ``[B, S, C + R]``."""
        latent, k_pe = jnp.split(self.kv_down(x), [self.latent_features], axis=-1)
        return jnp.concatenate([self.kv_norm(latent), self._rotate(k_pe, positions)], axis=-1)

    def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        angles = positions[..., None] * rope.frequencies(self.rope_features, self.rope_theta, self.yarn)
        scale = self.yarn.rotation_scale if self.yarn else 1.0
        return rope.rotate(x, angles, interleave=self.rope_interleave, scale=scale)

    def _expand(self, latent: jax.Array, up: nnx.Param) -> jax.Array:
        """Keys or values of all heads, ``[B, S, H, n]``, from latents ``[B, S, C]``: one product."""
        kernel = up[...].astype(latent.dtype).transpose(1, 0, 2).reshape(self.latent_features, -1)
        out = gemm(latent, kernel)
        return out.reshape(*out.shape[:2], self.num_heads, -1)

    def _by_head(self, x: jax.Array, up: nnx.Param, *, transpose: bool) -> jax.Array:
        """``x`` ``[B, S, H, k]`` times each head's own matrix: ``[B, S, H, n]``."""
        batch, new, heads, _ = x.shape
        x = x.transpose(2, 0, 1, 3).reshape(heads, batch * new, -1)
        out = gemm(x, up[...].astype(x.dtype), transpose_rhs=transpose)
        return out.reshape(heads, batch, new, -1).transpose(1, 2, 0, 3)
