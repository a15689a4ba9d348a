"""The synchronization in a compiled kernel as a Program of its own: loops, branches and flags, without the work.

A kernel that the compiler schedules has no flags in its front-end IR; those in its compiled form can be checked like
the flags of a kernel that synchronizes itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import tilelang  # noqa: F401 - brings tvm, which is not importable before it
from tvm import tirx

from glass_jax import errors
from glass_jax.hw.ir import program as ir
from glass_jax.hw.order import sync
from glass_jax.lowering.tilelang import expressions
from glass_jax.lowering.tilelang.names import op_name, short

_SECTIONS = {"CUBE": "cube", "VECTOR": "vector"}
_WORK = {"SIMT_VF", "SIMD_VF"}  # regions, in which there are no flags
# Functions of TileLang's device library that multiply from L1: which argument is the depth (the size of a part comes
# two later), and which the number of the first lock.
_PRODUCTS = {"ascend_gemm_l1": (4, 10), "ascend_blockscaled_gemm_l1": (6, 14)}
_UNKNOWN = ir.Var("(known at run time)")


def skeleton(function: tirx.PrimFunc) -> ir.Program:
    """The synchronization in ``function``, a kernel's device code.

    What a loop or branch depends on and no constant, loop variable or counter gives is the variable ``_UNKNOWN``, which
    nothing binds.
    """
    return _Skeleton().program(function)


class _Skeleton:
    def __init__(self) -> None:
        self.where = "the compiled kernel"
        self._names: dict[tirx.Var, str] = {}
        self._buffers: dict[str, ir.Buffer] = {}
        self._block = ir.Var("blockIdx.x")
        self._unit: ir.Var | None = None
        self._units = 1

    def program(self, function: tirx.PrimFunc) -> ir.Program:
        """The whole kernel."""
        body = tuple(self._walk(function.body))
        extent = function.attrs["thread_extent"]["blockIdx.x"]
        blocks = int(extent) if isinstance(extent, int | tirx.IntImm) else _UNKNOWN
        name = str(function.attrs["global_symbol"])
        return ir.Program(name, (), self._buffers, self._block, blocks, body, self._unit, self._units, manual=True)

    # --- what expressions ask of a decoder ---

    def variable(self, var: tirx.Var) -> ir.Var:
        """The variable that ``var`` is."""
        if var not in self._names:
            raise errors.UnsupportedError(var.name)
        return ir.Var(self._names[var], str(var.dtype))

    def buffer(self, buffer: tirx.Buffer) -> str:
        """The name of a scalar variable of the kernel."""
        if buffer.data not in self._names:
            raise errors.UnsupportedError(buffer.name)
        return self._names[buffer.data]

    def pure(self, what: str) -> AbstractContextManager[None]:
        """Nothing in compiled code does anything inside an expression."""
        return contextlib.nullcontext()

    def _expr(self, expr: Any) -> ir.Expr:
        try:
            return expressions.decode(self, expr)
        except errors.UnsupportedError:
            return _UNKNOWN

    # --- statements ---

    def _bind(self, var: tirx.Var) -> ir.Var:
        self._names[var] = f"{var.name}.{len(self._names)}"
        return self.variable(var)

    def _walk(self, stmt: tirx.Stmt) -> Iterator[ir.Stmt]:
        handler = _HANDLERS.get(type(stmt))
        if handler is not None:
            yield from handler(self, stmt)

    def _sequence(self, stmt: tirx.SeqStmt) -> Iterator[ir.Stmt]:
        for item in stmt.seq:
            yield from self._walk(item)

    def _sblock(self, stmt: tirx.SBlock) -> Iterator[ir.Stmt]:
        if stmt.name_hint in _SECTIONS:
            yield ir.Section(_SECTIONS[stmt.name_hint], tuple(self._walk(stmt.body)))
        elif stmt.name_hint not in _WORK:
            yield from self._walk(stmt.body)

    def _attribute(self, stmt: tirx.AttrStmt) -> Iterator[ir.Stmt]:
        if stmt.attr_key == "thread_extent":
            if str(stmt.node.thread_tag) == "blockIdx.x":
                self._names[stmt.node.var] = self._block.name
            elif str(stmt.node.thread_tag) == "cthread":
                self._unit, self._units = self._unit or ir.Var("cthread"), int(stmt.value)
                self._names[stmt.node.var] = self._unit.name
        yield from self._walk(stmt.body)

    def _allocate(self, stmt: tirx.AllocBuffer | tirx.DeclBuffer) -> Iterator[ir.Stmt]:
        """Scalar variables of a core, such as the counters of buffers that are taken in turns."""
        buffer = stmt.buffer
        if buffer.scope() == "local.var" and buffer.data not in self._names:
            name = self._bind(buffer.data).name
            self._buffers[name] = ir.Buffer(name, ir.Space.SCALAR, (1,), str(buffer.dtype), name)
        yield from ()

    def _let(self, stmt: tirx.Bind) -> Iterator[ir.Stmt]:
        value = self._expr(stmt.value)
        yield ir.Let(self._bind(stmt.var), value)

    def _for(self, stmt: tirx.For) -> Iterator[ir.Stmt]:
        start, extent = self._expr(stmt.min), self._expr(stmt.extent)
        yield ir.For(self._bind(stmt.loop_var), start, extent, "serial", tuple(self._walk(stmt.body)))

    def _while(self, stmt: tirx.While) -> Iterator[ir.Stmt]:
        yield ir.While(self._expr(stmt.condition), tuple(self._walk(stmt.body)))

    def _if(self, stmt: tirx.IfThenElse) -> Iterator[ir.Stmt]:
        orelse = () if stmt.else_case is None else tuple(self._walk(stmt.else_case))
        yield ir.If(self._expr(stmt.condition), tuple(self._walk(stmt.then_case)), orelse)

    def _store(self, stmt: tirx.BufferStore) -> Iterator[ir.Stmt]:
        if stmt.buffer.data in self._names:
            indices = tuple(self._expr(index) for index in stmt.indices)
            yield ir.Store(self.buffer(stmt.buffer), indices, self._expr(stmt.value))

    def _evaluate(self, stmt: tirx.Evaluate) -> Iterator[ir.Stmt]:
        call = stmt.value
        if isinstance(call, tirx.Call) and short(op_name(call)) in sync.WITHIN_CORE | sync.CROSS_CORE:
            arguments = (str(arg.value) if isinstance(arg, tirx.StringImm) else self._expr(arg) for arg in call.args)
            yield ir.Op(short(op_name(call)), tuple(arguments))
        elif isinstance(call, tirx.Call) and short(op_name(call)) in _PRODUCTS:
            yield from self._product(call, *_PRODUCTS[short(op_name(call))])

    def _product(self, call: tirx.Call, depth: int, first_lock: int) -> Iterator[ir.Stmt]:
        """The locks by which a product from L1 fills L0 and multiplies, part by part along K, two parts at a time."""
        parts, first = int(call.args[depth]) // int(call.args[depth + 2]), int(call.args[first_lock])
        for part in range(parts):
            for pipe in ("PIPE_MTE1", "PIPE_M"):
                for operation in ("ascend_get_buf", "ascend_rls_buf"):
                    yield ir.Op(operation, (pipe, ir.Const(first + part % 2, "int32"), ir.Const(0, "int32")))


_HANDLERS: dict[type, Callable[[_Skeleton, Any], Iterator[ir.Stmt]]] = {
    tirx.SeqStmt: _Skeleton._sequence,
    tirx.SBlockRealize: lambda skeleton, stmt: skeleton._walk(stmt.block),
    tirx.SBlock: _Skeleton._sblock,
    tirx.AttrStmt: _Skeleton._attribute,
    tirx.AllocBuffer: _Skeleton._allocate,
    tirx.DeclBuffer: _Skeleton._allocate,
    tirx.Bind: _Skeleton._let,
    tirx.For: _Skeleton._for,
    tirx.While: _Skeleton._while,
    tirx.IfThenElse: _Skeleton._if,
    tirx.BufferStore: _Skeleton._store,
    tirx.Evaluate: _Skeleton._evaluate,
}
