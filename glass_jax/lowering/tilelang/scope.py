"""What the names of a kernel stand for while it is decoded: variables, buffers, expressions and regions of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Set
from typing import Any

import tilelang  # noqa: F401 - brings tvm, which is not importable before it
from tilelang import ir as tl_ir
from tvm import tirx

from glass_jax import errors
from glass_jax.hw.ir import program as ir
from glass_jax.hw.memory import ON_CHIP
from glass_jax.lowering.tilelang import expressions
from glass_jax.lowering.tilelang.names import op_name, short
from glass_jax.lowering.tilelang.places import place

_SPACES = {
    "global": ir.Space.GM,
    "shared.l1": ir.Space.L1,
    "shared.l0a": ir.Space.L0A,
    "shared.l0b": ir.Space.L0B,
    "shared.l0a.sf": ir.Space.L0_SCALES,
    "shared.l0b.sf": ir.Space.L0_SCALES,
    "shared.l0c": ir.Space.L0C,
    "shared.dyn": ir.Space.UB,
    "shared": ir.Space.UB,
    "local.fragment": ir.Space.FRAGMENT,
    "local.reducer": ir.Space.REDUCER,
    "local.var": ir.Space.SCALAR,
    "local": ir.Space.SCALAR,
}


class Scope:
    """The names of one kernel and the place in its source.

    Attributes:
      loc: ``file:line`` of the statement that is being decoded.
    """

    def __init__(self, func: tirx.PrimFunc):
        self._func = func
        self._name = str(func.attrs["global_symbol"])
        self.loc: str | None = place(tl_ir.get_prim_func_span(func))
        self._taken: set[str] = set()
        self._variables: dict[tirx.Var, ir.Var] = {}
        self._buffers: dict[tirx.Buffer, str] = {}
        self._storages: dict[tirx.Var, str] = {}
        self._declared: dict[str, ir.Buffer] = {}
        self._nz: set[tirx.Var] = set()
        self._before: list[ir.Stmt] = []  # statements for what the expressions of the current statement do
        self._states: dict[str, str] = {}  # buffers of operations that keep a state

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

    def new_variable(self, name: str) -> ir.Var:
        """A variable of the Program's own."""
        return ir.Var(self._unique(name))

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

    def space(self, buffer: str) -> ir.Space:
        """The memory of the buffer of that name."""
        return self._declared[buffer].space

    def dtype(self, buffer: str) -> str:
        """The element type of the buffer of that name."""
        return self._declared[buffer].dtype

    def _declare(self, buffer: tirx.Buffer) -> str:
        space = _SPACES.get(buffer.scope())
        known = buffer.data in self._storages or any(buffer.same_as(b) for b in self._func.buffer_map.values())
        if space is None or (space is ir.Space.GM and not known):
            raise errors.UnsupportedError(
                f"{self.where}: buffer {buffer.name} in memory {buffer.scope()!r} is not decoded"
            )
        if not isinstance(buffer.elem_offset, tirx.IntImm) or buffer.elem_offset.value:
            raise errors.UnsupportedError(
                f"{self.where}: buffer {buffer.name} starts at an offset, which is not decoded"
            )
        name, dtype = self._unique(buffer.name), str(buffer.dtype)
        shape = tuple(self.extent(size) for size in buffer.shape)
        if (register := ir.register(dtype)) is not None:
            dtype, lanes = register
            space, shape = ir.Space.FRAGMENT, (*shape, lanes)
        strides = tuple(self.extent(size) for size in buffer.strides)
        loc = place(tl_ir.get_buffer_span(buffer)) or self.loc
        self._buffers[buffer] = name
        self._declared[name] = ir.Buffer(
            name,
            space,
            shape,
            dtype,
            self._storages.setdefault(buffer.data, name),
            "nz" if buffer.data in self._nz else None,
            None if strides in ((), _row_major(shape)) else strides,
            loc,
        )
        return name

    def temporary(self, dtype: str) -> str:
        """The name of a new scalar variable, for what an operation returns."""
        name = self._unique("result")
        self._declared[name] = ir.Buffer(name, ir.Space.SCALAR, (1,), dtype, name, loc=self.loc)
        return name

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the buffers that :meth:`state` made."""
        return tuple(self._states.values())

    def state(self, name: str, dtype: str, size: int) -> str:
        """The name of a buffer that each thread keeps the state of an operation in, declared when first asked for."""
        if name not in self._states:
            unique = self._unique(name)
            self._declared[unique] = ir.Buffer(unique, ir.Space.SCALAR, (size,), dtype, unique)
            self._states[name] = unique
        return self._states[name]

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

    def element(self, pointer: Any) -> ir.Region:
        """The element that an access pointer, or a load in the place of one, points to."""
        if isinstance(pointer, tirx.Call) and short(op_name(pointer)) in ("access_ptr", "address_of"):
            pointer = pointer.args[0]
        if not isinstance(pointer, tirx.BufferLoad):
            raise errors.UnsupportedError(f"{self.where}: a pointer to {pointer} is not decoded")
        starts = tuple(self.expr(index) for index in pointer.indices)
        return ir.Region(self.buffer(pointer.buffer), starts, (1,) * len(starts))

    def before(self, stmt: ir.Stmt) -> None:
        """Puts ``stmt`` before the statement whose expressions are being decoded."""
        self._before.append(stmt)

    @contextlib.contextmanager
    def pure(self, what: str) -> Iterator[None]:
        """Expressions decoded inside must not do anything, since ``what`` does not always evaluate them once."""
        count = len(self._before)
        yield
        if len(self._before) > count:
            name = self._before[-1].name
            raise errors.UnsupportedError(f"{self.where}: {name} inside {what} is not decoded; bind its result first")

    def attributes(self, annotations: Mapping[str, Any], hints: Set[str] = frozenset()) -> dict[str, Any]:
        """Annotations as plain data: buffers by name, arrays as tuples. Of ``hints`` only those that are constants."""
        return {
            str(key): self._attribute_value(str(key), value)
            for key, value in annotations.items()
            if str(key) not in hints or isinstance(value, tirx.IntImm | tirx.StringImm | int | str)
        }

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


def _row_major(shape: tuple[int | ir.Expr, ...]) -> tuple[int, ...] | None:
    """Element strides of a row-major array, or None where they are not constants."""
    if not all(isinstance(size, int) for size in shape[1:]):
        return None
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
