"""TileLang's front-end IR as a ``hw.Program``: one handler a statement type.

What is not understood raises, naming the operation and the kernel's line: a Program never says less than its kernel.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tilelang
from tilelang import ir as tl_ir
from tvm import tirx

from glass_jax import errors
from glass_jax.hw import program as ir
from glass_jax.hw.memory import ON_CHIP
from glass_jax.lowering.tilelang import expressions, operations
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

_PACKAGE = pathlib.Path(__file__).parents[3]  # the folder that holds glass_jax
_TILELANG = pathlib.Path(tilelang.__file__).parent


def decode(func: tirx.PrimFunc) -> ir.Program:
    """``func``, as TileLang's front end makes it and before any lowering, as a Program.

    Variables and buffers get names that are unique in the program. Scalars that ``T.Persistent`` binds before the loop
    that defines them become Lets at the start of its body. A view is a buffer whose ``storage`` is that of the buffer
    it views.

    Raises:
      UnsupportedError: the kernel uses something that has no form in a Program, with the place in its source.
    """
    return Decoder(func).program()


class Decoder:
    """The state of decoding one kernel. :meth:`program` may be called once."""

    def __init__(self, func: tirx.PrimFunc):
        self._func = func
        self._name = str(func.attrs["global_symbol"])
        self.loc: str | None = _place(tl_ir.get_prim_func_span(func))
        self._taken: set[str] = set()
        self._variables: dict[tirx.Var, ir.Var] = {}
        self._buffers: dict[tirx.Buffer, str] = {}
        self._storages: dict[tirx.Var, str] = {}
        self._declared: dict[str, ir.Buffer] = {}
        self._unbound: list[tuple[tirx.Var, Any, str | None]] = []
        self._nz: set[tirx.Var] = set()
        self.pad: ir.Expr | None = None  # what the pad register holds
        self._block: tuple[ir.Var, int | ir.Expr] | None = None
        self._unit: tuple[ir.Var, int] | None = None

    # --- the whole kernel ---

    def program(self) -> ir.Program:
        """The kernel as a Program."""
        source = (self.loc or "").rpartition(":")[0] or None
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
            raise errors.UnsupportedError(
                f"{self.where}: parameter {param.name} is a scalar; pass it as a tensor of one element"
            )
        return self._func.buffer_map[param]

    @property
    def where(self) -> str:
        """The place in the kernel's source that is being decoded, for messages: ``loc``, or the kernel's name."""
        return self.loc or f"kernel {self._name}"

    @property
    def storages(self) -> dict[str, list[str]]:
        """The program's names of the on-chip memory that the compiler knows by one name, in order of allocation."""
        names: dict[str, list[str]] = {}
        for data, storage in self._storages.items():
            if self._declared[storage].space in ON_CHIP:
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
        if space is None or (
            space is ir.Space.GM and not any(buffer.same_as(b) for b in self._func.buffer_map.values())
        ):
            raise errors.UnsupportedError(
                f"{self.where}: buffer {buffer.name} in memory {buffer.scope()!r} is not decoded"
            )
        if not isinstance(buffer.elem_offset, tirx.IntImm) or buffer.elem_offset.value:
            raise errors.UnsupportedError(
                f"{self.where}: buffer {buffer.name} starts at an offset, which is not decoded"
            )
        name = self._unique(buffer.name)
        shape = tuple(self.extent(size) for size in buffer.shape)
        strides = tuple(self.extent(size) for size in buffer.strides)
        loc = _place(tl_ir.get_buffer_span(buffer)) or self.loc
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

    def attributes(self, annotations: Mapping[str, Any]) -> dict[str, Any]:
        """Annotations as plain data: buffers by name, arrays as tuples."""
        return {str(key): self._attribute_value(str(key), value) for key, value in annotations.items()}

    def _attribute_value(self, key: str, value: Any) -> Any:
        if isinstance(value, tirx.Buffer):
            return self.buffer(value)
        if isinstance(value, tirx.StringImm | tirx.IntImm | tirx.FloatImm):
            return bool(value.value) if value.dtype == "bool" else value.value
        if isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tirx.PrimExpr):
            raise errors.UnsupportedError(f"{self.where}: {key}={value} is not a constant, which is not decoded")
        return tuple(self._attribute_value(key, item) for item in value)

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
        previous, self.loc = self.loc, _place(span) or self.loc
        try:
            yield
        finally:
            self.loc = previous

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
            raise errors.UnsupportedError(
                f"{self.where}: kernels split by hand into T.Cube() and T.Vector() are not decoded"
            )
        region = {"SIMT_VF": self._simt, "SIMD_VF": self._simd}.get(stmt.name_hint)
        yield from region(stmt) if region else self._walk(stmt.body)

    def _simt(self, stmt: tirx.SBlock) -> Iterator[ir.Stmt]:
        threads, extents, body = [], [], stmt.body
        while isinstance(body, tirx.AttrStmt) and body.attr_key in ("thread_extent", "tl.simtvf_scope"):
            if body.attr_key == "thread_extent":
                threads.append(self.bind(body.node.var))
                extents.append(int(body.value))
            body = body.body
        yield ir.Simt(tuple(threads), tuple(extents), self.statements(body), self.loc)

    def _simd(self, stmt: tirx.SBlock) -> Iterator[ir.Stmt]:
        body = stmt.body
        while isinstance(body, tirx.AttrStmt) and body.attr_key == "tl.simdvf_scope":
            body = body.body
        yield ir.Simd(self.statements(body), self.loc)

    def _attribute(self, stmt: tirx.AttrStmt) -> Iterator[ir.Stmt]:
        if stmt.attr_key not in _ATTRIBUTE_HINTS:
            raise errors.UnsupportedError(f"{self.where}: attribute {stmt.attr_key} is not decoded")
        yield ir.Op(_ATTRIBUTE_HINTS[stmt.attr_key], (self.argument(stmt.value),), loc=self.loc)
        yield from self._walk(stmt.body)

    def _bind(self, stmt: tirx.Bind) -> Iterator[ir.Stmt]:
        if isinstance(stmt.value, tirx.Call) and short(op_name(stmt.value)) == "launch_thread_idx":
            return  # threads outside a SIMT region, which the NPU does not have
        if self._free(stmt.value):
            self._unbound.append((stmt.var, stmt.value, self.loc))
            return
        value = self.expr(stmt.value)
        yield ir.Let(self.bind(stmt.var), value, self.loc)

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
        attrs = self.attributes(stmt.annotations)
        kind = "pipelined" if "num_stages" in attrs else _LOOP_KINDS[stmt.kind]
        start, extent = self.expr(stmt.min), self.expr(stmt.extent)
        var, loc = self.bind(stmt.loop_var), self.loc
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

    def _while(self, stmt: tirx.While) -> Iterator[ir.Stmt]:
        yield ir.While(self.expr(stmt.condition), self.statements(stmt.body), self.loc)

    def _if(self, stmt: tirx.IfThenElse) -> Iterator[ir.Stmt]:
        orelse = self.statements(stmt.else_case) if stmt.else_case is not None else ()
        yield ir.If(self.expr(stmt.condition), self.statements(stmt.then_case), orelse, self.loc)

    def _store(self, stmt: tirx.BufferStore) -> Iterator[ir.Stmt]:
        if stmt.predicate is not None:
            raise errors.UnsupportedError(f"{self.where}: a predicated store is not decoded")
        indices = tuple(self.expr(index) for index in stmt.indices)
        yield ir.Store(self.buffer(stmt.buffer), indices, self.expr(stmt.value), self.loc)

    def _evaluate(self, stmt: tirx.Evaluate) -> Iterator[ir.Stmt]:
        yield from operations.decode(self, stmt.value)


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


def _place(span: Any) -> str | None:
    """``file:line`` of ``span``, files of this package relative to its folder; None inside TileLang itself."""
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
    """Whether the cube takes part, or a copy is split, so that a block has both vector units of its core."""
    cube = (ir.Space.L1, ir.Space.L0A, ir.Space.L0B, ir.Space.L0C)
    split = any(isinstance(stmt, ir.Copy) and "dual" in stmt.attrs for stmt in ir.walk(body))
    return split or any(buffer.space in cube for buffer in buffers.values())
