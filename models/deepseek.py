"""DeepSeek language models, V2, V3 and V3.2, as Flax nnx modules built of glass operations.

The modules are functional: a call changes nothing in them. A training step is therefore the usual one::

    graphdef, params, rest = nnx.split(model, nnx.Param, ...)      # rest: the gates' biases

    def loss(params, rest, ids):
        model = nnx.merge(graphdef, params, rest)
        logits, load = model.with_load(ids[:, :-1])                # load [layers with experts, E]
        return next_token_loss(logits, ids[:, 1:]), load

    (value, load), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, ids)
    updates, state = optimizer.update(grads, state, params)        # optax
    params = optax.apply_updates(params, updates)
    rest = ...                                                     # nnx.merge, model.update_biases(load), nnx.split

On a mesh, build and call the model under ``jax.set_mesh(mesh)``; ``nnx.jit(lambda: DeepSeek(config, ...))()`` makes
each parameter where it belongs. Activations are split by batch over the data and expert axes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from glass_jax.nn import MLA, Gate, Indexer, Linear, MeshAxes, MoE, RMSNorm, SwiGLU, YaRN
from glass_jax.nn.mesh import DEFAULT_AXES, parameter
from glass_jax.nn.mla import Cached


@dataclasses.dataclass(frozen=True)
class DeepSeekConfig:
    """Sizes of a model, under the names of the published ``config.json`` files.

    Attributes:
      vocab_size: tokens.
      hidden_size: features of a token.
      num_hidden_layers: layers.
      first_k_dense_replace: how many of them, from the first one, have a dense feed-forward layer and no experts.
      intermediate_size: hidden size of a dense feed-forward layer.
      num_attention_heads: heads.
      kv_lora_rank: size of the latent of keys and values.
      q_lora_rank: size of the latent of queries, or None.
      qk_nope_head_dim: features of a head that are not rotated.
      qk_rope_head_dim: features of a head that are.
      v_head_dim: features of a head's values.
      n_routed_experts: experts to choose from.
      n_shared_experts: experts that all tokens have.
      num_experts_per_tok: experts that a token chooses.
      moe_intermediate_size: hidden size of an expert.
      scoring_func: ``"softmax"`` (V2: no bias in the gate, weights as they are) or ``"sigmoid"`` (V3: with a bias).
      n_group: groups of experts.
      topk_group: groups that a token may choose experts of.
      routed_scaling_factor: what the weights of routed experts are multiplied by.
      norm_topk_prob: divide a token's weights by their sum; V3 only.
      rms_norm_eps: of the norms, but those of latents.
      rope_theta: base of the rotation's frequencies.
      rope_interleave: neighbouring features are rotated together.
      yarn: the extension of the context, or None.
      index_topk: tokens that a token attends to, chosen by an indexer (V3.2); None: all before it.
      index_n_heads: heads of the indexer.
      index_head_dim: features of a head of the indexer.
      max_position_embeddings: the longest context.
      initializer_range: standard deviation of initial kernels.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    intermediate_size: int
    num_attention_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    scoring_func: str = "sigmoid"
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_interleave: bool = True
    yarn: YaRN | None = None
    index_topk: int | None = None
    index_n_heads: int = 64
    index_head_dim: int = 128
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02


TINY = DeepSeekConfig(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    intermediate_size=256,
    num_attention_heads=4,
    kv_lora_rank=32,
    q_lora_rank=48,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    max_position_embeddings=512,
)
"""A model of V3's architecture that trains on a CPU."""

V2_LITE = DeepSeekConfig(
    vocab_size=102400,
    hidden_size=2048,
    num_hidden_layers=27,
    first_k_dense_replace=1,
    intermediate_size=10944,
    num_attention_heads=16,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    moe_intermediate_size=1408,
    scoring_func="softmax",
    norm_topk_prob=False,
    yarn=YaRN(factor=40, original_length=4096, mscale=0.707, mscale_all_dim=0.707),
    max_position_embeddings=163840,
)
"""DeepSeek-V2-Lite, 16 billion parameters."""

