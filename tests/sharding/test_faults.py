"""Dead ranks: who waits for whom, judged by playing the schedule; and the error that a simulated mesh raises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from glass_jax import errors
from glass_jax.sharding import algorithms, collectives, faults, pending
from glass_jax.sharding.simulated import SimulatedMesh


def play(schedule, dead):
    """Which ranks stop, and in which step: every rank goes through its own program until nothing moves."""
    program = {rank: [] for rank in range(schedule.ranks)}  # per step: whom it sends to and whom it hears from
    step = 0
    for phase in schedule.phases:
        for t in range(phase.repeat):
            if t == 0 or not phase.concurrent:
                for steps in program.values():
                    steps.append((set(), set()))
            for transfer in phase.transfers:
                for src, dst in enumerate(transfer.destinations(t)):
                    if dst >= 0:
                        program[src][-1][0].add(int(dst))
                        program[int(dst)][-1][1].add(src)
            step += 1
    at = dict.fromkeys(program, 0)  # the step that each rank is in; in it, it has sent
    moved = True
    while moved:
        moved = False
        for rank, steps in program.items():
            if rank in dead or at[rank] == len(steps):
                continue
            if all(source not in dead and at[source] >= at[rank] for source in steps[at[rank]][1]):
                at[rank] += 1
                moved = True
    return {rank: at[rank] for rank, steps in program.items() if rank not in dead and at[rank] < len(steps)}


@pytest.mark.parametrize("ranks, dead", [(8, [3]), (8, [0]), (12, [5]), (12, [2, 9])])
def test_waits_are_those_of_the_schedule_played(ranks, dead):
    for collective, names in algorithms.ALGORITHMS.items():
        for algorithm in names:
            if collective == "send_recv" or not algorithms.defined(collective, algorithm, ranks):
                continue
            schedule = algorithms.build(collective, algorithm, ranks)
            waits = faults.waits(schedule, dead)
            assert {wait.rank: wait.step for wait in waits} == play(schedule, dead), (collective, algorithm)
            stopped = {wait.rank for wait in waits}
            for wait in waits:
                assert wait.source in stopped | set(dead) and wait.dead in dead and wait.chunks
                assert (wait.source in dead) == (wait.source == wait.dead)


def test_a_leaf_of_a_tree_is_not_waited_for():
    """In a binomial broadcast rank 7 of 8 passes nothing on."""
    assert faults.waits(algorithms.build("broadcast", "tree", 8), [7]) == []
    assert [wait.rank for wait in faults.waits(algorithms.build("broadcast", "tree", 8), [6])] == [7]


def run(mesh, function, spec=None):
    spec = spec or P("x")
    return mesh.shard_map(function, in_specs=spec, out_specs=spec, check_vma=False)(jnp.ones((mesh.size, 8)))


@pytest.mark.parametrize("size", [8, 1024])
def test_a_dead_rank_is_an_error_that_names_it(size):
    mesh = SimulatedMesh({"x": size}, faults=[faults.DeadRank(5)])
    with pytest.raises(errors.PeerFailureError) as caught:
        run(mesh, lambda x: collectives.all_reduce(x, "x", algorithm="ring"))
    error = caught.value
    assert error.dead == (5,) and sorted(wait.rank for wait in error.waits) == [r for r in range(size) if r != 5]
    assert "rank 5 is dead" in str(error) and "rank 6 waits in step 0" in str(error)
    assert "rank 7 waits in step 1 for chunk 4 from rank 6, which waits itself" in str(error)
    assert len(str(error)) < 1500


def test_only_the_groups_of_the_dead_are_concerned():
    """Rank 5 of a 2 x 4 mesh is in row 1 and column 1; errors use the numbers of the whole mesh."""
    mesh = SimulatedMesh({"y": 2, "x": 4}, faults=[faults.DeadRank(5)])
    for axis, group in (("x", {4, 6, 7}), ("y", {1})):
        with pytest.raises(errors.PeerFailureError) as caught:
            run(
                mesh,
                lambda x, axis=axis: collectives.all_reduce(x, axis, algorithm="ring"),
                P(("y", "x")),
            )
        assert {wait.rank for wait in caught.value.waits} == group
        assert {wait.source for wait in caught.value.waits} <= group | {5}
    perm = [(rank, (rank + 1) % 3) for rank in range(3)]  # ranks 0 to 2, in every row
    with pytest.raises(errors.PeerFailureError):
        run(mesh, lambda x: collectives.send_recv(x, "x", perm), P(("y", "x")))
    run(mesh, lambda x: collectives.send_recv(x, "x", [(2, 3)]), P(("y", "x")))


def test_a_jitted_part_of_a_program_is_traced_again_on_a_mesh_with_faults():
    part = jax.jit(lambda x: collectives.all_reduce(x, "x", algorithm="ring"))
    np.testing.assert_array_equal(run(SimulatedMesh({"x": 4}), part), np.full((4, 8), 4))
    with pytest.raises(errors.PeerFailureError, match="rank 1 is dead"):
        run(SimulatedMesh({"x": 4}, faults=[faults.DeadRank(1)]), part)


def test_posted_and_foreign_collectives():
    mesh = SimulatedMesh({"x": 4}, faults=[faults.DeadRank(1)])
    with pytest.raises(errors.PeerFailureError, match="rank 1 is dead"):
        run(mesh, lambda x: pending.wait(pending.post_all_gather(x, "x")).sum(0))
    with pytest.raises(errors.PeerFailureError, match="which rank waits for which it does not tell"):
        run(mesh, lambda x: collectives.all_reduce(x, "x", algorithm="xla"))


def test_what_is_lost_is_sent_again():
    healthy, hurt = (
        SimulatedMesh({"x": 8}, faults=f) for f in ((), [faults.LossyLink(0, 1, 0.5), faults.SlowLink(2, 3, 9)])
    )
    results = [
        np.asarray(run(mesh, lambda x: collectives.all_reduce(x * 0.1, "x", algorithm="ring")))
        for mesh in (healthy, hurt)
    ]
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: faults.SlowLink(0, 1, 1.0), "slows nothing down"),
        (lambda: faults.LossyLink(0, 1, 0.0), "above 0 and below 1"),
        (lambda: faults.LossyLink(0, 1, 1.0), "use DeadRank"),
        (lambda: SimulatedMesh({"x": 4}, faults=[faults.DeadRank(4)]), "ranks are 0 to 3"),
        (lambda: SimulatedMesh({"x": 4}, faults=[faults.SlowLink(1, 1, 2)]), "no such link"),
        (lambda: SimulatedMesh({"x": 4}, faults=["dead"]), "is no fault"),
        (lambda: SimulatedMesh({"x": 4}, faults=[faults.DeadRank(1.5)]), "is 1.5, a float"),
        (lambda: SimulatedMesh({"x": 4}, topology="911"), "unknown topology"),
    ],
)
def test_faults_without_effect_are_errors(make, message):
    with pytest.raises(errors.CollectiveError, match=message):
        make()
