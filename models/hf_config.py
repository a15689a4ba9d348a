"""``config.json`` of DeepSeek models in Hugging Face's format, to and from :class:`models.deepseek.DeepSeekConfig`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from glass_jax import errors
from glass_jax.nn import YaRN
from models.deepseek import DeepSeekConfig

MODEL_TYPES = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "deepseek_v32": "DeepseekV32"}
"""Of the models that can be read, and what names of their classes begin with."""

_INDEX = ("index_topk", "index_n_heads", "index_head_dim")
_OTHERS = ("scoring_func", "n_group", "topk_group", "norm_topk_prob", "rope_theta", "yarn", *_INDEX)
_FIELDS = {field.name: field for field in dataclasses.fields(DeepSeekConfig)}
_SAME_NAME = tuple(name for name in _FIELDS if name not in _OTHERS)
_NONE_IS = {"n_shared_experts": 0}  # what null means, where a field has no None
_TYPES = {"int": (int,), "int | None": (int, type(None)), "float": (int, float), "bool": (bool,)}
_DTYPES = ("float32", "bfloat16", "float16")

# What changes a model's numbers and is the same in all published models: anything else is refused, not passed over.
_EVERYWHERE = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "tie_word_embeddings": (False, None),
    "moe_layer_freq": (1, None),
}
_V2 = {"scoring_func": ("softmax",), "topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False, None)}
_V3 = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}


def config_from_hf(raw: dict[str, Any]) -> DeepSeekConfig:
    """The configuration that a ``config.json`` of one of the model types :data:`MODEL_TYPES` describes.

    Raises:
      UnsupportedError: another model, or an option that these models do not have.
      ValueError: sizes are missing, or are not numbers.
    """
    kind = raw.get("model_type")
    if kind not in MODEL_TYPES:
        raise errors.UnsupportedError(f"config.json: model_type is {kind!r}; {', '.join(MODEL_TYPES)} can be read")
    is_v2 = kind == "deepseek_v2"
    for name, known in (_EVERYWHERE | (_V2 if is_v2 else _V3)).items():
        if (value := raw.get(name, known[0])) not in known:
            raise errors.UnsupportedError(
                f"config.json: {name}={value!r} is not supported in a {kind}; {' or '.join(map(repr, known))} is"
            )
    same = (*_SAME_NAME, *_INDEX) if kind == "deepseek_v32" else _SAME_NAME
    values = {name: _NONE_IS.get(name) if raw[name] is None else raw[name] for name in same if name in raw}
    required = [name for name in same if _FIELDS[name].default is dataclasses.MISSING or name == "index_topk"]
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"config.json of a {kind} lacks {', '.join(missing)}: add what the model was made with")
    _check_layer_types(raw, values)
    grouped = not is_v2 or raw.get("topk_method") == "group_limited_greedy"
    theta, yarn = _rope_from_hf(raw)
    values |= {
        "n_group": (raw.get("n_group") or 1) if grouped else 1,
        "topk_group": (raw.get("topk_group") or 1) if grouped else 1,
        "norm_topk_prob": not is_v2 and raw.get("norm_topk_prob", True),
        "rope_theta": theta,
    }
    for name, value in values.items():
        types = _TYPES[_FIELDS[name].type]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"config.json: {name}={value!r}, expected {_FIELDS[name].type}")
    return DeepSeekConfig(**values, scoring_func="softmax" if is_v2 else "sigmoid", yarn=yarn)


def _check_layer_types(raw: dict[str, Any], values: dict[str, Any]) -> None:
    """Raises UnsupportedError where layers are listed one by one and the list is another one than the sizes say."""
    layers, dense = values["num_hidden_layers"], values["first_k_dense_replace"]
    same = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    if (listed := raw.get("mlp_layer_types") or same) != same:
        raise errors.UnsupportedError(
            f"config.json: mlp_layer_types={listed} is not supported; the first {dense} of {layers} layers "
            "(first_k_dense_replace) are dense"
        )


def dtype_from_hf(raw: dict[str, Any]) -> jnp.dtype:
    """The type that ``config.json`` says a model is computed in; float32 where it says none.

    Raises:
      UnsupportedError: another type than float32, bfloat16 and float16.
    """
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise errors.UnsupportedError(f"config.json: dtype={name!r}; {', '.join(_DTYPES)} can be computed in; pass one")
    return jnp.dtype(name)


def _rope_from_hf(raw: dict[str, Any]) -> tuple[float, YaRN | None]:
    """The base of the rotation's frequencies and the extension, from either spelling."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn" or rope.get("attention_factor") is not None or not rope.get("truncate", True):
        raise errors.UnsupportedError(f"config.json: rotation {rope} is not supported; default and yarn are")
    length = rope.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
    if "factor" not in rope or not length:
        raise ValueError(f"config.json: rotation {rope} lacks factor, or original_max_position_embeddings")
    yarn = YaRN(
        factor=rope["factor"],
        original_length=length,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
    )
    return theta, yarn


def config_to_hf(config: DeepSeekConfig) -> dict[str, Any]:
    """What ``config.json`` says of the model; the inverse of :func:`config_from_hf`."""
    is_v2, is_sparse = config.scoring_func == "softmax", config.index_topk is not None
    kind = "deepseek_v2" if is_v2 else "deepseek_v32" if is_sparse else "deepseek_v3"
    raw = {name: getattr(config, name) for name in (*_SAME_NAME, *(_INDEX if is_sparse else ()))}
    raw |= {
        "model_type": kind,
        "architectures": [f"{MODEL_TYPES[kind]}ForCausalLM"],
        "num_key_value_heads": config.num_attention_heads,
        "hidden_act": "silu",
        "n_group": config.n_group,
        "topk_group": config.topk_group,
        "topk_method": ("group_limited_greedy" if config.n_group > 1 else "greedy") if is_v2 else "noaux_tc",
        "norm_topk_prob": config.norm_topk_prob and not is_v2,
        "moe_layer_freq": 1,
        "scoring_func": config.scoring_func,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
    }
    if (yarn := config.yarn) is not None:
        scaling = {
            "type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_length,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
        raw["rope_scaling"] = {name: value for name, value in scaling.items() if value is not None}
    return raw