V3 = DeepSeekConfig(
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    intermediate_size=18432,
    num_attention_heads=128,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    yarn=YaRN(factor=40, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
    max_position_embeddings=163840,
)
"""DeepSeek-V3 and R1, 671 billion parameters (without the layer that predicts a second token)."""

V3_2 = dataclasses.replace(V3, index_topk=2048)
"""DeepSeek-V3.2: V3 with sparse attention."""


def _gate(config: DeepSeekConfig) -> Gate:
    is_v2 = config.scoring_func == "softmax"
    return Gate(
        k=config.num_experts_per_tok,
        score=config.scoring_func,
        num_groups=config.n_group,
        topk_groups=config.topk_group,
        route_scale=config.routed_scaling_factor,
        renormalize=config.norm_topk_prob and not is_v2,
        use_bias=not is_v2,
    )


def _indexer(config: DeepSeekConfig, options: dict[str, Any]) -> Indexer | None:
    if config.index_topk is None:
        return None
    return Indexer(
        config.hidden_size,
        q_lora_rank=config.q_lora_rank,
        num_heads=config.index_n_heads,
        head_dim=config.index_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        topk=config.index_topk,
        rope_theta=config.rope_theta,
        yarn=config.yarn,
        **options,
    )


CONFIGS = {"tiny": TINY, "v2-lite": V2_LITE, "v3": V3, "v3.2": V3_2}
"""By the name that commands take."""


class Block(nnx.Module):
    """One layer: attention and a feed-forward layer, each after a norm and added to what came in.

    Args:
      config: of the model.
      layer: its number.
      options: ``dtype``, ``param_dtype``, ``axes`` and ``rngs``.
    """

    def __init__(self, config: DeepSeekConfig, layer: int, options: dict[str, Any]):
        init = nnx.initializers.normal(config.initializer_range)
        options = options | {"kernel_init": init}
        norm = {"eps": config.rms_norm_eps, "param_dtype": options["param_dtype"]}
        self.attention_norm = RMSNorm(config.hidden_size, **norm)
        self.attention = MLA(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            kv_lora_rank=config.kv_lora_rank,
            q_lora_rank=config.q_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            rope_theta=config.rope_theta,
            yarn=config.yarn,
            rope_interleave=config.rope_interleave,
            indexer=_indexer(config, options),
            up_init=init,
            **options,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, **norm)
        if layer < config.first_k_dense_replace:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, **options)
        else:
            self.mlp = MoE(
                config.hidden_size,
                config.moe_intermediate_size,
                num_experts=config.n_routed_experts,
                gate=_gate(config),
                num_shared=config.n_shared_experts,
                expert_init=init,
                **options,
            )

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, *, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """The layer on whole sequences ``[B, S, features]``, and the load of its experts, or None."""
        x = x + self.attention(self.attention_norm(x), positions, segment_ids=segment_ids)
        return self._feed_forward(x, None)

    def prefill(
        self, x: jax.Array, positions: jax.Array, valid: jax.Array, cache: Cached, block_table: jax.Array
    ) -> tuple[jax.Array, Cached]:
        """The layer on prompts, where ``valid``, and the cache with them."""
        y, rows = self.attention.prefill(self.attention_norm(x), positions)
        cache = self.attention.store(cache, rows, block_table, jnp.where(valid, positions, -1))
        return self._feed_forward(x + y, valid)[0], cache

    def decode(
        self, x: jax.Array, lengths: jax.Array, valid: jax.Array, cache: Cached, block_table: jax.Array
    ) -> tuple[jax.Array, Cached]:
        """The layer on the next tokens, where ``valid``, of sequences in the cache, and the cache with them."""
        y, cache = self.attention.decode(self.attention_norm(x), cache, block_table, lengths, valid=valid)
        return self._feed_forward(x + y, valid)[0], cache

    def _feed_forward(self, x: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """The second half; the experts' load, or None."""
        if isinstance(self.mlp, MoE):
            y, load = self.mlp.with_load(self.mlp_norm(x), valid)
            return x + y, load
        return x + self.mlp(self.mlp_norm(x)), None


class DeepSeek(nnx.Module):
    """A DeepSeek language model.

    Args:
      config: sizes.
      dtype: type of activations.
      param_dtype: type of the parameters; None: that of activations. The gates' are float32.
      axes: mesh axes by role.
      rngs: random keys, ``params``.

    Attributes:
      embedding: ``[vocab_size, hidden_size]``.
      blocks: ``nnx.List`` of :class:`Block`.
      norm: :class:`RMSNorm` of the last layer's output.
      head: :class:`Linear`, to the logits.
    """

    def __init__(
        self,
        config: DeepSeekConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike | None = None,
        axes: MeshAxes = DEFAULT_AXES,
        rngs: nnx.Rngs,
    ):
        param_dtype = param_dtype or dtype
        self.config, self.dtype, self.axes = config, dtype, axes
        init = nnx.initializers.normal(config.initializer_range)
        options = {"dtype": dtype, "param_dtype": param_dtype, "axes": axes, "rngs": rngs}
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = parameter(init, rngs, shape, param_dtype, axes, None, "tensor")
        self.blocks = nnx.List(Block(config, layer, options) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, param_dtype=param_dtype)
        self.head = Linear(config.hidden_size, config.vocab_size, roles=(None, "tensor"), kernel_init=init, **options)

    def __call__(
        self, input_ids: jax.Array, positions: jax.Array | None = None, *, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Scores of the token after each.

        Args:
          input_ids: int32 ``[B, S]``.
          positions: int32 ``[B, S]``; None: 0, 1, 2 and so on.
          segment_ids: int32 ``[B, S]``, of texts that were packed together: tokens see only those of the same number.

        Returns:
          float32 ``[B, S, vocab_size]``.
        """
        return self.with_load(input_ids, positions, segment_ids=segment_ids)[0]

    def with_load(
        self, input_ids: jax.Array, positions: jax.Array | None = None, *, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """As :meth:`__call__`, and the tokens of each expert: int32 ``[layers with experts, n_routed_experts]``."""
        x, loads = self.embed(input_ids), []
        for block in self.blocks:
            x, load = block(x, positions, segment_ids=segment_ids)
            loads.append(load)
        return self.logits(x), self._stack(loads)

    def prefill(
        self, input_ids: jax.Array, lengths: jax.Array, cache: list[Cached], block_table: jax.Array
    ) -> tuple[jax.Array, list[Cached]]:
        """Reads prompts into the cache.

        Args:
          input_ids: int32 ``[B, S]``, each prompt followed by anything.
          lengths: int32 ``[B]``, the prompts' lengths; 0: there is none.
          cache: one for each layer, ``[pages, page_size, 1, D]``, see :meth:`empty_cache`.
          block_table: int32 ``[B, n]``, pages for the prompts.

        Returns:
          Scores of the token after each prompt, float32 ``[B, vocab_size]``, and the cache.
        """
        positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1], dtype=jnp.int32), input_ids.shape)
        valid = positions < lengths[:, None]
        x, cache = self.embed(input_ids), list(cache)
        for i, block in enumerate(self.blocks):
            x, cache[i] = block.prefill(x, positions, valid, cache[i], block_table)
        last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
        return self.logits(last)[:, 0], cache

    def decode(
        self,
        input_ids: jax.Array,
        lengths: jax.Array,
        cache: list[Cached],
        block_table: jax.Array,
        *,
        valid: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Cached]]:
        """The next tokens of each sequence, after those that the cache holds.

        Args:
          input_ids: int32 ``[B, S]``.
          lengths: int32 ``[B]``, tokens that the cache holds; -1: there is no such sequence.
          cache: one for each layer.
          block_table: int32 ``[B, n]``, pages of each sequence, with room for the new tokens; the scores after one that
            has none are NaN.
          valid: bool ``[B, S]``, which of ``input_ids`` are new tokens, see :meth:`glass_jax.nn.MLA.decode`. None: all
            are.

        Returns:
          Scores of the token after each, float32 ``[B, S, vocab_size]``, and the cache with the new tokens.
        """
        exist = jnp.broadcast_to(lengths[:, None] >= 0, input_ids.shape)
        valid = exist if valid is None else exist & valid
        x, cache = self.embed(input_ids), list(cache)
        for i, block in enumerate(self.blocks):
            x, cache[i] = block.decode(x, lengths, valid, cache[i], block_table)
        return self.logits(x), cache

    def empty_cache(self, pages: int, page_size: int) -> list[Cached]:
        """A cache with so many pages, of so many tokens each, in every layer."""
        return [block.attention.empty_cache(pages, page_size, self.dtype) for block in self.blocks]

    def update_biases(self, load: jax.Array, rate: float = 1e-3) -> None:
        """Moves the gates' biases towards equal loads, see :meth:`glass_jax.nn.MoE.update_bias`.

        Args:
          load: int32 ``[layers with experts, n_routed_experts]``, from :meth:`with_load`.
          rate: the step.
        """
        for block, each in zip(self.blocks[self.config.first_k_dense_replace :], load, strict=True):
            block.mlp.update_bias(each, rate)

    def embed(self, input_ids: jax.Array) -> jax.Array:
        """Features of tokens int32 ``[B, S]`` before the first layer, ``[B, S, hidden_size]``."""
        x = self.axes.take_rows(self.embedding[...].astype(self.dtype), input_ids, "batch", None, "tensor")
        return self.axes.constrain(x, "batch", None, None)

    def logits(self, x: jax.Array) -> jax.Array:
        """Scores float32 ``[..., vocab_size]`` from the last layer's features ``[..., hidden_size]``."""
        return self.head(self.norm(x)).astype(jnp.float32)

    def _stack(self, loads: list[jax.Array | None]) -> jax.Array:
        loads = [load for load in loads if load is not None]
        return jnp.stack(loads) if loads else jnp.zeros((0, self.config.n_routed_experts), jnp.int32)


def next_token_loss(logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Mean softmax cross entropy, in nats a token.

    Args:
      logits: ``[B, S, V]``.
      targets: int32 ``[B, S]``, the tokens that follow.
      weights: ``[B, S]``, how much each counts; None: all the same.
    """
    logits = logits.astype(jnp.float32)
    # A sum over one entry a row, not a gather of it: the vocabulary may be split over devices.
    right = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - right
    return jnp.mean(losses) if weights is None else jnp.sum(losses * weights) / jnp.sum(weights)
