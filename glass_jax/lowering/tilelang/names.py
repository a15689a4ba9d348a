"""Names of operations in TileLang's IR."""

from __future__ import annotations

import tilelang  # noqa: F401 - brings tvm, which is not importable before it
from tvm import tirx


def op_name(call: tirx.Call) -> str:
    """The name of the operation that ``call`` performs, with its namespace: ``"tirx.exp"``, ``"tl.tileop.gemm"``."""
    return getattr(call.op, "name", None) or str(call.op)


def short(name: str) -> str:
    """``name`` without its namespace."""
    return name.rsplit(".", 1)[-1]
