"""How values join into one: reductions, reducers and atomics, whose order does not matter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Join:
    """A way for values to join.

    Attributes:
      pair: of two arrays.
      along: of an array along axes.
      identity: the value of a type that joins with any other to that other.
      scatter: ``scatter(x, positions, values)`` joins values to elements of ``x``, dropping those outside.
    """

    pair: Callable[[jax.Array, jax.Array], jax.Array]
    along: Callable[[jax.Array, int | tuple[int, ...]], jax.Array]
    identity: Callable[[np.dtype], np.ndarray]
    scatter: Callable[[jax.Array, tuple[jax.Array, ...], jax.Array], jax.Array]


def _extreme(of: np.dtype, largest: bool) -> np.ndarray:
    if jnp.issubdtype(of, jnp.floating):
        return np.asarray(np.inf if largest else -np.inf, of)
    if of == np.bool_:
        return np.asarray(largest)
    return np.asarray(np.iinfo(of).max if largest else np.iinfo(of).min, of)


def _bitwise(function: Callable[..., jax.Array], ones: bool) -> Join:
    def scatter(x: jax.Array, positions: tuple[jax.Array, ...], values: jax.Array) -> jax.Array:
        def step(number: jax.Array, x: jax.Array) -> jax.Array:
            place = tuple(position.reshape(-1)[number] for position in positions)
            old = x.at[place].get(mode="fill", fill_value=0)
            return x.at[place].set(function(old, values.reshape(-1)[number]), mode="drop")

        return jax.lax.fori_loop(0, values.size, step, x)

    def along(x: jax.Array, axes: int | tuple[int, ...]) -> jax.Array:
        for axis in sorted((axes,) if isinstance(axes, int) else axes, reverse=True):
            x = function.reduce(x, axis)
        return x

    return Join(function, along, lambda of: np.asarray(-1 if ones else 0).astype(of), scatter)


JOINS: dict[str, Join] = {
    "add": Join(
        jnp.add,
        lambda x, axes: jnp.sum(x, axes, dtype=x.dtype),
        lambda of: np.zeros((), of),
        lambda x, positions, values: x.at[positions].add(values, mode="drop"),
    ),
    "max": Join(
        jnp.maximum,
        jnp.max,
        lambda of: _extreme(of, False),
        lambda x, positions, values: x.at[positions].max(values, mode="drop"),
    ),
    "min": Join(
        jnp.minimum,
        jnp.min,
        lambda of: _extreme(of, True),
        lambda x, positions, values: x.at[positions].min(values, mode="drop"),
    ),
    "bitand": _bitwise(jnp.bitwise_and, True),
    "bitor": _bitwise(jnp.bitwise_or, False),
    "bitxor": _bitwise(jnp.bitwise_xor, False),
}
