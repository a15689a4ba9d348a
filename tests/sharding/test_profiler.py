"""Profiles: what they count against what algorithms promise, on devices and on simulated meshes."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from glass_jax import errors
from glass_jax.sharding import collectives, profiler
from glass_jax.sharding.faults import LossyLink, SlowLink
from glass_jax.sharding.planner import plan
from glass_jax.sharding.simulated import SimulatedMesh

RANKS, SIZE = 8, 4096  # floats of a rank


def program(x):
    """A ring all-reduce in a loop of three, and a Bruck all-gather."""
    x = lax.fori_loop(0, 3, lambda _, x: collectives.all_reduce(x, "x", algorithm="ring") / RANKS, x)
    return collectives.all_gather(x, "x", algorithm="bruck").sum(axis=0)


def on_devices(function):
    mesh = jax.make_mesh((RANKS,), ("x",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))


def on_simulated(function, **options):
    mesh = SimulatedMesh({"x": RANKS}, **options)
    return jax.jit(mesh.shard_map(function, in_specs=P("x"), out_specs=P("x"), check_vma=False))


def operand():
    return jnp.asarray(np.random.default_rng(0).normal(size=RANKS * SIZE), jnp.float32)


PROMISED = {  # calls, steps and bytes of a rank
    "all_reduce": (3, 3 * 2 * (RANKS - 1), 3 * 2 * 4 * SIZE * (RANKS - 1) // RANKS),
    "all_gather": (1, 3, 4 * SIZE * (RANKS - 1)),
}


def check_promises(rows):
    assert len(rows) == 2 * RANKS
    for row in rows:
        assert (row["calls"], row["steps"], row["sent_bytes"]) == PROMISED[row["collective"]]
    for name in PROMISED:
        assert sorted(row["rank"] for row in rows if row["collective"] == name) == list(range(RANKS))


def test_on_devices(tmp_path):
    function, x = on_devices(program), operand()
    expected = np.asarray(function(x))
    start = time.perf_counter()
    with profiler.profile() as first:
        inside = np.asarray(function(x))
    elapsed = time.perf_counter() - start
    assert np.array_equal(np.asarray(function(x)), expected) and np.array_equal(inside, expected)
    check_promises(first.rows())
    assert all(0 < row["seconds"] < elapsed and row["retries"] is None for row in first.rows())
    assert {row["clock"] for row in first.rows()} == {"measured"} and first.links() == []
    assert first.unfinished() == []
    with profiler.profile() as second:  # another profile takes the program that is marked already
        jax.block_until_ready(function(x))
        jax.block_until_ready(function(x))
    assert {row["calls"] for row in second.rows()} == {2, 6} and len(first.runs) == 4 * RANKS
    second.save_trace(tmp_path / "trace.json")
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 8 * RANKS and all(event["dur"] > 0 for event in events)
    assert "measured" in second.table() and len(json.loads(second.to_json())["collectives"]) == 2 * RANKS


def test_derivatives_and_foreign_collectives_on_devices():
    def loss(x):
        return (collectives.all_gather(x, "x", algorithm="ring") ** 2).sum() + collectives.all_reduce(
            x, "x", algorithm="xla"
        ).sum()

    function = on_devices(jax.grad(loss))
    with profiler.profile() as p:
        jax.block_until_ready(function(operand()))
    rows = {(row["collective"], row["algorithm"]): row for row in p.rows()}
    assert (
        rows["all_gather", "ring"]["sent_bytes"]
        == rows["reduce_scatter", "ring"]["sent_bytes"]
        == 4 * SIZE * (RANKS - 1)
    )
    foreign = rows["all_reduce", "xla"]
    assert foreign["sent_bytes"] is None and foreign["steps"] is None and foreign["seconds"] > 0
    assert " ? " in p.table()


def test_on_a_simulated_mesh():
    function, x = on_simulated(program, topology="a3"), operand()
    expected = np.asarray(function(x))
    with profiler.profile() as p:
        assert np.array_equal(np.asarray(function(x)), expected)
    check_promises(p.rows())
    ring = plan("all_reduce", 4 * SIZE, "a3", ranks=RANKS, algorithm="ring").seconds
    bruck = plan("all_gather", 4 * SIZE * RANKS, "a3", ranks=RANKS, algorithm="bruck").seconds
    for row in p.rows():
        assert row["seconds"] == pytest.approx(3 * ring if row["collective"] == "all_reduce" else bruck)
        assert row["bytes_per_second"] == pytest.approx(row["sent_bytes"] / row["seconds"])
        assert (row["retries"], row["clock"]) == (0, "a3")
    assert sum(row["bytes"] for row in p.links()) == sum(row["sent_bytes"] for row in p.rows())
    starts = [run.start[0] for run in p.runs]
    assert starts == pytest.approx([0, ring, 2 * ring, 3 * ring])


def test_faults_show_at_their_link():
    """In a ring every rank sends as much; a slow link stands out by its rate, a lossy one by what was sent again."""
    faults = [SlowLink(1, 2, 10), LossyLink(5, 6, 0.5)]
    function = on_simulated(lambda x: collectives.all_reduce(x, "x", algorithm="ring"), faults=faults)
    with profiler.profile() as p:
        jax.block_until_ready(function(operand()))
    links = p.links()
    assert (links[0]["src"], links[0]["dst"]) == (1, 2)
    rates = {(link["src"], link["dst"]): link["bytes_per_second"] for link in links}
    healthy = [rate for pair, rate in rates.items() if pair not in ((1, 2), (5, 6))]
    assert max(healthy) == pytest.approx(min(healthy)) and rates[1, 2] < min(healthy) / 2
    assert [(link["src"], link["dst"]) for link in links if link["retries"]] == [(5, 6)]
    assert [row["rank"] for row in p.rows() if row["retries"]] == [5]
    lines = p.table().splitlines()
    assert any(line.startswith("1 -> 2 ") for line in lines) and "of 910b" in p.table()


def test_simulated_mesh_of_two_axes_and_16_bits():
    """Rows of 4 ranks run at the same time. Sums of bfloat16 travel in float32, results in bfloat16."""
    mesh = SimulatedMesh({"y": 2, "x": 4})
    function = mesh.shard_map(
        lambda x: collectives.all_reduce(x, "x", algorithm="ring"),
        in_specs=P(("y", "x")),
        out_specs=P(("y", "x")),
        check_vma=False,
    )
    with profiler.profile() as p:
        jax.block_until_ready(function(jnp.ones((8, 1024), jnp.bfloat16)))
    assert sorted(row["rank"] for row in p.rows()) == list(range(8))
    assert all(row["sent_bytes"] == 3 * 256 * (4 + 2) and row["calls"] == 1 for row in p.rows())
    assert {(link["src"], link["dst"]) for link in p.links()} == {(r, r // 4 * 4 + (r + 1) % 4) for r in range(8)}


def test_gradient_outside_of_a_simulated_mesh():
    function = on_simulated(lambda x: collectives.all_gather(x, "x", algorithm="ring").sum(axis=0))
    with profiler.profile() as p:
        jax.block_until_ready(jax.grad(lambda x: (function(x) ** 2).sum())(operand()))
    assert {row["collective"] for row in p.rows()} == {"all_gather", "reduce_scatter"}


def test_large_tables_list_the_slowest():
    function = SimulatedMesh({"x": 64}, faults=[SlowLink(7, 8, 5)]).shard_map(
        lambda x: collectives.all_reduce(x, "x", algorithm="mesh"), in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    with profiler.profile() as p:
        jax.block_until_ready(function(jnp.ones((64, 64))))
    assert "48 more ranks" in p.table() and "7 -> 8" in p.table() and len(p.table().splitlines()) < 40


def test_nothing_ran():
    with profiler.profile() as p:
        pass
    assert "no collective ran" in p.table() and p.rows() == []


def test_axes_left_to_the_compiler():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    function = jax.shard_map(
        lambda x: collectives.all_reduce(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P(), axis_names={"x"}
    )
    with profiler.profile(), pytest.raises(errors.UnsupportedError, match="here y: JAX has no callbacks there"):
        jax.jit(function)(operand())
