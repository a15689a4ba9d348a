"""Where in a kernel's source something stands."""

from __future__ import annotations

import pathlib
from typing import Any

import tilelang
from tilelang import ir as tl_ir
from tvm import tirx

_PACKAGE = pathlib.Path(__file__).parents[3]  # the folder that holds glass_jax
_TILELANG = pathlib.Path(tilelang.__file__).parent


def place(span: Any) -> str | None:
    """``file:line`` of ``span``, files of this package relative to its folder; None inside TileLang itself."""
    location = tl_ir.span_to_location(span)
    if location is None:
        return None
    file, line = location
    path = pathlib.Path(file)
    if path.is_relative_to(_TILELANG):
        return None
    return f"{path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path}:{line}"


def lines(func: tirx.PrimFunc) -> tuple[str, ...]:
    """``file:line`` of every statement of a kernel that has one, in the order of a walk through it."""
    found = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Stmt):
            found.append(place(tl_ir.get_stmt_span(node)))

    tirx.stmt_functor.post_order_visit(func.body, visit)
    return tuple(line for line in found if line is not None)


def is_assertion(span: Any) -> bool:
    """Whether ``span`` is inside ``T.device_assert``, of which the front end leaves only the condition."""
    location = tl_ir.span_to_location(span)
    return location is not None and pathlib.Path(location[0]) == _TILELANG / "ascend" / "debug.py"
