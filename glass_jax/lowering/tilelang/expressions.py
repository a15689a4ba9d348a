"""Expressions of TileLang's front-end IR as those of ``ir.program``: one handler a node type, one name a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang  # noqa: F401 - brings tvm, which is not importable before it
from tvm import tirx

from glass_jax import errors
from glass_jax.hw.ir import program as ir
from glass_jax.lowering.tilelang import effects, simd
from glass_jax.lowering.tilelang.decoding import Decoding
from glass_jax.lowering.tilelang.names import op_name, short

# Functions of scalars, by their name in the IR without its namespace, and by their name in a Program.
_FUNCTIONS = {
    name: name
    for name in (
        "exp", "exp2", "exp10", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh", "sin", "cos",
        "tan", "sinh", "cosh", "asin", "acos", "atan", "atan2", "erf", "floor", "ceil", "trunc", "round", "nearbyint",
        "isnan", "isinf", "isfinite", "clz", "popcount", "reinterpret", "fmod", "copysign", "hypot", "ldexp", "clamp",
        "warp_reduce_sum", "warp_reduce_max", "warp_reduce_min", "warp_reduce_bitand", "warp_reduce_bitor",
        "shfl_sync", "shfl_up_sync", "shfl_down_sync", "shfl_xor_sync", "ballot", "ballot_sync", "any_sync", "all_sync",
        "activemask", "syncthreads_and", "syncthreads_or", "syncthreads_count",
    )
} | {"fabs": "abs", "bitwise_not": "bitnot", "round_ties_away_from_zero": "round_away"}  # fmt: skip

_BINARY_FUNCTIONS = {
    "pow": "pow",
    "bitwise_and": "bitand",
    "bitwise_or": "bitor",
    "bitwise_xor": "bitxor",
    "shift_left": "shl",
    "shift_right": "shr",
}

_BINARY_NODES = {
    tirx.Add: "add",
    tirx.Sub: "sub",
    tirx.Mul: "mul",
    tirx.FloorDiv: "floordiv",
    tirx.FloorMod: "floormod",
    tirx.Mod: "truncmod",
    tirx.Min: "min",
    tirx.Max: "max",
    tirx.EQ: "eq",
    tirx.NE: "ne",
    tirx.LT: "lt",
    tirx.LE: "le",
    tirx.GT: "gt",
    tirx.GE: "ge",
    tirx.And: "and",
    tirx.Or: "or",
}


def decode(decoder: Decoding, expr: Any) -> ir.Expr:
    """``expr`` as an expression of a Program.

    Raises:
      UnsupportedError: a Program has no form for it.
    """
    if isinstance(expr, bool | int | float):
        expr = tirx.const(expr)
    if (op := _BINARY_NODES.get(type(expr))) is not None:
        return _binary(decoder, op, expr.a, expr.b, expr)
    handler = _HANDLERS.get(type(expr))
    if handler is None:
        raise errors.UnsupportedError(f"{decoder.where}: the expression {expr} ({type(expr).__name__}) is not decoded")
    return handler(decoder, expr)


def _binary(decoder: Decoding, op: str, lhs: Any, rhs: Any, expr: Any) -> ir.Binary:
    if op in ("and", "or"):
        with decoder.pure("a condition"):
            return ir.Binary(op, decode(decoder, lhs), decode(decoder, rhs), str(expr.dtype))
    return ir.Binary(op, decode(decoder, lhs), decode(decoder, rhs), str(expr.dtype))


def _div(decoder: Decoding, expr: tirx.Div) -> ir.Binary:
    op = "truncdiv" if str(expr.dtype).startswith(("int", "uint")) else "div"
    return _binary(decoder, op, expr.a, expr.b, expr)


def _integer(decoder: Decoding, expr: tirx.IntImm) -> ir.Const:
    dtype = str(expr.dtype)
    return ir.Const(bool(expr.value) if dtype == "bool" else int(expr.value), dtype)


def _load(decoder: Decoding, expr: tirx.BufferLoad) -> ir.Load:
    indices = tuple(decode(decoder, index) for index in expr.indices)
    return ir.Load(decoder.buffer(expr.buffer), indices, str(expr.dtype))


def _select(decoder: Decoding, condition: Any, then: Any, orelse: Any, expr: Any) -> ir.Select:
    chosen = decode(decoder, condition)
    with decoder.pure("one side of a choice"):
        return ir.Select(chosen, decode(decoder, then), decode(decoder, orelse), str(expr.dtype))


def _cast(decoder: Decoding, expr: tirx.Cast) -> ir.Cast:
    if "round" in (getattr(expr, "annotations", None) or {}):
        raise errors.UnsupportedError(
            f"{decoder.where}: a cast with a rounding mode of its own is not decoded, in {expr}"
        )
    return ir.Cast(decode(decoder, expr.value), str(expr.dtype))


def _call(decoder: Decoding, expr: tirx.Call) -> ir.Expr:
    name, dtype = short(op_name(expr)), str(expr.dtype)
    if simd.is_operation(expr):
        return simd.register(decoder, expr)
    if name == "reinterpret" and ir.register(dtype) is not None:
        return simd.reinterpreted(decoder, expr)
    if name == "if_then_else":
        return _select(decoder, *expr.args, expr)
    if name in _BINARY_FUNCTIONS:
        return _binary(decoder, _BINARY_FUNCTIONS[name], *expr.args, expr)
    if name == "infinity":
        return ir.Const(float("inf"), dtype)
    if name in ("likely", "ret"):
        return decode(decoder, expr.args[0])
    if name in _FUNCTIONS:
        return ir.Call(_FUNCTIONS[name], tuple(decode(decoder, arg) for arg in expr.args), dtype)
    if name == "atomic_load_elem_op":
        element = decoder.element(expr.args[0])
        return ir.Load(element.buffer, element.starts, dtype)
    if name in effects.RETURNING:
        return effects.returning(decoder, name, expr)
    raise errors.UnsupportedError(f"{decoder.where}: the function {op_name(expr)} is not decoded, in {expr}")


_HANDLERS: dict[type, Callable[[Decoding, Any], ir.Expr]] = {
    tirx.Div: _div,
    tirx.IntImm: _integer,
    tirx.FloatImm: lambda decoder, expr: ir.Const(float(expr.value), str(expr.dtype)),
    tirx.Var: lambda decoder, expr: decoder.variable(expr),
    tirx.SizeVar: lambda decoder, expr: decoder.variable(expr),
    tirx.BufferLoad: _load,
    tirx.Cast: _cast,
    tirx.Select: lambda decoder, expr: _select(decoder, expr.condition, expr.true_value, expr.false_value, expr),
    tirx.Not: lambda decoder, expr: ir.Call("not", (decode(decoder, expr.a),), str(expr.dtype)),
    tirx.Call: _call,
}
