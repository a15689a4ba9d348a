"""Rules about pipes and cores that wait for one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from glass_jax import errors
from glass_jax.hw import memory as mem
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.order import ordering, pieces, sync, unwritten
from glass_jax.hw.order.sync import Sync
from glass_jax.hw.rules.base import Findings, Rule, Subject

_OF_THE_CUBE = (Space.L1, Space.L0A, Space.L0B, Space.L0C)


def _cores(subject: Subject) -> int:
    """How many blocks run at once: a kernel that uses no cube has the vector units to itself."""
    cube = any(buffer.space in _OF_THE_CUBE for buffer in subject.program.buffers.values())
    return subject.chip.cube_cores if cube else subject.chip.vector_cores or subject.chip.cube_cores


def _grid(subject: Subject) -> Findings:
    blocks, cores = mem.static(subject.program.blocks), _cores(subject)
    waits = [
        op
        for op in subject.of(ir.Op)
        if op.name.endswith("cross_core_wait_flag") and mem.static(op.args[0]) == sync.ALL_CORES
    ]
    if waits and blocks is not None and blocks > cores:
        message = (
            f"{blocks} blocks wait for one another and {subject.chip.name} runs {cores} at a time: they never meet"
        )
        yield waits[0].loc, message, f"Launch at most {cores} blocks, each taking several tiles (T.Persistent)"


def _operations(subject: Subject) -> list[tuple[Sync, ir.Stmt]]:
    """The synchronizing operations whose numbers are known; of a kernel that synchronizes itself, all it executes."""
    found = dict(subject.outcome.used)
    for op in subject.of(ir.Op):
        operation = sync.parse(op)
        if operation is not None and mem.static(operation.id) is not None:
            number = mem.static(operation.id)
            found.setdefault(Sync(operation.kind, operation.pipe, operation.peer, number, operation.mode), op)
    return list(found.items())


def _numbers(subject: Subject) -> Findings:
    yield from _out_of_range(subject, _operations(subject))


def _out_of_range(subject: Subject, operations: Iterable[tuple[Sync, ir.Stmt]]) -> Findings:
    for operation, stmt in operations:
        if operation.kind in ("set", "wait"):
            count = sync.EVENT_IDS_910A if subject.chip.family == "910A" else sync.EVENT_IDS
            what = "a pair of pipes"
        elif operation.kind in ("lock", "unlock"):
            count, what = sync.LOCK_IDS, "a core"
        elif operation.kind.startswith("cross"):
            count, what = sync.FLAG_IDS * (2 if operation.mode == sync.ONE_UNIT else 1), "a core"
        else:
            continue
        if not 0 <= operation.id < count:
            message = f"{operation.text}: {what} has the numbers 0 to {count - 1}"
            yield stmt.loc, message, f"Use a number below {count}, and again once it has been waited for"


def _modes(subject: Subject) -> Findings:
    known = (sync.ALL_CORES, sync.UNITS, sync.BLOCK, sync.ONE_UNIT)
    for op in subject.of(ir.Op):
        operation = sync.parse(op)
        if operation is None or not operation.kind.startswith("cross"):
            continue
        if operation.mode not in known:
            yield op.loc, f"a cross-core flag of mode {operation.mode}; there are 0, 1, 2 and 4", "Use one of them"
        elif operation.mode in (sync.BLOCK, sync.ONE_UNIT) and not _is_mixed(subject.program):
            message = (
                f"a flag between the cube and the vector units (mode {operation.mode}) in a kernel that has only one"
            )
            yield op.loc, message, "Use both kinds of cores in the kernel, or flags between pipes"


def _is_mixed(program: ir.Program) -> bool:
    if sync.is_split(program):
        return len(sync.parts(program)) == 2
    spaces = {buffer.space for buffer in program.buffers.values()}
    return Space.UB in spaces and not spaces.isdisjoint(_OF_THE_CUBE)


def _compiled(subject: Subject) -> Findings:
    """The flags that the compiler inserted, which nobody has written and nobody can correct but by avoiding them."""
    if subject.flags is None or subject.program.manual:
        return
    outcome = ordering.check(subject.flags, accesses=False)
    found = [finding.message for finding in outcome.findings]
    found += [message for _, message, _ in _out_of_range(subject, outcome.used.items())]
    for message in found:
        yield None, f"in the generated code, {message}", "Change num_stages or the order of operations, and report it"


def _scalar_barriers(subject: Subject) -> Findings:
    for op in subject.of(ir.Op):
        if (operation := sync.parse(op)) is not None and operation.kind == "barrier" and operation.pipe == "S":
            yield op.loc, "a barrier on the scalar pipe", 'Use a flag from or to "S", or a barrier on "PIPE_ALL"'


def _found(rule: str) -> Callable[[Subject], Findings]:
    """What simulating the kernel pipe by pipe has found for one rule."""

    def check(subject: Subject) -> Findings:
        for finding in subject.outcome.findings:
            if finding.rule == rule:
                yield finding.loc, finding.message, finding.remedy

    return check


def _deadlocks(subject: Subject) -> Findings:
    yield from _found("deadlock")(subject)
    blocks = mem.static(subject.program.blocks)
    if not subject.program.manual and sync.meets(subject.program) and blocks is not None:
        try:
            pieces.check_order(subject.program, blocks)
        except errors.DeadlockError as error:
            text = "nobody sets what these wait for, so that the kernel never ends: " + "; ".join(error.waits)
            yield error.loc, text, "Set each flag as often as it is waited for"
        except errors.UnsupportedError:
            return  # who waits for whom is known only when the kernel runs


def _unwritten(subject: Subject) -> Findings:
    yield from _found("unwritten-memory")(subject)
    if not subject.program.manual:
        for loc, message in unwritten.reads(subject.program):
            yield loc, message, "Load or fill it first"


RULES = (
    Rule(
        "grid-size",
        "A block that waits for all others keeps its core, so that more blocks than cores never meet.",
        _grid,
    ),
    Rule(
        "flag-id",
        "A pair of pipes has 8 flags (4 on the 910A), a core 32 locks and 16 cross-core flags; others do not exist.",
        _numbers,
    ),
    Rule(
        "flag-mode",
        "A flag between the cube and the vector units needs a kernel that is launched on both.",
        _modes,
    ),
    Rule("compiled-sync", "The compiler's own flags are subject to the same rules.", _compiled),
    Rule("scalar-barrier", "The scalar pipe has no barrier of its own.", _scalar_barriers),
    Rule("deadlock", "A pipe that waits for a flag which nobody sets stops the kernel for ever.", _deadlocks),
    Rule(
        "flag-unpaired",
        "A flag that is still set when a kernel ends lets the first wait of the next kernel pass.",
        _found("flag-unpaired"),
    ),
    Rule(
        "flag-doubled",
        "A flag of two pipes is set or not: one that is set twice lets one wait pass.",
        _found("flag-doubled"),
    ),
    Rule("flag-count", "A cross-core flag counts to 15.", _found("flag-count")),
    Rule(
        "race",
        "Pipes run at the same time: two accesses to one place that no flag orders happen in either order.",
        _found("race"),
    ),
    Rule("unwritten-memory", "On-chip memory holds at first what the kernel before it left there.", _unwritten),
)
