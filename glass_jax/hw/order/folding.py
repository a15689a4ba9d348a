"""A sequence of steps as loops: what repeats, with numbers that grow by the same amount each time, becomes a loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

LONGEST = 64  # steps of the longest pattern that is looked for


class Item(Protocol):
    """What a step does. Two steps do the same if their keys are equal."""

    @property
    def key(self) -> Hashable:
        """Identifies it."""


@dataclasses.dataclass(frozen=True)
class Affine:
    """``base + strides[0] * i + strides[1] * j + ...``: i is the iteration of the innermost loop around, j the next."""

    base: int
    strides: tuple[int, ...] = ()


def constant(value: int) -> Affine:
    """``value`` in a step that is in no loop yet."""
    return Affine(value)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One step, with the values of its variables."""

    item: Any
    values: Mapping[str, Affine]


@dataclasses.dataclass(frozen=True)
class Loop:
    """Steps that are taken ``trips`` times."""

    trips: int
    body: tuple[Node, ...]


Node = Leaf | Loop


def fold(nodes: Sequence[Node]) -> list[Node]:
    """``nodes`` with repetitions as loops, the shortest patterns first; taken one after the other they are the same."""
    nodes = list(nodes)
    shapes = list(map(_shape, nodes))
    length = 1
    while 2 * length <= min(len(nodes), 2 * LONGEST):
        folded = _fold(nodes, shapes, length)
        if len(folded) < len(nodes):
            nodes, shapes, length = folded, list(map(_shape, folded)), 1
        else:
            length += 1
    return nodes


def _fold(nodes: Sequence[Node], shapes: Sequence[Hashable], length: int) -> list[Node]:
    """``nodes`` with each repetition of a pattern of ``length`` nodes as a loop."""
    result: list[Node] = []
    start = 0
    while start < len(nodes):
        pattern = nodes[start : start + length]
        trips, step = 1, None
        while shapes[start : start + length] == shapes[start + trips * length : start + (trips + 1) * length]:
            last, following = (nodes[start + n * length : start + (n + 1) * length] for n in (trips - 1, trips))
            found = [b - a for a, b in zip(_bases(last), _bases(following), strict=True)]
            if step is not None and found != step:
                break
            trips, step = trips + 1, found
        if trips == 1 or len(pattern) < length:
            result.append(nodes[start])
            start += 1
        else:
            steps = iter(step)
            result.append(Loop(trips, tuple(_advancing(node, steps) for node in pattern)))
            start += trips * length
    return result


def _shape(node: Node) -> Hashable:
    """A key that is equal for nodes that differ in the bases of their values only."""
    if isinstance(node, Leaf):
        return (node.item.key, tuple((name, value.strides) for name, value in node.values.items()))
    return (node.trips, tuple(map(_shape, node.body)))


def _bases(nodes: Sequence[Node]) -> list[int]:
    """The bases of all values, in a fixed order."""
    found: list[int] = []
    for node in nodes:
        if isinstance(node, Leaf):
            found += [value.base for value in node.values.values()]
        else:
            found += _bases(node.body)
    return found


def _advancing(node: Node, steps: Any) -> Node:
    """``node`` inside one more loop, whose iterations advance its values by ``steps``, in the order of their bases."""
    if isinstance(node, Loop):
        return Loop(node.trips, tuple(_advancing(inner, steps) for inner in node.body))
    values = {name: Affine(value.base, (*value.strides, next(steps))) for name, value in node.values.items()}
    return Leaf(node.item, values)
