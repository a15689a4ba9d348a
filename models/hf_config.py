"""``config.json`` of DeepSeek models in Hugging Face's format, to and from :class:`models.deepseek.DeepSeekConfig`."""

from __future__ import annotations

import dataclasses
from typing import Any

from glass_jax import errors
from glass_jax.nn import YaRN
from models.deepseek import DeepSeekConfig

_SAME_NAME = tuple(
    field.name
    for field in dataclasses.fields(DeepSeekConfig)
    if field.name not in ("scoring_func", "n_group", "topk_group", "norm_topk_prob", "rope_theta", "yarn")
)
_UNSUPPORTED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


def config_from_hf(raw: dict[str, Any]) -> DeepSeekConfig:
    """The configuration that a ``config.json`` of ``model_type`` ``deepseek_v2`` or ``deepseek_v3`` describes.

    Raises:
      UnsupportedError: another model, or an option that these models do not have.
    """
    kind = raw.get("model_type")
    if kind not in ("deepseek_v2", "deepseek_v3"):
        raise errors.UnsupportedError(f"config.json: model_type is {kind!r}; deepseek_v2 and deepseek_v3 can be read")
    for name, value in _UNSUPPORTED.items():
        if raw.get(name) == value:
            raise errors.UnsupportedError(f"config.json: {name}={value} is not supported")
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise errors.UnsupportedError(f"config.json: hidden_act={activation!r} is not supported; silu is")
    is_v2 = kind == "deepseek_v2"
    grouped = not is_v2 or raw.get("topk_method") == "group_limited_greedy"
    theta, yarn = _rope_from_hf(raw)
    return DeepSeekConfig(
        **{name: raw[name] for name in _SAME_NAME if name in raw},
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
    is_v2 = config.scoring_func == "softmax"
    raw = {name: getattr(config, name) for name in _SAME_NAME}
    raw |= {
        "model_type": "deepseek_v2" if is_v2 else "deepseek_v3",
        "architectures": ["DeepseekV2ForCausalLM" if is_v2 else "DeepseekV3ForCausalLM"],
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
