"""Simulated times against closed formulas, and against a simulation message by message in plain Python."""

import collections

import numpy as np
import pytest

from glass_jax import errors
from glass_jax.sharding import algorithms, simulate, topology
from glass_jax.sharding.faults import Faults, LossyLink, SlowLink
from glass_jax.sharding.network import NO_LINK, Network
from glass_jax.sharding.schedule import REDUCE
from glass_jax.sharding.topology import Level, Topology

ALPHA, RATE, MEMORY = 2e-6, 1e10, 1e12
MESH = Topology("mesh", (Level("all", 64, "mesh", RATE, ALPHA, "test"),), MEMORY)
SWITCH = Topology("switch", (Level("all", 64, "switch", RATE, ALPHA, "test"),), MEMORY)
SIZE = 3 << 20


def run(collective, algorithm, machine, ranks, nbytes=SIZE, **options):
    return simulate.simulate(algorithms.build(collective, algorithm, ranks), nbytes, Network(machine, ranks), **options)


@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_closed_forms(ranks):
    """Thakur, Rabenseifner, Gropp 2005; mesh: two steps, one P-th of the array over each link in each."""
    part = SIZE / ranks
    added = 3 * part * (ranks - 1) / MEMORY
    for machine in (MESH, SWITCH):
        ring = run("all_reduce", "ring", machine, ranks)
        assert ring.alpha == pytest.approx(2 * (ranks - 1) * ALPHA)
        assert ring.beta == pytest.approx(2 * (ranks - 1) * part / RATE)
        assert ring.gamma == pytest.approx(added)
        doubling = run("all_reduce", "halving_doubling", machine, ranks)
        assert doubling.alpha == pytest.approx(2 * np.log2(ranks) * ALPHA)
        assert doubling.beta == pytest.approx(2 * (ranks - 1) * part / RATE)
        assert doubling.gamma == pytest.approx(added)
        tree = run("broadcast", "tree", machine, ranks)
        assert tree.seconds == pytest.approx(np.log2(ranks) * (ALPHA + SIZE / RATE))
    on_links, on_ports = run("all_reduce", "mesh", MESH, ranks), run("all_reduce", "mesh", SWITCH, ranks)
    assert on_links.seconds == pytest.approx(2 * (ALPHA + part / RATE) + added)
    assert on_ports.seconds == pytest.approx(2 * (ALPHA + (ranks - 1) * part / RATE) + added)
    assert run("all_to_all", "pairwise", MESH, ranks).seconds == pytest.approx((ranks - 1) * (ALPHA + part / RATE))


