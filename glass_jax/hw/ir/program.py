"""A kernel as plain data: what the NPU model executes, verifies and times.

A :class:`Program` is the front-end form of a tile kernel, in the order it was written, with no reference to the
compiler that produced it. Expressions and statements are frozen dataclasses; ``serialization`` writes them as
JSON. Variable and buffer names are unique within a program.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator
from typing import Any, ClassVar


class Space(str, enum.Enum):
    """Memory spaces of an AI core, as HARDWARE names them."""

    GM = "gm"  # global memory: the kernel's parameters
    L1 = "l1"
    L0A = "l0a"
    L0B = "l0b"
    L0_SCALES = "l0_scales"  # scales of operands in L0A and L0B: the hardware keeps them with the operands
    L0C = "l0c"
    UB = "ub"  # unified buffer of a vector unit
    FRAGMENT = "fragment"  # registers of a SIMT or SIMD region
    REDUCER = "reducer"  # accumulators of a reduction across threads
    SCALAR = "scalar"  # mutable scalar variables and small arrays of the scalar unit, or of a thread


# --- expressions ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Const:
    """A literal. ``value`` is an int, a float or a bool; ``dtype`` a NumPy or ml_dtypes name."""

    value: Any
    dtype: str


@dataclasses.dataclass(frozen=True)
class Var:
    """A scalar variable: a loop index, a block index, or the name of a :class:`Let`."""

    name: str
    dtype: str = "int32"


@dataclasses.dataclass(frozen=True)
class Load:
    """The element ``buffer[indices]``."""

    buffer: str
    indices: tuple[Expr, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Binary:
    """``op(lhs, rhs)``; ``op`` is one of :data:`BINARY_OPS`."""

    op: str
    lhs: Expr
    rhs: Expr
    dtype: str


@dataclasses.dataclass(frozen=True)
class Cast:
    """``value`` converted to ``dtype`` as the vector unit converts (see docs/numerics.md)."""

    value: Expr
    dtype: str


@dataclasses.dataclass(frozen=True)
class Select:
    """``then`` where ``condition``, else ``orelse``."""

    condition: Expr
    then: Expr
    orelse: Expr
    dtype: str


@dataclasses.dataclass(frozen=True)
class Call:
    """A named scalar function such as ``exp``, ``tanh``, ``rsqrt``, ``not``, ``abs``."""

    name: str
    args: tuple[Expr, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Address:
    """The place ``offset`` bytes behind the element ``buffer[indices]``.

    SIMD operations go on from there in the order of addresses, whatever the buffer's layout. One that is itself an
    argument of an :class:`Op` is written by it.
    """

    buffer: str
    indices: tuple[Expr, ...]
    offset: int | Expr = 0
    dtype: ClassVar[str] = "handle"


@dataclasses.dataclass(frozen=True)
class Register:
    """The vector register, the predicate or the pair of them that an operation of a SIMD region gives.

    Attributes:
      name: the operation's name in the kernel language: ``vadd``, ``vld``, ``pset``.
      args: its operands, in the kernel language's order.
      modes: its words, in that order: ``("ROUND_R", "RS_ENABLE", "PART_EVEN", "MODE_ZEROING")``.
      dtype: element type and lanes, ``"float32x64"``; ``"boolx256"`` for a predicate; of a pair the first one's.
    """

    name: str
    args: tuple[Expr, ...]
    modes: tuple[str, ...]
    dtype: str


Expr = Const | Var | Load | Binary | Cast | Select | Call | Address | Register

BINARY_OPS = (
    "add", "sub", "mul", "div", "floordiv", "floormod", "truncdiv", "truncmod", "min", "max",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "bitand", "bitor", "bitxor", "shl", "shr", "pow",
)  # fmt: skip


REGISTER_BITS = 2048


def register(dtype: str) -> tuple[str, int] | None:
    """Element type and lanes of a register type such as ``"float32x64"``, None for other types.

    A predicate register, ``"boolx256"``, has a lane for every byte of a vector register.
    """
    match = re.fullmatch(r"(.*?(\d+).*?|bool)x(\d+)", dtype)
    if match is None:
        return None
    element, bits, lanes = match[1], int(match[2] or 8), int(match[3])
    return (element, lanes) if bits * lanes == REGISTER_BITS else None


# --- memory --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer in one memory space.

    Attributes:
      name: unique within the program.
      space: where it lives.
      shape: extents; an expression where the kernel takes a dynamic shape.
      dtype: element type, a NumPy or ml_dtypes name. Of an array of vector registers too: their lanes are its last
        dimension, and a Load or a Store of a whole register leaves that index out.
      storage: name of the allocation it views; equal to ``name`` unless it is a view or reinterpretation of another
        buffer.
      layout: ``"nz"`` for a unified-buffer tile annotated as compact NZ, else None (row-major, or the space's own
        fractal layout, which a program never sees).
      strides: element strides of a GM parameter that is not row-major, else None.
      loc: ``file:line`` of its allocation, if known.
    """

    name: str
    space: Space
    shape: tuple[int | Expr, ...]
    dtype: str
    storage: str
    layout: str | None = None
    strides: tuple[int | Expr, ...] | None = None
    loc: str | None = None


