"""Integers of a program, partly known: a static pattern over the lanes plus multiples of traced scalars.

An index of a tile is ``pattern + sum(coefficient * symbol)``. The pattern is a NumPy array known while the program is
traced, one value a lane; the symbols are scalars that JAX traces, such as a loop index. Keeping the two apart lets the
executor turn ``u[row + i, j]`` into a slice, decide a predicate, or prove that two iterations never touch one element.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Facts known at some point of a program: an upper bound for a sum of terms.
Facts = Mapping[Hashable, float]

_births = itertools.count()


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A scalar known when the program runs. Two symbols of one key have one value.

    Attributes:
      key: what it is: a number of its own, or an operation and the keys of its operands.
      value: the traced int32 scalar.
      low: no value is smaller.
      high: no value is larger.
      born: when it, or the youngest symbol it is made of, came into being. What depends on a loop index is younger.
      division: for a quotient or a remainder, the operation, its dividend and its divisor.
    """

    key: Hashable
    value: jax.Array = dataclasses.field(compare=False)
    low: float = dataclasses.field(default=-math.inf, compare=False)
    high: float = dataclasses.field(default=math.inf, compare=False)
    born: int = dataclasses.field(default=-1, compare=False)
    division: tuple[str, Linear, int] | None = dataclasses.field(default=None, compare=False)


def now() -> int:
    """A moment: symbols made earlier have a smaller ``born``, symbols made later a larger one."""
    return next(_births)


def fresh(value: jax.Array | int, low: float = -math.inf, high: float = math.inf) -> Symbol:
    """A symbol unlike any other, for a traced value between ``low`` and ``high``."""
    born = now()
    return Symbol(born, value, low, high, born)


class Linear:
    """``pattern + sum(coefficient * symbol)``, exact integers.

    Attributes:
      pattern: NumPy int64 array that broadcasts to the lanes; rank 0 for a scalar.
      terms: coefficient of each symbol, none of them 0.
    """

    def __init__(self, pattern: np.ndarray | int, terms: Mapping[Symbol, int] | None = None):
        self.pattern = np.asarray(pattern, np.int64)
        self.terms = {symbol: factor for symbol, factor in (terms or {}).items() if factor}

    @classmethod
    def of(cls, symbol: Symbol) -> Linear:
        """The linear form that is ``symbol`` alone."""
        return cls(0, {symbol: 1})

    @property
    def key(self) -> Hashable:
        """Identifies the traced part: equal keys, equal values."""
        return frozenset((symbol.key, factor) for symbol, factor in self.terms.items())

    @property
    def static(self) -> int | None:
        """The value, if it is one number known now."""
        return int(self.pattern) if not self.terms and self.pattern.ndim == 0 else None

    def __add__(self, other: Linear) -> Linear:
        terms = dict(self.terms)
        for symbol, factor in other.terms.items():
            terms[symbol] = terms.get(symbol, 0) + factor
        return Linear(self.pattern + other.pattern, terms)._recompose()

    def __sub__(self, other: Linear) -> Linear:
        return self + other.scaled(-1)

    def scaled(self, factor: int) -> Linear:
        """``factor * self``."""
        return Linear(self.pattern * factor, {symbol: value * factor for symbol, value in self.terms.items()})

    def split(self, symbol: Symbol) -> tuple[int, Linear]:
        """The coefficient of ``symbol`` and the rest."""
        rest = {other: factor for other, factor in self.terms.items() if other != symbol}
        return self.terms.get(symbol, 0), Linear(self.pattern, rest)

    @property
    def born(self) -> int:
        """When the youngest of its symbols came into being, -1 if it has none."""
        return max((symbol.born for symbol in self.terms), default=-1)

    def bounds(self, facts: Facts) -> tuple[float, float]:
        """The smallest and the largest value it may have in any lane."""
        low = sum(min(factor * symbol.low, factor * symbol.high) for symbol, factor in self.terms.items())
        high = sum(max(factor * symbol.low, factor * symbol.high) for symbol, factor in self.terms.items())
        high = min(high, facts.get(self.key, math.inf)) if self.terms else high
        return low + int(self.pattern.min()), high + int(self.pattern.max())

    def traced(self) -> jax.Array | np.ndarray:
        """The value as an int32 array of the pattern's shape."""
        total = self.pattern.astype(np.int32)
        for symbol, factor in self.terms.items():
            total = total + symbol.value * np.int32(factor)
        return total

    def _recompose(self) -> Linear:
        """Replaces ``(x // c) * c * q + (x % c) * q`` by ``x * q``, as persistent schedules write tile numbers."""
        for symbol, factor in self.terms.items():
            if symbol.division is None or symbol.division[0] != "mod":
                continue
            _, dividend, divisor = symbol.division
            quotient = next((s for s in self.terms if s.division and s.key == ("div", *symbol.key[1:])), None)
            if quotient is None or self.terms[quotient] != factor * divisor:
                continue
            rest = {other: value for other, value in self.terms.items() if other not in (symbol, quotient)}
            return Linear(self.pattern, rest) + dividend.scaled(factor)
        return self