def test_links_are_shared():
    shared = Topology("shared", (Level("all", 8, "switch", RATE, 0, "test", sharers=4),), MEMORY)
    step = simulate.one_step((np.arange(8) + 4) % 8)
    assert simulate.simulate(step, SIZE, Network(shared, 8)).seconds == pytest.approx(4 * SIZE / RATE)
    levels = (
        Level("leaf", 4, "switch", RATE, 0, "test", port="p"),
        Level("spine", 8, "switch", RATE, 0, "test", "p", 1, 2.0),
    )
    tree = Network(Topology("tree", levels, MEMORY), 8)
    assert simulate.simulate(step, SIZE, tree).seconds == pytest.approx(2 * SIZE / RATE)
    inside = simulate.one_step(np.arange(8) // 4 * 4 + (np.arange(8) + 1) % 4)
    assert simulate.simulate(inside, SIZE, tree).seconds == pytest.approx(SIZE / RATE)


def step_by_step(schedule, nbytes, network):
    """Seconds of a schedule, message by message; links of a pipeline are shared as if it were full."""
    chunk, total = schedule.chunk_size(nbytes), 0.0
    for phase in schedule.phases:
        repeats = [range(phase.repeat)] if phase.concurrent else [[t] for t in range(phase.repeat)]
        everything = [transfer.dst for transfer in phase.transfers]
        for together in repeats:
            messages, crowd, added = [], [], collections.Counter()
            for transfer, dst in zip(phase.transfers, everything, strict=True):
                for t in together:
                    ends = transfer.destinations(t)
                    full = ends if transfer.turn else dst
                    crowd += [(s, d, transfer.count * chunk) for s, d in enumerate(full) if d >= 0]
                    messages += [(s, d, transfer.count * chunk) for s, d in enumerate(ends) if d >= 0]
                    if transfer.op == REDUCE:
                        added.update({int(d): transfer.count * chunk for d in full if d >= 0})
            loads = collections.Counter()
            for s, d, size in crowd:
                for link in network.routes(np.array([s]), np.array([d])).links[:, 0]:
                    loads[int(link)] += size
            longest = 0.0
            for s, d, _ in messages:
                routes = network.routes(np.array([s]), np.array([d]))
                links = [int(link) for link in routes.links[:, 0] if link != NO_LINK]
                longest = max(longest, routes.alpha[0] + max(loads[k] / network.bytes_per_second[k] for k in links))
            total += longest + 3 * max(added.values(), default=0) / network.topology.memory_bytes_per_second
    return total


@pytest.mark.parametrize("machine, ranks", [("910b", 12), ("a3", 20), ("910b", 16)])
def test_against_a_simulation_message_by_message(machine, ranks):
    network = Network(topology.get(machine), ranks)
    for collective, names in algorithms.ALGORITHMS.items():
        for algorithm in names:
            if collective == "send_recv" or not algorithms.defined(collective, algorithm, ranks):
                continue
            schedule = algorithms.build(collective, algorithm, ranks)
            expected = step_by_step(schedule, SIZE, network)
            for options in ({}, {"groups": np.arange(ranks)[None]}):
                found = simulate.simulate(schedule, SIZE, network, **options).seconds
                # What travels at once is allowed to wait for the largest latency, even if that is another message's.
                largest = 0.0 if options or algorithm != "mesh" else 2 * 2.1e-6
                assert expected * (1 - 1e-9) <= found <= expected * (1 + 1e-9) + largest, (
                    collective,
                    algorithm,
                    options,
                )


def test_listed_messages_are_all_there():
    for algorithm in ("ring", "halving_doubling", "double_tree", "mesh"):
        done = run("all_reduce", algorithm, MESH, 12, groups=np.arange(12)[None])
        sent = simulate.sent_bytes(done.schedule, SIZE)
        assert np.array_equal(np.bincount(done.messages.src, done.messages.nbytes, minlength=12), sent)
        assert done.link_bytes.sum() == pytest.approx(sent.sum())  # every message takes one link of a mesh


def test_groups_run_at_the_same_time():
    """Ports are shared by two ranks: one group sends one message through each, two groups send two."""
    machine = Topology("shared", (Level("all", 4, "switch", RATE, 0, "test", sharers=2),), MEMORY)
    schedule = algorithms.build("all_gather", "ring", 2)
    alone = simulate.simulate(schedule, SIZE, Network(machine, 4), groups=np.array([[0, 2]]))
    both = simulate.simulate(schedule, SIZE, Network(machine, 4), groups=np.array([[0, 2], [1, 3]]))
    assert alone.seconds == pytest.approx(SIZE / RATE)
    assert both.seconds == pytest.approx(2 * SIZE / RATE)


def test_sums_travel_in_their_own_dtype():
    whole = run("all_reduce", "ring", SWITCH, 8)
    wide = run("all_reduce", "ring", SWITCH, 8, widening=2.0)
    assert wide.beta == pytest.approx(1.5 * whole.beta) and wide.gamma == pytest.approx(2 * whole.gamma)


def test_a_slow_link_slows_those_who_use_it():
    groups = np.arange(8)[None]
    healthy = run("all_gather", "ring", MESH, 8, groups=groups)
    slow = run("all_gather", "ring", MESH, 8, groups=groups, faults=Faults([SlowLink(2, 3, 5)], 8))
    assert slow.beta == pytest.approx(5 * healthy.beta) and slow.alpha == pytest.approx(healthy.alpha)
    unused = run("all_gather", "ring", MESH, 8, groups=groups, faults=Faults([SlowLink(3, 2, 5)], 8))
    assert unused.seconds == pytest.approx(healthy.seconds)


def test_losses_are_counted_at_their_link():
    """What is sent again is negative binomial: for n messages, mean n p / (1 - p), variance mean / (1 - p)."""
    ranks, loss = 64, 0.4
    faults = Faults([LossyLink(5, 6, loss)], ranks)
    expected = (ranks - 1) * loss / (1 - loss)
    counts = []
    for _ in range(50):
        done = run("all_gather", "ring", MESH, ranks, groups=np.arange(ranks)[None], faults=faults)
        retries = done.messages.retries
        assert set(done.messages.src[retries > 0]) <= {5} and set(done.messages.dst[retries > 0]) <= {6}
        assert done.seconds == pytest.approx((ranks - 1 + retries.sum()) * (ALPHA + SIZE / RATE))
        counts.append(retries.sum())
    assert abs(np.mean(counts) - expected) < 5 * np.sqrt(expected / (1 - loss) / len(counts))


def test_large_machines_cost_one_step():
    done = run("all_reduce", "ring", topology.get("910b"), 16384)
    assert done.schedule.steps == 2 * 16383
    part = -(-SIZE // 16384)
    assert done.beta == pytest.approx(2 * 16383 * part / (0.7 * 25e9))


def test_who_runs_it_must_be_clear():
    schedule = algorithms.build("all_gather", "ring", 4)
    with pytest.raises(errors.CollectiveError, match="4 ranks on 8 ranks of mesh: say by groups"):
        simulate.simulate(schedule, SIZE, Network(MESH, 8))
    with pytest.raises(errors.CollectiveError, match="with faults"):
        simulate.simulate(schedule, SIZE, Network(MESH, 4), faults=Faults([SlowLink(0, 1, 2)], 4))
