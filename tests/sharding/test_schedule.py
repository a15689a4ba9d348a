"""Schedules: proved, interpreted in NumPy, counted against the published formulas, and broken on purpose."""

import dataclasses
import math

import numpy as np
import pytest
from collective_reference import expected, root

from glass_jax import errors
from glass_jax.sharding import algorithms
from glass_jax.sharding.proof import proof
from glass_jax.sharding.schedule import REDUCE, Chunks, Phase, Schedule, Transfer, everywhere, messages, reverse

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 32, 64)
KNOWN = algorithms.ALGORITHMS | {"reduce": algorithms.ALGORITHMS["broadcast"]}
SCHEDULED = [(name, way) for name, known in KNOWN.items() for way in known if name != "send_recv"]


def built(collective: str, algorithm: str, ranks: int) -> Schedule | None:
    if not algorithms.defined(collective, algorithm, ranks):
        return None
    return algorithms.build(
        collective, algorithm, ranks, root=root(ranks) if collective in ("broadcast", "reduce") else 0
    )


def interpreted(schedule: Schedule, x: np.ndarray) -> np.ndarray:
    """Runs a schedule on ``[P, input chunks]`` numbers, rank by rank and message by message: ``[P, result chunks]``."""
    buffers = np.full((schedule.ranks, schedule.nchunks), np.nan)
    for rank, places in enumerate(schedule.placed.indices(0)):
        buffers[rank, places] = x[rank]
    for phase in schedule.phases:
        before = buffers.copy()
        for t in range(phase.repeat):
            source = before if phase.reads_start else buffers.copy()
            for transfer in phase.transfers:
                sent, received = transfer.send.indices(t), transfer.recv.indices(t)
                for rank, target in enumerate(transfer.destinations(t)):
                    if target >= 0 and transfer.op == REDUCE:
                        buffers[target, received[target]] += source[rank, sent[rank]]
                    elif target >= 0:
                        buffers[target, received[target]] = source[rank, sent[rank]]
    return np.stack([buffer[places] for buffer, places in zip(buffers, schedule.result.indices(0), strict=True)])


@pytest.mark.parametrize(("collective", "algorithm"), SCHEDULED)
def test_proved_at_every_size(collective, algorithm):
    for ranks in SIZES:
        if (schedule := built(collective, algorithm, ranks)) is not None:
            found = proof(schedule)
            assert found.messages == messages(schedule).sent.sum()
            assert math.ceil(math.log2(ranks)) <= found.additions < ranks or "reduce" not in collective


@pytest.mark.parametrize(("collective", "algorithm"), SCHEDULED)
def test_interpreted_in_numpy(collective, algorithm):
    for ranks in (1, 2, 5, 8, 12):
        if (schedule := built(collective, algorithm, ranks)) is None:
            continue
        x = np.random.default_rng(ranks).standard_normal((ranks, schedule.placed.count))
        result = interpreted(schedule, x)
        if collective == "reduce":
            result, want = result[root(ranks)], x.sum(axis=0)
        else:
            want = expected(collective, x).reshape(ranks, -1)
        np.testing.assert_allclose(result, want, rtol=1e-12, atol=1e-12)


# Steps, and bytes that a rank sends at most, for an input of S bytes (reduce-scatter, all-reduce, all-to-all: S is the
# whole array; all-gather: S is the whole result). Sources as in glass_jax.sharding.algorithms.
LOG = {p: math.ceil(math.log2(p)) for p in SIZES}
FORMULAS = {
    ("all_reduce", "ring"): lambda p: (2 * (p - 1), 2 * (p - 1) / p),
    ("all_reduce", "two_way_ring"): lambda p: (2 * (p - 1), 2 * (p - 1) / p),
    ("all_reduce", "mesh"): lambda p: (2 * (p > 1), 2 * (p - 1) / p),
    ("all_reduce", "bruck"): lambda p: (2 * LOG[p], 2 * (p - 1) / p),
    ("all_reduce", "tree"): lambda p: (2 * LOG[p], LOG[p]),
    ("all_gather", "ring"): lambda p: (p - 1, (p - 1) / p),
    ("all_gather", "bruck"): lambda p: (LOG[p], (p - 1) / p),
    ("reduce_scatter", "ring"): lambda p: (p - 1, (p - 1) / p),
    ("broadcast", "tree"): lambda p: (LOG[p], LOG[p]),
    ("broadcast", "ring"): lambda p: ((p - 2 + algorithms.PIECES) * (p > 1), 1 if p > 1 else 0),
    ("all_to_all", "pairwise"): lambda p: (p - 1, (p - 1) / p),
    ("all_to_all", "mesh"): lambda p: (int(p > 1), (p - 1) / p),
}


@pytest.mark.parametrize(("collective", "algorithm"), FORMULAS)
def test_counts_are_the_published_ones(collective, algorithm):
    for ranks in SIZES:
        schedule = built(collective, algorithm, ranks)
        whole = schedule.placed.count * (ranks if collective == "all_gather" else 1)
        counted, (steps, share) = messages(schedule), FORMULAS[collective, algorithm](ranks)
        assert counted.steps == steps
        assert counted.chunks.max() / whole == pytest.approx(share)