@dataclasses.dataclass(frozen=True)
class Region:
    """``buffer[starts : starts + extents]``, one range a dimension. Extents are not clamped to the buffer's shape."""

    buffer: str
    starts: tuple[Expr, ...]
    extents: tuple[int | Expr, ...]


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Bytes that one buffer takes in one on-chip memory, all its versions (multi-buffering) counted.

    Attributes:
      buffer: the buffer's name.
      space: the memory.
      offset: address of the first version, in bytes.
      nbytes: size of one version, in bytes.
      versions: how many versions the compiler keeps.
    """

    buffer: str
    space: Space
    offset: int
    nbytes: int
    versions: int


# --- statements ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class For:
    """A loop.

    ``kind`` is ``serial``, ``pipelined``, ``unrolled``, ``vectorized`` or ``parallel`` (independent iterations).
    """

    var: Var
    start: Expr
    extent: Expr
    kind: str
    body: tuple[Stmt, ...]
    attrs: dict[str, Any] = dataclasses.field(default_factory=dict)
    loc: str | None = None


@dataclasses.dataclass(frozen=True)
class While:
    """A loop that goes on while ``condition`` holds."""

    condition: Expr
    body: tuple[Stmt, ...]
    loc: str | None = None


@dataclasses.dataclass(frozen=True)
class If:
    """A branch."""

    condition: Expr
    then: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...] = ()
    loc: str | None = None


@dataclasses.dataclass(frozen=True)
class Let:
    """Binds ``var`` for the statements that follow it in the same block."""

    var: Var
    value: Expr
    loc: str | None = None


@dataclasses.dataclass(frozen=True)
class Store:
    """``buffer[indices] = value``."""

    buffer: str
    indices: tuple[Expr, ...]
    value: Expr
    loc: str | None = None


@dataclasses.dataclass(frozen=True)
class Copy:
    """A transfer by one of the copy pipes; converts when the dtypes differ.

    ``attrs`` may hold

    * ``transpose``: the source is read transposed in its last two dimensions;
    * ``dual``: ``"rows"`` or ``"columns"``. The copy is done by, or for, a core's two vector units. One side is the
      full tile, in L0C, L1 or GM; the other, in the unified buffer, is half of it in the dimension that ``dual`` names
      (the last but one or the last; the only one of a vector, which counts as ``"columns"``), and vector unit ``u`` has
      half ``u`` of the tile. With ``double`` the *destination* is the full tile and the source region each unit's half;
      without it the *source* is the full tile and the destination region each unit's half. Only the full side reaches
      over array edges;
    * ``unit``: the vector unit that a copy from L0C goes to, an int;
    * ``pad``: an expression: rows are padded to 32 bytes with it;
    * ``atomic``: ``"add"``, ``"max"`` or ``"min"``: how the elements join those of the destination, and ``atomic_if``:
      a condition without which they replace them;

    and hints that have no effect on the result.
    """

    src: Region
    dst: Region
    attrs: dict[str, Any] = dataclasses.field(default_factory=dict)
    loc: str | None = None


@dataclasses.dataclass(frozen=True)
class Gemm:
    """``c = a @ b`` (added to ``c`` unless ``clear``), operands in L1 or in L0A and L0B, ``c`` in L0C.

    ``attrs`` may hold ``hf32``, ``"nearest_even"`` or ``"nearest_away"``: how float32 operands are rounded to HF32; and
    ``scales``, the regions of the operands' e8m0 scales, one for 32 elements along the axis that is summed over.
    """

    a: Region
    b: Region
    c: Region
    transpose_a: bool
    transpose_b: bool
    clear: Expr
    attrs: dict[str, Any] = dataclasses.field(default_factory=dict)
    loc: str | None = None


@dataclasses.dataclass(frozen=True)
class Fill:
    """Every element of ``dst`` becomes ``value``."""

    dst: Region
    value: Expr
    loc: str | None = None


@dataclasses.dataclass(frozen=True)
class Simt:
    """A SIMT region: ``parallel`` loops are iteration spaces and tiles whole; other statements run in every thread."""

    threads: tuple[Var, ...]
    extents: tuple[int, ...]
    body: tuple[Stmt, ...]
    loc: str | None = None


@dataclasses.dataclass(frozen=True)
class Simd:
    """A SIMD region: vector registers of 256 bytes."""

    body: tuple[Stmt, ...]
    loc: str | None = None


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a kernel split by hand: only the cores of one kind execute it, at the same time as the other kind's.

    ``core`` is ``"cube"`` or ``"vector"``; both vector units of a block execute a vector section.
    """

    core: str
    body: tuple[Stmt, ...]
    loc: str | None = None