def divide(x: Linear, divisor: int, facts: Facts) -> Linear | None:
    """``x`` divided by a positive ``divisor``, rounded down; None if that is no linear form."""
    return _divide("div", x, divisor, facts)


def remainder(x: Linear, divisor: int, facts: Facts) -> Linear | None:
    """``x`` modulo a positive ``divisor``, never negative; None if that is no linear form."""
    return _divide("mod", x, divisor, facts)


def _divide(op: str, x: Linear, divisor: int, facts: Facts) -> Linear | None:
    if divisor <= 0:
        return None
    if all(factor % divisor == 0 for factor in x.terms.values()):
        if op == "mod":
            return Linear(x.pattern % divisor)
        return Linear(x.pattern // divisor, {symbol: factor // divisor for symbol, factor in x.terms.items()})
    if x.pattern.ndim:
        return None
    low, high = x.bounds(facts)
    if op == "div":
        value = jnp.floor_divide(x.traced(), np.int32(divisor))
        low, high = (bound if math.isinf(bound) else bound // divisor for bound in (low, high))
    elif low >= 0 and high < divisor:
        return x
    else:
        value, low, high = jnp.remainder(x.traced(), np.int32(divisor)), 0, divisor - 1
    key = (op, x.key, int(x.pattern), divisor)
    return Linear.of(Symbol(key, value, low, high, x.born, (op, x, divisor)))


def extremum(op: str, x: Linear, y: Linear, facts: Facts) -> Linear | None:
    """``min`` or ``max`` of two scalars; None if they vary by lane."""
    (x_low, x_high), (y_low, y_high) = x.bounds(facts), y.bounds(facts)
    if x_high <= y_low:
        return x if op == "min" else y
    if y_high <= x_low:
        return y if op == "min" else x
    if x.pattern.ndim or y.pattern.ndim:
        return Linear(getattr(np, op + "imum")(x.pattern, y.pattern)) if not x.terms and not y.terms else None
    pick: Callable[[float, float], float] = min if op == "min" else max
    value = (lax.min if op == "min" else lax.max)(jnp.asarray(x.traced()), jnp.asarray(y.traced()))
    key = (op, x.key, int(x.pattern), y.key, int(y.pattern))
    return Linear.of(Symbol(key, value, pick(x_low, y_low), pick(x_high, y_high), max(x.born, y.born)))


def clamp(x: Linear, high: int) -> Linear:
    """The scalar ``x`` limited to ``0 .. high``."""
    if x.static is not None:
        return Linear(min(max(x.static, 0), high))
    value = jnp.clip(x.traced(), 0, high)
    return Linear.of(Symbol(("clamp", x.key, int(x.pattern), high), value, 0, high, x.born))


def compare(op: str, difference: Linear, facts: Facts) -> np.ndarray | None:
    """The outcome of ``difference op 0`` if known now: rank 0 where it is the same in every lane."""
    low, high = difference.bounds(facts)
    outcomes = {
        "lt": (high < 0, low >= 0),
        "le": (high <= 0, low > 0),
        "gt": (low > 0, high <= 0),
        "ge": (low >= 0, high < 0),
        "eq": (low == 0 == high, low > 0 or high < 0),
        "ne": (low > 0 or high < 0, low == 0 == high),
    }
    true, false = outcomes[op]
    if true or false:
        return np.asarray(true)
    return None if difference.terms else _COMPARE[op](difference.pattern, 0)


_COMPARE = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def strides(pattern: np.ndarray) -> tuple[int, dict[int, int]] | None:
    """The base and the step along each axis (those of size 1 left out) if ``pattern`` is affine in the lanes."""
    base = int(pattern.flat[0]) if pattern.size else 0
    steps = {}
    rebuilt = np.asarray(base)
    for axis, size in enumerate(pattern.shape):
        if size > 1:
            second = int(pattern[tuple(int(axis == other) for other in range(pattern.ndim))])
            steps[axis] = second - base
            shape = [size if axis == other else 1 for other in range(pattern.ndim)]
            rebuilt = rebuilt + (steps[axis] * np.arange(size)).reshape(shape)
    if not np.array_equal(np.broadcast_to(rebuilt, pattern.shape), pattern):
        return None
    return base, {axis: step for axis, step in steps.items() if step}