@pytest.mark.parametrize("ranks", SIZES)
def test_halving_doubling_counts(ranks):
    counted = messages(built("all_reduce", "halving_doubling", ranks))
    power = 1 << (ranks.bit_length() - 1)
    extra = ranks - power
    assert counted.steps == 2 * int(math.log2(power)) + 2 * (extra > 0)
    assert counted.chunks.max() == 2 * (power - 1) + (power if extra else 0)  # of chunks that are S / power
    assert counted.sent.max() == counted.steps - (extra > 0)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_bruck_exchange_moves_half_of_everything_in_every_step(ranks):
    counted = messages(built("all_to_all", "bruck", ranks))
    assert counted.steps == LOG[ranks]
    assert (counted.chunks == ranks // 2 * LOG[ranks]).all()


def test_thousand_ranks_in_ten_hops():
    assert messages(algorithms.build("all_reduce", "halving_doubling", 1024)).steps == 20  # 10 down, 10 up
    assert messages(algorithms.build("broadcast", "tree", 1024)).steps == 10
    for collective, algorithm in [
        ("all_reduce", "ring"),
        ("all_reduce", "halving_doubling"),
        ("reduce_scatter", "hierarchical"),
        ("broadcast", "double_tree"),
        ("all_to_all", "bruck"),
    ]:
        proof(algorithms.build(collective, algorithm, 1024))


def test_hierarchical_sends_least_between_nodes():
    levels = (4, 8)
    schedule = algorithms.build("all_reduce", "hierarchical", 32, levels=levels)
    between = 0
    for phase in schedule.phases:
        (transfer,) = phase.transfers
        crosses = transfer.dst // 8 != np.arange(32) // 8
        between += phase.repeat * transfer.count * crosses
    np.testing.assert_array_equal(between, 2 * 3)  # chunks of S / 32: a ring over 4 nodes of an eighth of the array


@pytest.mark.parametrize("ranks", [8, 9, 31, 64])
def test_double_tree_uses_every_rank_in_at_most_one_tree(ranks):
    (phase,) = algorithms.build("broadcast", "double_tree", ranks).phases
    inner = [set(), set()]
    for transfer in phase.transfers:
        inner[int(transfer.send.spans[0].start[0])] |= set(np.flatnonzero(transfer.dst >= 0)) - {0}
    assert not inner[0] & inner[1]


def test_large_schedules_are_small():
    for algorithm in ("ring", "two_way_ring", "hierarchical", "halving_doubling", "bruck", "double_tree", "mesh"):
        schedule = algorithms.build("all_reduce", algorithm, 16384)
        transfers = [transfer for phase in schedule.phases for transfer in phase.transfers]
        tables = [transfer.dst for transfer in transfers]
        tables += [span.start for transfer in transfers for end in (transfer.send, transfer.recv) for span in end.spans]
        assert sum(table.nbytes for table in tables) < 20 << 20
        assert len(schedule.phases) <= 2 * 14


def _ring_with(**changes) -> Schedule:
    schedule = algorithms.build("all_gather", "ring", 4)
    (phase,) = schedule.phases
    (transfer,) = phase.transfers
    phase_changes = {key: changes.pop(key) for key in ("repeat",) if key in changes}
    transfer = dataclasses.replace(transfer, **changes)
    return dataclasses.replace(schedule, phases=(dataclasses.replace(phase, transfers=(transfer,), **phase_changes),))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_ring_with(dst=np.array([1, 1, 3, 0])), "rank 1 is the destination of ranks"),
        (_ring_with(repeat=2), "does not have every contribution exactly once"),
        (_ring_with(send=_ring_with().phases[0].transfers[0].recv), "sends chunk 3 before it has arrived"),
        (_ring_with(dst=np.array([1, 2, 3, 4])), "goes to rank 4"),
    ],
)
def test_broken_schedules_are_found_out(broken, message):
    with pytest.raises(errors.CollectiveError, match=message):
        proof(broken)


def test_different_orders_of_addition_are_found_out():
    whole = Chunks((everywhere(1, 4),))
    around = Transfer((np.arange(4) + 1) % 4, whole, whole, REDUCE, turn=1)
    everyone_adds = Schedule("all_reduce", "naive", 4, 1, (Phase((around,), 3, reads_start=True),), whole, whole)
    with pytest.raises(errors.CollectiveError, match="add in different orders"):
        proof(everyone_adds)


def test_only_copies_can_be_reversed():
    with pytest.raises(errors.UnsupportedError, match="copies"):
        reverse(algorithms.build("all_reduce", "ring", 4).phases)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_sum", "ring", 4), "no schedules of 'all_sum'"),
        (("all_reduce", "pairwise", 4), "has ring, two_way_ring"),
        (("all_gather", "halving_doubling", 6), "not defined for 6 ranks, only for powers of two; 'bruck'"),
        (("all_reduce", "hierarchical", 7), "not defined for 7 ranks, a prime number"),
        (("all_reduce", "ring", 0), "ranks >= 1"),
        (("all_reduce", "ring", 11.0), "ranks=11.0, root=0: need integers"),
    ],
)
def test_errors_say_what_to_use(arguments, message):
    with pytest.raises(errors.CollectiveError, match=message):
        algorithms.build(*arguments)


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("hierarchical", {"levels": (3, 3)}, "product 9"),
        ("tree", {"root": 8}, "root=8"),
        ("double_tree", {"pieces": 0}, "pieces=0"),
        ("ring", {"levels": (2, 4)}, "does not use levels"),
        ("ring", {"root": 1}, "does not use root"),
        ("tree", {"pieces": 4}, "does not use pieces"),
    ],
)
def test_wrong_options(algorithm, options, message):
    with pytest.raises(errors.CollectiveError, match=message):
        algorithms.build("all_reduce", algorithm, 8, **options)
