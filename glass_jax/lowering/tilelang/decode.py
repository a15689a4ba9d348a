"""TileLang's front-end IR as a ``hw.Program``: one handler a statement type.

What is not understood raises, naming the operation and the kernel's line: a Program never says less than its kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tilelang import ir as tl_ir
from tvm import tirx

from glass_jax import errors
from glass_jax.hw.ir import program as ir
from glass_jax.lowering.tilelang import breaks, layouts, operations, simd
from glass_jax.lowering.tilelang.modes import Modes
from glass_jax.lowering.tilelang.names import op_name, short
from glass_jax.lowering.tilelang.places import is_assertion, place
from glass_jax.lowering.tilelang.pointers import Pointers
from glass_jax.lowering.tilelang.scope import Scope

_LOOP_KINDS = {
    tirx.ForKind.SERIAL: "serial",
    tirx.ForKind.PARALLEL: "parallel",
    tirx.ForKind.VECTORIZED: "vectorized",
    tirx.ForKind.UNROLLED: "unrolled",
}

# Annotations of a block: those that say what it computes, and those that say how to schedule it.
_BLOCK_MEANINGS = {"layout_map", "reducer_info", "reducer_info_v2", "tl.l0_sf_bindings"}
_BLOCK_HINTS = {
    "tl.simd_pointer_dtypes",
    "tl.vf_latency",
    "vector_count",
    "tl.buffer_versions_map",
    "tl.buffer_version_mode",
    "tl.manual_multi_buffer",
    "tl.unlimit_memory_scopes",
    "tl.vf_source_index",
}
_SECTIONS = {"CUBE": "cube", "VECTOR": "vector"}
_ATTRIBUTE_HINTS = {"tl.ascend_stage": "stage", "tl.ascend_task": "task", "tl.ascend_per_core_task": "per_core_task"}

AUTO_SCHEDULE = "tl.enable_auto_schedule"  # the option of TileLang's passes that inserts all synchronization; it is on


def decode(func: tirx.PrimFunc, pass_configs: Mapping[str, Any] = types.MappingProxyType({})) -> ir.Program:
    """``func``, as TileLang's front end makes it and before any lowering, as a Program.

    Variables and buffers get names that are unique in the program. Scalars that ``T.Persistent`` binds before the loop
    that defines them become Lets at the start of its body. A view is a buffer whose ``storage`` is that of the buffer
    it views. ``pass_configs`` are the options of TileLang's passes that it is to be compiled with.

    Raises:
      UnsupportedError: the kernel uses something that has no form in a Program, with the place in its source.
    """
    return Decoder(func, pass_configs).program()


def is_split(func: tirx.PrimFunc) -> bool:
    """Whether ``func`` is split by hand into parts for the cube and for the vector units."""
    found = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.SBlock) and node.name_hint in _SECTIONS:
            found.append(node)

    tirx.stmt_functor.post_order_visit(func.body, visit)
    return bool(found)


@dataclasses.dataclass(frozen=True)
class _Launch:
    """One grid of a kernel: its index and size, its statements, its vector units' index, the buffers it allocates."""

    block: ir.Var
    blocks: int | ir.Expr
    body: tuple[ir.Stmt, ...]
    unit: tuple[ir.Var, int] | None
    buffers: list[ir.Buffer]


