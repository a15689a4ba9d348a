"""Tile operations of TileLang's front-end IR as statements of ``hw.ir.program``: one handler an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang  # noqa: F401 - brings tvm, which is not importable before it
from tvm import tirx

from glass_jax import errors
from glass_jax.hw.ir import program as ir
from glass_jax.lowering.tilelang import effects, simd
from glass_jax.lowering.tilelang.decoding import Decoding
from glass_jax.lowering.tilelang.modes import Atomic
from glass_jax.lowering.tilelang.names import op_name, short

_DUAL = {1: "rows", 2: "columns"}
_COPY_HINTS = {"l2_cache_ctrl", "unit_flag_ctrl", "coalesced_width"}
_GEMM_HINTS = {"unit_flag_ctrl", "sf_a_granularity_k", "sf_b_granularity_k"}
_HF32 = {0: None, 1: "nearest_away", 2: "nearest_even"}  # as code is generated; T names the first "nearest_zero"

# Operations that become an ``Op`` as they are: synchronization and hints, which have no effect when statements run in
# order, and modes of the hardware that change no result.
_PLAIN = {
    "assume",
    "ascend_cross_core_set_flag",
    "ascend_cross_core_wait_flag",
    "ascend_get_buf",
    "ascend_pipe_barrier",
    "ascend_rls_buf",
    "ascend_set_flag",
    "ascend_set_mmad_direction",
    "ascend_threadfence",
    "ascend_wait_flag",
    "conflict_hint",
    "sync_warp",
    "tvm_storage_sync",
}


def decode(decoder: Decoding, call: Any) -> tuple[ir.Stmt, ...]:
    """What the evaluated expression ``call`` does.

    Raises:
      UnsupportedError: a Program has no form for it.
    """
    if isinstance(call, tirx.IntImm):
        return ()  # how the IR writes an empty statement
    name = op_name(call) if isinstance(call, tirx.Call) else type(call).__name__
    if simd.is_operation(call):
        return simd.statement(decoder, call)
    if handler := _HANDLERS.get(name):
        return handler(decoder, call)
    if short(name) in effects.RETURNING:
        decoder.expr(call)  # what it returns is not used
        return ()
    if short(name) in _PLAIN:
        return (ir.Op(short(name), tuple(decoder.argument(arg) for arg in call.args), loc=decoder.loc),)
    raise errors.UnsupportedError(f"{decoder.where}: the operation {name} is not decoded")


# --- tiles ----------------------------------------------------------------------------------------------------------


def _copy(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    attrs: dict[str, Any] = {}
    for key, value in decoder.attributes(call.annotations, _COPY_HINTS).items():
        if key == "dual_dst_ctl" and value:
            attrs["dual"] = _DUAL[value]
        elif key == "sub_blockid":
            attrs["unit"] = value
        elif key in ("transpose", "double") and value:
            attrs[key] = True
        elif key == "data_select" and value:
            attrs["pad"] = decoder.modes.get("pad", decoder.where)
        elif key in _COPY_HINTS and value:
            attrs[key] = value
        elif value:
            raise errors.UnsupportedError(f"{decoder.where}: a copy with {key}={value} is not decoded")
    src, dst = (decoder.region(arg) for arg in call.args)
    return (_stored(decoder, ir.Copy(src, dst, attrs, decoder.loc)),)


def _stored(decoder: Decoding, copy: ir.Copy) -> ir.Copy:
    """A copy as the mode of stores to GM makes it."""
    if decoder.space(copy.dst.buffer) is ir.Space.GM and (mode := decoder.modes.get("atomic", decoder.where)):
        copy.attrs["atomic"] = mode.kind
        if mode != Atomic(mode.kind):
            copy.attrs["atomic_if"] = mode.condition
    return copy


def _move(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    """A transfer between GM and UB written as the instruction that does it, without padding."""
    target, source, _sid, count, nbytes, *padding, _cache, from_distance, to_distance = call.args
    if any(not isinstance(arg, int | tirx.IntImm) or int(arg) for arg in padding):
        raise errors.UnsupportedError(f"{decoder.where}: {short(op_name(call))} with padding is not decoded")
    if not all(isinstance(arg, int | tirx.IntImm) for arg in (count, nbytes)):
        raise errors.UnsupportedError(f"{decoder.where}: {short(op_name(call))} of a length that varies is not decoded")
    elements = decoder.element(target), decoder.element(source)
    distances = decoder.expr(to_distance), decoder.expr(from_distance)
    attrs = {"count": int(count), "nbytes": int(nbytes)}
    return (ir.Op("move", (*elements, *distances), attrs, decoder.loc),)


def _set_pad_value(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    decoder.modes.set("pad", decoder.expr(call.args[0]))
    return ()


def _set_atomic(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    decoder.modes.set("atomic", Atomic(str(call.args[0].value)))
    return ()


def _set_atomic_none(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    decoder.modes.set("atomic", None)
    return ()


def _set_hf32(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    decoder.modes.set("hf32", _HF32[int(call.args[0])])
    return ()


def _gemm(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    a, b, c, transpose_a, transpose_b, _m, _n, _k, _policy, clear, _barrier, _row, _column, *scales = call.args
    attrs = decoder.attributes(call.annotations, _GEMM_HINTS)
    if unknown := {key for key, value in attrs.items() if value and key not in _GEMM_HINTS}:
        raise errors.UnsupportedError(f"{decoder.where}: a product with {', '.join(sorted(unknown))} is not decoded")
    attrs = {}
    if scales:
        attrs["scales"] = tuple(decoder.region(scale) for scale in scales[:2])
    elif hf32 := decoder.modes.get("hf32", decoder.where):
        attrs["hf32"] = hf32
    regions = decoder.region(a), decoder.region(b), decoder.region(c)
    return (ir.Gemm(*regions, bool(transpose_a), bool(transpose_b), decoder.expr(clear), attrs, decoder.loc),)


def _fill(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    return (ir.Fill(decoder.region(call.args[0]), decoder.expr(call.args[1]), decoder.loc),)


def _reduce(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    src, dst, kind, dim, clear = call.args
    attrs = {"kind": str(kind.value), "dim": int(dim), "clear": bool(clear)}
    return (ir.Op("reduce", (decoder.region(src), decoder.region(dst)), attrs, decoder.loc),)


def _scan(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    src, dst, dim, reverse = call.args
    attrs = {"kind": short(op_name(call)).removeprefix("cum"), "dim": int(dim), "reverse": bool(reverse)}
    return (ir.Op("scan", (decoder.region(src), decoder.region(dst)), attrs, decoder.loc),)


# --- reducers and atomics -------------------------------------------------------------------------------------------

_REDUCER_KINDS = {"sum": "add"}
_REDUCER_OPERATORS = {"sum": tirx.Add, "max": tirx.Max, "min": tirx.Min}


def _reducer_init(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    region = decoder.region(call.args[0])
    kind, dtype = _reducer_kind(decoder, call.args[0].args[0].buffer), decoder.dtype(region.buffer)
    start = decoder.expr(call.args[1]) if len(call.args) > 1 else ir.Const(identity(kind, dtype), dtype)
    return (ir.Fill(region, start, decoder.loc),)


def _reducer_update(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    kind = _reducer_kind(decoder, call.args[0].buffer)
    return (_update(decoder, decoder.element(call.args[0]), call.args[1], kind),)


def _reducer_kind(decoder: Decoding, buffer: tirx.Buffer) -> str:
    kind = decoder.reducers[buffer.data]
    return _REDUCER_KINDS.get(kind, kind)


def reducer_store(decoder: Decoding, stmt: tirx.BufferStore) -> ir.Stmt:
    """A store to a reducer of the first kind, which says ``s[i] = s[i] + value`` for a contribution."""
    kind, value = decoder.reducers[stmt.buffer.data], stmt.value
    if isinstance(value, _REDUCER_OPERATORS[kind]):
        for old, new in ((value.a, value.b), (value.b, value.a)):
            if isinstance(old, tirx.BufferLoad) and old.buffer.same_as(stmt.buffer):
                return _update(decoder, decoder.element(old), new, _REDUCER_KINDS.get(kind, kind))
    raise errors.UnsupportedError(
        f"{decoder.where}: a store to the {kind} reducer {stmt.buffer.name} that joins no value to it is not decoded"
    )


def _finalize(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    """The parts that threads kept are joined already: what is left is to copy the result, if it is asked for."""
    regions = [decoder.region(arg) for arg in call.args]
    return (ir.Copy(*regions, {}, decoder.loc),) if len(regions) == 2 else ()


def _update(decoder: Decoding, element: ir.Region, value: Any, kind: str) -> ir.Op:
    return ir.Op("atomic", (element, decoder.expr(value)), {"kind": kind}, decoder.loc)


def identity(kind: str, dtype: str) -> float | int | bool:
    """What joins with any value of ``dtype`` to that value, for a kind of reduction or atomic."""
    if kind in ("add", "bitor", "bitxor"):
        return 0
    if kind == "bitand":
        return -1 if dtype.startswith("int") else 2 ** int(dtype.removeprefix("uint")) - 1
    if dtype.startswith(("float", "bfloat")):
        return float("-inf") if kind == "max" else float("inf")
    bits = int(dtype.lstrip("uint"))
    low, high = (0, 2**bits - 1) if dtype.startswith("uint") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return low if kind == "max" else high


def _atomic(kind: str) -> Callable[[Decoding, tirx.Call], tuple[ir.Stmt, ...]]:
    return lambda decoder, call: (_update(decoder, decoder.element(call.args[0]), call.args[1], kind),)


def _atomic_store(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    element = decoder.element(call.args[0])
    return (ir.Store(element.buffer, element.starts, decoder.expr(call.args[1]), decoder.loc),)


def _atomic_vector(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    """``atomic_addx2`` and ``atomic_addx4``: neighbours along the last dimension."""
    count = int(short(op_name(call)).removeprefix("atomic_addx")[0])
    target, source = (decoder.element(arg) for arg in call.args[:2])
    result = []
    for number in range(count):
        to, of = (
            (*region.starts[:-1], ir.Binary("add", region.starts[-1], ir.Const(number, "int32"), "int32"))
            for region in (target, source)
        )
        value = ir.Load(source.buffer, of, decoder.dtype(source.buffer))
        element = ir.Region(target.buffer, to, target.extents)
        result.append(ir.Op("atomic", (element, value), {"kind": "add"}, decoder.loc))
    return tuple(result)


def _atomic_tile(kind: str) -> Callable[[Decoding, tirx.Call], tuple[ir.Stmt, ...]]:
    def handler(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
        src, dst = (decoder.region(arg) for arg in call.args[:2])
        return (ir.Copy(src, dst, {"atomic": kind}, decoder.loc),)

    return handler


# --- random numbers, messages, control ------------------------------------------------------------------------------


def _random_init(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    seed, sequence, offset = (decoder.expr(arg) for arg in call.args[:3])
    generator = str(call.args[3].value)
    if "Philox" not in generator:
        raise errors.UnsupportedError(f"{decoder.where}: the random generator {generator} is not decoded; Philox is")
    return (ir.Op("random_init", (effects.random_state(decoder), seed, sequence, offset), loc=decoder.loc),)


def _extern(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    name, *args = call.args
    if str(name.value) not in ("debug_print_var", "debug_print_buffer_value", "debug_print_msg"):
        raise errors.UnsupportedError(f"{decoder.where}: the function {name.value}, written in C, is not decoded")
    texts = tuple(str(arg.value) for arg in args if isinstance(arg, tirx.StringImm))
    values = tuple(decoder.expr(arg) for arg in args if not isinstance(arg, tirx.StringImm))
    return (ir.Op("print", values, {"texts": texts}, decoder.loc),)


def _assert(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    message = str(call.args[1].value) if len(call.args) > 1 else ""
    return (ir.Op("assert", (decoder.expr(call.args[0]),), {"message": message}, decoder.loc),)


def _break(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    return (ir.Op("break", (), loc=decoder.loc),)


_HANDLERS: dict[str, Callable[[Decoding, tirx.Call], tuple[ir.Stmt, ...]]] = {
    "tl.tileop.ascend_copy": _copy,
    "tl.tileop.copy": _copy,
    "tl.tileop.gemm": _gemm,
    "tl.tileop.gemm_blockscaled": _gemm,
    "tl.tileop.fill": _fill,
    "tl.tileop.reduce": _reduce,
    "tl.tileop.cumsum": _scan,
    "tl.tileop.cummax": _scan,
    "tl.tileop.reducer_init": _reducer_init,
    "tl.reducer_update": _reducer_update,
    "tl.tileop.finalize_reducer": _finalize,
    "tl.tileop.finalize_reducer_v2": _finalize,
    "tl.tileop.atomicadd": _atomic_tile("add"),
    "tl.tileop.atomicmax": _atomic_tile("max"),
    "tl.tileop.atomicmin": _atomic_tile("min"),
    "tl.ascend_copy_gm_to_ubuf": _move,
    "tl.ascend_set_copy_pad_value": _set_pad_value,
    "tl.ascend_set_atomic": _set_atomic,
    "tl.ascend_set_atomic_none": _set_atomic_none,
    "tl.ascend_set_hf32_mode": _set_hf32,
    "tl.atomic_store_elem_op": _atomic_store,
    "tl.atomic_addx2_elem_op": _atomic_vector,
    "tl.atomic_addx4_elem_op": _atomic_vector,
    "tl.rng_init": _random_init,
    "tirx.call_extern": _extern,
    "tl.device_assert": _assert,
    "tl.device_assert_with_msg": _assert,
    "tl.loop_break": _break,
} | {f"tl.{name}_elem_op": _atomic(kind) for name, kind in effects.ATOMICS.items()}
