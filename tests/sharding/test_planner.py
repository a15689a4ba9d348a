"""Plans: what is chosen and why, the numbers that are printed, timelines, pictures, and the ``glass plan`` command."""

import contextlib
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from glass_jax import errors
from glass_jax.cli import main as cli
from glass_jax.sharding import algorithms, collectives, profiler, report
from glass_jax.sharding.cost import choose, use_topology
from glass_jax.sharding.planner import plan
from glass_jax.sharding.simulated import SimulatedMesh

SIZES = (1 << 12, 1 << 26)


@pytest.mark.parametrize("collective", list(algorithms.ALGORITHMS))
def test_every_algorithm_is_estimated_or_left_out_with_a_reason(collective):
    found = plan(collective, SIZES, "a3", ranks=24)
    for nbytes in SIZES:
        rows = [row for row in found.estimates if row.nbytes == nbytes]
        assert {row.algorithm for row in rows} | set(found.left_out) == set(algorithms.ALGORITHMS[collective])
        assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
        assert found.chosen[nbytes] is rows[0]
    assert all(found.left_out.values())
    assert found.chosen[SIZES[1]].algorithm == found.algorithm and found.seconds == found.chosen[SIZES[1]].seconds


def test_the_machine_decides():
    """Few steps for small arrays, every link for large ones, and no full mesh where there is none."""
    assert plan("all_reduce", 1 << 10, "a3", ranks=64).algorithm == "halving_doubling"
    assert plan("all_reduce", 1 << 28, "910b", ranks=8).algorithm == "mesh"
    large = plan("all_reduce", 1 << 28, "910b", ranks=64)
    assert "not all linked" in large.left_out["mesh"]
    assert plan("all_reduce", 1 << 28, "910b", ranks=64, algorithm="mesh").algorithm == "mesh"
    assert (
        "roce port" in large.chosen[1 << 28].busiest_link[0] or "server link" in large.chosen[1 << 28].busiest_link[0]
    )


