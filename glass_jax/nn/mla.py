"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads from one short latent row.

With ``c`` the latent of a token and ``r`` its rotated key, shared by the heads, head h has the key ``[c @ k_up[h], r]``
and the value ``c @ v_up[h]``. The plain form computes them, and attention on them. The absorbed form turns that around,

    q_nope . (c @ k_up[h]) + q_pe . r  =  [q_nope @ k_up[h].T, q_pe] . [c, r]
    sum(p * (c @ v_up[h]))             =  sum(p * c) @ v_up[h]

so that attention is on the rows ``[c, r]`` themselves, which is all that the cache holds. With an indexer attention is
sparse (DeepSeek-V3.2): on the rows that it chose, in the absorbed form.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from glass_jax import errors
from glass_jax.nn import latent_cache, rope
from glass_jax.nn.indexer import Indexer, seen
from glass_jax.nn.linear import Linear, default_kernel_init, default_stacked_init
from glass_jax.nn.mesh import DEFAULT_AXES, MeshAxes, Role, parameter
from glass_jax.nn.normalization import RMSNorm
from glass_jax.primitives.gemm import gemm
from glass_jax.primitives.mla_decode import mla_decode
from glass_jax.primitives.mla_prefill import mla_prefill
from glass_jax.primitives.sparse_mla_prefill import sparse_mla_prefill

Cached = jax.Array | tuple[jax.Array, jax.Array]
"""What a cache holds: rows of latents; with an indexer, also its keys."""

