"""Pointers into UB that SIMD operations advance: a Program has the address of each access instead, in closed form."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import tilelang  # noqa: F401 - brings tvm, which is not importable before it
from tvm import tirx

from glass_jax import errors
from glass_jax.hw.ir import program as ir


class Pointers:
    """Where the pointers of a kernel point at the place that is being decoded."""

    def __init__(self) -> None:
        self._addresses: dict[tirx.Var, ir.Address] = {}

    def set(self, pointer: tirx.Var, address: ir.Address) -> None:
        """The pointer, a variable of type handle, points to ``address`` from here on."""
        self._addresses[pointer] = address

    def knows(self, pointer: Any) -> bool:
        """Whether ``pointer`` is a pointer, or what a load gave together with one."""
        return isinstance(pointer, tirx.Var) and pointer in self._addresses

    def get(self, pointer: tirx.Var, where: str) -> ir.Address:
        """Where the pointer points.

        Raises:
          UnsupportedError: nothing has been assigned to it.
        """
        if pointer not in self._addresses:
            raise errors.UnsupportedError(f"{where}: the pointer {pointer.name} points nowhere here")
        return self._addresses[pointer]

    @contextlib.contextmanager
    def loop(
        self,
        stmt: tirx.For,
        loop: tuple[ir.Var, ir.Expr, ir.Expr],
        new_variable: Callable[[str], ir.Var],
        where: str,
        loc: str | None,
    ) -> Iterator[list[ir.Let]]:
        """What is decoded inside is the body of a loop.

        Args:
          stmt: the loop.
          loop: its variable, start and extent.
          new_variable: gives a new variable of that name, or nearly so.
          where: the loop's place, for messages.
          loc: the same, if known.

        Yields:
          a list that in the end holds what must stand before the body: where the pointers are in each iteration.

        Raises:
          UnsupportedError: a pointer is not the same number of bytes farther after each iteration.
        """
        var, start, extent = loop
        lets: list[ir.Let] = []
        outside = {pointer: self._addresses[pointer] for pointer in _assigned(stmt.body) if pointer in self._addresses}
        entries = {pointer: new_variable(f"{pointer.name}_offset") for pointer in outside}
        for pointer, address in outside.items():
            self.set(pointer, dataclasses.replace(address, offset=entries[pointer]))
        yield lets
        for pointer, address in outside.items():
            after, entry = self._addresses[pointer], entries[pointer]
            step = _step(after.offset, entry)
            if step is None or (after.buffer, after.indices) != (address.buffer, address.indices):
                raise errors.UnsupportedError(
                    f"{where}: the pointer {pointer.name} does not advance by a constant in each iteration, "
                    "which is not decoded"
                )
            iteration = _sum(var, _product(start, -1))
            lets.append(ir.Let(entry, _sum(address.offset, _product(iteration, step)), loc))
            self.set(pointer, advanced(address, _product(extent, step)))

    @contextlib.contextmanager
    def fork(self, where: str) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Gives a context manager for each way that the program may go from here; one of them is gone.

        Raises:
          UnsupportedError: the ways leave a pointer at different places.
        """
        before, ends = dict(self._addresses), []

        @contextlib.contextmanager
        def way() -> Iterator[None]:
            self._addresses = dict(before)
            yield
            ends.append(self._addresses)

        yield way
        for pointer in before:
            if any(end[pointer] != ends[0][pointer] for end in ends):
                raise errors.UnsupportedError(
                    f"{where}: where the pointer {pointer.name} points depends on a condition, which is not decoded"
                )
        self._addresses = {pointer: address for end in ends for pointer, address in end.items()}


def advanced(address: ir.Address, nbytes: int | ir.Expr) -> ir.Address:
    """The place ``nbytes`` behind ``address``."""
    return dataclasses.replace(address, offset=_sum(address.offset, nbytes))


def _assigned(body: Any) -> list[tirx.Var]:
    """The pointers that ``body`` assigns to."""
    found: list[tirx.Var] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.BufferStore) and str(node.buffer.dtype) == "handle":
            found.append(node.buffer.data)

    tirx.stmt_functor.post_order_visit(body, visit)
    return list(dict.fromkeys(found))


def _step(offset: int | ir.Expr, entry: ir.Var) -> int | None:
    """The constant by which ``offset`` is beyond ``entry``, None if there is none."""
    if offset == entry:
        return 0
    if (
        isinstance(offset, ir.Binary)
        and offset.op == "add"
        and offset.lhs == entry
        and isinstance(offset.rhs, ir.Const)
    ):
        return offset.rhs.value
    return None


def _sum(lhs: int | ir.Expr, rhs: int | ir.Expr) -> int | ir.Expr:
    """``lhs + rhs`` with constants added up at the right."""
    lhs, rhs = (x.value if isinstance(x, ir.Const) else x for x in (lhs, rhs))
    if isinstance(lhs, int) and isinstance(rhs, int):
        return lhs + rhs
    if isinstance(lhs, int):
        lhs, rhs = rhs, lhs
    if rhs == 0:
        return lhs
    if isinstance(rhs, int) and isinstance(lhs, ir.Binary) and lhs.op == "add" and isinstance(lhs.rhs, ir.Const):
        return _sum(lhs.lhs, lhs.rhs.value + rhs)
    return ir.Binary("add", lhs, _constant(rhs), "int32")


def _product(x: int | ir.Expr, factor: int) -> int | ir.Expr:
    x = x.value if isinstance(x, ir.Const) else x
    return x * factor if isinstance(x, int) else ir.Binary("mul", x, _constant(factor), "int32")


def _constant(x: int | ir.Expr) -> ir.Expr:
    return ir.Const(x, "int32") if isinstance(x, int) else x
