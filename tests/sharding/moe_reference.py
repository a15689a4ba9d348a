"""Expert parallelism in NumPy, one token at a time, and ways to run the JAX programs on real and simulated ranks."""

import functools
import math

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType

from glass_jax.sharding.simulated import SimulatedMesh

DEVICES, SIMULATED = "devices", "simulated"
PLACES = (DEVICES, SIMULATED)


def run(place, f, *args, axes=None):
    """``f`` on every rank, with the rank's part of each argument ``[P, ...]``; results ``[P, ...]``.

    ``axes`` are the names and sizes of the mesh axes; by default one, ``"x"``. A function that can be hashed is
    compiled once.
    """
    ranks = len(jax.tree.leaves(args)[0])
    program = sharded(place, f, tuple((axes or {"x": ranks}).items()))
    out = program(*jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), args))
    return jax.tree.map(lambda a: a.reshape(ranks, -1, *a.shape[1:]), out)


@functools.cache
def sharded(place, f, axes):
    """``f`` under ``jit`` and ``shard_map``, first dimensions of everything being split over all ``axes``."""
    axes = dict(axes)
    spec = jax.P(tuple(axes))
    if place == SIMULATED:
        return jax.jit(SimulatedMesh(axes).shard_map(f, in_specs=spec, out_specs=spec))
    devices, types = jax.devices()[: math.prod(axes.values())], (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices, axis_types=types)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))


def routing(seed, ranks, tokens, k, experts, kind="uniform"):
    """``topk_idx`` and ``topk_weights`` ``[P, T, K]``, with experts named twice and none named here and there.

    Kinds: "uniform"; "skewed", most choices are of the first experts; "one", all are of the last; "none"; "ranks",
      every other
    rank has no tokens.
    """
    rng = np.random.default_rng(seed)
    shape = (ranks, tokens, k)
    idx = rng.integers(-1, experts, shape)
    if kind == "skewed":
        idx = np.where(rng.random(shape) < 0.8, rng.integers(0, max(experts // ranks, 1), shape), idx)
    elif kind == "one":
        idx = np.full(shape, experts - 1)
    elif kind == "none":
        idx = np.full(shape, -1)
    elif kind == "ranks":
        idx[::2] = -1
    return idx.astype(np.int32), rng.random(shape, np.float32)


def rows_of_experts(idx, experts, quota=None):
    """For each expert, the (rank, token) of its rows in order, if a rank sends at most ``quota`` rows to another."""
    ranks, tokens, _ = idx.shape
    rows = [[] for _ in range(experts)]
    for rank in range(ranks):
        sent = [0] * ranks
        for token in range(tokens):
            for expert in dict.fromkeys(e for e in idx[rank, token].tolist() if 0 <= e < experts):
                to = expert * ranks // experts
                if quota is None or sent[to] < quota:
                    rows[expert].append((rank, token))
                sent[to] += 1
    return rows


def round_up(n, multiple):
    return -(-n // multiple) * multiple


def quantized(x, dtype=ml_dtypes.float8_e4m3fn):
    """What is left of ``x`` ``[..., H]`` in 8 bits with a scale a block of 128: values in float32, and scales."""
    out, scales = np.empty_like(x, np.float32), []
    for start in range(0, x.shape[-1], 128):
        block = x[..., start : start + 128].astype(np.float32)
        amax = np.maximum(np.abs(block).max(axis=-1, keepdims=True), np.float32(1e-4))
        scale = amax * np.float32(1 / float(ml_dtypes.finfo(dtype).max))
        out[..., start : start + 128] = (block / scale).astype(dtype).astype(np.float32) * scale
        scales.append(scale)
    return out, np.concatenate(scales, axis=-1)


def mixture(x, idx, weights, experts):
    """``[P, T, F]`` float64: for each token the weighted sum of ``x @ experts[e]``, ``experts`` being ``[E, H, F]``."""
    chosen = (idx >= 0) & (idx < len(experts))
    y = np.einsum("pth,ehf->ptef", x.astype(np.float64), experts.astype(np.float64))
    picked = np.take_along_axis(y, np.where(chosen, idx, 0)[..., None], axis=2)
    return np.sum(np.where(chosen, weights, 0)[..., None] * picked, axis=2)
