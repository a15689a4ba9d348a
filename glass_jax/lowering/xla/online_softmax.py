"""Sums of a softmax whose scores come a few at a time (Milakov and Gimelshein, "Online normalizer calculation", 2018).

Of the scores so far a row keeps the largest one, the sum of exponentials relative to it, and the sum of values that
they weigh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sums(NamedTuple):
    """What rows ``[...]`` keep.

    Attributes:
      largest: ``[...]``, the largest score.
      total: ``[...]``, the sum of ``exp(score - largest)``; 0 if all scores so far were -inf.
      values: ``[..., D]``, the sum of values times these.
    """

    largest: jax.Array
    total: jax.Array
    values: jax.Array


def nothing(rows: tuple[int, ...], width: int, dtype: jnp.dtype) -> Sums:
    """No score so far, for values of ``width`` numbers."""
    # The lowest number, not -inf: of a row that has seen nothing the differences are still defined.
    return Sums(jnp.full(rows, jnp.finfo(dtype).min, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, width), dtype))


def add(sums: Sums, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> Sums:
    """``sums`` and more scores.

    Args:
      sums: of rows ``[...]``.
      scores: ``[..., n]``, -inf for what does not count.
      weigh: from weights ``[..., n]`` the sum of the values times these, ``[..., D]``.
    """
    largest = jnp.maximum(sums.largest, scores.max(axis=-1))
    weights, worth = jnp.exp(scores - largest[..., None]), jnp.exp(sums.largest - largest)
    total = sums.total * worth + weights.sum(axis=-1)
    return Sums(largest, total, sums.values * worth[..., None] + weigh(weights))
