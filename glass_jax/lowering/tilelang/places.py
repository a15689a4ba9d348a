"""Where in a kernel's source something stands."""

from __future__ import annotations

import pathlib
from typing import Any

import tilelang
from tilelang import ir as tl_ir

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


def is_assertion(span: Any) -> bool:
    """Whether ``span`` is inside ``T.device_assert``, of which the front end leaves only the condition."""
    location = tl_ir.span_to_location(span)
    return location is not None and pathlib.Path(location[0]) == _TILELANG / "ascend" / "debug.py"
