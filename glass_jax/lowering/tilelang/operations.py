"""Tile operations of TileLang's front-end IR as statements of ``hw.program``: one handler an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tilelang  # noqa: F401 - brings tvm, which is not importable before it
from tvm import tirx

from glass_jax import errors
from glass_jax.hw import program as ir
from glass_jax.lowering.tilelang.expressions import op_name, short

if TYPE_CHECKING:
    from glass_jax.lowering.tilelang.decode import Decoder

_DUAL = {1: "rows", 2: "columns"}
_COPY_HINTS = {"l2_cache_ctrl", "unit_flag_ctrl", "coalesced_width"}

# Operations that become an ``Op`` as they are: synchronization and hints, which have no effect when statements run in
# order, and modes of the hardware.
_PLAIN = {
    "assume",
    "ascend_cross_core_set_flag",
    "ascend_cross_core_wait_flag",
    "ascend_get_buf",
    "ascend_pipe_barrier",
    "ascend_rls_buf",
    "ascend_set_flag",
    "ascend_set_hf32_mode",
    "ascend_set_mmad_direction",
    "ascend_threadfence",
    "ascend_wait_flag",
    "conflict_hint",
}


def decode(decoder: Decoder, call: Any) -> tuple[ir.Stmt, ...]:
    """What the evaluated expression ``call`` does.

    Raises:
      UnsupportedError: a Program has no form for it.
    """
    if isinstance(call, tirx.IntImm):
        return ()  # how the IR writes an empty statement
    name = op_name(call) if isinstance(call, tirx.Call) else type(call).__name__
    if handler := _HANDLERS.get(name):
        return handler(decoder, call)
    if short(name) in _PLAIN:
        return (ir.Op(short(name), tuple(decoder.argument(arg) for arg in call.args), loc=decoder.loc),)
    raise errors.UnsupportedError(f"{decoder.where}: the operation {name} is not decoded")


def _copy(decoder: Decoder, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    attrs: dict[str, Any] = {}
    for key, value in decoder.attributes(call.annotations).items():
        if not value:
            continue
        if key == "dual_dst_ctl":
            attrs["dual"] = _DUAL[value]
        elif key in ("transpose", "double"):
            attrs[key] = True
        elif key == "data_select" and decoder.pad is not None:
            attrs["pad"] = decoder.pad
        elif key in _COPY_HINTS:
            attrs[key] = value
        else:
            raise errors.UnsupportedError(f"{decoder.where}: a copy with {key}={value} is not decoded")
    src, dst = call.args
    return (ir.Copy(decoder.region(src), decoder.region(dst), attrs, decoder.loc),)


def _pad_value(decoder: Decoder, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    decoder.pad = decoder.expr(call.args[0])
    return ()


def _gemm(decoder: Decoder, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    a, b, c, transpose_a, transpose_b, _m, _n, _k, _policy, clear, *rest = call.args
    if any(not isinstance(arg, tirx.IntImm) or arg.value for arg in rest) or any(
        decoder.attributes(call.annotations).values()
    ):
        raise errors.UnsupportedError(f"{decoder.where}: options of this T.gemm are not decoded: {call}")
    regions = decoder.region(a), decoder.region(b), decoder.region(c)
    return (ir.Gemm(*regions, bool(transpose_a), bool(transpose_b), decoder.expr(clear), loc=decoder.loc),)


def _fill(decoder: Decoder, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    return (ir.Fill(decoder.region(call.args[0]), decoder.expr(call.args[1]), decoder.loc),)


def _reduce(decoder: Decoder, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    src, dst, kind, dim, clear = call.args
    attrs = {"kind": str(kind.value), "dim": int(dim), "clear": bool(clear)}
    return (ir.Op("reduce", (decoder.region(src), decoder.region(dst)), attrs, decoder.loc),)


_HANDLERS: dict[str, Callable[[Decoder, tirx.Call], tuple[ir.Stmt, ...]]] = {
    "tl.tileop.ascend_copy": _copy,
    "tl.tileop.copy": _copy,
    "tl.tileop.gemm": _gemm,
    "tl.tileop.fill": _fill,
    "tl.tileop.reduce": _reduce,
    "tl.ascend_set_copy_pad_value": _pad_value,
}
