"""DeepSeek-V2, V3 and V3.2 in NumPy float64, from the papers and the public code, head by head and token by token.

Weights are a mapping of the tensors of the public checkpoints, ``[N, K]``; configurations are their ``config.json``.
"""

import math

import numpy as np


def norm(x, weight, eps):
    return weight.astype(np.float64) * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def silu(x):
    return x / (1 + np.exp(-x))


def feed_forward(x, gate, up, down):
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def mscale(factor, m):
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1


def rotation(raw):
    """Radians a position of each pair, the factor of cosines and sines, the factor of scores."""
    d, theta, scaling = raw["qk_rope_head_dim"], raw.get("rope_theta", 10000.0), raw.get("rope_scaling")
    pairs = [theta ** (2 * i / d) for i in range(d // 2)]
    if not scaling:
        return np.array([1 / f for f in pairs]), 1.0, 1.0
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_that_turns(times):
        return d * math.log(original / (2 * math.pi * times)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow", 1))), d - 1)
    high = low + 0.001 if high == low else high
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(d // 2)]
    speeds = np.array([r / (factor * f) + (1 - r) / f for r, f in zip(ramp, pairs, strict=True)])
    m, m_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    turned = mscale(factor, m) / mscale(factor, m_all) if m and m_all else mscale(factor, 1)
    return speeds, turned, mscale(factor, m_all) ** 2 if m_all else 1.0


def rotate(x, position, raw):
    """One head's rotated features at one position; pairs stay where they are."""
    speeds, scale, _ = rotation(raw)
    out = np.empty_like(x)
    for i, speed in enumerate(speeds):
        a, b = (2 * i, 2 * i + 1) if raw.get("rope_interleave", True) else (i, i + len(speeds))
        cos, sin = scale * math.cos(position * speed), scale * math.sin(position * speed)
        out[a], out[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return out


def attention(x, w, raw, segments=None, chosen=None):
    """``x`` ``[S, hidden]`` of one sequence; ``w`` by the names behind ``self_attn.``; ``chosen``: by token, or all."""
    heads, nope, v_dim = raw["num_attention_heads"], raw["qk_nope_head_dim"], raw["v_head_dim"]
    latent = raw["kv_lora_rank"]
    if raw.get("q_lora_rank"):
        q = norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-6) @ w["q_b_proj.weight"].T
    else:
        q = x @ w["q_proj.weight"].T
    q = q.reshape(len(x), heads, -1)
    down = x @ w["kv_a_proj_with_mqa.weight"].T
    up = (norm(down[:, :latent], w["kv_a_layernorm.weight"], 1e-6) @ w["kv_b_proj.weight"].T).reshape(len(x), heads, -1)
    key_pe = [rotate(down[t, latent:], t, raw) for t in range(len(x))]
    scale = (nope + raw["qk_rope_head_dim"]) ** -0.5 * rotation(raw)[2]
    if chosen is None and "index_topk" in raw:
        chosen = choices(index_scores(x, w, raw | {"rope_interleave": False}), raw["index_topk"])
    out = np.zeros((len(x), heads, v_dim))
    for t in range(len(x)):
        for h in range(heads):
            query_pe = rotate(q[t, h, nope:], t, raw)
            seen = [s for s in range(t + 1) if segments is None or segments[s] == segments[t]]
            seen = seen if chosen is None else chosen[t]
            scores = np.array([q[t, h, :nope] @ up[s, h, :nope] + query_pe @ key_pe[s] for s in seen]) * scale
            p = np.exp(scores - scores.max())
            out[t, h] = sum(share * up[s, h, nope:] for share, s in zip(p / p.sum(), seen, strict=True))
    return out.reshape(len(x), -1) @ w["o_proj.weight"].T


def index_scores(x, w, raw):
    """Scores of earlier tokens, token by token; ``w`` by the names behind ``self_attn.``, ``raw`` of the indexer."""
    heads, d = raw["index_n_heads"], raw["qk_rope_head_dim"]
    q = norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-6) @ w["indexer.wq_b.weight"].T
    q, keys = q.reshape(len(x), heads, -1), x @ w["indexer.wk.weight"].T
    centred = keys - keys.mean(axis=1, keepdims=True)
    keys = norm(centred, w["indexer.k_norm.weight"], 1e-6) + w["indexer.k_norm.bias"]
    weights = x @ w["indexer.weights_proj.weight"].T * heads**-0.5 * q.shape[-1] ** -0.5

    def turned(row, t):
        return np.concatenate([rotate(row[:d], t, raw), row[d:]])

    keys = [turned(key, t) for t, key in enumerate(keys)]
    queries = [[turned(head, t) for head in row] for t, row in enumerate(q)]
    return [
        np.array([sum(weights[t, h] * max(queries[t][h] @ key, 0.0) for h in range(heads)) for key in keys[: t + 1]])
        for t in range(len(x))
    ]


def choices(scores, k):
    """The ``k`` tokens of the largest scores, by token."""
    return [sorted(np.argsort(-row, kind="stable")[:k].tolist()) for row in scores]


def choose(logits, bias, raw):
    """The experts of one token and their weights, by expert number."""
    experts, groups = len(logits), raw.get("n_group") or 1
    match raw["score"]:
        case "softmax":
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        case "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        case "sqrt_softplus":
            scores = np.sqrt(np.log1p(np.exp(logits)))
    choice = scores if bias is None else scores + bias
    size = experts // groups
    best = 1 if raw["score"] == "softmax" else 2
    worth = [np.sort(choice[g * size : (g + 1) * size])[-best:].sum() for g in range(groups)]
    kept = np.argsort(worth)[::-1][: raw.get("topk_group") or 1] if groups > 1 else [0]
    allowed = [e for e in range(experts) if e // size in kept]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: raw["num_experts_per_tok"]]
    total = sum(scores[e] for e in chosen) + 1e-20 if raw.get("norm_topk_prob") else 1.0
    return {e: scores[e] / total * raw.get("routed_scaling_factor", 1.0) for e in chosen}


def mixture(x, w, raw):
    """``x`` ``[T, hidden]``; ``w`` by the names behind ``mlp.``. The result, and the tokens of each expert."""
    out, load = np.zeros_like(x), np.zeros(raw["n_routed_experts"], int)
    for t, token in enumerate(x):
        chosen = choose(token @ w["gate.weight"].T.astype(np.float64), w.get("gate.e_score_correction_bias"), raw)
        for expert, share in chosen.items():
            kernels = (w[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            out[t] += share * feed_forward(token, *kernels)
            load[expert] += 1
    if raw.get("n_shared_experts"):
        out += feed_forward(x, *(w[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")))
    return out, load


def below(tensors, prefix):
    return {
        name.removeprefix(prefix): np.asarray(value, np.float64)
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def logits(ids, tensors, raw):
    """Scores ``[S, V]`` after each token of one sequence ``ids`` ``[S]``."""
    raw = raw | {"score": "softmax" if raw["model_type"] == "deepseek_v2" else "sigmoid"}
    if raw["score"] == "softmax":
        raw = raw | {"norm_topk_prob": False}
        if raw.get("topk_method") == "greedy":
            raw = raw | {"n_group": 1}
    x = np.asarray(tensors["model.embed_tokens.weight"], np.float64)[ids]
    for layer in range(raw["num_hidden_layers"]):
        w = below(tensors, f"model.layers.{layer}.")
        x = x + attention(norm(x, w["input_layernorm.weight"], raw["rms_norm_eps"]), below(w, "self_attn."), raw)
        y, w = norm(x, w["post_attention_layernorm.weight"], raw["rms_norm_eps"]), below(w, "mlp.")
        if layer < raw["first_k_dense_replace"]:
            x = x + feed_forward(y, *(w[f"{name}_proj.weight"] for name in ("gate", "up", "down")))
        else:
            x = x + mixture(y, w, raw)[0]
    return norm(x, tensors["model.norm.weight"], raw["rms_norm_eps"]) @ np.asarray(tensors["lm_head.weight"]).T
