"""TileLang's front-end IR as a ``hw.Program``: one handler a statement type, one a tile operation.

What is not understood raises, naming the operation and the kernel's line: a Program never says less than its kernel.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import tilelang
from tilelang import ir as tl_ir
from tvm import tirx

from glass_jax import errors
from glass_jax.hw import program as ir
from glass_jax.lowering.tilelang import expressions
from glass_jax.lowering.tilelang.expressions import op_name, short

_SPACES = {
    "global": ir.Space.GM,
    "shared.l1": ir.Space.L1,
    "shared.l0a": ir.Space.L0A,
    "shared.l0b": ir.Space.L0B,
    "shared.l0c": ir.Space.L0C,
    "shared.dyn": ir.Space.UB,
    "shared": ir.Space.UB,
    "local.fragment": ir.Space.FRAGMENT,
    "local.reducer": ir.Space.REDUCER,
    "local.var": ir.Space.SCALAR,
}

_LOOP_KINDS = {
    tirx.ForKind.SERIAL: "serial",
    tirx.ForKind.PARALLEL: "parallel",
    tirx.ForKind.VECTORIZED: "vectorized",
    tirx.ForKind.UNROLLED: "unrolled",
}

# Annotations of a block that say how to schedule it, not what it computes. ``layout_map`` is read apart.
_BLOCK_HINTS = {
    "layout_map",
    "vector_count",
    "tl.buffer_versions_map",
    "tl.buffer_version_mode",
    "tl.manual_multi_buffer",
    "tl.unlimit_memory_scopes",
    "tl.vf_source_index",
}
_ATTRIBUTE_HINTS = {"tl.ascend_stage": "stage", "tl.ascend_task": "task"}
_COPY_HINTS = {"l2_cache_ctrl", "unit_flag_ctrl", "coalesced_width"}
_DUAL = {1: "rows", 2: "columns"}

# Operations that become an ``Op`` as they are: synchronization and hints, which have no effect when statements run in
# order, and modes of the hardware.
_PLAIN_OPS = {
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

_PACKAGE = pathlib.Path(__file__).parents[3]  # the folder that holds glass_jax
_TILELANG = pathlib.Path(tilelang.__file__).parent


def decode(func: tirx.PrimFunc) -> ir.Program:
    """``func``, as TileLang's front end makes it and before any lowering, as a Program.

    Variables and buffers get names that are unique in the program. Scalars that ``T.Persistent`` binds before the loop that
    defines them become Lets at the start of its body. A view is a buffer whose ``storage`` is that of the buffer it views.

    Raises:
      UnsupportedError: the kernel uses something that has no form in a Program, with the place in its source.
    """
    return Decoder(func).program()


class Decoder:
    """The state of decoding one kernel. :meth:`program` may be called once."""

    def __init__(self, func: tirx.PrimFunc):
        self._func = func
        self._name = str(func.attrs["global_symbol"])
        self._loc: str | None = _place(tl_ir.get_prim_func_span(func))
        self._taken: set[str] = set()
        self._variables: dict[tirx.Var, ir.Var] = {}
        self._buffers: dict[tirx.Buffer, str] = {}
        self._storages: dict[tirx.Var, str] = {}
        self._declared: dict[str, ir.Buffer] = {}
        self._unbound: list[tuple[tirx.Var, Any, str | None]] = []
        self._nz: set[tirx.Var] = set()
        self._pad: ir.Expr | None = None
        self._block: tuple[ir.Var, int | ir.Expr] | None = None
        self._unit: tuple[ir.Var, int] | None = None

    # --- the whole kernel ---

    def program(self) -> ir.Program:
        source = (self._loc or "").rpartition(":")[0] or None
        params = tuple(self._declare(self._parameter(param)) for param in self._func.params)
        body = self.statements(self._func.body)
        if self._block is None:
            raise errors.UnsupportedError(f"{self.where}: kernel {self._name} has no T.Kernel grid")
        if self._unbound:
            raise errors.UnsupportedError(f"{self.where}: {self._unbound[0][0].name} uses variables that nothing binds")
        unit, units = self._unit or (None, 2 if _is_mixed(body, self._declared) else 1)
        block, blocks = self._block
        return ir.Program(self._name, params, self._declared, block, blocks, body, unit, units, source)

    def _parameter(self, param: tirx.Var) -> tirx.Buffer:
        if param not in self._func.buffer_map:
            raise errors.UnsupportedError(f"{self.where}: parameter {param.name} is a scalar; pass it as a tensor of one element")
        return self._func.buffer_map[param]

    @property
    def where(self) -> str:
        """The place in the kernel's source that is being decoded, for messages."""
        return self._loc or f"kernel {self._name}"

    @property
    def storages(self) -> dict[str, list[str]]:
        """The program's names of the memory that the compiler knows by one name, in the order of their allocation."""
        names: dict[str, list[str]] = {}
        for data, storage in self._storages.items():
            names.setdefault(data.name, []).append(storage)
        return names

    # --- names ---

    def _unique(self, name: str) -> str:
        candidate, count = name, 0
        while candidate in self._taken:
            count += 1
            candidate = f"{name}_{count}"
        self._taken.add(candidate)
        return candidate

    def bind(self, var: tirx.Var) -> ir.Var:
        """Makes ``var`` known."""
        self._variables[var] = ir.Var(self._unique(var.name), str(var.dtype))
        return self._variables[var]

    def variable(self, var: tirx.Var) -> ir.Var:
        """The variable that ``var`` is."""
        if var not in self._variables:
            raise errors.UnsupportedError(f"{self.where}: {var.name} has no value here that a Program can name")
        return self._variables[var]

    def buffer(self, buffer: tirx.Buffer) -> str:
        """The name of ``buffer``; one not seen before is a view of the buffer whose memory it has."""
        if buffer not in self._buffers:
            if buffer.data not in self._storages:
                raise errors.UnsupportedError(f"{self.where}: buffer {buffer.name} is not allocated in this kernel")
            self._declare(buffer)
        return self._buffers[buffer]

    def _declare(self, buffer: tirx.Buffer) -> str:
        space = _SPACES.get(buffer.scope())
        if space is None or (space is ir.Space.GM and not any(buffer.same_as(b) for b in self._func.buffer_map.values())):
            raise errors.UnsupportedError(f"{self.where}: buffer {buffer.name} in memory {buffer.scope()!r} is not decoded")
        if not isinstance(buffer.elem_offset, tirx.IntImm) or buffer.elem_offset.value:
            raise errors.UnsupportedError(f"{self.where}: buffer {buffer.name} starts at an offset, which is not decoded")
        name = self._unique(buffer.name)
        shape = tuple(self.extent(size) for size in buffer.shape)
        strides = tuple(self.extent(size) for size in buffer.strides)
        loc = _place(tl_ir.get_buffer_span(buffer)) or self._loc
        self._buffers[buffer] = name
        self._declared[name] = ir.Buffer(
            name,
            space,
            shape,
            str(buffer.dtype),
            self._storages.setdefault(buffer.data, name),
            "nz" if buffer.data in self._nz else None,
            None if strides in ((), _row_major(shape)) else strides,
            loc,
        )
        return name

    # --- expressions and regions ---

    def expr(self, expr: Any) -> ir.Expr:
        """``expr`` as an expression of the program."""
        return expressions.decode(self, expr)

    def extent(self, expr: Any) -> int | ir.Expr:
        """``expr`` as an int where it is one."""
        value = self.expr(expr)
        return value.value if isinstance(value, ir.Const) else value

    def region(self, call: Any) -> ir.Region:
        """The access region that the call ``tl.region(buffer[starts], access, *extents)`` stands for."""
        if not isinstance(call, tirx.Call) or short(op_name(call)) != "region":
            raise errors.UnsupportedError(f"{self.where}: expected a region of a buffer, found {call}")
        load, _, *extents = call.args
        starts = tuple(self.expr(index) for index in load.indices)
        return ir.Region(self.buffer(load.buffer), starts, tuple(self.extent(size) for size in extents))

    def argument(self, arg: Any) -> ir.Expr | ir.Region | str:
        """An argument of an operation: a region, a string, or an expression."""
        if isinstance(arg, tirx.StringImm):
            return str(arg.value)
        if isinstance(arg, tirx.Call) and short(op_name(arg)) == "region":
            return self.region(arg)
        if isinstance(arg, tirx.Var) and arg in self._storages:
            return self._storages[arg]
        return self.expr(arg)

    # --- statements ---

    def statements(self, stmt: tirx.Stmt) -> tuple[ir.Stmt, ...]:
        """``stmt`` as the statements of a block."""
        return tuple(self._walk(stmt))

    def _walk(self, stmt: tirx.Stmt) -> Iterator[ir.Stmt]:
        handler = _STATEMENTS.get(type(stmt))
        with self._at(tl_ir.get_stmt_span(stmt)):
            if handler is None:
                raise errors.UnsupportedError(f"{self.where}: the statement {type(stmt).__name__} is not decoded")
            yield from handler(self, stmt)

    @contextlib.contextmanager
    def _at(self, span: Any) -> Iterator[None]:
        """Locations inside a macro of TileLang itself are those of the kernel's line that calls it."""
        previous, self._loc = self._loc, _place(span) or self._loc
        try:
            yield
        finally:
            self._loc = previous

    def _sequence(self, stmt: tirx.SeqStmt) -> Iterator[ir.Stmt]:
        for item in stmt.seq:
            yield from self._walk(item)

    def _sblock(self, stmt: tirx.SBlock) -> Iterator[ir.Stmt]:
        if unknown := set(stmt.annotations) - _BLOCK_HINTS:
            raise errors.UnsupportedError(f"{self.where}: block annotation {', '.join(sorted(unknown))} is not decoded")
        for data, layout in stmt.annotations.get("layout_map", {}).items():
            data = getattr(data, "data", data)
            if data.type_annotation.storage_scope.startswith("shared.dyn"):
                if type(layout).__name__ != "AscendFractalLayout":
                    raise errors.UnsupportedError(f"{self.where}: layout {layout} of {data.name} is not decoded")
                self._nz.add(data)
        for buffer in stmt.alloc_buffers:
            self._declare(buffer)
        if stmt.name_hint in ("CUBE", "VECTOR"):
            raise errors.UnsupportedError(f"{self.where}: kernels split by hand into T.Cube() and T.Vector() are not decoded")
        region = {"SIMT_VF": self._simt, "SIMD_VF": self._simd}.get(stmt.name_hint)
        yield from region(stmt) if region else self._walk(stmt.body)

    def _simt(self, stmt: tirx.SBlock) -> Iterator[ir.Stmt]:
        threads, extents, body = [], [], stmt.body
        while isinstance(body, tirx.AttrStmt) and body.attr_key in ("thread_extent", "tl.simtvf_scope"):
            if body.attr_key == "thread_extent":
                threads.append(self.bind(body.node.var))
                extents.append(int(body.value))
            body = body.body
        yield ir.Simt(tuple(threads), tuple(extents), self.statements(body), self._loc)

    def _simd(self, stmt: tirx.SBlock) -> Iterator[ir.Stmt]:
        body = stmt.body
        while isinstance(body, tirx.AttrStmt) and body.attr_key == "tl.simdvf_scope":
            body = body.body
        yield ir.Simd(self.statements(body), self._loc)

    def _attribute(self, stmt: tirx.AttrStmt) -> Iterator[ir.Stmt]:
        if stmt.attr_key not in _ATTRIBUTE_HINTS:
            raise errors.UnsupportedError(f"{self.where}: attribute {stmt.attr_key} is not decoded")
        yield ir.Op(_ATTRIBUTE_HINTS[stmt.attr_key], (self.argument(stmt.value),), loc=self._loc)
        yield from self._walk(stmt.body)

    def _bind(self, stmt: tirx.Bind) -> Iterator[ir.Stmt]:
        if isinstance(stmt.value, tirx.Call) and short(op_name(stmt.value)) == "launch_thread_idx":
            return  # threads outside a SIMT region, which the NPU does not have
        if self._free(stmt.value):
            self._unbound.append((stmt.var, stmt.value, self._loc))
            return
        value = self.expr(stmt.value)
        yield ir.Let(self.bind(stmt.var), value, self._loc)

    def _free(self, expr: Any) -> bool:
        """Whether ``expr`` uses a variable that has no value yet."""
        found: list[tirx.Var] = []

        def visit(node: Any) -> None:
            if isinstance(node, tirx.Var) and node.dtype != "handle" and node not in self._variables:
                found.append(node)

        tirx.stmt_functor.post_order_visit(expr, visit)
        return bool(found)

    def _bound_now(self) -> Iterator[ir.Stmt]:
        """Lets for the scalars that waited for a variable that is known by now."""
        waiting, self._unbound = self._unbound, []
        for var, value, loc in waiting:
            if self._free(value):
                self._unbound.append((var, value, loc))
            else:
                yield ir.Let(self.bind(var), self.expr(value), loc)

    def _for(self, stmt: tirx.For) -> Iterator[ir.Stmt]:
        if stmt.kind == tirx.ForKind.THREAD_BINDING:
            yield from self._grid(stmt)
            return
        if stmt.step is not None and self.extent(stmt.step) != 1:
            raise errors.UnsupportedError(f"{self.where}: a loop with step {stmt.step} is not decoded")
        attrs = {str(key): self._attr(value) for key, value in stmt.annotations.items()}
        kind = "pipelined" if "num_stages" in attrs else _LOOP_KINDS[stmt.kind]
        start, extent = self.expr(stmt.min), self.expr(stmt.extent)
        var, loc = self.bind(stmt.loop_var), self._loc
        body = (*self._bound_now(), *self.statements(stmt.body))
        yield ir.For(var, start, extent, kind, body, attrs, loc)

    def _grid(self, stmt: tirx.For) -> Iterator[ir.Stmt]:
        tag, extent, var = str(stmt.thread_binding.thread_tag), self.extent(stmt.extent), self.bind(stmt.loop_var)
        if tag == "blockIdx.x" and self._block is None:
            self._block = var, extent
        elif tag == "cthread" and self._unit is None:
            self._unit = var, extent
        else:
            raise errors.UnsupportedError(f"{self.where}: a second grid, or one over {tag}, is not decoded")
        yield from self._walk(stmt.body)

    def _attr(self, value: Any) -> Any:
        """An annotation as plain data: buffers by name."""
        if isinstance(value, tirx.Buffer):
            return self.buffer(value)
        if isinstance(value, tirx.StringImm | tirx.IntImm | tirx.FloatImm):
            return bool(value.value) if value.dtype == "bool" else value.value
        if isinstance(value, bool | int | float | str):
            return value
        return tuple(self._attr(item) for item in value)

    def _while(self, stmt: tirx.While) -> Iterator[ir.Stmt]:
        yield ir.While(self.expr(stmt.condition), self.statements(stmt.body), self._loc)

    def _if(self, stmt: tirx.IfThenElse) -> Iterator[ir.Stmt]:
        orelse = self.statements(stmt.else_case) if stmt.else_case is not None else ()
        yield ir.If(self.expr(stmt.condition), self.statements(stmt.then_case), orelse, self._loc)

    def _store(self, stmt: tirx.BufferStore) -> Iterator[ir.Stmt]:
        if stmt.predicate is not None:
            raise errors.UnsupportedError(f"{self.where}: a predicated store is not decoded")
        indices = tuple(self.expr(index) for index in stmt.indices)
        yield ir.Store(self.buffer(stmt.buffer), indices, self.expr(stmt.value), self._loc)

    def _evaluate(self, stmt: tirx.Evaluate) -> Iterator[ir.Stmt]:
        if isinstance(stmt.value, tirx.IntImm):
            return  # how the IR writes an empty statement
        name = op_name(stmt.value) if isinstance(stmt.value, tirx.Call) else type(stmt.value).__name__
        if handler := _OPERATIONS.get(name):
            yield from handler(self, stmt.value)
        elif short(name) in _PLAIN_OPS:
            yield ir.Op(short(name), tuple(self.argument(arg) for arg in stmt.value.args), loc=self._loc)
        else:
            raise errors.UnsupportedError(f"{self.where}: the operation {name} is not decoded")

    # --- tile operations ---

    def _copy(self, call: tirx.Call) -> Iterator[ir.Stmt]:
        annotations = {str(key): self._attr(value) for key, value in call.annotations.items()}
        attrs: dict[str, Any] = {}
        for key, value in annotations.items():
            if not value:
                continue
            if key == "dual_dst_ctl":
                attrs["dual"] = _DUAL[value]
            elif key in ("transpose", "double"):
                attrs[key] = True
            elif key == "data_select" and self._pad is not None:
                attrs["pad"] = self._pad
            elif key in _COPY_HINTS:
                attrs[key] = value
            else:
                raise errors.UnsupportedError(f"{self.where}: a copy with {key}={value} is not decoded")
        src, dst = call.args
        yield ir.Copy(self.region(src), self.region(dst), attrs, self._loc)

    def _pad_value(self, call: tirx.Call) -> Iterator[ir.Stmt]:
        self._pad = self.expr(call.args[0])
        return iter(())

    def _gemm(self, call: tirx.Call) -> Iterator[ir.Stmt]:
        a, b, c, transpose_a, transpose_b, _m, _n, _k, _policy, clear, *rest = call.args
        if any(not isinstance(arg, tirx.IntImm) or arg.value for arg in rest) or any(call.annotations.values()):
            raise errors.UnsupportedError(f"{self.where}: options of this T.gemm are not decoded: {call}")
        regions = self.region(a), self.region(b), self.region(c)
        yield ir.Gemm(*regions, bool(transpose_a), bool(transpose_b), self.expr(clear), loc=self._loc)

    def _fill(self, call: tirx.Call) -> Iterator[ir.Stmt]:
        yield ir.Fill(self.region(call.args[0]), self.expr(call.args[1]), self._loc)

    def _reduce(self, call: tirx.Call) -> Iterator[ir.Stmt]:
        src, dst, kind, dim, clear = call.args
        attrs = {"kind": str(kind.value), "dim": int(dim), "clear": bool(clear)}
        yield ir.Op("reduce", (self.region(src), self.region(dst)), attrs, self._loc)


