"""``tl.simd`` operations of TileLang's front-end IR as registers and statements of ``hw.ir.program``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tilelang  # noqa: F401 - brings tvm, which is not importable before it
from tvm import tirx

from glass_jax import errors
from glass_jax.hw import memory
from glass_jax.hw.ir import program as ir
from glass_jax.lowering.tilelang import pointers
from glass_jax.lowering.tilelang.decoding import Decoding
from glass_jax.lowering.tilelang.names import op_name, short

_PREFIX = "tl.simd."
_BLOCK_BYTES = 32
_KEEP_SUBNORMALS = 2  # code of the annotation ``precision``

# Operations whose first argument is a register in place that they update.
_UPDATES = {"vmula", "vmadd", "vaxpy", "dhistv2", "chistv2"}
_STORES = {"vsts", "vscatter", "pst", "mem_bar"}


def is_operation(node: Any) -> bool:
    """Whether ``node`` is a call of a ``tl.simd`` operation."""
    return isinstance(node, tirx.Call) and op_name(node).startswith(_PREFIX)


def is_pointer(buffer: tirx.Buffer) -> bool:
    """Whether ``buffer`` is a variable that holds a pointer."""
    return str(buffer.dtype) == "handle"


# --- expressions ----------------------------------------------------------------------------------------------------


def register(decoder: Decoding, call: tirx.Call) -> ir.Register:
    """A call that gives a register, a predicate or a pair."""
    name, args, modes = short(op_name(call)), [], []
    for arg in call.args:
        if isinstance(arg, tirx.StringImm):
            modes.append(str(arg.value))
        else:
            args.append(_operand(decoder, arg))
    if name == "vld2" and len(args) == 2:
        args = [_behind(args[0], args[1], str(call.dtype))]
    if int(call.annotations.get("precision", 0)) == _KEEP_SUBNORMALS:
        modes.append("FTZ_FALSE")
    return ir.Register(name, tuple(args), tuple(modes), str(call.dtype))


def reinterpreted(decoder: Decoding, call: tirx.Call) -> ir.Register:
    """A register read as one of another type."""
    return ir.Register("reinterpret", (decoder.expr(call.args[0]),), (), str(call.dtype))


def _operand(decoder: Decoding, arg: Any) -> ir.Expr:
    if isinstance(arg, tirx.BufferLoad) and is_pointer(arg.buffer):
        return decoder.pointers.get(arg.buffer.data, decoder.where)
    if isinstance(arg, tirx.Call) and short(op_name(arg)) == "access_ptr":
        return _address(decoder, arg)
    return decoder.expr(arg)


def _address(decoder: Decoding, call: tirx.Call) -> ir.Address:
    """What ``access_ptr(buffer[indices], extent, access)`` points to."""
    load = call.args[0]
    return ir.Address(decoder.buffer(load.buffer), tuple(decoder.expr(index) for index in load.indices))


def _behind(address: ir.Address, count: ir.Expr, dtype: str) -> ir.Address:
    """The place ``count`` elements of a register of type ``dtype`` behind ``address``."""
    element, _ = ir.register(dtype)
    size = memory.bits(element) // 8
    nbytes = count.value * size if isinstance(count, ir.Const) else ir.Binary("mul", count, _constant(size), "int32")
    return pointers.advanced(address, nbytes)


def _constant(value: int) -> ir.Const:
    return ir.Const(value, "int32")


# --- statements -----------------------------------------------------------------------------------------------------


def statement(decoder: Decoding, call: tirx.Call) -> tuple[ir.Stmt, ...]:
    """A call whose value is not used."""
    name = short(op_name(call))
    if name in _UPDATES:
        return (_update(decoder, name, call),)
    if name == "vsstb":
        return (_store_blocks(decoder, call),)
    if name in _STORES:
        args = (str(arg.value) if isinstance(arg, tirx.StringImm) else _operand(decoder, arg) for arg in call.args)
        return (ir.Op(name, tuple(args), loc=decoder.loc),)
    register(decoder, call)  # known, and without effect
    return ()


def _update(decoder: Decoding, name: str, call: tirx.Call) -> ir.Store:
    """``op(register, operands, mask, mode)`` as the store of what a register becomes."""
    target = call.args[0].args[0]
    indices = tuple(decoder.expr(index) for index in target.indices)
    old = ir.Load(decoder.buffer(target.buffer), indices, str(target.dtype))
    *operands, last = call.args[1:]
    mode = str(last.value) if isinstance(last, tirx.StringImm) else f"BIN{int(last)}"
    args = (old, *(decoder.expr(operand) for operand in operands))
    return ir.Store(old.buffer, indices, ir.Register(name, args, (mode,), old.dtype), decoder.loc)


def _store_blocks(decoder: Decoding, call: tirx.Call) -> ir.Op:
    args = tuple(_operand(decoder, arg) for arg in call.args[:4])
    return ir.Op("vsstb", args, loc=decoder.loc)


def assign_pointer(decoder: Decoding, stmt: tirx.BufferStore) -> Iterator[ir.Stmt]:
    """A store to a pointer variable; what an operation that advances a pointer does besides is a statement."""
    pointer, value = stmt.buffer.data, stmt.value
    if is_operation(value) and short(op_name(value)) == "vsstb":
        store = _store_blocks(decoder, value)
        yield store
        _, address, stride, _ = store.args
        decoder.pointers.set(pointer, pointers.advanced(address, _repeat_bytes(decoder, stride)))
    elif isinstance(value, tirx.Call) and short(op_name(value)) == "access_ptr":
        decoder.pointers.set(pointer, _address(decoder, value))
    elif isinstance(value, tirx.Var):
        decoder.pointers.set(pointer, decoder.pointers.get(value, decoder.where))
    else:
        raise errors.UnsupportedError(f"{decoder.where}: the pointer {value} is not decoded")


def _repeat_bytes(decoder: Decoding, stride: ir.Expr) -> int:
    """How far ``vsstb`` advances its pointer: by the lower half of the stride, in blocks of 32 bytes."""
    if not isinstance(stride, ir.Const):
        raise errors.UnsupportedError(f"{decoder.where}: a stride of vsstb that is not a constant is not decoded")
    return (stride.value & 0xFFFF) * _BLOCK_BYTES


def bind(decoder: Decoding, stmt: tirx.Bind) -> Iterator[ir.Stmt]:
    """A variable bound to what a ``tl.simd`` operation gives.

    A load that also advances its pointer gives a pair: the register, and the pointer as it is afterwards.
    """
    value, name = stmt.value, short(op_name(stmt.value))
    if name == "vld" and len(value.args) == 3:
        address = _operand(decoder, value.args[0])
        loaded = ir.Register("vld", (address,), (str(value.args[1].value),), str(value.dtype))
        decoder.pointers.set(stmt.var, _behind(address, decoder.expr(value.args[2]), str(value.dtype)))
        yield ir.Let(decoder.bind(stmt.var), loaded, decoder.loc)
    elif name == "pair_get" and decoder.pointers.knows(value.args[0]):
        if str(stmt.var.dtype) == "handle":
            decoder.pointers.set(stmt.var, decoder.pointers.get(value.args[0], decoder.where))
        else:
            yield ir.Let(decoder.bind(stmt.var), decoder.variable(value.args[0]), decoder.loc)
    else:
        register_value = register(decoder, value)
        yield ir.Let(decoder.bind(stmt.var), register_value, decoder.loc)
