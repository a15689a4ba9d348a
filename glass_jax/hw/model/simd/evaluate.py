"""Expressions whose value is a register, a predicate or a pair."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.simd import arithmetic, convert, loads, permute, predicates, reduce
from glass_jax.hw.model.values.registers import Array, Operation, Value, aligned, layout

_FUNCTIONS: dict[str, Callable[[Operation], Value]] = (
    arithmetic.OPERATIONS | predicates.OPERATIONS | permute.OPERATIONS | reduce.OPERATIONS
)


def is_register(expr: ir.Expr) -> bool:
    """Whether an expression's value is a register, a predicate or a pair."""
    return isinstance(expr, ir.Register) or ir.register(expr.dtype) is not None


def value(machine: Machine, expr: ir.Expr, merging: bool = False) -> Value:
    """The value of a register expression in every lane of the machine.

    Args:
      machine: the machine.
      expr: the expression.
      merging: what ``MODE_MERGING`` keeps is looked after by the caller.

    Raises:
      UnsupportedError: the model does not know an operation, or one merges into nothing.
    """
    if isinstance(expr, ir.Var):
        return aligned(machine.registers[expr.name], len(machine.lanes), machine.active)
    if isinstance(expr, ir.Load):
        return loads.load_register(machine, expr)
    if not isinstance(expr, ir.Register):
        raise UnsupportedError(f"the NPU model does not run {type(expr).__name__} of vector registers")
    if "MODE_MERGING" in expr.modes and not merging:
        raise UnsupportedError(f"{expr.name} merges into a register: assign its result to a mutable one")
    known = operation(machine, expr)
    if expr.name == "vcvt":
        return convert.register_conversion(expr, known)
    if expr.name in loads.OPERATIONS:
        return loads.OPERATIONS[expr.name](machine, known)
    if expr.name not in _FUNCTIONS:
        raise UnsupportedError(f"the NPU model does not run the SIMD operation {expr.name!r} yet")
    return _FUNCTIONS[expr.name](known)


def operation(machine: Machine, expr: ir.Register) -> Operation:
    """``expr`` with its operands evaluated."""
    dtype, lanes = layout(expr.dtype)
    return Operation(expr.name, dtype, lanes, tuple(operand(machine, arg) for arg in expr.args), expr.modes)


def operand(machine: Machine, arg: ir.Expr) -> Value | ir.Address:
    """An operand: a register's value, an address as it is, a scalar as an array whose last axis has size 1."""
    if isinstance(arg, ir.Address):
        return arg
    if is_register(arg):
        return value(machine, arg)
    scalar: Array = expressions.value(machine, arg)
    return scalar.reshape(*np.shape(scalar), 1)