_BY_HEAD: tuple[Role, ...] = ("batch", None, "tensor", None)
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
      indexer: of the same ``features`` and ``q_lora_rank``: each token attends to those that it chooses. A sequence no
        longer than its ``topk`` is attended to as without it. None: to all before it.
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

    Raises:
      HardwareConstraintError: (a ValueError) an indexer without a ``q_lora_rank``.
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
        indexer: Indexer | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable = default_kernel_init,
        up_init: Callable = default_stacked_init,
        axes: MeshAxes = DEFAULT_AXES,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.rope_features, self.latent_features = num_heads, qk_rope_head_dim, kv_lora_rank
        self.rope_theta, self.yarn, self.rope_interleave = rope_theta, yarn, rope_interleave
        self.dtype, self.axes, self.indexer = dtype, axes, indexer
        if indexer is not None and q_lora_rank is None:
            raise errors.HardwareConstraintError("MLA: an indexer scores the latent of queries; pass q_lora_rank, too")
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
    ) -> tuple[jax.Array, Cached]:
        """As :meth:`__call__`; returns also the rows ``[B, S, C + R]`` that belong in the cache.

        With an indexer those are two arrays, the second one of its keys.
        """
        x = self.axes.constrain(x, "batch", None, None)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        q_latent, kept = self._query_latent(x), self._kept(x, positions)
        rows, keys = (kept, None) if self.indexer is None else kept
        q_nope, q_pe = self._queries(q_latent, positions)
        if self.indexer is None or x.shape[1] <= self.indexer.topk:
            out = self._plain(q_nope, q_pe, rows, segment_ids)
        else:
            scores = self.indexer.scores(x, q_latent, positions, keys, segment_ids=segment_ids)
            chosen, poisoned = self.indexer.choose(scores, *seen(x.shape[:2], segment_ids))
            out = jax.vmap(self._attend)(self._absorbed(q_nope, q_pe), rows[:, :, None], chosen[:, :, None])
            out = self._by_head(_nan_where(poisoned, out), self.v_up, transpose=False)
        return self.out(out.reshape(*x.shape[:2], -1)), kept

    def _plain(self, q_nope: jax.Array, q_pe: jax.Array, rows: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Attention of each token to all before it: ``[B, S, H, v]``."""
        latent, k_pe = jnp.split(rows, [self.latent_features], axis=-1)
        k_nope, v = self._expand(latent, self.k_up), self._expand(latent, self.v_up)
        k_pe = jnp.broadcast_to(k_pe[:, :, None], (*k_nope.shape[:3], self.rope_features))
        q = jnp.concatenate([q_nope, q_pe], axis=-1)
        k = jnp.concatenate([k_nope, self.axes.constrain(k_pe, "batch", None, "tensor", None)], axis=-1)
        return mla_prefill(q, k, v, softmax_scale=self.softmax_scale, segment_ids=segment_ids)[0]

    def decode(
        self,
        x: jax.Array,
        cache: Cached,
        block_table: jax.Array,
        lengths: jax.Array,
        *,
        valid: jax.Array | None = None,
    ) -> tuple[jax.Array, Cached]:
        """Attention of new tokens to themselves and what the cache holds, in the absorbed form.

        Args:
          x: ``[B, S, features]``, the next tokens of each sequence.
          cache: from :meth:`empty_cache`.
          block_table: int32 ``[B, n]``, the pages of each sequence in order, with room for the new tokens.
          lengths: int32 ``[B]``, tokens of each sequence that the cache holds; -1: the sequence does not exist.
          valid: bool ``[B, S]``, which of ``x`` are new tokens, where sequences have not all as many: those of one
            follow each other, and the others fill up. None: all are.

        Returns:
          ``[B, S, features]``, zero of what is no token of a sequence; and the cache with the new tokens. A token that
          has no place there, its page being beyond the table or none of the cache, is not stored, and its result, and
          that of later ones, is NaN.

        Raises:
          HardwareConstraintError: the sequences do not split over the mesh as the pages do.
        """
        batch, new, _ = x.shape
        x = self.axes.constrain(x, "batch", None, None)
        valid = jnp.ones((batch, new), bool) if valid is None else valid
        earlier = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
        positions = jnp.where(valid & (lengths[:, None] >= 0), lengths[:, None] + earlier, -1)
        q_latent = self._query_latent(x)
        cache = self.store(cache, self._kept(x, positions), block_table, positions)
        q = self._absorbed(*self._queries(q_latent, positions))
        if self.indexer is None:
            out = self._over_all(q, cache, block_table, positions)
        else:
            out = self._over_chosen(q, self.indexer.queries(x, q_latent, positions), cache, block_table, positions)
        out = self._by_head(out, self.v_up, transpose=False)
        return self.out(out.reshape(batch, new, -1)), cache

    def _over_all(self, q: jax.Array, cache: jax.Array, block_table: jax.Array, positions: jax.Array) -> jax.Array:
        """Attention of queries ``[B, S, H, C + R]`` over all that the cache holds: ``[B, S, H, C]``."""

        def attend(cache, block_table, q, ends):
            here = ends <= latent_cache.room(cache, block_table)[:, None]
            exists = here & (ends > 0)
            # The last queries see all tokens, the one before all but one: those that exist have to be the last.
            order = jnp.argsort(exists, axis=1, stable=True)
            out, _ = mla_decode(
                _reordered(q, order).astype(cache.dtype),
                cache,
                block_table,
                jnp.max(jnp.where(exists, ends, 0), axis=1),
                head_dim_v=self.latent_features,
                softmax_scale=self.softmax_scale,
                causal=True,
            )
            out = _reordered(out.astype(q.dtype), jnp.argsort(order, axis=1))
            return _nan_where(~here, jnp.where(exists[..., None, None], out, 0))

        operands = (q, _BY_HEAD), (positions + 1, ("batch", None))
        return latent_cache.on_each_device(attend, cache, block_table, *operands, result=_BY_HEAD, axes=self.axes)

    def _over_chosen(
        self,
        q: jax.Array,
        index_queries: tuple[jax.Array, jax.Array],
        cache: tuple[jax.Array, jax.Array],
        block_table: jax.Array,
        positions: jax.Array,
    ) -> jax.Array:
        """The same over what the indexer chooses of it."""
        tensor = self.axes.of("tensor")  # over which its heads are split

        def attend(cache, block_table, keys, q, index_q, weights, ends):
            here = ends <= latent_cache.room(cache, block_table)[:, None]
            bounds = jnp.zeros_like(ends), jnp.where(here, ends, 0)
            scores = self.indexer.score(index_q, weights, latent_cache.of_sequences(keys, block_table), *bounds)
            scores = jax.lax.psum(scores, tensor) if tensor else scores
            chosen, poisoned = self.indexer.choose(scores, *bounds)
            rows = latent_cache.places(cache, block_table, chosen.reshape(len(q), -1))
            out = self._attend(
                q.reshape(-1, *q.shape[2:]).astype(cache.dtype),
                cache.reshape(-1, 1, cache.shape[-1]),
                rows.reshape(q.shape[0] * q.shape[1], 1, -1),
            )
            return _nan_where(poisoned | ~here, out.reshape(*q.shape[:3], -1).astype(q.dtype))

        latents, keys = cache
        index_q, weights = index_queries
        operands = (
            (keys, latent_cache.PAGES),
            (q, _BY_HEAD),
            (index_q, _BY_HEAD),
            (weights, _BY_HEAD[:3]),
            (positions + 1, ("batch", None)),
        )
        return latent_cache.on_each_device(attend, latents, block_table, *operands, result=_BY_HEAD, axes=self.axes)

    def empty_cache(self, pages: int, page_size: int, dtype: DTypeLike) -> Cached:
        """A cache that holds nothing, ``[pages, page_size, 1, C + R]``; with an indexer, also one of its keys.

        On a mesh it is split, see :mod:`glass_jax.nn.latent_cache`.
        """
        cache = latent_cache.empty(pages, page_size, self.latent_features + self.rope_features, dtype, self.axes)
        if self.indexer is None:
            return cache
        return cache, latent_cache.empty(pages, page_size, self.indexer.head_dim, dtype, self.axes)

    def store(self, cache: Cached, rows: Cached, block_table: jax.Array, positions: jax.Array) -> Cached:
        """``cache`` with the rows of new tokens.

        Args:
          cache: from :meth:`empty_cache`.
          rows: ``[B, S, C + R]``, from :meth:`prefill`, which gives two of them with an indexer.
          block_table: int32 ``[B, n]``, the pages of each sequence in order.
          positions: int32 ``[B, S]``, where in its sequence each token is; -1: its row is not stored. Nor is that of a
            position beyond the table, or in a page that is none of the cache.
        """
        return jax.tree.map(lambda c, r: latent_cache.write(c, block_table, r, positions, self.axes), cache, rows)

    def _attend(self, q: jax.Array, rows: jax.Array, chosen: jax.Array) -> jax.Array:
        """Attention of queries ``[S, H, C + R]`` to the ``rows`` ``[N, 1, C + R]`` chosen for each: ``[S, H, C]``."""
        options = {"head_dim_v": self.latent_features, "softmax_scale": self.softmax_scale}
        return sparse_mla_prefill(q, rows, chosen, **options)[0]

    def _absorbed(self, q_nope: jax.Array, q_pe: jax.Array) -> jax.Array:
        """Queries of the absorbed form, ``[B, S, H, C + R]``."""
        return jnp.concatenate([self._by_head(q_nope, self.k_up, transpose=True), q_pe], axis=-1)

    def _query_latent(self, x: jax.Array) -> jax.Array:
        """What queries come from: their latent, or the input itself."""
        return self.q_norm(self.q_down(x)) if hasattr(self, "q_down") else x

    def _queries(self, latent: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The part of the queries that is not rotated, ``[B, S, H, nope]``, and the rotated one ``[B, S, H, R]``."""
        q = self.q(latent)
        q = q.reshape(*q.shape[:2], self.num_heads, -1)
        q_nope, q_pe = jnp.split(q, [q.shape[-1] - self.rope_features], axis=-1)
        return q_nope, self._rotate(q_pe, positions[:, :, None])

    def _kept(self, x: jax.Array, positions: jax.Array) -> Cached:
        """What a cache holds of the tokens: ``[latent, rotated key]``, ``[B, S, C + R]``; the indexer's keys."""
        latent, k_pe = jnp.split(self.kv_down(x), [self.latent_features], axis=-1)
        rows = jnp.concatenate([self.kv_norm(latent), self._rotate(k_pe, positions)], axis=-1)
        return rows if self.indexer is None else (rows, self.indexer.keys(x, positions))

    def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return rope.embed(x, positions, theta=self.rope_theta, yarn=self.yarn, interleave=self.rope_interleave)

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


def _reordered(x: jax.Array, order: jax.Array) -> jax.Array:
    """``x`` ``[B, S, H, n]`` with the tokens of each sequence in ``order`` ``[B, S]``."""
    return x if x.shape[1] == 1 else jnp.take_along_axis(x, order[..., None, None], axis=1)


def _nan_where(lost: jax.Array, x: jax.Array) -> jax.Array:
    """``x`` ``[B, S, H, n]``, NaN, its derivative too, for the tokens ``lost`` ``[B, S]``."""
    return x * jnp.where(lost, jnp.nan, 1).astype(x.dtype)[..., None, None]
