"""Expressions of a program evaluated over the lanes of a machine."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.evaluation import elements, warps
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.values import numerics, symbolic
from glass_jax.hw.model.values.lanes import Index
from glass_jax.hw.model.values.symbolic import Linear

COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})

Array = jax.Array | np.ndarray


def index(machine: Machine, expr: int | ir.Expr) -> Index:
    """An expression as a linear form if it is an integer that has one, else as an array of rank 0 or the lanes' rank.

    A scalar integer without a linear form becomes a symbol of its own.
    """
    if isinstance(expr, int):
        return Linear(expr)
    found = _linear(machine, expr)
    if found is not None:
        return found
    result = value(machine, expr)
    if np.size(result) == 1 and jnp.issubdtype(result.dtype, jnp.integer):
        return _opaque(result)
    return result


def indices(machine: Machine, exprs: Iterable[int | ir.Expr]) -> list[Index]:
    """Several expressions as :func:`index` gives them."""
    return [index(machine, expr) for expr in exprs]


def scalar(machine: Machine, expr: int | ir.Expr) -> Linear | None:
    """An integer expression if it is the same in every lane, else None."""
    found = index(machine, expr)
    if isinstance(found, Linear) and found.pattern.size == 1:
        return Linear(found.pattern.reshape(()), found.terms)
    return None


def constant(machine: Machine, expr: int | ir.Expr, what: str) -> int:
    """The value of an expression that must be known when the program is traced."""
    found = scalar(machine, expr)
    if found is None or found.static is None:
        raise UnsupportedError(f"the NPU model does not run {what} that is known only at run time yet")
    return found.static


def bind(machine: Machine, var: ir.Var, expr: ir.Expr) -> None:
    """Gives ``var`` the value of an expression."""
    machine.variables[var.name] = index(machine, expr)


def value(machine: Machine, expr: ir.Expr) -> Array:
    """An expression in every lane: an array of its dtype, of rank 0 or of the lanes' rank, size 1 where it is the same.

    What is known while the program is traced stays a NumPy array.

    Raises:
      UnsupportedError: for a function that the model does not know.
    """
    dtype = numerics.scalar_dtype(expr.dtype)
    if isinstance(expr, ir.Const):
        return np.asarray(expr.value, dtype)
    if isinstance(expr, ir.Var):
        return _variable(machine, expr, dtype)
    if isinstance(expr, ir.Load):
        return elements.load(machine, expr.buffer, indices(machine, expr.indices))
    if isinstance(expr, ir.Binary):
        return _binary(machine, expr, dtype)
    if isinstance(expr, ir.Cast):
        return _cast(machine, expr, dtype)
    if isinstance(expr, ir.Select):
        condition = value(machine, expr.condition)
        known = decided(condition)
        if known is not None:
            return value(machine, expr.then if known else expr.orelse)
        return jnp.where(condition, value(machine, expr.then), value(machine, expr.orelse)).astype(dtype)
    args = [value(machine, argument) for argument in expr.args]
    if expr.name == "reinterpret":
        return lax.bitcast_convert_type(jnp.asarray(args[0]), dtype)
    if expr.name in warps.NAMES:
        return warps.call(machine, expr.name, args).astype(dtype)
    function = numerics.CALLS.get(expr.name)
    if function is None:
        raise UnsupportedError(f"the NPU model does not run the function {expr.name!r} yet")
    return numerics.apply(function, args, dtype)


_STATIC = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
    "truncdiv": lambda lhs, rhs: int(lhs / rhs), "floormod": operator.mod, "min": min, "max": max,
    "shl": operator.lshift, "shr": operator.rshift,
}  # fmt: skip


def static(expr: int | ir.Expr, sizes: Mapping[str, Linear]) -> int | None:
    """An integer expression of variables with known values, such as an extent; None if it is something else."""
    if isinstance(expr, int):
        return expr
    if isinstance(expr, ir.Var):
        return sizes[expr.name].static if expr.name in sizes else None
    if isinstance(expr, ir.Const):
        return int(expr.value)
    if isinstance(expr, ir.Cast):
        return static(expr.value, sizes)
    if isinstance(expr, ir.Binary):
        lhs, rhs = static(expr.lhs, sizes), static(expr.rhs, sizes)
        return None if lhs is None or rhs is None or expr.op not in _STATIC else _STATIC[expr.op](lhs, rhs)
    return None


def decided(condition: Array) -> bool | None:
    """The truth of a condition if it is known now and the same in every lane."""
    if not isinstance(condition, np.ndarray | np.bool_):
        return None
    return True if condition.all() else None if condition.any() else False


def _variable(machine: Machine, expr: ir.Var, dtype: np.dtype) -> Array:
    bound = _bound(machine, expr.name)
    return (bound.traced() if isinstance(bound, Linear) else bound).astype(dtype)


def _bound(machine: Machine, name: str) -> Linear | jax.Array:
    """A variable's value, with the axes of lanes added since it was bound."""
    if name not in machine.variables:
        raise UnsupportedError(f"the NPU model does not know the variable {name!r} here: the program uses it unbound")
    bound, rank = machine.variables[name], len(machine.lanes)
    array = bound.pattern if isinstance(bound, Linear) else bound
    if array.ndim in (0, rank):
        return bound
    array = array.reshape(array.shape + (1,) * (rank - array.ndim))
    return Linear(array, bound.terms) if isinstance(bound, Linear) else array


