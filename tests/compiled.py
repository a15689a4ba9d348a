"""What a compiled program does between devices, read from its text."""

import math
import re

_COLLECTIVE = re.compile(
    r" = (\S.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"\w+\[([\d,]*)\]")


def collectives(compiled) -> dict[str, int]:
    """Elements of the results of each kind of collective in the compiled program."""
    found: dict[str, int] = {}
    for result, kind in _COLLECTIVE.findall(compiled.as_text()):
        sizes = (math.prod(map(int, filter(None, dims.split(",")))) for dims in _ARRAY.findall(result))
        found[kind] = found.get(kind, 0) + sum(sizes)
    return found
