"""A hand-synchronized kernel pipe by pipe: does it end, and is every access to a memory ordered?

The pipes of one block's cores are simulated without data: the scalar unit of a core issues instructions in program
order, each pipe takes its own in order and stops at a flag that is not set. What a pipe knows to have ended is a vector
clock; flags, barriers and locks carry it from one pipe to another. Two accesses of which neither is known to have ended
before the other are a race, whichever comes first here.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence

from glass_jax.errors import DeadlockError, UnsupportedError
from glass_jax.hw import memory as mem
from glass_jax.hw.ir import intervals
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Allocation, Space
from glass_jax.hw.order import pipes, sync
from glass_jax.hw.order.history import Clock, Event, History
from glass_jax.hw.order.pipes import VECTOR_MEMORIES, Instruction
from glass_jax.hw.order.sync import ALL, PIPES, Core, CrossFlags, Sync
from glass_jax.hw.order.unrolling import Scope, Unrolling

MAX_STEPS = 50_000  # of a block; a longer kernel is judged by its beginning


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something wrong in the order of things, as ``glass_jax.hw.rules`` reports it."""

    rule: str
    loc: str | None
    message: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class _Known:
    """What the scalar unit knew when it issued the instructions that follow in a queue."""

    clock: Clock


@dataclasses.dataclass(frozen=True)
class _Step:
    """One entry of a pipe's queue.

    Attributes:
      pipe: the pipe.
      stmt: the statement it is of.
      does: an instruction or a synchronization.
      held: of a lock, how often each pipe had taken it when this was issued.
    """

    pipe: str
    stmt: ir.Stmt
    does: Instruction | Sync | _Known
    held: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of simulating a kernel.

    Attributes:
      findings: what is wrong.
      waits: what the pipes wait for that nobody will do; empty if the kernel ends.
      used: every flag, lock and barrier that a block used, with a statement that did.
    """

    findings: tuple[Finding, ...] = ()
    waits: tuple[str, ...] = ()
    used: Mapping[Sync, ir.Stmt] = dataclasses.field(default_factory=dict)


def check(program: ir.Program, memory: Sequence[Allocation] = (), accesses: bool = True) -> Outcome:
    """Simulates the first and the last block of ``program``, as far as its order is known without data.

    Args:
      program: the kernel; one that the compiler synchronizes has nothing to find.
      memory: the compiler's memory map, which tells buffers that share room.
      accesses: whether to look at what is read and written, or at the flags alone.
    """
    if not program.manual:
        return Outcome()
    blocks = mem.static(program.blocks)
    findings: dict[Finding, None] = {}
    used: dict[Sync, ir.Stmt] = {}
    for block in (0,) if blocks in (None, 1) else (0, blocks - 1):
        simulation = _Simulation(program, block, History(program, memory) if accesses else None)
        with contextlib.suppress(UnsupportedError):  # what was found until then is certain all the same
            simulation.run()
        findings |= simulation.findings
        used |= simulation.used
        if simulation.waits:
            break
    return Outcome(tuple(findings), simulation.waits, used)


def check_progress(program: ir.Program) -> None:
    """Raises if a kernel's pipes or cores certainly wait for each other for ever.

    Raises:
      DeadlockError: they do; the message names each waiting pipe, its flag and the line.
    """
    outcome = check(program, accesses=False)
    if outcome.waits:
        loc = next(finding.loc for finding in outcome.findings if finding.rule == "deadlock")
        raise DeadlockError(program.name, outcome.waits, loc)


class _Unit:
    """A core in simulation: what it has still to issue, and the queues of its pipes."""

    def __init__(self, core: Core, steps: Iterator[_Step]):
        self.core = core
        self._steps = steps
        self._own = next(steps, None)  # what the scalar unit does next itself
        self.queues: dict[str, collections.deque[_Step]] = {pipe: collections.deque() for pipe in PIPES}
        self._issue()

    def _issue(self) -> None:
        """Puts instructions into the queues until the scalar unit has something to do itself."""
        while self._own is not None and self._own.pipe not in ("S", ALL):
            self.queues[self._own.pipe].append(self._own)
            self._own = next(self._steps, None)

    def head(self, pipe: str) -> _Step | None:
        """The first step of a queue."""
        if pipe == "S":
            return self._own
        return self.queues[pipe][0] if self.queues[pipe] else None

    def pop(self, pipe: str) -> None:
        """The first step of a queue is done."""
        if pipe == "S":
            self._own = next(self._steps, None)
            self._issue()
        else:
            self.queues[pipe].popleft()


class _Simulation:
    """One block of a kernel."""

    def __init__(self, program: ir.Program, block: int, history: History | None):
        self.findings: dict[Finding, None] = {}
        self.waits: tuple[str, ...] = ()
        self.used: dict[Sync, ir.Stmt] = {}
        self._program = program
        self._history = history
        bodies = dict(_cores(program, block))
        places = ((core, pipe) for core in bodies for pipe in PIPES)
        self._numbers = {place: number for number, place in enumerate(places)}
        self._clocks: list[Clock] = [(0,) * len(self._numbers)] * len(self._numbers)
        self._flags: dict[Hashable, collections.deque[tuple[Clock, ir.Stmt]]] = collections.defaultdict(
            collections.deque
        )
        self._taken: dict[Hashable, tuple[int, int]] = {}  # the pipe that last took a flag, and its count then
        self._unlocks: dict[Hashable, list[Clock]] = collections.defaultdict(list)
        self._cross = CrossFlags(bodies, _joined)
        self._steps_left = MAX_STEPS
        self._bodies = bodies

    # --- what the cores issue ---

    def _stream(self, core: Core, body: tuple[ir.Stmt, ...]) -> Iterator[_Step]:
        values = {self._program.block.name: (core.block, core.block)}
        if self._program.unit is not None:
            values[self._program.unit.name] = (core.unit, core.unit)
        locks: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
        for stmt, scope in Unrolling(self._program, lambda stmt: True).leaves(body, Scope(values)):
            operation = sync.parse(stmt) if isinstance(stmt, ir.Op) else None
            if operation is None:
                yield from self._instructions(stmt, scope)
                continue
            number = intervals.value(operation.id, scope.values)
            if number is None:
                raise UnsupportedError(f"{stmt.loc}: the number of a flag is known only at run time")
            does = dataclasses.replace(operation, id=number)
            if does.kind == "barrier" and does.pipe == "S":
                does = dataclasses.replace(does, pipe=ALL)
            held = tuple(locks[number].items()) if does.kind == "lock" else ()
            if does.kind == "lock":
                locks[number][does.pipe] += 1
            self.used.setdefault(does, stmt)
            yield _Step(does.pipe, stmt, does, held)

    def _instructions(self, stmt: ir.Stmt, scope: Scope) -> Iterator[_Step]:
        """The instructions of a statement, each after the one before it."""
        previous = None
        for instruction in pipes.instructions(stmt, scope.values, self._program):
            if previous not in (None, "S"):
                yield _Step(previous, stmt, Sync("set", previous, instruction.pipe, None))
                yield _Step(instruction.pipe, stmt, Sync("wait", instruction.pipe, previous, None))
            yield _Step(instruction.pipe, stmt, instruction)
            previous = instruction.pipe

    # --- running ---

    def run(self) -> None:
        """Runs the block to its end, or to where nothing moves any more.

        Raises:
          UnsupportedError: what the block does next is known only at run time.
        """
        units = [_Unit(core, self._stream(core, body)) for core, body in self._bodies.items()]
        moved = True
        while moved and self._steps_left > 0:
            moved = False
            for unit in units:
                for pipe in PIPES:
                    while (step := unit.head(pipe)) is not None and self._goes_on(unit, step):
                        unit.pop(pipe)
                        moved, self._steps_left = True, self._steps_left - 1
        if self._steps_left <= 0:
            return
        heads = [(unit.core, unit.head(pipe)) for unit in units for pipe in PIPES if unit.head(pipe) is not None]
        stuck = [(core, step) for core, step in heads if step.does.kind != "barrier"]
        if stuck:
            self.waits = tuple(sync.waiting(core, step.does, step.stmt.loc) for core, step in stuck)
            text = "nobody sets what these wait for, so that the kernel never ends: " + "; ".join(self.waits)
            self._find("deadlock", stuck[0][1].stmt.loc, text, "Set each flag as often as it is waited for")
        else:
            self._check_left()

    def _goes_on(self, unit: _Unit, step: _Step) -> bool:
        """Does a step, unless it has to wait."""
        does = step.does
        if isinstance(does, Instruction):
            self._execute(unit.core, step)
        elif isinstance(does, _Known):
            self._learn(unit.core, step.pipe, does.clock)
        elif does.kind == "barrier":
            return self._barrier(unit, does)
        elif does.kind == "wait":
            return self._wait(unit, step, does)
        elif does.kind == "lock":
            return self._lock(unit, step, does)
        elif does.kind == "cross_wait":
            if not self._cross.ready(unit.core, does.mode, does.id):
                return False
            self._pass(unit, step, self._cross.take(unit.core, does.mode, does.id))
        elif does.kind == "cross_set":
            self._cross.set(unit.core, does.mode, does.id, self._clock(unit.core, does.pipe))
        elif does.kind == "unlock":
            self._unlocks[unit.core, does.id, does.pipe].append(self._clock(unit.core, does.pipe))
        else:
            self._set(unit.core, step, does)
        return True

    def _clock(self, core: Core, pipe: str) -> Clock:
        return self._clocks[self._numbers[core, pipe]]

    def _learn(self, core: Core, pipe: str, known: Clock) -> None:
        """A pipe gets to know what has ended."""
        number = self._numbers[core, pipe]
        self._clocks[number] = _joined([self._clocks[number], known])

    def _pass(self, unit: _Unit, step: _Step, known: Clock) -> tuple[int, int]:
        """A pipe gets past a wait: its number, and how many steps it has then done."""
        self._learn(unit.core, step.pipe, known)
        if step.pipe == "S":  # whatever the scalar unit issues from now on starts later
            for pipe in PIPES[1:]:
                unit.queues[pipe].append(_Step(pipe, step.stmt, _Known(self._clock(unit.core, "S"))))
        return self._advance(unit.core, step.pipe)

    def _advance(self, core: Core, pipe: str) -> tuple[int, int]:
        number = self._numbers[core, pipe]
        clock = list(self._clocks[number])
        clock[number] += 1
        self._clocks[number] = tuple(clock)
        return number, clock[number]

    def _execute(self, core: Core, step: _Step) -> None:
        number, count = self._advance(core, step.pipe)
        if self._history is None:
            return
        clock = self._clocks[number]
        found = [(access, self._place(core, access)) for access in step.does.accesses]
        for access, place in found:
            for event in self._history.conflicts(access, place, number, clock):
                self._race(step, access, event)
            if self._history.unwritten(access, place):
                space = self._program.buffers[access.buffer].space.name
                text = f"{step.pipe} reads a part of {access.buffer} in {space} that nobody has written"
                self._find("unwritten-memory", step.stmt.loc, text, "Load or fill it first")
        for access, place in found:
            self._history.add(Event(access, step.stmt, number, count), place, clock)

    def _place(self, core: Core, access: pipes.Access) -> int | None:
        """Which core's memory an access is to, of those that several cores have by one name."""
        if self._program.buffers[access.buffer].space not in VECTOR_MEMORIES:
            return None
        return core.unit if access.unit is None else access.unit

    def _race(self, step: _Step, access: pipes.Access, event: Event) -> None:
        other = list(self._numbers)[event.pipe][1]
        verbs = ["writes" if item.write else "reads" for item in (access, event.access)]
        text = (
            f"{step.pipe} {verbs[0]} {access.buffer} and {other} {verbs[1]} {event.access.buffer}, at "
            f"{event.stmt.loc or 'a line not recorded'}, in no certain order, and they overlap"
        )
        remedy = (
            "Order the two pipes with flags: when the one has filled the buffer, and when the other is done with it"
        )
        self._find("race", step.stmt.loc, text, remedy)

    # --- synchronization ---

    def _barrier(self, unit: _Unit, does: Sync) -> bool:
        if does.pipe != ALL:
            return True
        if any(unit.queues.values()):
            return False
        everything = _joined([self._clock(unit.core, pipe) for pipe in PIPES])
        for pipe in PIPES:
            self._learn(unit.core, pipe, everything)
        return True

    def _set(self, core: Core, step: _Step, does: Sync) -> None:
        key = (core, does.pipe, does.peer, does.id)
        taken = self._taken.get(key)
        known = taken is None or self._clock(core, does.pipe)[taken[0]] >= taken[1]
        if does.id is not None and (self._flags[key] or not known):
            self._find(
                "flag-doubled",
                step.stmt.loc,
                f"{does.text} is set again though {does.peer} may not have taken it yet",
                f"Let {does.pipe} wait for {does.peer} before it sets the flag again, or alternate between two numbers",
            )
        self._flags[key].append((self._clock(core, does.pipe), step.stmt))

    def _wait(self, unit: _Unit, step: _Step, does: Sync) -> bool:
        key = (unit.core, does.peer, does.pipe, does.id)
        if not self._flags[key]:
            return False
        self._taken[key] = self._pass(unit, step, self._flags[key].popleft()[0])
        return True

    def _lock(self, unit: _Unit, step: _Step, does: Sync) -> bool:
        """A lock waits until the pipes that took it before have given it back."""
        others = [(pipe, times) for pipe, times in step.held if pipe != does.pipe] if does.mode == 0 else []
        given = {pipe: self._unlocks[unit.core, does.id, pipe] for pipe, _ in others}
        if any(len(given[pipe]) < times for pipe, times in others):
            return False
        for pipe, times in others:
            self._learn(unit.core, does.pipe, given[pipe][times - 1])
        return True

    def _check_left(self) -> None:
        """Flags that are still set at the end are there when the next kernel begins."""
        for (_, pipe, peer, number), left in self._flags.items():
            if left and number is not None:
                text = f"{Sync('set', pipe, peer, number).text} is set and nobody waits for it"
                self._find("flag-unpaired", left[0][1].loc, text, "Wait for it before the kernel ends")
        for core, mode, flag, count in self._cross.left():
            text = f"{Sync('cross_set', '', None, flag, mode).text} of {core.kind} still counts {count} at the end"
            self._find("flag-unpaired", None, text, "Wait for it as often as it is set")
        for (core, mode, flag), count in self._cross.highest.items():
            if count > sync.MAX_COUNT:
                flag_text = Sync("cross_set", "", None, flag, mode).text
                text = f"{flag_text} of {core.kind} can count to {count}, over {sync.MAX_COUNT}"
                self._find("flag-count", None, text, "Let the setter wait for the receiver from time to time")

    def _find(self, *finding: str | None) -> None:
        self.findings[Finding(*finding)] = None


def _joined(clocks: Sequence[Clock]) -> Clock:
    """The clock of one who knows what all of ``clocks`` know."""
    return tuple(map(max, *clocks)) if len(clocks) > 1 else clocks[0]


def _cores(program: ir.Program, block: int) -> Iterator[tuple[Core, tuple[ir.Stmt, ...]]]:
    """The cores that execute a block, and what each of them executes."""
    for kind, body in sync.parts(program).items():
        if kind == "vector":
            yield from ((Core(block, kind, unit), body) for unit in range(program.units))
        elif kind == "cube":
            yield Core(block, kind), body
        else:
            cube = any(b.space not in (Space.GM, Space.UB) and b.space in mem.ON_CHIP for b in program.buffers.values())
            yield Core(block, "cube" if cube else "vector"), body
