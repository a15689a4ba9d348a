"""``config.json`` of DeepSeek models in Hugging Face's format, to and from :class:`models.deepseek.DeepSeekConfig`."""

from __future__ import annotations

import dataclasses
from typing import Any

from glass_jax import errors
from glass_jax.nn import YaRN
from models.deepseek import DeepSeekConfig

MODEL_TYPES = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "deepseek_v32": "DeepseekV32"}
"""Of the models that can be read, and what names of their classes begin with."""

_INDEX = ("index_topk", "index_n_heads", "index_head_dim")
_OTHERS = ("scoring_func", "n_group", "topk_group", "norm_topk_prob", "rope_theta", "yarn", *_INDEX)
_SAME_NAME = tuple(field.name for field in dataclasses.fields(DeepSeekConfig) if field.name not in _OTHERS)
_UNSUPPORTED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


def config_from_hf(raw: dict[str, Any]) -> DeepSeekConfig:
    """The configuration that a ``config.json`` of one of the model types :data:`MODEL_TYPES` describes.

    Raises:
      UnsupportedError: another model, or an option that these models do not have.
    """
    kind = raw.get("model_type")
    if kind not in MODEL_TYPES:
        raise errors.UnsupportedError(f"config.json: model_type is {kind!r}; {', '.join(MODEL_TYPES)} can be read")
    for name, value in _UNSUPPORTED.items():
        if raw.get(name) == value:
            raise errors.UnsupportedError(f"config.json: {name}={value} is not supported")
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise errors.UnsupportedError(f"config.json: hidden_act={activation!r} is not supported; silu is")
    is_v2 = kind == "deepseek_v2"
    grouped = not is_v2 or raw.get("topk_method") == "group_limited_greedy"
    theta, yarn = _rope_from_hf(raw)
    same = (*_SAME_NAME, *_INDEX) if kind == "deepseek_v32" else _SAME_NAME
    return DeepSeekConfig(
        **{name: raw[name] for name in same if name in raw},
        scoring_func="softmax" if is_v2 else "sigmoid",
        n_group=(raw.get("n_group") or 1) if grouped else 1,
        topk_group=(raw.get("topk_group") or 1) if grouped else 1,
        norm_topk_prob=not is_v2 and raw.get("norm_topk_prob", True),  # V2's own code ignores it
        rope_theta=theta,
        yarn=yarn,
    )


def _rope_from_hf(raw: dict[str, Any]) -> tuple[float, YaRN | None]:
    """The base of the rotation's frequencies and the extension, from either spelling."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn" or rope.get("attention_factor") is not None or not rope.get("truncate", True):
        raise errors.UnsupportedError(f"config.json: rotation {rope} is not supported; default and yarn are")
    yarn = YaRN(
        factor=rope["factor"],
        original_length=rope.get("original_max_position_embeddings") or raw["max_position_embeddings"],
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
        "norm_topk_prob": config.norm_topk_prob,
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