@dataclasses.dataclass(frozen=True)
class Op:
    """Any other operation, by its name.

    Those that are not hints, and are made of several operations of the kernel language:

    * ``reduce(source, target)``: ``kind``, ``dim``, ``clear``;
    * ``scan(source, target)``: ``kind``, ``dim``, ``reverse``;
    * ``atomic(element, value[, result])``: ``element`` joins ``value`` by ``kind``; ``result`` is what it was before.
      Also the contribution to a reducer;
    * ``move(target, source, target_distance, source_distance)``: ``count`` pieces of ``nbytes`` each, from element to
      element on, at distances in bytes;
    * ``random_init(state, seed, sequence, offset)``, ``random(state, result)`` with ``kind``;
    * ``print(*values)`` with ``texts``; ``assert(condition)`` with ``message``.

    Synchronization has the kernel language's names and operands (see ``glass_jax.hw.order.sync``).
    """

    name: str
    args: tuple[Expr | Region | str, ...]
    attrs: dict[str, Any] = dataclasses.field(default_factory=dict)
    loc: str | None = None


Stmt = For | While | If | Let | Store | Copy | Gemm | Fill | Simt | Simd | Section | Op


@dataclasses.dataclass(frozen=True)
class Program:
    """One kernel.

    Attributes:
      name: the kernel's name.
      params: names of its GM buffers, in the order of the kernel's signature.
      buffers: every buffer by name, parameters included.
      block: the block index variable.
      blocks: number of blocks of the grid.
      body: the statements of one block.
      unit: variable of the vector unit's index (``sid``) where the kernel names it, else None.
      units: how many vector units a block uses.
      source: file that defines the kernel, if known.
      next: the grid that is launched when this one has ended, on the same parameters; None after the last.
      manual: whether the kernel synchronizes its pipes itself: the compiler's scheduler is off and adds no flags.
    """

    name: str
    params: tuple[str, ...]
    buffers: dict[str, Buffer]
    block: Var
    blocks: int | Expr
    body: tuple[Stmt, ...]
    unit: Var | None = None
    units: int = 2
    source: str | None = None
    next: Program | None = None
    manual: bool = False


# --- traversal -----------------------------------------------------------------------------------------------------


_OUTER = For | While | If | Simt | Simd | Section  # the statements with blocks in them


def blocks_of(stmt: Stmt) -> tuple[tuple[Stmt, ...], ...]:
    """The statement blocks nested directly in ``stmt``."""
    if isinstance(stmt, If):
        return (stmt.then, stmt.orelse)
    return (stmt.body,) if isinstance(stmt, For | While | Simt | Simd | Section) else ()


def result_of(op: Op) -> str | None:
    """The scalar variable in which an operation leaves what it returns, if it returns something."""
    if op.name == "random" or (op.name == "atomic" and len(op.args) == 3):
        return op.args[-1]
    return None


def walk(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Every statement of ``body``, outer before inner, in program order."""
    for stmt in body:
        yield stmt
        for block in blocks_of(stmt):
            yield from walk(block)


def subexpressions(node: Any) -> Iterator[Expr]:
    """Every expression inside ``node`` (a statement, region or expression), itself included, outer before inner.

    Does not enter the statement blocks nested in a statement.
    """
    if isinstance(node, Expr):
        yield node
    if isinstance(node, tuple | list):
        for item in node:
            yield from subexpressions(item)
    elif isinstance(node, dict):
        for item in node.values():
            yield from subexpressions(item)
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            if field.name not in ("body", "then", "orelse") or not isinstance(node, _OUTER):
                yield from subexpressions(getattr(node, field.name))