class Decoder(Scope):
    """The state of decoding one kernel. :meth:`program` may be called once."""

    def __init__(self, func: tirx.PrimFunc, pass_configs: Mapping[str, Any] = types.MappingProxyType({})):
        super().__init__(func)
        self._manual = pass_configs.get(AUTO_SCHEDULE) is False
        self._scalars: list[ir.Let] = []  # the parameters that are scalars
        self._unbound: list[tuple[tirx.Var, Any, str | None]] = []
        self._launches: list[_Launch] = []
        self._unit: tuple[ir.Var, int] | None = None
        self.modes = Modes()
        self.pointers = Pointers()
        self.reducers: dict[tirx.Var, str] = {}  # how the buffers that are reducers combine values

    # --- the whole kernel ---

    def program(self) -> ir.Program:
        """The kernel as a Program."""
        source = (self.loc or "").rpartition(":")[0] or None
        self._bind_dimensions()
        params = tuple(self._parameter(param) for param in self._func.params)
        outside = self.statements(self._func.body)
        if not self._launches:
            raise errors.UnsupportedError(f"{self.where}: kernel {self._name} has no T.Kernel grid")
        if self._unbound:
            raise errors.UnsupportedError(f"{self.where}: {self._unbound[0][0].name} uses variables that nothing binds")
        program = None
        own = {buffer.name for launch in self._launches for buffer in launch.buffers} - set(self.states)
        for launch in reversed(self._launches):
            others = own - {buffer.name for buffer in launch.buffers}
            buffers = {name: buffer for name, buffer in self._declared.items() if name not in others}
            unit, units = launch.unit or (None, 2 if _is_mixed(launch.body, launch.buffers) else 1)
            body = (*self._scalars, *outside, *launch.body)
            manual = self._manual or any(isinstance(stmt, ir.Section) for stmt in ir.walk(body))
            program = ir.Program(
                self._name,
                params,
                buffers,
                launch.block,
                launch.blocks,
                body,
                unit,
                units,
                source,
                next=program,
                manual=manual,
            )
        return program

    def _bind_dimensions(self) -> None:
        """Makes the variables known that stand for dimensions and strides of the parameters."""
        for buffer in self._func.buffer_map.values():
            for extent in (*buffer.shape, *buffer.strides):
                for var in self._free_in(extent):
                    self.bind(var)

    def _parameter(self, param: tirx.Var) -> str:
        if param in self._func.buffer_map:
            name = self._declare(self._func.buffer_map[param])
            if (other := self._declared[name].storage) != name:
                raise errors.HardwareConstraintError(
                    f"{self.where}: parameters {other} and {param.name} are declared with one T.Tensor object, "
                    "which makes them one array: give each its own"
                )
            return name
        # A scalar: one element in GM, read before anything else.
        name, dtype = self._unique(param.name), str(param.dtype)
        self._declared[name] = ir.Buffer(name, ir.Space.GM, (), dtype, name, loc=self.loc)
        self._scalars.append(ir.Let(self.bind(param), ir.Load(name, (), dtype), self.loc))
        return name

    # --- statements ---

    def statements(self, stmt: tirx.Stmt) -> tuple[ir.Stmt, ...]:
        """``stmt`` as the statements of a block."""
        return tuple(self._walk(stmt))

    def _walk(self, stmt: tirx.Stmt) -> Iterator[ir.Stmt]:
        handler = _STATEMENTS.get(type(stmt))
        outer, self._before = self._before, []
        with self._at(tl_ir.get_stmt_span(stmt)):
            if handler is None:
                raise errors.UnsupportedError(f"{self.where}: the statement {type(stmt).__name__} is not decoded")
            for result in handler(self, stmt):
                yield from self._taken_before()
                yield result
            yield from self._taken_before()
        self._before = outer

    def _taken_before(self) -> list[ir.Stmt]:
        taken, self._before = self._before, []
        return taken

    @contextlib.contextmanager
    def _at(self, span: Any) -> Iterator[None]:
        """Locations inside a macro of TileLang itself are those of the kernel's line that calls it."""
        previous, self.loc = self.loc, place(span) or self.loc
        try:
            yield
        finally:
            self.loc = previous

    def _sequence(self, stmt: tirx.SeqStmt) -> Iterator[ir.Stmt]:
        for item in stmt.seq:
            yield from self._walk(item)

    def _sblock(self, stmt: tirx.SBlock) -> Iterator[ir.Stmt]:
        if unknown := set(stmt.annotations) - _BLOCK_HINTS - _BLOCK_MEANINGS:
            raise errors.UnsupportedError(f"{self.where}: block annotation {', '.join(sorted(unknown))} is not decoded")
        for data, layout in stmt.annotations.get("layout_map", {}).items():
            data = getattr(data, "data", data)
            if data.type_annotation.storage_scope.startswith("shared.dyn"):
                if not layouts.is_compact_nz(layout, str(data.type_annotation.element_type.dtype)):
                    raise errors.UnsupportedError(f"{self.where}: layout {layout} of {data.name} is not decoded")
                self._nz.add(data)
        for version in ("reducer_info", "reducer_info_v2"):
            for data, info in stmt.annotations.get(version, {}).items():
                self.reducers[getattr(data, "data", data)] = str(info["op"])
        for buffer in stmt.alloc_buffers:
            if not simd.is_pointer(buffer):
                self._declare(buffer)
        sections = dict.fromkeys(_SECTIONS, self._section)
        region = ({"SIMT_VF": self._simt, "SIMD_VF": self._simd} | sections).get(stmt.name_hint)
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

    def _section(self, stmt: tirx.SBlock) -> Iterator[ir.Stmt]:
        """A part for the cube or for the vector units, whose index has one variable however many parts there are."""
        body = stmt.body
        while isinstance(body, tirx.AttrStmt) and body.attr_key == "thread_extent":
            unit = body.node.var
            if self._unit is None:
                self._unit = self.bind(unit), int(body.value)
            self._variables[unit] = self._unit[0]
            body = body.body
        yield ir.Section(_SECTIONS[stmt.name_hint], self.statements(body), self.loc)

    def _attribute(self, stmt: tirx.AttrStmt) -> Iterator[ir.Stmt]:
        if stmt.attr_key not in _ATTRIBUTE_HINTS:
            raise errors.UnsupportedError(f"{self.where}: attribute {stmt.attr_key} is not decoded")
        node = stmt.node  # the number of a stage, the costs of a task
        costs = node.items() if hasattr(node, "items") else [("value", node)]
        attrs = {str(key): int(value) for key, value in costs}
        yield ir.Op(_ATTRIBUTE_HINTS[stmt.attr_key], (), attrs, self.loc)
        yield from self._walk(stmt.body)

    def _bind(self, stmt: tirx.Bind) -> Iterator[ir.Stmt]:
        if isinstance(stmt.value, tirx.Call) and short(op_name(stmt.value)) == "launch_thread_idx":
            return  # threads outside a SIMT region, which the NPU does not have
        if is_assertion(tl_ir.get_stmt_span(stmt)):
            yield ir.Op("assert", (self.expr(stmt.value),), {"message": ""}, self.loc)
            return
        if simd.is_operation(stmt.value):
            yield from simd.bind(self, stmt)
            return
        if self._free(stmt.value):
            self._unbound.append((stmt.var, stmt.value, self.loc))
            return
        value = self.expr(stmt.value)
        yield ir.Let(self.bind(stmt.var), value, self.loc)

    def _free(self, expr: Any) -> bool:
        """Whether ``expr`` uses a variable that has no value yet."""
        return bool(self._free_in(expr))

    def _free_in(self, expr: Any) -> list[tirx.Var]:
        """The variables in ``expr`` that have no value yet."""
        found: list[tirx.Var] = []

        def visit(node: Any) -> None:
            if isinstance(node, tirx.Var) and node.dtype != "handle" and node not in self._variables:
                found.append(node)

        tirx.stmt_functor.post_order_visit(expr, visit)
        return list(dict.fromkeys(found))

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
        moves = self.pointers.loop(stmt, (var, start, extent), self.new_variable, self.where, loc)
        with self.modes.loop(self.where), moves as places:
            body = (*self._bound_now(), *self.statements(stmt.body))
        body = (*places, *body)
        stop, body = breaks.guarded(body, self.temporary)
        yield from breaks.cleared(stop, loc)
        yield ir.For(var, start, extent, kind, body, attrs, loc)

    def _grid(self, stmt: tirx.For) -> Iterator[ir.Stmt]:
        tag, extent, var = str(stmt.thread_binding.thread_tag), self.extent(stmt.extent), self.bind(stmt.loop_var)
        if tag == "cthread" and self._unit is None:
            self._unit = var, extent
            yield from self._walk(stmt.body)
        elif tag == "blockIdx.x":
            known = set(self._declared)
            body = self.statements(stmt.body)
            buffers = [buffer for name, buffer in self._declared.items() if name not in known]
            self._launches.append(_Launch(var, extent, body, self._unit, buffers))
            self._unit = None
        else:
            raise errors.UnsupportedError(f"{self.where}: a grid over {tag} is not decoded")

    def _while(self, stmt: tirx.While) -> Iterator[ir.Stmt]:
        with self.pure("the condition of a while loop"):
            condition = self.expr(stmt.condition)
        with self.modes.loop(self.where):
            body = self.statements(stmt.body)
        stop, body = breaks.guarded(body, self.temporary)
        yield from breaks.cleared(stop, self.loc)
        yield ir.While(breaks.until(stop, condition), body, self.loc)

    def _if(self, stmt: tirx.IfThenElse) -> Iterator[ir.Stmt]:
        condition = self.expr(stmt.condition)
        with self.modes.fork(condition) as way, self.pointers.fork(self.where) as at:
            with way(), at():
                then = self.statements(stmt.then_case)
            with way(), at():
                orelse = self.statements(stmt.else_case) if stmt.else_case is not None else ()
        yield ir.If(condition, then, orelse, self.loc)

    def _store(self, stmt: tirx.BufferStore) -> Iterator[ir.Stmt]:
        if stmt.predicate is not None:
            raise errors.UnsupportedError(f"{self.where}: a predicated store is not decoded")
        if simd.is_pointer(stmt.buffer):
            yield from simd.assign_pointer(self, stmt)
            return
        if stmt.buffer.data in self.reducers:
            yield operations.reducer_store(self, stmt)
            return
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


def _is_mixed(body: tuple[ir.Stmt, ...], buffers: list[ir.Buffer]) -> bool:
    """Whether the cube takes part, or a copy is split, so that a block has both vector units of its core."""
    cube = (ir.Space.L1, ir.Space.L0A, ir.Space.L0B, ir.Space.L0C)
    split = any(isinstance(stmt, ir.Copy) and "dual" in stmt.attrs for stmt in ir.walk(body))
    return split or any(buffer.space in cube for buffer in buffers)
