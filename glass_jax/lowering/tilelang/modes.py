"""Modes of the hardware that one operation sets and later ones obey: known where they are used, or an error."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from glass_jax import errors
from glass_jax.hw.ir import program as ir

_UNKNOWN = object()  # a mode that depends on which way the program went
_TRUE = ir.Const(True, "bool")


@dataclasses.dataclass(frozen=True)
class Atomic:
    """How stores to GM join what is there, if a condition holds, which no statement can change."""

    kind: str
    condition: ir.Expr = _TRUE


class Modes:
    """The modes at one place of a kernel, in the order in which it is written.

    ``pad`` is what padded copies fill with, ``atomic`` an :class:`Atomic`, ``hf32`` how products round their float32
    operands; None is the mode at the start.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = dict.fromkeys(("pad", "atomic", "hf32"))
        self._loops: list[tuple[set[str], set[str]]] = []  # of each loop around: modes set, modes used before that

    def set(self, name: str, value: Any) -> None:
        """The mode ``name`` is ``value`` from here on."""
        self._values[name] = value
        for changed, _ in self._loops:
            changed.add(name)

    def get(self, name: str, where: str) -> Any:
        """The mode ``name`` at ``where``.

        Raises:
          UnsupportedError: it is not the same whichever way the program went.
        """
        for changed, inherited in self._loops:
            if name not in changed:
                inherited.add(name)
        if self._values[name] is _UNKNOWN:
            raise errors.UnsupportedError(
                f"{where}: the {name} mode depends on which way the kernel went, which is not decoded; set it here"
            )
        return self._values[name]

    @contextlib.contextmanager
    def loop(self, where: str) -> Iterator[None]:
        """What is decoded inside is the body of a loop.

        Raises:
          UnsupportedError: an iteration would use a mode that the one before it left, and the first one another.
        """
        before = dict(self._values)
        self._loops.append((set(), set()))
        yield
        _, inherited = self._loops.pop()
        for name, value in before.items():
            if self._values[name] != value:
                if name in inherited:
                    raise errors.UnsupportedError(
                        f"{where}: the loop leaves another {name} mode than it begins with, and uses it before it sets "
                        "it, which is not decoded; set it at the start of the body"
                    )
                self._values[name] = _UNKNOWN

    @contextlib.contextmanager
    def fork(self, condition: ir.Expr) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Gives a context manager for each of the ways that the program may go: if ``condition``, and if not."""
        before, ends = dict(self._values), []

        @contextlib.contextmanager
        def way() -> Iterator[None]:
            self._values = dict(before)
            yield
            ends.append(self._values)

        yield way
        self._values = {name: _merged(condition, *(end[name] for end in ends)) for name in before}


def _merged(condition: ir.Expr, then: Any, orelse: Any) -> Any:
    """A mode after a branch."""
    if then == orelse:
        return then
    ends = [end for end in (then, orelse) if end is not None]
    mutable = any(isinstance(e, ir.Load) for e in ir.subexpressions(condition))
    if mutable or not all(isinstance(end, Atomic) for end in ends) or len({end.kind for end in ends}) > 1:
        return _UNKNOWN
    never = ir.Const(False, "bool")
    holds = [end.condition if end is not None else never for end in (then, orelse)]
    if holds == [_TRUE, never]:
        return Atomic(ends[0].kind, condition)
    return Atomic(ends[0].kind, ir.Select(condition, *holds, "bool"))
