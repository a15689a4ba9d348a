"""Synchronization: what the operations of the kernel language mean, and the flags between cores.

A core issues its statements in order to pipes that run at the same time. Within a core a flag orders two pipes
(``ascend_set_flag("MTE2_V", id)`` on the first, ``ascend_wait_flag`` on the second), a barrier one pipe or all of them,
and a lock (``ascend_get_buf`` to ``ascend_rls_buf``) the pipes that take the same number, in the order in which the
core issues them. Between the cores of a block, or of the whole grid, there are cross-core flags, by mode:

=====  =========================================================================================================
mode   what a set does
=====  =========================================================================================================
0      counts for every core of the grid of the setter's kind, once all of them have set the flag
1      counts for both vector units of a block, once both have
2      by the cube: counts for both vector units; by the vector units, once both have: for the cube
4      by vector unit u: counts for the cube as flag id % 16 + 16 u; by the cube: for unit id // 16, as flag id % 16
=====  =========================================================================================================

A wait takes one count, and holds up its pipe until there is one. Source: the Ascend C documentation of SetFlag,
PipeBarrier, CrossCoreSetFlag and GetBuf, and TileLang's use of them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from typing import Any

from glass_jax.hw.ir import program as ir

PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
ALL = "ALL"  # the pipe of a barrier that is for all of them

EVENT_IDS, EVENT_IDS_910A = 8, 4  # of each pair of pipes
LOCK_IDS = 32
FLAG_IDS = 16  # between cores; the cube counts those of the second vector unit from 16 in mode 4
MAX_COUNT = 15  # of a cross-core flag

ALL_CORES, UNITS, BLOCK, ONE_UNIT = 0, 1, 2, 4  # modes of cross-core flags

CROSS_CORE = frozenset({"ascend_cross_core_set_flag", "ascend_cross_core_wait_flag"})
WITHIN_CORE = frozenset(
    {"ascend_set_flag", "ascend_wait_flag", "ascend_pipe_barrier", "ascend_get_buf", "ascend_rls_buf"}
)


@dataclasses.dataclass(frozen=True)
class Sync:
    """One synchronizing operation.

    Attributes:
      kind: ``set``, ``wait``, ``barrier``, ``lock``, ``unlock``, ``cross_set`` or ``cross_wait``.
      pipe: the pipe that executes it, or :data:`ALL`.
      peer: of a set the pipe that waits, of a wait the one that sets.
      id: number of the flag or lock.
      mode: of a cross-core flag its mode; of a lock whether it waits (0) or only takes its place (1).
    """

    kind: str
    pipe: str
    peer: str | None = None
    id: int | ir.Expr = 0
    mode: int = 0

    @property
    def text(self) -> str:
        """How a message names it; the number must be known."""
        if self.kind in ("set", "wait"):
            event = (self.pipe, self.peer) if self.kind == "set" else (self.peer, self.pipe)
            return f"flag {'_'.join(event)} {self.id}"
        if self.kind.startswith("cross"):
            return f"cross-core flag {self.id} (mode {self.mode})"
        return f"lock {self.id}" if self.kind.endswith("lock") else f"barrier of {self.pipe}"


def parse(op: ir.Op) -> Sync | None:
    """The synchronization that ``op`` is, None if it is none."""
    if op.name not in WITHIN_CORE | CROSS_CORE:
        return None
    if op.name in CROSS_CORE:
        mode, pipe, flag = op.args
        kind = "cross_set" if op.name == "ascend_cross_core_set_flag" else "cross_wait"
        return Sync(kind, _pipe(pipe), None, flag, int(mode.value))
    if op.name == "ascend_pipe_barrier":
        return Sync("barrier", _pipe(op.args[0]))
    if op.name in ("ascend_get_buf", "ascend_rls_buf"):
        pipe, lock, mode = op.args
        return Sync("lock" if op.name == "ascend_get_buf" else "unlock", _pipe(pipe), None, lock, int(mode.value))
    setter, waiter = op.args[0].split("_")
    if op.name == "ascend_set_flag":
        return Sync("set", setter, waiter, op.args[1])
    return Sync("wait", waiter, setter, op.args[1])


def _pipe(name: str) -> str:
    return name.removeprefix("PIPE_")


def has(statements: Iterable[ir.Stmt], names: Set[str]) -> bool:
    """Whether any of the statements, or one nested in them, is one of the named operations."""
    return any(isinstance(stmt, ir.Op) and stmt.name in names for stmt in ir.walk(tuple(statements)))


def is_split(program: ir.Program) -> bool:
    """Whether a kernel is split by hand into parts for the cube and for the vector units."""
    return any(isinstance(stmt, ir.Section) for stmt in ir.walk(program.body))


def meets(program: ir.Program) -> bool:
    """Whether a kernel waits for all cores of the grid."""
    ops = (stmt for stmt in ir.walk(program.body) if isinstance(stmt, ir.Op) and stmt.name in CROSS_CORE)
    return any(parse(op).mode == ALL_CORES for op in ops)


def is_concurrent(program: ir.Program) -> bool:
    """Whether statements of a kernel run at the same time in a way that the result may depend on."""
    return is_split(program) or meets(program)


# --- cores ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Core:
    """A core that executes a block: ``kind`` is ``cube`` or ``vector``, ``unit`` the number of the vector unit."""

    block: int
    kind: str
    unit: int = 0

    @property
    def text(self) -> str:
        """How a message names it."""
        name = "cube" if self.kind == "cube" else f"vector unit {self.unit}"
        return f"block {self.block}, {name}"


def waiting(core: Core, operation: Sync, loc: str | None) -> str:
    """How a message says that a pipe of ``core`` waits at ``operation``."""
    return f"{core.text}, pipe {operation.pipe} waits for {operation.text} at {loc or 'a line not recorded'}"


def parts(program: ir.Program) -> dict[str, tuple[ir.Stmt, ...]]:
    """What the cores of each kind execute: their sections, and all that is outside of sections.

    Without sections that is the whole body, for a kind that has no name: ``""``.
    """
    if not is_split(program):
        return {"": program.body}
    kinds = {stmt.core for stmt in ir.walk(program.body) if isinstance(stmt, ir.Section)}
    return {kind: _part(program.body, kind) for kind in sorted(kinds)}


def _part(statements: tuple[ir.Stmt, ...], kind: str) -> tuple[ir.Stmt, ...]:
    kept: list[ir.Stmt] = []
    for stmt in statements:
        if isinstance(stmt, ir.Section):
            kept.extend(stmt.body if stmt.core == kind else ())
        elif any(isinstance(inner, ir.Section) for inner in ir.walk((stmt,))):
            kept.extend(_with_blocks(stmt, lambda block: _part(block, kind)))
        else:
            kept.append(stmt)
    return tuple(kept)


def without(statements: tuple[ir.Stmt, ...], names: Set[str]) -> tuple[ir.Stmt, ...]:
    """``statements`` without the named operations, and without loops and branches that hold nothing."""
    kept: list[ir.Stmt] = []
    for stmt in statements:
        if isinstance(stmt, ir.For | ir.If):
            kept.extend(_with_blocks(stmt, lambda block: without(block, names)))
        elif not (isinstance(stmt, ir.Op) and stmt.name in names):
            kept.append(stmt)
    return tuple(kept)


def _with_blocks(stmt: ir.Stmt, change: Callable[[tuple[ir.Stmt, ...]], tuple[ir.Stmt, ...]]) -> list[ir.Stmt]:
    """``stmt`` with its blocks changed; nothing if there is nothing left in them but Lets."""
    names = ("then", "orelse") if isinstance(stmt, ir.If) else ("body",)
    new = dataclasses.replace(stmt, **{name: change(getattr(stmt, name)) for name in names})
    return [new] if any(not isinstance(inner, ir.Let) for block in ir.blocks_of(new) for inner in block) else []


class CrossFlags:
    """The cross-core flags of some cores. With each set goes what the setter knows, which the wait that takes it gets.

    Attributes:
      highest: the largest count that each flag has had, by receiver, mode and number.
    """

    def __init__(self, cores: Iterable[Core], join: Callable[[list[Any]], Any] = lambda known: None):
        """``join`` combines what several setters know; by default nobody knows anything."""
        self._cores = tuple(cores)
        self._join = join
        self._arrived: dict[Hashable, dict[Core, collections.deque]] = {}
        self._counts: dict[tuple[Core, int, int], collections.deque] = collections.defaultdict(collections.deque)
        self.highest: dict[tuple[Core, int, int], int] = {}

    def set(self, core: Core, mode: int, flag: int, known: Any = None) -> None:
        """``core`` sets a flag."""
        senders, receivers, number = self._ends(core, mode, flag)
        arrived = self._arrived.setdefault((senders, mode, flag), {c: collections.deque() for c in senders})
        arrived[core].append(known)
        if all(arrived.values()):
            joined = self._join([waiting.popleft() for waiting in arrived.values()])
            for receiver in receivers:
                key = (receiver, mode, number)
                self._counts[key].append(joined)
                self.highest[key] = max(self.highest.get(key, 0), len(self._counts[key]))

    def ready(self, core: Core, mode: int, flag: int) -> bool:
        """Whether a wait of ``core`` would go on."""
        return bool(self._counts[core, mode, _own_number(core, mode, flag)])

    def take(self, core: Core, mode: int, flag: int) -> Any:
        """A wait that goes on: what the setter knew."""
        return self._counts[core, mode, _own_number(core, mode, flag)].popleft()

    def left(self) -> Iterator[tuple[Core, int, int, int]]:
        """Flags set and not waited for: the receiver, the mode, the number, the count."""
        for (receiver, mode, flag), counts in self._counts.items():
            if counts:
                yield receiver, mode, flag, len(counts)

    def _ends(self, core: Core, mode: int, flag: int) -> tuple[tuple[Core, ...], tuple[Core, ...], int]:
        """Who has to set a flag, for whom it then counts, and its number there."""
        near = [other for other in self._cores if other.block == core.block]
        alike = tuple(other for other in near if other.kind == core.kind)
        opposite = tuple(other for other in near if other.kind != core.kind)
        if mode == ALL_CORES:
            everywhere = tuple(other for other in self._cores if other.kind == core.kind)
            return everywhere, everywhere, flag
        if mode == UNITS:
            return alike, alike, flag
        if mode == BLOCK:
            return alike, opposite, flag
        if core.kind == "cube":
            unit = flag // FLAG_IDS
            return (core,), tuple(other for other in opposite if other.unit == unit), flag % FLAG_IDS
        return (core,), opposite, flag % FLAG_IDS + FLAG_IDS * core.unit


def _own_number(core: Core, mode: int, flag: int) -> int:
    """The number under which a core counts a flag that it names ``flag``: a vector unit has 16 of its own."""
    return flag % FLAG_IDS if mode == ONE_UNIT and core.kind == "vector" else flag