def _binary(machine: Machine, expr: ir.Binary, dtype: np.dtype) -> Array:
    if expr.op not in numerics.BINARY:
        raise UnsupportedError(f"the NPU model does not run the operator {expr.op!r} yet")
    linear = _linear(machine, expr)
    if linear is not None:
        return linear.traced().astype(dtype)
    if expr.op in COMPARISONS:
        lhs, rhs = _linear(machine, expr.lhs), _linear(machine, expr.rhs)
        if lhs is not None and rhs is not None:
            known = symbolic.compare(expr.op, lhs - rhs, machine.facts)
            if known is not None:
                return known
    lhs, rhs = value(machine, expr.lhs), value(machine, expr.rhs)
    if expr.op in ("and", "or"):
        for first, second in ((lhs, rhs), (rhs, lhs)):
            known = decided(first)
            if known is not None:
                return second if known == (expr.op == "and") else np.asarray(known)
    return numerics.apply(numerics.BINARY[expr.op], [lhs, rhs], dtype)


def _cast(machine: Machine, expr: ir.Cast, dtype: np.dtype) -> Array:
    linear = _linear(machine, expr)
    if linear is not None:
        return linear.traced().astype(dtype)
    return numerics.convert(jnp.asarray(value(machine, expr.value)), dtype)


def _linear(machine: Machine, expr: ir.Expr) -> Linear | None:
    """The linear form of an integer expression that has one. Integers of 32 bits and more are taken not to overflow."""
    if not _is_index(expr):
        return None
    if isinstance(expr, ir.Const):
        return Linear(int(expr.value))
    if isinstance(expr, ir.Var):
        bound = _bound(machine, expr.name)
        return bound if isinstance(bound, Linear) else None
    if isinstance(expr, ir.Cast):
        return _linear(machine, expr.value)
    if isinstance(expr, ir.Load):
        loaded = value(machine, expr)
        return _opaque(loaded) if np.ndim(loaded) == 0 else None
    if isinstance(expr, ir.Binary):
        lhs, rhs = _linear(machine, expr.lhs), _linear(machine, expr.rhs)
        return None if lhs is None or rhs is None else _combine(machine, expr.op, lhs, rhs)
    return None


def _combine(machine: Machine, op: str, lhs: Linear, rhs: Linear) -> Linear | None:
    facts = machine.facts
    if op == "add":
        return lhs + rhs
    if op == "sub":
        return lhs - rhs
    if op == "mul":
        if lhs.static is not None:
            lhs, rhs = rhs, lhs
        return None if rhs.static is None else lhs.scaled(rhs.static)
    if op in ("min", "max"):
        return symbolic.extremum(op, lhs, rhs, facts)
    if op == "shl":
        return None if rhs.static is None else lhs.scaled(1 << rhs.static)
    if op in ("truncdiv", "truncmod", "div") and lhs.bounds(facts)[0] < 0:
        return None
    if op in ("floordiv", "truncdiv", "div"):
        return None if rhs.static is None else symbolic.divide(lhs, rhs.static, facts)
    if op in ("floormod", "truncmod"):
        return None if rhs.static is None else symbolic.remainder(lhs, rhs.static, facts)
    return None


def _is_index(expr: ir.Expr) -> bool:
    return expr.dtype in ("int32", "int64")


def _opaque(scalar: Array) -> Linear:
    return Linear.of(symbolic.fresh(jnp.reshape(scalar, ()).astype(jnp.int32)))
