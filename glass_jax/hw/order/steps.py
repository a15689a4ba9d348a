"""The statements of one core as steps with jumps, for kernels whose order is known only when they run."""

from __future__ import annotations

import dataclasses

from glass_jax.hw.ir import program as ir
from glass_jax.hw.order import sync

Bindings = tuple[ir.For | ir.Let, ...]


@dataclasses.dataclass(eq=False)
class Step:
    """What a core does before it goes on to the next step, or to ``target``.

    Attributes:
      kind: ``piece``, ``sync``, ``enter`` (a loop), ``test`` (whether it goes on), ``next`` (iteration), ``if`` (a
        branch or a while loop) or ``skip``.
      bindings: the loops and Lets around it.
      stmt: the loop, branch or operation.
      statements: of a piece.
      target: number of the step to go to: if a test or condition fails, or in any case for ``next`` and ``skip``.
    """

    kind: str
    bindings: Bindings
    stmt: ir.Stmt | None = None
    statements: tuple[ir.Stmt, ...] = ()
    target: int = 0


def flatten(statements: tuple[ir.Stmt, ...]) -> list[Step]:
    """The steps of one core that executes ``statements``."""
    steps: list[Step] = []
    _append(statements, (), steps)
    return steps


def _append(statements: tuple[ir.Stmt, ...], bindings: Bindings, steps: list[Step]) -> None:
    """Appends the steps of ``statements``."""
    pending: list[ir.Stmt] = []
    outer = bindings

    def flush() -> None:
        if any(not isinstance(stmt, ir.Let) for stmt in pending):
            steps.append(Step("piece", outer, statements=tuple(pending)))
        pending.clear()

    for stmt in statements:
        if not sync.has((stmt,), sync.CROSS_CORE):
            pending.append(stmt)
            bindings = (*bindings, stmt) if isinstance(stmt, ir.Let) else bindings
            continue
        flush()
        outer = bindings
        if isinstance(stmt, ir.Op):
            steps.append(Step("sync", bindings, stmt))
        elif isinstance(stmt, ir.If):
            branch = Step("if", bindings, stmt)
            steps.append(branch)
            _append(stmt.then, bindings, steps)
            skip = Step("skip", bindings)
            steps.append(skip)
            branch.target = len(steps)
            _append(stmt.orelse, bindings, steps)
            skip.target = len(steps)
        elif isinstance(stmt, ir.For):
            test = Step("test", bindings, stmt)
            steps.extend((Step("enter", bindings, stmt), test))
            _append(stmt.body, (*bindings, stmt), steps)
            steps.append(Step("next", bindings, stmt, target=steps.index(test)))
            test.target = len(steps)
        else:
            test = Step("if", bindings, stmt)
            steps.append(test)
            _append(stmt.body, bindings, steps)
            steps.append(Step("skip", bindings, target=steps.index(test)))
            test.target = len(steps)
    flush()
