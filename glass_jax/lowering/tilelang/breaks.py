"""``T.loop_break`` as a flag: a Program's loops have no other way out than their condition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from glass_jax.hw.ir import program as ir

_FLAG = "bool"


def guarded(body: tuple[ir.Stmt, ...], temporary: Callable[[str], str]) -> tuple[str | None, tuple[ir.Stmt, ...]]:
    """The name of the flag that stops a loop, None if nothing does, and the loop's body, idle once the flag is set.

    ``temporary(dtype)`` gives the name of a new scalar variable.
    """
    if not _breaks(body):
        return None, body
    stop = temporary(_FLAG)
    return stop, (ir.If(_running(stop), _flagged(body, stop)),)


def cleared(stop: str | None, loc: str | None) -> Iterator[ir.Stmt]:
    """What stands before a loop that ``stop`` stops."""
    if stop is not None:
        yield ir.Store(stop, (ir.Const(0, "int32"),), ir.Const(False, _FLAG), loc)


def until(stop: str | None, condition: ir.Expr) -> ir.Expr:
    """The condition of a while loop that ``stop`` stops too."""
    return condition if stop is None else ir.Binary("and", _running(stop), condition, "bool")


def _running(stop: str) -> ir.Expr:
    return ir.Call("not", (ir.Load(stop, (ir.Const(0, "int32"),), _FLAG),), "bool")


def _breaks(body: tuple[ir.Stmt, ...]) -> bool:
    """Whether a break in ``body`` leaves the loop whose body it is: loops inside have their own, already replaced."""
    return any(isinstance(stmt, ir.Op) and stmt.name == "break" for stmt in ir.walk(body))


def _flagged(body: tuple[ir.Stmt, ...], stop: str) -> tuple[ir.Stmt, ...]:
    """``body`` with breaks that set the flag, and what stands after them run only if it is not set."""
    for position, stmt in enumerate(body):
        if isinstance(stmt, ir.Op) and stmt.name == "break":
            return (*body[:position], ir.Store(stop, (ir.Const(0, "int32"),), ir.Const(True, _FLAG), stmt.loc))
        if _breaks((stmt,)):
            new = dataclasses.replace(stmt, then=_flagged(stmt.then, stop), orelse=_flagged(stmt.orelse, stop))
            rest = _flagged(body[position + 1 :], stop)
            return (*body[:position], new, *((ir.If(_running(stop), rest, loc=stmt.loc),) if rest else ()))
    return body
