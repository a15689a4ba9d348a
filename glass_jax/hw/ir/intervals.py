"""The values that integers of a program may take, from those of the variables in them, without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from glass_jax.hw.ir import program as ir

Interval = tuple[int, int]  # the smallest and the largest value
Environment = Mapping[str, Interval]

_BOOL = (0, 1)


def bounds(expr: int | ir.Expr, env: Environment) -> Interval | None:
    """The interval in which ``expr`` certainly lies, given those of its variables; None if it is not known.

    Conditions are 0 or 1. A scalar variable in memory is known by the name of its buffer.
    """
    match expr:
        case int():
            return (int(expr), int(expr))
        case ir.Const():
            return (int(expr.value), int(expr.value)) if isinstance(expr.value, int) else None
        case ir.Var():
            return env.get(expr.name)
        case ir.Load() if all(index == ir.Const(0, index.dtype) for index in expr.indices):
            return env.get(expr.buffer)  # a scalar variable, known by its buffer's name
        case ir.Cast():
            return bounds(expr.value, env) if expr.dtype.startswith(("int", "uint", "bool")) else None
        case ir.Select():
            return _select(expr, env)
        case ir.Call() if expr.name == "not":
            low, high = _truth(bounds(expr.args[0], env))
            return (1 - high, 1 - low)
        case ir.Binary():
            lhs, rhs = bounds(expr.lhs, env), bounds(expr.rhs, env)
            if expr.op in ("and", "or"):
                return _logical(expr.op, lhs, rhs)
            operation = _OPERATIONS.get(expr.op)
            return None if lhs is None or rhs is None or operation is None else operation(lhs, rhs)
    return None


def value(expr: int | ir.Expr, env: Environment) -> int | None:
    """The one value that ``expr`` can have, None if it may have several or is not known."""
    found = bounds(expr, env)
    return found[0] if found is not None and found[0] == found[1] else None


def _select(expr: ir.Select, env: Environment) -> Interval | None:
    condition = value(expr.condition, env)
    if condition is not None:
        return bounds(expr.then if condition else expr.orelse, env)
    then, orelse = bounds(expr.then, env), bounds(expr.orelse, env)
    return None if then is None or orelse is None else (min(then[0], orelse[0]), max(then[1], orelse[1]))


def _truth(value: Interval | None) -> Interval:
    """The truth of a value, 0 or 1."""
    if value is None or (value[0] <= 0 <= value[1] and value != (0, 0)):
        return _BOOL
    return (0, 0) if value == (0, 0) else (1, 1)


def _logical(op: str, lhs: Interval | None, rhs: Interval | None) -> Interval:
    """``and`` and ``or`` may be known though one side is not."""
    join = min if op == "and" else max
    (a, b), (c, d) = _truth(lhs), _truth(rhs)
    return (join(a, c), join(b, d))


def _corners(op: Callable[[int, int], int]) -> Callable[[Interval, Interval], Interval]:
    """An operation whose extremes are taken at the ends of its operands' intervals."""

    def apply(lhs: Interval, rhs: Interval) -> Interval:
        values = [op(a, b) for a in lhs for b in rhs]
        return (min(values), max(values))

    return apply


def _divide(lhs: Interval, rhs: Interval) -> Interval | None:
    """Division by a positive number; the roundings differ for negative dividends only, which are not needed."""
    if rhs[0] <= 0 or lhs[0] < 0:
        return None
    return (lhs[0] // rhs[1], lhs[1] // rhs[0])


def _remainder(lhs: Interval, rhs: Interval) -> Interval | None:
    if rhs[0] <= 0 or rhs[0] != rhs[1] or lhs[0] < 0:
        return None
    if lhs[0] // rhs[0] == lhs[1] // rhs[0]:
        return (lhs[0] % rhs[0], lhs[1] % rhs[0])
    return (0, rhs[0] - 1)


def _bits(op: Callable[[int, int], int]) -> Callable[[Interval, Interval], Interval | None]:
    """A bitwise operation: known for single values, and bounded for an ``and`` with a mask."""

    def apply(lhs: Interval, rhs: Interval) -> Interval | None:
        if lhs[0] == lhs[1] and rhs[0] == rhs[1]:
            result = op(lhs[0], rhs[0])
            return (result, result)
        return (0, min(lhs[1], rhs[1])) if op(1, 0) == 0 and op(1, 1) == 1 and min(lhs[0], rhs[0]) >= 0 else None

    return apply


def _comparison(certain: Callable[[Interval, Interval], bool], excluded: Callable[[Interval, Interval], bool]):
    def apply(lhs: Interval, rhs: Interval) -> Interval:
        return (1, 1) if certain(lhs, rhs) else (0, 0) if excluded(lhs, rhs) else _BOOL

    return apply


def _same(a: Interval, b: Interval) -> bool:
    return a == b and a[0] == a[1]


def _apart(a: Interval, b: Interval) -> bool:
    return a[1] < b[0] or b[1] < a[0]


_OPERATIONS: dict[str, Callable[[Interval, Interval], Interval | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _corners(lambda a, b: a * b),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "div": _divide,
    "floordiv": _divide,
    "truncdiv": _divide,
    "floormod": _remainder,
    "truncmod": _remainder,
    "shl": lambda a, b: (a[0] << b[0], a[1] << b[1]) if a[0] >= 0 <= b[0] else None,
    "shr": lambda a, b: (a[0] >> b[1], a[1] >> b[0]) if a[0] >= 0 <= b[0] else None,
    "bitand": _bits(lambda a, b: a & b),
    "bitor": _bits(lambda a, b: a | b),
    "bitxor": _bits(lambda a, b: a ^ b),
    "lt": _comparison(lambda a, b: a[1] < b[0], lambda a, b: a[0] >= b[1]),
    "le": _comparison(lambda a, b: a[1] <= b[0], lambda a, b: a[0] > b[1]),
    "gt": _comparison(lambda a, b: a[0] > b[1], lambda a, b: a[1] <= b[0]),
    "ge": _comparison(lambda a, b: a[0] >= b[1], lambda a, b: a[1] < b[0]),
    "eq": _comparison(_same, _apart),
    "ne": _comparison(_apart, _same),
}
