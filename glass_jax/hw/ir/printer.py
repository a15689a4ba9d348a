"""A program as text that a kernel's author can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from glass_jax.hw.ir import program as ir

_SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "floormod": "%", "pow": "**",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and": "and", "or": "or",
    "bitand": "&", "bitor": "|", "bitxor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip
# Python's own precedence, so that the text reads as the reader expects; functions and atoms bind tightest.
_PRECEDENCE = {
    "or": 1, "and": 2, "eq": 4, "ne": 4, "lt": 4, "le": 4, "gt": 4, "ge": 4, "bitor": 5, "bitxor": 6, "bitand": 7,
    "shl": 8, "shr": 8, "add": 9, "sub": 9, "mul": 10, "div": 10, "floordiv": 10, "floormod": 10, "pow": 12,
}  # fmt: skip
_ATOM = 13


def expression(expr: int | ir.Expr) -> str:
    """``expr`` in Python's notation."""
    return _expression(expr)[0]


def _expression(expr: int | ir.Expr) -> tuple[str, int]:
    """The text of ``expr`` and how tightly its outermost operator binds."""
    match expr:
        case ir.Const():
            return str(expr.value), _ATOM
        case ir.Var():
            return expr.name, _ATOM
        case ir.Load():
            return f"{expr.buffer}[{_list(expr.indices)}]", _ATOM
        case ir.Cast():
            return f"{expr.dtype}({expression(expr.value)})", _ATOM
        case ir.Select():
            return f"select({expression(expr.condition)}, {expression(expr.then)}, {expression(expr.orelse)})", _ATOM
        case ir.Call():
            return f"{expr.name}({_list(expr.args)})", _ATOM
        case ir.Binary():
            return _binary(expr)
        case ir.Address():
            offset = f" + {expression(expr.offset)} bytes" if expr.offset else ""
            return f"&{expr.buffer}[{_list(expr.indices)}]{offset}", _ATOM
        case ir.Register():
            words = "".join(f", {word}" for word in expr.modes)
            return f"{expr.name}({_list(expr.args)}{words})", _ATOM
    return str(expr), _ATOM


def _binary(expr: ir.Binary) -> tuple[str, int]:
    if expr.op not in _SYMBOLS:  # min, max, truncdiv, truncmod
        return f"{expr.op}({expression(expr.lhs)}, {expression(expr.rhs)})", _ATOM
    precedence = _PRECEDENCE[expr.op]
    (lhs, lhs_binds), (rhs, rhs_binds) = _expression(expr.lhs), _expression(expr.rhs)
    lhs = f"({lhs})" if lhs_binds < precedence else lhs
    rhs = f"({rhs})" if rhs_binds <= precedence else rhs
    return f"{lhs} {_SYMBOLS[expr.op]} {rhs}", precedence


def _list(exprs: tuple[Any, ...]) -> str:
    return ", ".join(map(expression, exprs))


def region(item: ir.Region) -> str:
    """``item`` as ``buffer[start:+extent, ...]``; an extent of 1 is left out."""
    ranges = []
    for start, extent in zip(item.starts, item.extents, strict=True):
        length = expression(extent)
        ranges.append(expression(start) if length == "1" else f"{expression(start)}:+{length}")
    return f"{item.buffer}[{', '.join(ranges)}]"


def _argument(arg: Any) -> str:
    return region(arg) if isinstance(arg, ir.Region) else expression(arg)


def _attrs(attrs: dict[str, Any]) -> str:
    return "".join(f" {name}={_argument(value)}" for name, value in attrs.items())


def head(stmt: ir.Stmt) -> str:
    """The first line of ``stmt``, without the blocks inside it."""
    match stmt:
        case ir.For():
            start, stop = expression(stmt.start), expression(stmt.extent)
            bounds = stop if start == "0" else f"{start}, +{stop}"
            return f"for {stmt.var.name} in {stmt.kind}({bounds}){_attrs(stmt.attrs)}:"
        case ir.While():
            return f"while {expression(stmt.condition)}:"
        case ir.If():
            return f"if {expression(stmt.condition)}:"
        case ir.Let():
            return f"{stmt.var.name} = {expression(stmt.value)}"
        case ir.Store():
            return f"{stmt.buffer}[{_list(stmt.indices)}] = {expression(stmt.value)}"
        case ir.Copy():
            return f"copy {region(stmt.src)} -> {region(stmt.dst)}{_attrs(stmt.attrs)}"
        case ir.Gemm():
            a, b = region(stmt.a) + ".T" * stmt.transpose_a, region(stmt.b) + ".T" * stmt.transpose_b
            return f"gemm {region(stmt.c)} += {a} @ {b} clear={expression(stmt.clear)}{_attrs(stmt.attrs)}"
        case ir.Fill():
            return f"fill {region(stmt.dst)} = {expression(stmt.value)}"
        case ir.Simt():
            threads = ", ".join(
                f"{var.name} < {extent}" for var, extent in zip(stmt.threads, stmt.extents, strict=True)
            )
            return f"simt {threads}:"
        case ir.Simd():
            return "simd:"
        case ir.Section():
            return f"{stmt.core}:"
        case ir.Op():
            return f"{stmt.name}({', '.join(map(_argument, stmt.args))}){_attrs(stmt.attrs)}"


def _lines(body: tuple[ir.Stmt, ...], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for stmt in body:
        yield indent + head(stmt)
        blocks = ir.blocks_of(stmt)
        for index, block in enumerate(blocks):
            if index == 1 and block:
                yield f"{indent}else:"
            yield from _lines(block, depth + 1)


def text(program: ir.Program) -> str:
    """``program`` as text: its parameters, its buffers with their memories, and the statements of one block."""
    lines = [f"kernel {program.name}"]
    width = max((len(name) for name in program.buffers), default=0)
    for buffer in program.buffers.values():
        role = "param" if buffer.name in program.params else "alloc"
        notes = f" view of {buffer.storage}" if buffer.storage != buffer.name else ""
        notes += f" layout {buffer.layout}" if buffer.layout else ""
        notes += f" strides [{_list(buffer.strides)}]" if buffer.strides else ""
        lines.append(
            f"  {role} {buffer.name:<{width}}  {buffer.space.value:<8} {buffer.dtype}[{_list(buffer.shape)}]{notes}"
        )
    units = f", {program.unit.name} < {program.units}" if program.unit else ""
    lines.append(f"  blocks {program.block.name} < {expression(program.blocks)}{units}:")
    lines.extend(_lines(program.body, 2))
    if program.next is not None:
        lines.append(f"then {text(program.next)}")
    return "\n".join(lines)
