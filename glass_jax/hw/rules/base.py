"""What every rule is made of: its description, what it looks at, and what it reports."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence

from glass_jax.hw import memory as mem
from glass_jax.hw.chips import Chip
from glass_jax.hw.ir import intervals
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Allocation
from glass_jax.hw.order import ordering

Findings = Iterator[tuple[str | None, str, str]]  # (loc, message, remedy) of each place that breaks a rule


@dataclasses.dataclass(frozen=True)
class Violation:
    """One thing in a kernel that the chip cannot take.

    Attributes:
      rule: identifier of the rule, for example ``"memory-overflow"``.
      kernel: the kernel's name.
      loc: ``file:line`` of the statement or allocation, or None where the compiler did not record it.
      message: what is wrong, with the numbers.
      remedy: what to do about it.
    """

    rule: str
    kernel: str
    loc: str | None
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.loc or self.kernel}: [{self.rule}] {self.message}. {self.remedy}."


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a rule looks at: a program, its chip, its memory map, and the flags in the code generated from it."""

    program: ir.Program
    chip: Chip
    memory: Sequence[Allocation]
    flags: ir.Program | None = None

    @functools.cached_property
    def statements(self) -> tuple[ir.Stmt, ...]:
        """Every statement, in program order."""
        return tuple(ir.walk(self.program.body))

    @functools.cached_property
    def outcome(self) -> ordering.Outcome:
        """What came of simulating a kernel that synchronizes itself, pipe by pipe."""
        return ordering.check(self.program, self.memory)

    @functools.cached_property
    def loops(self) -> frozenset[str]:
        """Variables of loops whose extents are known: they take every value of their range."""
        fors = (loop for loop in self.of(ir.For) if isinstance(loop.start, ir.Const))
        return frozenset(loop.var.name for loop in fors if mem.static(loop.extent) is not None)

    @functools.cached_property
    def ranges(self) -> dict[str, intervals.Interval]:
        """The smallest and the largest value of each variable of which they are known."""
        blocks, unit = mem.static(self.program.blocks), self.program.unit
        found = {} if blocks is None else {self.program.block.name: (0, blocks - 1)}
        found |= {} if unit is None else {unit.name: (0, self.program.units - 1)}
        for stmt in self.statements:
            if isinstance(stmt, ir.Simt):
                found |= {var.name: (0, n - 1) for var, n in zip(stmt.threads, stmt.extents, strict=True)}
            elif isinstance(stmt, ir.For):
                start, extent = (intervals.bounds(expr, found) for expr in (stmt.start, stmt.extent))
                if start is not None and extent is not None:
                    found[stmt.var.name] = (start[0], start[1] + extent[1] - 1)
            elif isinstance(stmt, ir.Let) and (known := intervals.bounds(stmt.value, found)) is not None:
                found[stmt.var.name] = known
        return found

    @functools.cached_property
    def _definitions(self) -> dict[str, ir.Stmt]:
        """The Let or For that binds each variable."""
        return {stmt.var.name: stmt for stmt in self.statements if isinstance(stmt, ir.Let | ir.For)}

    @functools.cached_property
    def transfers(self) -> tuple[ir.Copy, ...]:
        """The copies that a copy pipe makes; those inside a SIMT or SIMD region are loads and stores of its threads."""
        inside = {id(inner) for outer in self.of(ir.Simt | ir.Simd) for inner in ir.walk(outer.body)}
        return tuple(copy for copy in self.of(ir.Copy) if id(copy) not in inside)

    def of(self, kind: type | types.UnionType) -> Iterator[ir.Stmt]:
        """The statements of one kind."""
        return (stmt for stmt in self.statements if isinstance(stmt, kind))

    def buffer(self, region: ir.Region) -> ir.Buffer:
        """The buffer that ``region`` is a part of."""
        return self.program.buffers[region.buffer]

    def multiple_of(self, expr: int | ir.Expr) -> tuple[int, bool]:
        """A number that divides every value of ``expr``, and whether no larger one does.

        0 stands for the value 0, which everything divides. ``(1, False)`` says that nothing is known.
        """
        value = mem.static(expr)
        if value is not None:
            return abs(value), True
        if isinstance(expr, ir.Var):
            return self._multiple_of_variable(expr)
        if isinstance(expr, ir.Binary) and expr.op in ("add", "sub", "mul"):
            (lhs, lhs_exact), (rhs, rhs_exact) = self.multiple_of(expr.lhs), self.multiple_of(expr.rhs)
            factor = lhs * rhs if expr.op == "mul" else math.gcd(lhs, rhs)
            return factor, lhs_exact and rhs_exact
        return 1, False

    def _multiple_of_variable(self, var: ir.Var) -> tuple[int, bool]:
        definition = self._definitions.get(var.name)
        if isinstance(definition, ir.Let):
            return self.multiple_of(definition.value)
        if isinstance(definition, ir.For):
            start, exact = self.multiple_of(definition.start)
            extent = mem.static(definition.extent)
            return (start, exact) if extent == 1 else (1, exact and extent is not None)
        if var == self.program.block:
            return int(self.program.blocks != 1), True
        return 1, var == self.program.unit


@dataclasses.dataclass(frozen=True)
class Rule:
    """One limit of the hardware.

    Attributes:
      id: its name, in reports and in ``docs/verification.md``.
      hardware: what the hardware does with a kernel that breaks it.
      check: yields its findings in a subject.
    """

    id: str
    hardware: str
    check: Callable[[Subject], Findings]

    def violations(self, subject: Subject) -> Iterator[Violation]:
        """The violations of this rule in ``subject``."""
        for loc, message, remedy in self.check(subject):
            yield Violation(self.id, subject.program.name, loc, message, remedy)
