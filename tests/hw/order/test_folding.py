"""Sequences folded into loops say what they said before, and repetitions are found."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from glass_jax.hw.order import folding
from glass_jax.hw.order.folding import Affine, Leaf, Loop


@dataclasses.dataclass(frozen=True)
class Step:
    key: str


def leaf(key, **values):
    return Leaf(Step(key), {name: folding.constant(value) for name, value in values.items()})


def unfold(nodes, numbers=()):
    """The steps one after the other; ``numbers`` are the iterations of the loops around, the innermost last."""
    for node in nodes:
        if isinstance(node, Loop):
            for number in range(node.trips):
                yield from unfold(node.body, (*numbers, number))
        else:
            values = {
                name: value.base + sum(s * n for s, n in zip(value.strides, reversed(numbers), strict=True))
                for name, value in node.values.items()
            }
            yield node.item.key, values


def spoken(nodes):
    return list(unfold(nodes))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=24), st.integers(1, 4))
def test_folding_keeps_the_sequence(steps, times):
    sequence = [leaf(key, i=value + n) for n in range(times) for key, value in steps]
    assert spoken(folding.fold(sequence)) == spoken(sequence)


def test_nested_loops_are_found():
    sequence = [s for t in range(5) for s in (leaf("a", t=t), *(leaf("b", t=t, k=k) for k in range(4)), leaf("c", t=t))]
    assert folding.fold(sequence) == [
        Loop(5, (
            Leaf(Step("a"), {"t": Affine(0, (1,))}),
            Loop(4, (Leaf(Step("b"), {"t": Affine(0, (0, 1)), "k": Affine(0, (1, 0))}),)),
            Leaf(Step("c"), {"t": Affine(0, (1,))}),
        ))
    ]  # fmt: skip


def test_a_producer_some_steps_ahead_is_one_loop_with_a_beginning_and_an_end():
    ahead = [leaf("p", t=0)] + [s for t in range(9) for s in (leaf("p", t=t + 1), leaf("c", t=t))] + [leaf("c", t=9)]
    folded = folding.fold(ahead)
    assert len(folded) <= 4 and spoken(folded) == spoken(ahead)


def test_uneven_steps_stay_as_they_are():
    sequence = [leaf("a", t=value) for value in (0, 1, 3, 7, 8)]
    assert spoken(folding.fold(sequence)) == spoken(sequence)
    assert not isinstance(folding.fold([leaf("a"), leaf("b")])[0], Loop)
