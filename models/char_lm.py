"""A small character language model whose every matrix product is ``glass.gemm``.

A window of characters is embedded, the embeddings are laid side by side, and a stack of fully connected layers predicts
the character that comes next (the feed-forward language model of Bengio et al., JMLR 3, 2003, over characters and with
gelu). Layers alternate between column- and row-parallel over the mesh's ``tensor`` axis (Shoeybi et al.,
arXiv:1909.08053), so that activations are reduced once in two layers; batches are split over its ``data`` axis.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import glass_jax as glass
from models import data

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class CharLM:
    """The model's sizes; its parameters are a plain pytree of float32 arrays.

    Attributes:
      context: characters in a window.
      embedding: features of a character.
      hidden: width of the hidden layers.
      layers: number of hidden layers.
      dtype: the type matrix products take their operands in.
    """

    context: int = 16
    embedding: int = 32
    hidden: int = 512
    layers: int = 2
    dtype: str = "float32"

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths from the first layer's input to the logits."""
        return (self.context * self.embedding, *[self.hidden] * self.layers, len(data.VOCABULARY))

    def init(self, key: jax.Array) -> Params:
        """Random parameters: ``embedding`` ``[V, E]``, and ``w`` ``[K, N]``, ``b`` ``[N]`` of each layer."""
        embedding_key, *keys = jax.random.split(key, self.layers + 2)
        layers = [
            {"w": jax.random.normal(key, (k, n)) * (2 / k) ** 0.5, "b": jnp.zeros(n)}
            for key, k, n in zip(keys, self.widths[:-1], self.widths[1:], strict=True)
        ]
        return {"embedding": jax.random.normal(embedding_key, (len(data.VOCABULARY), self.embedding)), "layers": layers}

    def logits(self, params: Params, contexts: jax.Array) -> jax.Array:
        """Scores of the next character, ``[B, V]`` float32, after each window of ``contexts`` ``[B, context]``."""
        x = params["embedding"].astype(self.dtype)[contexts].reshape(len(contexts), -1)
        *hidden, last = params["layers"]
        for layer in hidden:
            x = glass.gemm(x, layer["w"].astype(self.dtype), bias=layer["b"], activation="gelu")
        return glass.gemm(x, last["w"].astype(self.dtype), bias=last["b"], preferred_element_type=jnp.float32)

    def loss(self, params: Params, contexts: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean softmax cross entropy, in nats, of ``targets`` ``[B]``, the characters after ``contexts``."""
        logits = self.logits(params, contexts)
        right = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)

    def shardings(self, mesh: Mesh) -> Params:
        """Where each parameter lives on a mesh with axes ``data`` and ``tensor``: the pytree of :meth:`init`."""
        column = {"w": PartitionSpec(None, "tensor"), "b": PartitionSpec("tensor")}
        row = {"w": PartitionSpec("tensor", None), "b": PartitionSpec()}
        specs = {
            "embedding": PartitionSpec(),
            "layers": [row if i % 2 else column for i in range(self.layers + 1)],
        }
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )

    def generate(self, params: Params, prompt: jax.Array, length: int, key: jax.Array, temperature: float) -> jax.Array:
        """Draws ``length`` characters after ``prompt`` ``[context]``, one at a time; character numbers ``[length]``."""

        def draw(window, key):
            drawn = jax.random.categorical(key, self.logits(params, window[None])[0] / temperature)
            return jnp.append(window[1:], drawn), drawn

        return jax.lax.scan(draw, prompt, jax.random.split(key, length))[1]
