"""What collectives are, in NumPy, and programs that run every algorithm of every collective at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax import sharding
from glass_jax.sharding import algorithms

ROOT = 1  # of broadcasts, if there are that many ranks


def root(ranks: int) -> int:
    return ROOT % ranks


def shift(ranks: int) -> list[tuple[int, int]]:
    """A permutation that leaves out a rank as a source and another as a destination, if there are several."""
    return [(rank, (rank + 1) % ranks) for rank in range(1, ranks)] or [(0, 0)]


def expected(collective: str, x: np.ndarray) -> np.ndarray:
    """Every rank's output from every rank's input ``[P, ...]``, sums in float64 or the integers' own arithmetic."""
    ranks = len(x)
    wide = x.astype(np.float64) if x.dtype.kind not in "iucb" else x
    total = wide.sum(axis=0, dtype=None if wide.dtype.kind in "fc" else wide.dtype)
    match collective:
        case "all_reduce":
            return np.broadcast_to(total, x.shape)
        case "broadcast":
            return np.broadcast_to(x[root(ranks)], x.shape)
        case "all_gather":
            return np.broadcast_to(x, (ranks, *x.shape))
        case "reduce_scatter":
            return total.reshape(ranks, x.shape[1] // ranks, *x.shape[2:])
        case "all_to_all":
            blocks = x.reshape(ranks, ranks, x.shape[1] // ranks, *x.shape[2:])
            return blocks.swapaxes(0, 1).reshape(x.shape)
        case "send_recv":
            out = np.zeros_like(x)
            for source, target in shift(ranks):
                out[target] = x[source]
            return out
    raise AssertionError(collective)


def call(collective: str, x: jax.Array, axis: str | tuple[str, ...], ranks: int, algorithm: str) -> jax.Array:
    """The collective, with the same root and permutation as :func:`expected`."""
    function = getattr(sharding, collective)
    match collective:
        case "broadcast":
            return function(x, axis, root=root(ranks), algorithm=algorithm)
        case "send_recv":
            return function(x, axis, shift(ranks), algorithm=algorithm)
    return function(x, axis, algorithm=algorithm)


def cases(ranks: int, *, xla: bool = False) -> list[tuple[str, str]]:
    """Every collective with every algorithm that is defined for the number of ranks.

    Above 12 ranks, to compile less: all-reduce stands for the gathering and scattering that it consists of, and the
    pairwise exchange, whose program grows with the ranks, is left out.
    """
    found = []
    for collective, known in algorithms.ALGORITHMS.items():
        for algorithm in (*known, *(("xla",) if xla else ())):
            defined = algorithm in ("xla", "direct") or algorithms.defined(collective, algorithm, ranks)
            implied = collective in ("all_gather", "reduce_scatter") and algorithm != "bruck"
            if defined and (ranks <= 12 or not (implied or algorithm == "pairwise")):
                found.append((collective, algorithm))
    return found


def inputs(collective: str, ranks: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """The input of every rank, of odd lengths: ``[P, 3 * P, 5]`` where it is cut into blocks, else ``[P, 7, 3]``."""
    shape = (ranks, 3 * ranks, 5) if collective in ("reduce_scatter", "all_to_all") else (ranks, 7, 3)
    values = np.random.default_rng(seed).standard_normal(shape) * 4
    return np.asarray(jnp.asarray(values).astype(dtype))


def everything(ranks: int, axis: str | tuple[str, ...], chosen: list[tuple[str, str]]):
    """A rank's program: takes ``{collective: x}`` with a leading 1, and returns ``{case: result}`` likewise."""

    def program(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {f"{name} {way}": call(name, x[name][0], axis, ranks, way)[None] for name, way in chosen}

    return program
