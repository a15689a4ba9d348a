"""The gates of DeepSeek-V2, V3 and V4 in NumPy float64, one token at a time."""

import math

import numpy as np


def _scores(logits: list[float], score: str) -> list[float]:
    if score == "softmax":
        largest = max(logits)
        powers = [math.exp(x - largest) for x in logits]
        return [p / sum(powers) for p in powers]
    if score == "sigmoid":
        return [1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x)) for x in logits]
    return [math.sqrt(max(x, 0) + math.log1p(math.exp(-abs(x)))) for x in logits]


def _best(values: dict[int, float], count: int) -> list[int]:
    """The keys of the largest values, the smaller key first among equals."""
    return sorted(values, key=lambda key: (-values[key], key))[:count]


def token(logits, bias=None, *, k, score, num_groups=1, topk_groups=1, route_scale=1.0, renormalize=True):
    """Weights and indices of one token."""
    scores = _scores([float(x) for x in logits], score)
    choice = dict(enumerate(s + float(b) for s, b in zip(scores, [0.0] * len(scores) if bias is None else bias)))  # noqa: B905
    size = len(scores) // num_groups
    if num_groups > 1:
        members = {g: sorted((choice[g * size + i] for i in range(size)), reverse=True) for g in range(num_groups)}
        kept = _best({g: m[0] if score == "softmax" else sum(m[:2]) for g, m in members.items()}, topk_groups)
        choice = {e: c for e, c in choice.items() if e // size in kept}
    chosen = _best(choice, k)
    weights = [scores[e] for e in chosen]
    if renormalize:
        total = sum(weights) + 1e-20
        weights = [w / total for w in weights]
    return [w * route_scale for w in weights], chosen


def moe_gate(logits, bias=None, **options) -> tuple[np.ndarray, np.ndarray]:
    logits = np.asarray(logits).astype(np.float64)
    bias = None if bias is None else np.asarray(bias).astype(np.float64)
    rows = [token(row, bias, **options) for row in logits.reshape(-1, logits.shape[-1])]
    shape = (*logits.shape[:-1], options["k"])
    return np.array([w for w, _ in rows]).reshape(shape), np.array([i for _, i in rows]).reshape(shape)
