"""Intervals of integer expressions hold every value that the expression takes."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from glass_jax.hw.ir import intervals
from glass_jax.hw.ir import program as ir
from tests.hw import programs as p

OPERATIONS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "min": min, "max": max,
    "floordiv": lambda a, b: a // b, "floormod": lambda a, b: a % b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
    "and": lambda a, b: bool(a and b), "or": lambda a, b: bool(a or b), "bitand": lambda a, b: a & b,
    "bitor": lambda a, b: a | b, "bitxor": lambda a, b: a ^ b, "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b,
}  # fmt: skip
RANGES = {"i": (0, 5), "j": (2, 4), "k": (3, 3)}


def expressions():
    leaves = st.one_of(st.sampled_from(list(RANGES)).map(p.var), st.integers(0, 6).map(p.const))

    def combine(inner):
        return st.builds(p.op, st.sampled_from(list(OPERATIONS)), inner, inner)

    return st.recursive(leaves, combine, max_leaves=5)


def evaluate(expr, values):
    if isinstance(expr, ir.Const):
        return expr.value
    if isinstance(expr, ir.Var):
        return values[expr.name]
    return OPERATIONS[expr.op](evaluate(expr.lhs, values), evaluate(expr.rhs, values))


@settings(max_examples=300, deadline=None)
@given(expressions())
def test_every_value_is_in_the_interval(expr):
    found = intervals.bounds(expr, RANGES)
    for numbers in itertools.product(*(range(low, high + 1) for low, high in RANGES.values())):
        try:
            value = int(evaluate(expr, dict(zip(RANGES, numbers, strict=True))))
        except (ZeroDivisionError, ValueError):
            continue
        assert found is None or found[0] <= value <= found[1]


def test_known_and_unknown():
    assert intervals.bounds(p.op("add", p.op("mul", "i", 8), "k"), RANGES) == (3, 43)
    assert intervals.value(p.op("floormod", "k", 2), RANGES) == 1
    assert intervals.value(p.var("i"), RANGES) is None
    assert intervals.bounds(p.var("unknown"), RANGES) is None
    assert intervals.value(p.op("and", p.op("lt", "k", 0), p.op("lt", "unknown", 5)), RANGES) == 0
    assert intervals.value(ir.Select(p.op("gt", "k", 0), p.const(7), p.var("unknown"), "int32"), RANGES) == 7
    assert intervals.bounds(ir.Call("not", (p.op("lt", "i", 9),), "bool"), RANGES) == (0, 0)
