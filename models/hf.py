"""DeepSeek models in Hugging Face's format: a folder with ``config.json`` and safetensors.

:func:`load_hf` reads each parameter straight to where it belongs: on a mesh, a device's part of a tensor is sliced out
of the file for that device, and no device ever holds a whole tensor that is split.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from glass_jax.nn import MeshAxes
from glass_jax.nn.mesh import DEFAULT_AXES
from models import block_scales, parameters
from models.deepseek import DeepSeek, DeepSeekConfig
from models.hf_config import config_from_hf, config_to_hf, dtype_from_hf
from models.safetensors import Checkpoint, read_json, save

_NO_PARAMETER = re.compile(r"rotary_emb\.inv_freq$")
_FILE_BYTES = 5 * 10**9


def load_hf(
    path: str | os.PathLike, *, dtype: DTypeLike | None = None, axes: MeshAxes = DEFAULT_AXES
) -> tuple[DeepSeekConfig, DeepSeek]:
    """Reads a model, onto the mesh of ``jax.set_mesh`` if there is one.

    Args:
      path: a folder with ``config.json`` and ``model.safetensors``, or several files with their index. Weights in fp8
        with a scale for each block, as V3 is published, are multiplied out; how large a block is says
        ``quantization_config`` in ``config.json``, else it is 128 by 128.
      dtype: of activations and parameters; None: what ``config.json`` says, else float32.
      axes: mesh axes by role.

    Returns:
      The configuration and the model. The layer that V3 predicts a second token with is left out.

    Raises:
      UnsupportedError: another kind of model, or an option that is not supported.
      FileNotFoundError: files are missing.
      ValueError: tensors or scales are missing, have other shapes or types, or are left over; a file is damaged.
    """
    path = pathlib.Path(path)
    raw = read_json(path / "config.json")
    config, block = config_from_hf(raw), block_scales.block_of(raw)
    dtype = dtype_from_hf(raw) if dtype is None else jnp.dtype(dtype)
    abstract = nnx.eval_shape(lambda: DeepSeek(config, dtype=dtype, axes=axes, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    checkpoint, sources, expected = Checkpoint(path), _sources(config), {}
    variables = {parameters.dotted(place): variable for place, variable in nnx.to_flat_state(state)}
    for name, variable in variables.items():
        expected |= sources[name].tensors(variable.get_value().shape)
    _check(checkpoint, expected, config, block)

    def part(tensor: str, index: Index) -> np.ndarray:
        return block_scales.read(checkpoint, tensor, index, block)

    def load(name: str, variable: nnx.Variable) -> jax.Array:
        source, leaf = sources[name], variable.get_value()

        def read(index: Index) -> np.ndarray:
            index = tuple(slice(*each.indices(size)) for each, size in zip(index, leaf.shape, strict=True))
            return np.ascontiguousarray(source.read(part, index), leaf.dtype)

        return jax.make_array_from_callback(leaf.shape, _sharding(variable), read)

    values = {name: load(name, variable) for name, variable in variables.items()}
    return config, nnx.merge(graphdef, parameters.from_named(state, values))


def save_hf(path: str | os.PathLike, model: DeepSeek, *, max_file_bytes: int = _FILE_BYTES) -> None:
    """Writes a model, as :func:`load_hf` and ``transformers`` read it.

    Args:
      path: the folder; made if there is none.
      model: the model; its parameters may be on a mesh.
      max_file_bytes: where a file of weights ends and the next begins.
    """
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    raw = config_to_hf(model.config) | {"torch_dtype": jnp.dtype(model.dtype).name}
    (path / "config.json").write_text(json.dumps(raw, indent=2))
    values = parameters.named(nnx.state(model))

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        heads = {}  # the part of each head that came first, of tensors that are two parameters
        for place, source in _sources(model.config).items():
            for name, value in source.write(np.asarray(values[place])):
                if not isinstance(source, _HeadPart):
                    yield name, value
                elif name in heads:
                    yield name, np.concatenate([heads.pop(name), value], axis=1).reshape(-1, value.shape[-1])
                else:
                    heads[name] = value

    save(path, tensors(), max_file_bytes)


Index = tuple[slice, ...]
"""A part of a parameter or tensor: a slice with both ends of each dimension."""

Part = Callable[[str, Index], np.ndarray]
"""Reads a part of the tensor of a name."""


class _Source(Protocol):
    """Where a parameter is in the files."""

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that a parameter of ``shape`` is made of."""

    def read(self, part: Part, index: Index) -> np.ndarray:
        """The part ``index`` of the parameter."""

    def write(self, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of the parameter ``value``."""


@dataclasses.dataclass(frozen=True)
class _Same:
    """A parameter that is a tensor."""

    name: str

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {self.name: shape}

    def read(self, part: Part, index: Index) -> np.ndarray:
        return part(self.name, index)

    def write(self, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        yield self.name, value


@dataclasses.dataclass(frozen=True)
class _Transposed:
    """A kernel ``[K, N]`` that is a tensor ``[N, K]``."""

    name: str

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {self.name: shape[::-1]}

    def read(self, part: Part, index: Index) -> np.ndarray:
        return part(self.name, index[::-1]).T

    def write(self, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        yield self.name, value.T


@dataclasses.dataclass(frozen=True)
class _Experts:
    """Kernels ``[E, K, N]`` that are a tensor ``[N, K]`` for each expert."""

    name: str  # with a place for the expert's number

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        experts, k, n = shape
        return {self.name.format(expert): (n, k) for expert in range(experts)}

    def read(self, part: Part, index: Index) -> np.ndarray:
        experts, k, n = index
        names = [self.name.format(expert) for expert in range(experts.start, experts.stop)]
        return np.stack([part(name, (n, k)).T for name in names])

    def write(self, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        for expert, kernel in enumerate(value):
            yield self.name.format(expert), kernel.T


@dataclasses.dataclass(frozen=True)
class _HeadPart:
    """Kernels ``[H, C, n]`` that are the rows ``begin`` to ``begin + n`` of each head in a tensor ``[H * rows, C]``."""

    name: str
    rows: int
    begin: int
    end: int

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {self.name: (shape[0] * self.rows, shape[1])}

    def read(self, part: Part, index: Index) -> np.ndarray:
        heads, c, n = index
        rows = slice(heads.start * self.rows, heads.stop * self.rows)
        whole = part(self.name, (rows, c))
        return whole.reshape(-1, self.rows, whole.shape[1])[:, self.begin : self.end][:, n].transpose(0, 2, 1)

    def write(self, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        yield self.name, value.transpose(0, 2, 1)


def _sources(config: DeepSeekConfig) -> dict[str, _Source]:
    """Where each parameter of the model is, by its place in the model."""
    sources: dict[str, _Source] = {
        "embedding": _Same("model.embed_tokens.weight"),
        "norm.scale": _Same("model.norm.weight"),
        "head.kernel": _Transposed("lm_head.weight"),
    }
    for layer in range(config.num_hidden_layers):
        here, there = f"blocks.{layer}", f"model.layers.{layer}"
        sources[f"{here}.attention_norm.scale"] = _Same(f"{there}.input_layernorm.weight")
        sources[f"{here}.mlp_norm.scale"] = _Same(f"{there}.post_attention_layernorm.weight")
        sources |= _attention(f"{here}.attention", f"{there}.self_attn", config)
        if layer < config.first_k_dense_replace:
            sources |= _feed_forward(f"{here}.mlp", f"{there}.mlp")
        else:
            sources |= _mixture(f"{here}.mlp", f"{there}.mlp", config)
    return sources


def _attention(here: str, there: str, config: DeepSeekConfig) -> dict[str, _Source]:
    nope, rows = config.qk_nope_head_dim, config.qk_nope_head_dim + config.v_head_dim
    sources = {
        f"{here}.kv_down.kernel": _Transposed(f"{there}.kv_a_proj_with_mqa.weight"),
        f"{here}.kv_norm.scale": _Same(f"{there}.kv_a_layernorm.weight"),
        f"{here}.k_up": _HeadPart(f"{there}.kv_b_proj.weight", rows, 0, nope),
        f"{here}.v_up": _HeadPart(f"{there}.kv_b_proj.weight", rows, nope, rows),
        f"{here}.out.kernel": _Transposed(f"{there}.o_proj.weight"),
    }
    if config.q_lora_rank is None:
        return sources | {f"{here}.q.kernel": _Transposed(f"{there}.q_proj.weight")}
    sources |= {
        f"{here}.q_down.kernel": _Transposed(f"{there}.q_a_proj.weight"),
        f"{here}.q_norm.scale": _Same(f"{there}.q_a_layernorm.weight"),
        f"{here}.q.kernel": _Transposed(f"{there}.q_b_proj.weight"),
    }
    return sources if config.index_topk is None else sources | _indexer(f"{here}.indexer", f"{there}.indexer")


def _indexer(here: str, there: str) -> dict[str, _Source]:
    return {
        f"{here}.q.kernel": _Transposed(f"{there}.wq_b.weight"),
        f"{here}.k.kernel": _Transposed(f"{there}.wk.weight"),
        f"{here}.k_norm.scale": _Same(f"{there}.k_norm.weight"),
        f"{here}.k_norm.bias": _Same(f"{there}.k_norm.bias"),
        f"{here}.weights.kernel": _Transposed(f"{there}.weights_proj.weight"),
    }


def _feed_forward(here: str, there: str) -> dict[str, _Source]:
    return {f"{here}.{name}.kernel": _Transposed(f"{there}.{name}_proj.weight") for name in ("gate", "up", "down")}


def _mixture(here: str, there: str, config: DeepSeekConfig) -> dict[str, _Source]:
    sources: dict[str, _Source] = {f"{here}.router": _Transposed(f"{there}.gate.weight")}
    if config.scoring_func != "softmax":
        sources[f"{here}.bias"] = _Same(f"{there}.gate.e_score_correction_bias")
    for name in ("gate", "up", "down"):
        sources[f"{here}.{name}"] = _Experts(f"{there}.experts.{{}}.{name}_proj.weight")
    if config.n_shared_experts:
        sources |= _feed_forward(f"{here}.shared", f"{there}.shared_experts")
    return sources


def _check(
    checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]], config: DeepSeekConfig, block: tuple[int, int]
) -> None:
    """Raises ValueError unless the files hold what the model needs and nothing else."""
    problems = [f"{name} is missing" for name in expected if name not in checkpoint]
    for name, value in checkpoint.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if name in expected:
            if value.shape != expected[name]:
                problems.append(f"{name} is {value.shape}, expected {expected[name]}")
            problems.extend(block_scales.problems(checkpoint, name, block))
        elif name.removesuffix(block_scales.SUFFIX) in expected or _NO_PARAMETER.search(name):
            continue
        elif layer is None or int(layer[1]) < config.num_hidden_layers:
            problems.append(f"{name} belongs to no parameter")
    if problems:
        listed = "\n  ".join(problems[:10])
        raise ValueError(f"{len(problems)} tensors do not fit config.json, among them:\n  {listed}")


def _sharding(variable: nnx.Variable) -> jax.sharding.Sharding:
    """Where a parameter belongs: on the current mesh, or without one on the default device."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.NamedSharding(mesh, nnx.get_partition_spec(variable).get_value())
