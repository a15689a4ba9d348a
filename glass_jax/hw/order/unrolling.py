"""Statements of a program in the order in which one core executes them, loops unrolled as far as asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import intervals
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.intervals import Interval

# Statements whose blocks are what threads or registers do, which is one step of the core that issues them.
REGIONS = ir.Simt | ir.Simd


@dataclasses.dataclass(frozen=True)
class Scope:
    """Where a statement stands while it is executed.

    Attributes:
      values: what is known of the variables.
      bindings: the loops and Lets that bind them, outermost first.
      run: number of the execution of the block that the statement stands in, unique in an unrolling.
    """

    values: dict[str, Interval]
    bindings: tuple[ir.For | ir.Let, ...] = ()
    run: int = 0

    def binding(self, stmt: ir.For | ir.Let, value: Interval | None) -> Scope:
        """The scope in which ``stmt`` has bound its variable."""
        values = {name: known for name, known in self.values.items() if name != stmt.var.name}
        if value is not None:
            values[stmt.var.name] = value
        return dataclasses.replace(self, values=values, bindings=(*self.bindings, stmt))


class Unrolling:
    """Unrolls the statements of one core."""

    def __init__(self, program: ir.Program, opens: Callable[[ir.Stmt], bool]):
        """``opens(stmt)`` says whether a loop or branch is to be unrolled; others are given as they are."""
        self._opens = opens
        self._runs = 0
        buffers = program.buffers.values()
        self._scalars = frozenset(b.name for b in buffers if b.space is ir.Space.SCALAR and b.shape in ((), (1,)))
        self._stored: dict[str, Interval] = {}  # what is known of the scalar variables in memory

    def leaves(self, statements: tuple[ir.Stmt, ...], scope: Scope) -> Iterator[tuple[ir.Stmt, Scope]]:
        """Each statement with the scope it is executed in. A Let is given, and binds what comes after it.

        Raises:
          UnsupportedError: how often a loop runs, or which way a branch goes, is known only at run time.
        """
        scope = dataclasses.replace(scope, run=self._runs)
        self._runs += 1
        for stmt in statements:
            scope = self._knowing(scope)
            if isinstance(stmt, ir.Let):
                yield stmt, scope
                scope = scope.binding(stmt, intervals.bounds(stmt.value, scope.values))
            elif ir.blocks_of(stmt) and not isinstance(stmt, REGIONS) and self._opens(stmt):
                yield from self._opened(stmt, scope)
            else:
                self._store(stmt, scope)
                yield stmt, scope

    def _knowing(self, scope: Scope) -> Scope:
        """``scope`` with what the scalar variables in memory hold now."""
        if all(scope.values.get(name) == self._stored.get(name) for name in self._scalars):
            return scope
        values = {name: value for name, value in scope.values.items() if name not in self._scalars}
        return dataclasses.replace(scope, values=values | self._stored)

    def _store(self, stmt: ir.Stmt, scope: Scope) -> None:
        """Notes what a statement does to the scalar variables in memory."""
        for inner in ir.walk((stmt,)) if self._scalars else ():
            if isinstance(inner, ir.Store) and inner.buffer in self._scalars:
                value = intervals.bounds(inner.value, scope.values) if inner is stmt else None
                self._stored.pop(inner.buffer, None)
                if value is not None:
                    self._stored[inner.buffer] = value
            elif isinstance(inner, ir.Op) and (result := ir.result_of(inner)) is not None:
                self._stored.pop(result, None)

    def _opened(self, stmt: ir.Stmt, scope: Scope) -> Iterator[tuple[ir.Stmt, Scope]]:
        if isinstance(stmt, ir.For):
            start, extent = (intervals.value(expr, scope.values) for expr in (stmt.start, stmt.extent))
            if start is None or extent is None:
                raise _unknown(stmt, f"how often the loop over {stmt.var.name} runs")
            for number in range(start, start + extent):
                yield from self.leaves(stmt.body, scope.binding(stmt, (number, number)))
        elif isinstance(stmt, ir.If):
            condition = intervals.value(stmt.condition, scope.values)
            if condition is None:
                raise _unknown(stmt, "which way a branch goes")
            yield from self.leaves(stmt.then if condition else stmt.orelse, scope)
        else:
            raise _unknown(stmt, "how often a while loop runs")


def _unknown(stmt: ir.Stmt, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{stmt.loc or 'the kernel'}: {what}, with synchronization inside, is known only at run time; "
        "make it depend on the shapes and the block's number only"
    )
