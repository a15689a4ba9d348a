"""Described machines: what is known, what a user may describe, and the links that messages take."""

import dataclasses
import json

import numpy as np
import pytest

from glass_jax import errors
from glass_jax.sharding import topology
from glass_jax.sharding.network import NO_LINK, Network
from glass_jax.sharding.topology import Level, Topology

GRID = Topology(
    "grid",
    (
        Level("x", 4, "mesh", 1e9, 1e-6, "test"),
        Level("y", 12, "mesh", 2e9, 2e-6, "test"),
        Level("row", 48, "switch", 1e9, 3e-6, "test", port="p", sharers=2),
        Level("hall", 96, "switch", 1e9, 4e-6, "test", port="p", sharers=2, oversubscription=4),
    ),
    1e12,
)
MACHINES = [*topology.topologies(), GRID]
OWN = {
    "name": "mine",
    "about": "two boxes",
    "source": "me",
    "memory_gb_per_second": 1000,
    "efficiency": 0.5,
    "levels": [
        {"name": "box", "ranks": 4, "kind": "mesh", "gb_per_second": 10, "alpha_us": 1, "source": "me"},
        {"name": "room", "ranks": 8, "kind": "switch", "gb_per_second": 5, "alpha_us": 2, "source": "me"},
    ],
}


def test_every_number_names_its_source():
    assert {machine.name for machine in topology.topologies()} >= {"910b", "a3", "950", "roce_fat_tree"}
    for machine in topology.topologies():
        assert machine.source and machine.about
        assert all(level.source for level in machine.levels), machine.name


def test_a_machine_of_ones_own(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OWN))
    machine = topology.get(str(path))
    assert machine.sizes == (4, 8) and machine.ranks == 8
    assert machine.levels[1].bytes_per_second == 5e9 and machine.levels[1].alpha == pytest.approx(2e-6)
    assert topology.get(machine) is machine


@pytest.mark.parametrize(
    "change, message",
    [
        ({"speed": 3}, "speed"),
        ({"levels": [OWN["levels"][0] | {"port": "p"}]}, "a mesh, which has links and no ports"),
        ({"levels": [OWN["levels"][0] | {"bytes_per_second": 3}]}, "given as gb_per_second"),
        ({"levels": [OWN["levels"][1] | {"oversubscription": 2}]}, "has no effect"),
        ({"levels": [OWN["levels"][0] | {"gb_per_second": 0}]}, "bytes_per_second > 0"),
        ({"levels": [OWN["levels"][0] | {"kind": "torus"}]}, "'torus'"),
        ({"levels": [OWN["levels"][0], OWN["levels"][1] | {"ranks": 10}]}, "do not nest"),
        ({"levels": []}, "do not nest"),
        ({"efficiency": 1.5}, "efficiency"),
        (
            {
                "levels": [
                    OWN["levels"][1] | {"name": n, "ranks": r, "port": "p", "gb_per_second": r}
                    for n, r in (("a", 2), ("b", 4))
                ]
            },
            "share the port 'p' and disagree",
        ),
    ],
)
def test_a_field_without_effect_or_sense_is_an_error(tmp_path, change, message):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OWN | change))
    with pytest.raises(errors.CollectiveError, match=message):
        topology.get(str(path))


def test_unknown_machines():
    with pytest.raises(errors.CollectiveError, match="did you mean '910b'"):
        topology.get("910c")
    with pytest.raises(errors.CollectiveError, match="cannot read"):
        topology.get("nowhere.json")


def test_grid_follows_the_machine():
    machine = topology.get("a3")
    assert machine.grid(64) == (4, 8, 2)  # nodes, packages in a node, dies in a package
    assert machine.grid(16) == (8, 2)
    assert machine.grid(2) == (2,)
    assert machine.grid(13) == (13,)


def names(network: Network, src: int, dst: int) -> list[str]:
    links = network.routes(np.array([src]), np.array([dst])).links[:, 0]
    return sorted(network.describe(link) for link in links if link != NO_LINK)


def test_routes_by_hand():
    network = Network(topology.get("roce_fat_tree"), 256)
    assert names(network, 0, 0) == []
    assert names(network, 1, 5) == ["server link 1 -> 5"]
    assert names(network, 1, 13) == ["roce port of rank 1, out", "roce port of rank 13, in"]
    up, down = "spine uplink of ranks 0..63", "spine downlink of ranks 128..191"
    assert names(network, 1, 130) == sorted([*names(network, 1, 13)[:1], "roce port of rank 130, in", up, down])
    grid = Network(GRID, 96)
    assert names(grid, 1, 10) == ["x link 9 -> 10", "y link 1 -> 9"]  # to its own place in the part, then on
    assert names(grid, 0, 13) == ["p port of ranks 0..1, out", "p port of ranks 12..13, in"]
    assert grid.routes(np.array([1]), np.array([10])).alpha == pytest.approx(3e-6)
    assert grid.bytes_per_second.min() == 1e9 and Network(GRID, 96).bytes_per_second.max() == 48 / 2 * 1e9 / 4


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 12, 48, 70, 96, 200])
def test_counted_loads_are_those_of_all_messages(machine, ranks):
    """Loads of everybody to everybody come from a formula, and those of a shift from one of its class of distances."""
    if ranks > machine.ranks:
        pytest.skip(f"{machine.name} has {machine.ranks} ranks")
    network = Network(machine, ranks)
    src, dst = np.divmod(np.arange(ranks * ranks), ranks)
    links = network.routes(src, dst).links
    assert np.array_equal(
        network.all_to_all_loads(), np.bincount(links[links != NO_LINK], minlength=len(network.bytes_per_second))
    )
    times = {}
    for distance in range(1, ranks):
        routes = network.routes(np.arange(ranks), (np.arange(ranks) + distance) % ranks)
        taken = routes.links != NO_LINK
        busy = np.bincount(routes.links[taken], minlength=len(network.bytes_per_second)) / network.bytes_per_second
        time = (routes.alpha + 1e4 * np.where(taken, busy[routes.links], 0).max(axis=0)).max()
        times.setdefault(network.shift_class(distance), set()).add(round(time * 1e12))
    assert all(len(different) == 1 for different in times.values())


def test_too_many_ranks():
    with pytest.raises(errors.CollectiveError, match="has 96 ranks; ranks=97"):
        Network(GRID, 97)


def test_efficiency_is_of_every_link():
    half = dataclasses.replace(GRID, efficiency=0.5)
    assert np.array_equal(Network(half, 96).bytes_per_second * 2, Network(GRID, 96).bytes_per_second)
