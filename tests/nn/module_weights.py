"""Parameters of modules as tensors of the public checkpoints, and the configuration that belongs to them."""

import numpy as np


def kernel(linear):
    return np.asarray(linear.kernel[...], np.float64).T


def of_attention(mla):
    ups = [np.asarray(up[...], np.float64) for up in (mla.k_up, mla.v_up)]
    rows = np.concatenate(ups, axis=2)  # [H, C, nope + v]
    weights = {
        "kv_a_proj_with_mqa.weight": kernel(mla.kv_down),
        "kv_a_layernorm.weight": np.asarray(mla.kv_norm.scale[...]),
        "kv_b_proj.weight": rows.transpose(0, 2, 1).reshape(-1, rows.shape[1]),
        "o_proj.weight": kernel(mla.out),
    }
    raw = {
        "num_attention_heads": mla.num_heads,
        "qk_nope_head_dim": ups[0].shape[2],
        "qk_rope_head_dim": mla.rope_features,
        "v_head_dim": ups[1].shape[2],
        "kv_lora_rank": mla.latent_features,
        "rope_theta": mla.rope_theta,
        "rope_interleave": mla.rope_interleave,
    }
    if mla.yarn is not None:
        raw["rope_scaling"] = {
            "factor": mla.yarn.factor,
            "original_max_position_embeddings": mla.yarn.original_length,
            "mscale": mla.yarn.mscale,
            "mscale_all_dim": mla.yarn.mscale_all_dim,
        }
    if not hasattr(mla, "q_down"):
        return weights | {"q_proj.weight": kernel(mla.q)}, raw
    latent_queries = {
        "q_a_proj.weight": kernel(mla.q_down),
        "q_a_layernorm.weight": np.asarray(mla.q_norm.scale[...]),
        "q_b_proj.weight": kernel(mla.q),
    }
    return weights | latent_queries, raw | {"q_lora_rank": len(latent_queries["q_a_proj.weight"])}


def of_indexer(indexer):
    weights = {
        "indexer.wq_b.weight": kernel(indexer.q),
        "indexer.wk.weight": kernel(indexer.k),
        "indexer.k_norm.weight": np.asarray(indexer.k_norm.scale[...]),
        "indexer.k_norm.bias": np.asarray(indexer.k_norm.bias[...]),
        "indexer.weights_proj.weight": kernel(indexer.weights),
    }
    raw = {
        "index_n_heads": indexer.num_heads,
        "qk_rope_head_dim": indexer.rope_features,
        "rope_theta": indexer.rope_theta,
        "rope_interleave": indexer.rope_interleave,
    }
    return weights, raw


def of_mixture(moe):
    weights = {"gate.weight": np.asarray(moe.router[...], np.float64).T}
    if moe.bias is not None:
        weights["gate.e_score_correction_bias"] = np.asarray(moe.bias[...])
    for name in ("gate", "up", "down"):
        for expert, values in enumerate(np.asarray(getattr(moe, name)[...], np.float64)):
            weights[f"experts.{expert}.{name}_proj.weight"] = values.T
        if moe.shared is not None:
            weights[f"shared_experts.{name}_proj.weight"] = kernel(getattr(moe.shared, name))
    return weights, {
        "score": moe.rule.score,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": int(moe.shared is not None),
        "num_experts_per_tok": moe.rule.k,
        "n_group": moe.rule.num_groups,
        "topk_group": moe.rule.topk_groups,
        "routed_scaling_factor": moe.rule.route_scale,
        "norm_topk_prob": moe.rule.renormalize,
    }
