"""Machines as planners see them: groups within groups of ranks, and the links of each.

The known ones are read from ``topologies.json``, in which every number names its source. A user's own machine is a
file of the same form, or a :class:`Topology` made in Python.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from glass_jax import errors

MESH, SWITCH = "mesh", "switch"
_GIGA, _MICRO = 1e9, 1e-6


@dataclasses.dataclass(frozen=True)
class Level:
    """Groups of ranks, and what links the parts of a group: the groups of the level below, or single ranks.

    Attributes:
      name: what a group is called, for example ``"server"``.
      ranks: ranks in a group, a multiple of those of the level below.
      kind: ``"mesh"``: each rank has a link to the rank at its own place in every other part of the group, and a
        message for another place there goes on by the links of the levels below; ``"switch"``: each rank has a port.
      bytes_per_second: of a link or port, one way, before :attr:`Topology.efficiency`.
      alpha: seconds until the first byte of a message arrives.
      source: where the numbers come from.
      port: the name of a switch's ports; levels that name the same port share it. By default a level has its own.
      sharers: ranks that share a port.
      oversubscription: how much less a part of the group sends to the others than its ports can: with 2, half.
    """

    name: str
    ranks: int
    kind: str
    bytes_per_second: float
    alpha: float
    source: str
    port: str | None = None
    sharers: int = 1
    oversubscription: float = 1.0

    def __post_init__(self):
        if self.kind not in (MESH, SWITCH):
            raise errors.CollectiveError(
                f"level {self.name!r} is a {self.kind!r}; it can be a {MESH!r} or a {SWITCH!r}"
            )
        if self.kind == MESH and (self.port is not None or self.sharers != 1 or self.oversubscription != 1):
            raise errors.CollectiveError(
                f"level {self.name!r} is a mesh, which has links and no ports: port, sharers and oversubscription are "
                "a switch's"
            )
        if not (self.bytes_per_second > 0 and self.alpha >= 0 and self.sharers >= 1 and self.oversubscription >= 1):
            raise errors.CollectiveError(
                f"level {self.name!r}: need bytes_per_second > 0, alpha >= 0, sharers >= 1 and oversubscription >= 1, "
                f"got {self.bytes_per_second}, {self.alpha}, {self.sharers} and {self.oversubscription}"
            )
        if self.kind == SWITCH and self.port is None:
            object.__setattr__(self, "port", self.name)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine.

    Attributes:
      name: what it is called.
      levels: from the smallest groups to the whole machine. Ranks fill group after group.
      memory_bytes_per_second: of a rank's own memory; adding a byte to another moves three, two in and one out.
      efficiency: the part of every link's rate that programs get.
      about: one line on what it is, and what a rank is.
      source: where efficiency and memory rate come from.
    """

    name: str
    levels: tuple[Level, ...]
    memory_bytes_per_second: float
    efficiency: float = 1.0
    about: str = ""
    source: str = ""

    def __post_init__(self):
        sizes = self.sizes
        if not sizes or any(outer % inner or outer == inner for inner, outer in zip((1, *sizes), sizes, strict=False)):
            raise errors.CollectiveError(
                f"topology {self.name!r}: groups of {', '.join(map(str, sizes)) or 'nothing'} ranks do not nest; each "
                "level must be a multiple, at least twice, of the one before"
            )
        if not (0 < self.efficiency <= 1 and self.memory_bytes_per_second > 0):
            raise errors.CollectiveError(
                f"topology {self.name!r}: efficiency {self.efficiency} must be above 0 and at most 1, and the memory "
                f"rate {self.memory_bytes_per_second} above 0"
            )
        self._check_ports()

    def _check_ports(self) -> None:
        by_port: dict[str, Level] = {}
        for below, level in zip((None, *self.levels), self.levels, strict=False):
            if level.kind != SWITCH:
                continue
            first = by_port.setdefault(level.port, level)
            if (first.bytes_per_second, first.sharers) != (level.bytes_per_second, level.sharers):
                raise errors.CollectiveError(
                    f"topology {self.name!r}: levels {first.name!r} and {level.name!r} share the port {level.port!r} "
                    f"and disagree on its rate, {first.bytes_per_second:g} and {level.bytes_per_second:g}, or on its "
                    f"sharers, {first.sharers} and {level.sharers}"
                )
            if level.oversubscription != 1 and below is None:
                raise errors.CollectiveError(
                    f"topology {self.name!r}: the oversubscription of {level.name!r} has no effect, its parts are "
                    "single ranks"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks in a group of each level."""
        return tuple(level.ranks for level in self.levels)

    @property
    def ranks(self) -> int:
        """Ranks of the whole machine."""
        return self.levels[-1].ranks

    def linked(self, ranks: int) -> bool:
        """Whether each of the first ``ranks`` ranks has a link of its own to each of the others."""
        return self.levels[0].kind == MESH and ranks <= self.levels[0].ranks

    def grid(self, ranks: int) -> tuple[int, ...]:
        """The grid that ``ranks`` ranks form in the machine's groups, outermost first, as far as they fill them."""
        extents, inner = [], 1
        for size in self.sizes:
            if ranks % size or size == ranks:
                break
            extents.append(size // inner)
            inner = size
        return (ranks // inner, *reversed(extents))


def _topology(row: Mapping[str, Any]) -> Topology:
    """A topology from its JSON form: rates in GB/s (1e9 bytes), latencies in us."""
    try:
        levels = tuple(Level(**_renamed(level)) for level in row["levels"])
        return Topology(**_renamed(row) | {"levels": levels})
    except (TypeError, KeyError, AttributeError) as error:
        name = row.get("name", "?") if isinstance(row, Mapping) else "?"
        raise errors.CollectiveError(
            f"topology {name!r} has a field that has no effect, or lacks one: {error}. A topology has name, about, "
            "efficiency, memory_gb_per_second, source and levels; a level name, ranks, kind, gb_per_second, alpha_us, "
            "source, and for a switch port, sharers and oversubscription"
        ) from error


def _renamed(row: Mapping[str, Any]) -> dict[str, Any]:
    units = {
        "gb_per_second": ("bytes_per_second", _GIGA),
        "memory_gb_per_second": ("memory_bytes_per_second", _GIGA),
        "alpha_us": ("alpha", _MICRO),
    }
    result = {}
    for key, value in row.items():
        name, unit = units.get(key, (key, None))
        if unit is None and name in ("bytes_per_second", "memory_bytes_per_second", "alpha"):
            raise KeyError(f"{name} is given as {next(field for field, (to, _) in units.items() if to == name)}")
        result[name] = value * unit if unit else value
    return result


@functools.cache
def _known() -> Mapping[str, Topology]:
    data = json.loads(importlib.resources.files("glass_jax.sharding").joinpath("topologies.json").read_text())
    return {row["name"]: _topology(row) for row in data["topologies"]}


def topologies() -> tuple[Topology, ...]:
    """The machines that are described in this library."""
    return tuple(_known().values())


def get(topology: str | Topology) -> Topology:
    """A topology: itself, the known one of that name, or the one that the JSON file of that name describes.

    Raises:
      CollectiveError: there is none of that name, or the file's levels do not fit together.
    """
    if isinstance(topology, Topology):
        return topology
    if not isinstance(topology, str):
        raise errors.CollectiveError(f"{topology=} must be the name of a machine, of a JSON file, or a Topology")
    if topology.lower() in _known():
        return _known()[topology.lower()]
    if topology.endswith(".json"):
        try:
            return _topology(json.loads(pathlib.Path(topology).read_text()))
        except (OSError, json.JSONDecodeError) as error:
            raise errors.CollectiveError(f"cannot read the topology {topology!r}: {error}") from error
    close = difflib.get_close_matches(topology.lower(), _known(), n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise errors.CollectiveError(
        f"unknown topology {topology!r}: {hint}There are {', '.join(_known())}, and JSON files of the same form"
    )
