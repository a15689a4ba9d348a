"""Flax nnx modules of the operations: attention on latents, mixtures of experts, and the layers around them."""

from glass_jax.nn.indexer import Indexer as Indexer
from glass_jax.nn.linear import Linear as Linear
from glass_jax.nn.linear import SwiGLU as SwiGLU
from glass_jax.nn.mesh import MeshAxes as MeshAxes
from glass_jax.nn.mla import MLA as MLA
from glass_jax.nn.moe import Gate as Gate
from glass_jax.nn.moe import GateBias as GateBias
from glass_jax.nn.moe import MoE as MoE
from glass_jax.nn.moe import balanced as balanced
from glass_jax.nn.moe import load_statistics as load_statistics
from glass_jax.nn.normalization import LayerNorm as LayerNorm
from glass_jax.nn.normalization import RMSNorm as RMSNorm
from glass_jax.nn.rope import YaRN as YaRN