@pytest.mark.parametrize(
    "collective, factor",
    [("all_reduce", 14 / 8), ("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("all_to_all", 7 / 8), ("broadcast", 1)],
)
def test_bandwidths_are_those_of_nccl_tests(collective, factor):
    """A collective whose links are always busy has their rate as its bus bandwidth: that is what the factor is for."""
    found = plan(collective, 1 << 30, "950", ranks=8)
    best = found.chosen[1 << 30]
    assert best.algorithm_bandwidth == pytest.approx((1 << 30) / best.seconds)
    assert best.bus_bandwidth == pytest.approx(factor * best.algorithm_bandwidth)
    if collective in ("all_gather", "all_to_all"):
        assert best.bus_bandwidth == pytest.approx(0.7 * 1e12, rel=0.02)
        assert best.busiest_link[2] == pytest.approx(1, abs=0.02)


def test_one_rank_takes_no_time():
    found = plan("all_reduce", 1 << 20, "910b", ranks=1)
    assert found.seconds == 0 and found.chosen[1 << 20].bus_bandwidth == 0
    assert "0" in str(found)


def test_16384_ranks():
    found = plan("all_reduce", 64 << 20, "roce_fat_tree", ranks=16384)
    assert found.chosen[64 << 20].simulation.schedule.ranks == 16384
    assert len(found.estimates) >= 7
    assert plan("all_to_all", 64 << 20, "950", ranks=16384).algorithm == "mesh"


def test_table_and_json_say_the_same():
    found = plan("all_reduce", SIZES, "910b", ranks=16)
    data = json.loads(found.to_json())
    assert len(data["estimates"]) == len(found.estimates) == len(found.table().splitlines()) - 1
    for row, line in zip(data["estimates"], found.table().splitlines()[1:], strict=True):
        assert f" {row['algorithm']} " in line and row["busiest_link"]["name"] in line
        assert row["seconds"] == pytest.approx(row["alpha_seconds"] + row["beta_seconds"] + row["gamma_seconds"])
        assert row["bus_bytes_per_second"] * row["seconds"] == pytest.approx(row["nbytes"] * 30 / 16)
    assert data["chosen"] == {str(nbytes): best.algorithm for nbytes, best in found.chosen.items()}
    assert "Next: " in data["why"] and "left out: mesh" in data["why"]


@pytest.mark.parametrize("algorithm", ["ring", "double_tree", "mesh"])
def test_timeline(tmp_path, algorithm):
    found = plan("all_reduce", 1 << 20, "910b", ranks=8, algorithm=algorithm)
    found.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {f"rank {rank}" for rank in range(8)} <= set(tracks.values())
    spans = [event for event in events if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(found.seconds * 1e6)
    sent = [event for event in spans if tracks[event["tid"]] == "rank 3"]
    if algorithm == "ring":
        assert len(sent) == 14 and {event["name"] for event in sent} == {"to 4"}
        assert all(event["args"]["bytes"] == (1 << 20) // 8 for event in sent)
    busy = sorted((event["ts"], event["dur"]) for event in sent if algorithm == "ring")
    assert all(a + b <= c * (1 + 1e-9) for (a, b), (c, _) in itertools.pairwise(busy))


def test_large_timelines_stay_small(tmp_path):
    plan("all_reduce", 1 << 26, "910b", ranks=4096, algorithm="ring").save_trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size < 5_000_000


def test_picture(tmp_path):
    for ranks, algorithm in ((8, "ring"), (8, "mesh"), (256, "halving_doubling")):
        plan("all_reduce", 1 << 20, "910b", ranks=ranks, algorithm=algorithm).save_picture(tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_picture_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(errors.MissingDependencyError, match="pip install matplotlib"):
        plan("all_reduce", 1 << 20, "910b", ranks=8).save_picture(tmp_path / "picture.png")


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        (("all_reduces", 1, "910b"), {}, "no collective 'all_reduces'"),
        (("all_reduce", 1, "910b"), {"algorithm": "rings"}, "no algorithm 'rings'"),
        (("all_reduce", 1, "910b"), {"ranks": 0}, "ranks=0"),
        (("all_reduce", 1, "910b"), {"ranks": 99999}, "has 16384 ranks"),
        (("all_reduce", -1, "910b"), {"ranks": 8}, "none below 0"),
        (("all_reduce", (8, 8), "910b"), {"ranks": 8}, "different"),
        (("all_reduce", (), "910b"), {"ranks": 8}, "need one size"),
        (("all_gather", 8, "910b"), {"ranks": 12, "algorithm": "halving_doubling"}, "not defined for 12 ranks"),
        (("all_gather", 8, "910b"), {"ranks": 12, "algorithm": "hierarchical"}, "plain ring here"),
        (("all_gather", 8, "911b"), {}, "did you mean"),
        (("all_reduce", 64e6, "910b"), {"ranks": 8}, "nbytes is 64000000.0, a float; it must be an integer"),
        (("all_reduce", [8, "1MiB"], "910b"), {"ranks": 8}, "nbytes is '1MiB', a str"),
        (("all_reduce", 1, "910b"), {"ranks": 5.0}, "ranks is 5.0, a float"),
        (("all_reduce", 1, 910), {"ranks": 8}, "topology=910 must be the name"),
    ],
)
def test_mistakes(arguments, options, message):
    with pytest.raises(errors.CollectiveError, match=message):
        plan(*arguments, **options)


def test_sizes():
    assert [report.parse_size(text) for text in ("4096", "64KiB", "64K", "1.5 GB", "2M")] == [
        4096,
        65536,
        65536,
        1500000000,
        2097152,
    ]
    for text in ("", "x", "64XB", "-1", "1 2"):
        with pytest.raises(errors.CollectiveError, match="is no size"):
            report.parse_size(text)


# --- the command ---------------------------------------------------------------------------------------------------


def command(capsys, *arguments):
    code = cli.main(["plan", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_command(capsys, tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    common = ("--collective", "all_reduce", "--size", "64MiB", "1KiB", "--ranks", 64, "--topology", "a3")
    code, out, _ = command(capsys, *common, "--trace", trace, "--picture", picture)
    assert code == 0 and "halving_doubling" in out and "busiest link" in out and "left out: mesh" in out
    assert json.loads(trace.read_text())["traceEvents"] and "<svg" in picture.read_text()
    code, out, _ = command(capsys, *common, "--json", "--algorithm", "ring")
    assert code == 0 and {row["algorithm"] for row in json.loads(out)["estimates"]} == {"ring"}


@pytest.mark.parametrize(
    "change, message",
    [
        (("--size", "64XB"), "is no size"),
        (("--topology", "H100"), "unknown topology"),
        (("--algorithm", "magic"), "no algorithm 'magic'"),
        (("--ranks", "99999"), "has 24576 ranks"),
    ],
)
def test_mistakes_on_the_command_line(capsys, change, message):
    common = ("--collective", "all_reduce", "--size", "1M", "--topology", "a3", "--ranks", 8)
    code, _, err = command(capsys, *common, *change)
    assert code == 2 and message in err and "Traceback" not in err


# --- the choice that programs leave open ---------------------------------------------------------------------------


def test_auto_chooses_for_the_topology_in_use():
    mesh = SimulatedMesh({"x": 8})
    function = jax.jit(
        mesh.shard_map(lambda x: collectives.all_reduce(x, "x"), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )
    ran = []
    for machine in ("910b", "950", None):
        with profiler.profile() as profile, use_topology(machine) if machine else contextlib.nullcontext():
            jax.block_until_ready(function(jnp.ones((8, 1 << 16))))
            assert choose("all_reduce", 1 << 18, 8).algorithm == profile.rows()[0]["algorithm"]
        ran.append(profile.rows()[0]["algorithm"])
    assert ran == ["mesh", "halving_doubling", "mesh"]


def test_choice_leaves_out_what_would_compile_for_long():
    choice = choose("all_to_all", 1 << 20, 256)
    assert choice.algorithm != "pairwise" and "compiled by itself" in choice.left_out["pairwise"]
    assert "pairwise" in {row.algorithm for row in choose("all_to_all", 1 << 20, 32).estimates}
    assert "left out: pairwise" in str(choice)
