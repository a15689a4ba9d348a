"""How operands and results are sharded, from what is parallel and what is summed."""

import pytest
from jax import P

from glass_jax.lowering import partition

GEMM = partition.Dimensions("b m k, k n -> b m n", parallel="b m n", summed="k")
ROWS = partition.Dimensions("r d, r d -> r d, r", parallel="r d")


@pytest.mark.parametrize(
    ("dimensions", "given", "operands", "results", "sums"),
    [
        (GEMM, (P(), P()), (P(None, None, None), P(None, None)), (P(None, None, None),), ((),)),
        (GEMM, (P("x", "y", None), P(None, "z")), (P("x", "y", None), P(None, "z")), (P("x", "y", "z"),), ((),)),
        (GEMM, (P(None, None, "x"), P()), (P(None, None, "x"), P("x", None)), (P(None, None, None),), (("x",),)),
        (GEMM, (P(), P(("x", "y"))), (P(None, None, ("x", "y")), P(("x", "y"), None)), (P(None, None, None),),
         (("x", "y"),)),
        # An axis goes to the first dimension that has it: of one operand or of several, alone or among others.
        (GEMM, (P(None, "x", None), P(None, "x")), (P(None, "x", None), P(None, None)), (P(None, "x", None),), ((),)),
        (GEMM, (P("x", None, "x"), P("x", "y")), (P("x", None, None), P(None, "y")), (P("x", None, "y"),), ((),)),
        (GEMM, (P("x"), P(None, ("y", "x"))), (P("x", None, None), P(None, None)), (P("x", None, None),), ((),)),
        # A dimension is sharded as the first operand that shards it has it.
        (ROWS, (P("x"), P("y", "z")), (P("x", "z"), P("x", "z")), (P("x", "z"), P("x")), ((), ())),
        (ROWS, (P("x", None), P(None, "x")), (P("x", None), P("x", None)), (P("x", None), P("x")), ((), ())),
        # What a result is wanted in counts where the operands leave a choice.
        (ROWS, (P(), P(), P("x", "y"), P("z")), (P("x", "y"), P("x", "y")), (P("x", "y"), P("x")), ((), ())),
        (GEMM, (P("x"), P(), P("y", "x", "z")), (P("x", None, None), P(None, "z")), (P("x", None, "z"),), ((),)),
    ],
)  # fmt: skip
def test_specs(dimensions, given, operands, results, sums):
    assert dimensions.specs(*given) == (operands, results)
    assert dimensions.sums(*given) == sums


def test_dimensions_that_are_not_shared_stay_whole():
    attention = partition.Dimensions("b s h d, b t h d -> b s h d, b h s", parallel="b h")
    operands, results = attention.specs(P("x", "y", "z", None), P(None, "y", None, "w"))
    assert operands == (P("x", None, "z", None),) * 2
    assert results == (P("x", None, "z", None), P("x", "z", None))


def test_a_sum_is_of_the_results_that_lack_the_dimension():
    both = partition.Dimensions("m k, k -> m, k", parallel="m", summed="k")
    assert both.specs(P("x", "y"), P()) == ((P("x", "y"), P("y")), (P("x"), P("y")))
    assert both.sums(P("x", "y"), P()) == (("y",), ())


def test_dimensions_of_one_are_broadcast():
    assert partition.broadcast("b", "u", (4, 1, 8), (4, 3)) == ["b0", "u1"]
    assert partition.broadcast("b", "u", (8,), ()) == []


def test_axes_of_an_entry():
    assert [partition.axes(entry) for entry in (None, "x", ("x", "y"))] == [(), ("x",), ("x", "y")]