_STATEMENTS: dict[type, Callable[[Decoder, Any], Iterator[ir.Stmt]]] = {
    tirx.SeqStmt: Decoder._sequence,
    tirx.SBlockRealize: lambda decoder, stmt: decoder._walk(stmt.block),
    tirx.SBlock: Decoder._sblock,
    tirx.AttrStmt: Decoder._attribute,
    tirx.Bind: Decoder._bind,
    tirx.For: Decoder._for,
    tirx.While: Decoder._while,
    tirx.IfThenElse: Decoder._if,
    tirx.BufferStore: Decoder._store,
    tirx.Evaluate: Decoder._evaluate,
}

_OPERATIONS: dict[str, Callable[[Decoder, tirx.Call], Iterator[ir.Stmt]]] = {
    "tl.tileop.ascend_copy": Decoder._copy,
    "tl.tileop.copy": Decoder._copy,
    "tl.tileop.gemm": Decoder._gemm,
    "tl.tileop.fill": Decoder._fill,
    "tl.tileop.reduce": Decoder._reduce,
    "tl.ascend_set_copy_pad_value": Decoder._pad_value,
}


def _place(span: Any) -> str | None:
    """``file:line`` of ``span``, the file relative to this package's folder if it is in it; None inside TileLang itself."""
    location = tl_ir.span_to_location(span)
    if location is None:
        return None
    file, line = location
    path = pathlib.Path(file)
    if path.is_relative_to(_TILELANG):
        return None
    return f"{path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path}:{line}"


def _row_major(shape: tuple[int | ir.Expr, ...]) -> tuple[int, ...] | None:
    """Element strides of a row-major array, or None where they are not constants."""
    if not all(isinstance(size, int) for size in shape[1:]):
        return None
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _is_mixed(body: tuple[ir.Stmt, ...], buffers: dict[str, ir.Buffer]) -> bool:
    """Whether the cube takes part, so that a block has both vector units of its core."""
    return any(isinstance(stmt, ir.Gemm) for stmt in ir.walk(body)) or any(
        buffer.space in (ir.Space.L1, ir.Space.L0A, ir.Space.L0B, ir.Space.L0C) for buffer in buffers.values()
    )
