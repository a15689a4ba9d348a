"""Integers of a program against the same arithmetic in NumPy."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from glass_jax.hw.model.values import symbolic
from glass_jax.hw.model.values.symbolic import Linear

SMALL = st.integers(-20, 20)


@st.composite
def linears(draw):
    """A linear form over lanes and two symbols, and its values."""
    low, value, other = draw(st.integers(-5, 0)), draw(st.integers(0, 7)), draw(SMALL)
    pattern = np.asarray(draw(st.one_of(SMALL, st.lists(SMALL, min_size=2, max_size=4))))
    first, second = draw(SMALL), draw(SMALL)
    bounded = Linear.of(symbolic.fresh(np.int32(value), low, 7)).scaled(first)
    return Linear(pattern) + bounded + Linear.of(symbolic.fresh(np.int32(other))).scaled(second)


@settings(max_examples=100, deadline=None)
@given(x=linears(), divisor=st.integers(1, 9))
def test_division(x, divisor):
    for operation, reference in ((symbolic.divide, np.floor_divide), (symbolic.remainder, np.mod)):
        result = operation(x, divisor, {})
        if result is not None:
            np.testing.assert_array_equal(result.traced(), reference(x.traced(), divisor))
            low, high = result.bounds({})
            assert low <= np.min(result.traced()) and np.max(result.traced()) <= high


@settings(max_examples=100, deadline=None)
@given(x=linears(), y=linears())
def test_comparisons_known_ahead_are_right(x, y):
    for name, reference in (("lt", np.less), ("le", np.less_equal), ("eq", np.equal), ("ne", np.not_equal)):
        if x.pattern.ndim and y.pattern.ndim and x.pattern.shape != y.pattern.shape:
            continue
        known = symbolic.compare(name, x - y, {})
        if known is not None:
            truth = reference(x.traced(), y.traced())
            np.testing.assert_array_equal(np.broadcast_to(known, np.shape(truth)), truth)


@settings(max_examples=50, deadline=None)
@given(x=linears(), high=st.integers(0, 9))
def test_clamping_and_extrema(x, high):
    scalar = Linear(int(x.pattern.flat[0]), x.terms)
    np.testing.assert_array_equal(symbolic.clamp(scalar, high).traced(), np.clip(scalar.traced(), 0, high))
    for name, reference in (("min", np.minimum), ("max", np.maximum)):
        result = symbolic.extremum(name, scalar, Linear(high), {})
        np.testing.assert_array_equal(result.traced(), reference(scalar.traced(), high))


def test_unknown_bounds_stay_unknown():
    quotient = symbolic.divide(Linear.of(symbolic.fresh(np.int32(11))), 5, {})
    assert quotient.bounds({}) == (-math.inf, math.inf)


def test_quotient_and_remainder_recompose():
    x = Linear.of(symbolic.fresh(np.int32(17), 0, 31)).scaled(3) + Linear(1)
    again = symbolic.divide(x, 5, {}).scaled(5) + symbolic.remainder(x, 5, {})
    assert again.key == x.key and again.pattern == x.pattern
    assert (symbolic.divide(x, 5, {}).scaled(4) + symbolic.remainder(x, 5, {})).key != x.key


def test_facts_bound_sums():
    x, y = (Linear.of(symbolic.fresh(np.int32(1), 0, 31)) for _ in range(2))
    total = x.scaled(32) + y
    assert total.bounds({})[1] == 32 * 31 + 31
    assert (total + Linear(2)).bounds({total.key: 6})[1] == 8


def test_strides():
    i, j = np.arange(3).reshape(3, 1), np.arange(4).reshape(1, 4)
    assert symbolic.strides(5 + 4 * i + j) == (5, {0: 4, 1: 1})
    assert symbolic.strides(np.asarray(7)) == (7, {})
    assert symbolic.strides(i * j) is None
    assert symbolic.strides((3 * i + j) % 5) is None
