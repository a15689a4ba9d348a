"""What statements read and overwrite, on cases worked out by hand."""

from __future__ import annotations

import pytest

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.dataflow import Dataflow
from glass_jax.hw.ir.program import Space
from tests.hw.programs import buffer, const, copy, load, loop, op, parallel, region, simt, store

X = buffer("x", Space.GM, (8, 16), "float32")
U, V = buffer("u", Space.UB, (8, 16), "float32"), buffer("v", Space.UB, (8, 16), "float32")
W, HALF = buffer("w", Space.UB, (8, 16), "float32"), buffer("half", Space.UB, (4, 16), "float32", storage="w")
A, B = buffer("a", Space.L1, (16, 16), "float32"), buffer("b", Space.L1, (16, 16), "float32")
C = buffer("c", Space.L0C, (16, 16), "float32")
BUFFERS = {b.name: b for b in (X, U, V, W, HALF, A, B, C)}
FLAG = op("gt", load(X, 0, 0), const(0.0, "float32"))


def needed(*statements: ir.Stmt, after: tuple[str, ...] = (), everywhere: bool = True) -> set[str]:
    return set(Dataflow(BUFFERS, everywhere).live_before(statements, frozenset(after)))


def sweep(target: ir.Buffer, value: ir.Expr, rows: int = 8) -> ir.Stmt:
    return simt(parallel({"i": rows, "j": 16}, store(target, ("i", "j"), value)))


def gemm(clear: ir.Expr) -> ir.Gemm:
    return ir.Gemm(region(A), region(B), region(C), False, True, clear)


def test_overwriting_makes_contents_unneeded():
    assert needed(copy(U, V), after=("v",)) == {"u"}
    assert needed(ir.Fill(region(V), const(0.0, "float32")), after=("u", "v")) == {"u"}
    assert needed(sweep(V, load(U, "i", "j")), copy(V, X), after=("x", "v")) == {"u", "x"}
    assert needed(gemm(const(True, "bool")), after=("c",)) == {"a", "b"}


def test_a_part_does_not():
    assert "v" in needed(copy(region(U, extents=(4, 16)), region(V, extents=(4, 16))), after=("v",))
    assert "v" in needed(sweep(V, load(U, "i", "j"), rows=4), after=("v",))
    assert "u" in needed(copy(X, U), after=("u",)), "what lies beyond the end of an array stays"
    assert "x" in needed(copy(U, X), after=("x",))


def test_a_tile_in_l1_is_filled_up():
    assert needed(copy(region(X, 4, 0, extents=(16, 16)), A), after=("a",)) == {"x"}


def test_reading_what_a_statement_overwrites():
    assert "v" in needed(sweep(V, op("add", load(V, "i", "j"), load(U, "i", "j"))))
    assert "c" in needed(gemm(const(False, "bool")))


def test_a_view_of_a_part_is_not_the_whole():
    assert "w" in needed(ir.Fill(region(HALF), const(0.0, "float32")), after=("w",))


def test_branches():
    fill = ir.Fill(region(V), const(0.0, "float32"))
    assert "v" in needed(ir.If(FLAG, (fill,)), after=("v",))
    assert "v" not in needed(ir.If(FLAG, (fill,), (copy(U, V),)), after=("v",))
    assert "v" in needed(ir.While(FLAG, (fill,)), after=("v",))


def test_loops():
    clears_first = gemm(op("eq", "k", 0))
    assert "c" not in needed(loop("k", 4, clears_first), after=("c",))
    assert "c" in needed(loop("k", 4, clears_first, start=1), after=("c",))
    # The first iteration may skip the product, the second then adds to what was there before.
    assert "c" in needed(loop("k", 4, ir.If(FLAG, (clears_first,))))
    assert "v" in needed(loop("k", load(X, 0, 0), copy(U, V)), after=("v",)), "a loop may not run at all"


def test_nothing_is_overwritten_where_only_some_lanes_execute():
    assert needed(copy(U, V), after=("v",), everywhere=False) == {"u", "v"}


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (copy(U, HALF), {"w"}),
        (gemm(const(True, "bool")), {"c"}),
        (loop("k", 2, ir.If(FLAG, (store(U, (0, 0), const(0.0, "float32")),))), {"u"}),
        (ir.Op("reduce", (region(U), region(V)), {}), {"u", "v"}),
        (ir.Let(ir.Var("t"), load(U, 0, 0)), set()),
    ],
)
def test_writes(statement, expected):
    assert Dataflow(BUFFERS, True).writes((statement,)) == expected
