"""The links of a machine, and which of them a message takes."""

from __future__ import annotations

import dataclasses

import numpy as np

from glass_jax import errors
from glass_jax.sharding.topology import MESH, SWITCH, Level, Topology

NO_LINK = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Routes:
    """The ways of messages.

    Attributes:
      links: ``[hops, messages]`` int64, the links that each takes; ``NO_LINK`` where it takes fewer.
      alpha: ``[messages]``, seconds until the first byte arrives.
    """

    links: np.ndarray
    alpha: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Block:
    """Links of one sort, numbered from ``start`` on.

    Attributes:
      kind: ``"link"`` (of a mesh), ``"out"`` or ``"in"`` (of a port), ``"up"`` or ``"down"`` (of a part of a switched
        group).
      level: whose they are.
      parts: links of each rank, where it is a mesh.
      group: ranks that one of them serves.
    """

    kind: str
    level: Level
    start: int
    count: int
    parts: int
    group: int


class Network:
    """The links that the first ``ranks`` ranks of a machine use.

    Attributes:
      topology: the machine.
      ranks: how many of its ranks take part.
      bytes_per_second: ``[links]``, one way, efficiency included.
    """

    def __init__(self, topology: Topology, ranks: int):
        if not 1 <= ranks <= topology.ranks:
            raise errors.CollectiveError(
                f"{topology.name} has {topology.ranks} ranks; ranks={ranks} must be 1 to {topology.ranks}"
            )
        self.topology, self.ranks = topology, ranks
        used = next(i for i, size in enumerate(topology.sizes) if ranks <= size)
        self.levels = topology.levels[: used + 1]
        self._parts = (1, *topology.sizes[:used])  # ranks in a part of each level's groups
        largest_mesh = max((level.ranks for level in self.levels if level.kind == MESH), default=1)
        self._places = -(-ranks // largest_mesh) * largest_mesh  # messages may pass ranks that take no part
        self._blocks: dict[tuple[str, str], _Block] = {}
        self.bytes_per_second = self._lay() * topology.efficiency

    def _lay(self) -> np.ndarray:
        rates = []

        def add(
            key: tuple[str, str], kind: str, level: Level, count: int, rate: float, parts: int = 1, group: int = 1
        ) -> None:
            start = sum(block.count for block in self._blocks.values())
            self._blocks[key] = _Block(kind, level, start, count, parts, group)
            rates.append(np.full(count, rate))

        for level, part in zip(self.levels, self._parts, strict=True):
            if level.kind == MESH:
                parts = level.ranks // part
                add((level.name, "link"), "link", level, self._places * parts, level.bytes_per_second, parts)
                continue
            if (level.port, "out") not in self._blocks:
                ports = -(-self._places // level.sharers)
                add((level.port, "out"), "out", level, ports, level.bytes_per_second, group=level.sharers)
                add((level.port, "in"), "in", level, ports, level.bytes_per_second, group=level.sharers)
            if level.oversubscription > 1:
                uplinks, rate = (
                    -(-self._places // part),
                    part / level.sharers * level.bytes_per_second / level.oversubscription,
                )
                add((level.name, "up"), "up", level, uplinks, rate, group=part)
                add((level.name, "down"), "down", level, uplinks, rate, group=part)
        return np.concatenate(rates)

    def routes(self, src: np.ndarray, dst: np.ndarray) -> Routes:
        """The links that messages from ``src`` to ``dst``, both ``[messages]``, take."""
        hops, alpha = [], np.zeros(len(src))
        here = src.astype(np.int64)
        for number in reversed(range(len(self.levels))):
            level, part = self.levels[number], self._parts[number]
            crosses = here // part != dst // part
            if not crosses.any():
                continue
            alpha += np.where(crosses, level.alpha, 0)
            if level.kind == MESH:
                links, arrived = self._mesh_link(level, part, here, dst)
                hops.append(np.where(crosses, links, NO_LINK))
                here = np.where(crosses, arrived, here)
            else:
                hops += [np.where(crosses, links, NO_LINK) for links in self._switch_links(number, src=here, dst=dst)]
                here = np.where(crosses, dst, here)
        return Routes(np.stack(hops) if hops else np.full((1, len(src)), NO_LINK), alpha)

    def _mesh_link(self, level: Level, part: int, here: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The link from each place to the part that the message is for, and the place it arrives at."""
        block = self._blocks[level.name, "link"]
        target = dst // part % block.parts
        arrived = here // level.ranks * level.ranks + target * part + here % part
        return block.start + here * block.parts + target, arrived

    def _switch_links(self, number: int, src: np.ndarray, dst: np.ndarray) -> list[np.ndarray]:
        """Port out, uplinks and downlinks of this level and of those below that share the port, port in."""
        port = self.levels[number].port
        links = [self._of(port, "out", src), self._of(port, "in", dst)]
        for level in self.levels[: number + 1]:
            if level.kind == SWITCH and level.port == port and level.oversubscription > 1:
                links += [self._of(level.name, "up", src), self._of(level.name, "down", dst)]
        return links

    def _of(self, name: str, kind: str, rank: np.ndarray) -> np.ndarray:
        block = self._blocks[name, kind]
        return block.start + rank // block.group

    def shift_class(self, distance: int) -> tuple:
        """Equal for two distances d if the messages of all ranks r to (r + d) mod P load the links alike.

        A message crosses the border of a group of s ranks if its rank is one of the last d of it, so the load of what
        serves such a group depends on d no more once d and P - d are at least s. A port of a single rank carries one
        message whatever d is; only whether any message stays inside a level's groups matters then.
        """
        key: list[int | bool] = []
        for level, part in zip(self.levels, self._parts, strict=True):
            sizes = [level.ranks] if level.kind == MESH else [level.sharers]
            if level.oversubscription > 1:
                sizes.append(part)
            for size in sizes:
                key += [min(distance, size), min(self.ranks - distance, size)]
            key += [distance < level.ranks, self.ranks - distance < level.ranks]
        return tuple(key)

    def all_to_all_loads(self) -> np.ndarray:
        """Messages that each link carries if every rank sends one to every other: counted, without listing them."""
        loads = np.zeros(len(self.bytes_per_second))
        rank = np.arange(self._places)
        held = np.where(
            rank < self.ranks, 1.0, 0.0
        )  # messages that a place sends on to each rank of its part of the group
        for number in reversed(range(len(self.levels))):
            level, part = self.levels[number], self._parts[number]
            group = np.clip(self.ranks - rank // level.ranks * level.ranks, 0, level.ranks)
            own = np.clip(self.ranks - rank // part * part, 0, part)
            others = np.where(rank < self.ranks, group - own, 0)  # ranks in the other parts of the group
            if level.kind == SWITCH:
                for links in self._switch_links(number, rank, rank):
                    np.add.at(loads, links, held * others)
                continue
            block = self._blocks[level.name, "link"]
            passed = np.zeros(self._places)
            for target in range(block.parts):
                first = rank // level.ranks * level.ranks + target * part
                away = rank // part % block.parts != target
                links, arrived = self._mesh_link(level, part, rank, first)
                loads[links] += np.where(away, held * np.clip(self.ranks - first, 0, part), 0)
                np.add.at(passed, arrived, np.where(away, held, 0))
            held = held + passed
        return loads

    def describe(self, link: int) -> str:
        """What a link is called."""
        block = self._block(link)
        number = int(link) - block.start
        if block.kind == "link":
            rank, target = divmod(number, block.parts)
            part = self._parts[self.levels.index(block.level)]
            place = rank // block.level.ranks * block.level.ranks + target * part + rank % part
            return f"{block.level.name} link {rank} -> {place}"
        first, last = number * block.group, (number + 1) * block.group - 1
        who = f"rank {first}" if first == last else f"ranks {first}..{min(last, self.ranks - 1)}"
        if block.kind in ("out", "in"):
            return f"{block.level.port} port of {who}, {block.kind}"
        return f"{block.level.name} {block.kind}link of {who}"

    def sort(self, link: int) -> str:
        """What sort of link it is: the name of its level or port."""
        block = self._block(link)
        return block.level.port if block.kind in ("out", "in") else block.level.name

    def _block(self, link: int) -> _Block:
        return next(block for block in self._blocks.values() if block.start <= link < block.start + block.count)
