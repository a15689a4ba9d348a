"""How much communication is hidden: against formulas for two streams, and the story that a server of 8 910B tells."""

import itertools
import json

import pytest

from glass_jax import errors
from glass_jax.sharding.overlap_plan import ChunkedMatmul, GradientBuckets, RingMatmul, plan_overlap
from glass_jax.sharding.planner import plan
from glass_jax.sharding.topology import Level, Topology

RATE = 1e10
SWITCH = Topology("switch", (Level("all", 8, "switch", RATE, 0, "test"),), 1e30)
LAYER = 8 << 20
COMM = 2 * 7 / 8 * LAYER / RATE  # all-reduce of a layer's gradients by a ring


@pytest.mark.parametrize("share", [0.3, 0.5, 2.0])
@pytest.mark.parametrize("per_bucket", [1, 2, 4])
def test_gradient_buckets(share, per_bucket):
    """Each bucket is sent behind the computation of the next: the last is exposed, and what the others exceed it by."""
    layers, backward = 8, COMM * share
    work = GradientBuckets([backward] * layers, [LAYER] * layers, per_bucket * LAYER, "ring")
    found = plan_overlap(work, SWITCH, ranks=8)
    buckets, send, compute = layers // per_bucket, COMM * per_bucket, backward * per_bucket
    exposed = send + (buckets - 1) * max(send - compute, 0)
    assert found.communication_seconds == pytest.approx(layers * COMM)
    assert found.exposed_seconds == pytest.approx(exposed)
    assert found.overlapped == pytest.approx(1 - exposed / (layers * COMM), abs=1e-9)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_chunked_matmul(collective, chunks):
    taken = plan(collective, LAYER // chunks, SWITCH, ranks=8).seconds
    found = plan_overlap(ChunkedMatmul(collective, 3 * taken * chunks, LAYER, chunks), SWITCH, ranks=8)
    assert found.overlapped == pytest.approx(1 - 1 / chunks, abs=1e-9)
    found = plan_overlap(ChunkedMatmul(collective, taken * chunks / 3, LAYER, chunks), SWITCH, ranks=8)
    assert found.seconds == pytest.approx(taken * chunks + taken / 3)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [2, 3, 7, 8])
def test_ring_matmul(collective, ranks):
    """Blocks that travel both ways: each step hides the shorter of what moves and what is multiplied."""
    block, step = LAYER // ranks, -(-LAYER // ranks) / RATE
    both, one = 2 * step, step  # through one port
    for seconds in (ranks * step / 10, ranks * step * 10):
        product = seconds / ranks
        pairs, opposite = divmod(ranks - 1, 2)
        moves = [both] * pairs + [one] * opposite
        products = [product] + [2 * product] * pairs + [product] * opposite
        if collective == "reduce_scatter":
            moves, products = moves[::-1], products[::-1]
        expected = sum(map(max, zip(products, [*moves, 0], strict=True)))
        found = plan_overlap(RingMatmul(collective, seconds, LAYER), SWITCH, ranks=ranks)
        assert block and found.seconds == pytest.approx(expected)


def test_story():
    """A 7B model on 8 910B1, a bucket a layer: rings hide about two fifths; the full mesh used as one, over 89%."""
    weights = 4 * 4096 * 4096 + 3 * 4096 * 11008
    backward = 4 * weights * 4096 / (0.6 * 363.7e12)

    def hidden(algorithm):
        work = GradientBuckets([backward] * 32, [2 * weights] * 32, 2 * weights, algorithm)
        return plan_overlap(work, "910b", ranks=8).overlapped

    assert 0.35 < hidden("ring") < 0.45
    assert hidden("mesh") > 0.89 and hidden("auto") == hidden("mesh")


def test_timeline_and_json(tmp_path):
    found = plan_overlap(GradientBuckets([COMM] * 4, [LAYER] * 4, LAYER, "ring"), SWITCH, ranks=8)
    found.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in spans[:2]] == ["backward of layer 3", "all_reduce of 8 MiB"]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(found.seconds * 1e6)
    for stream in {event["tid"] for event in spans}:
        own = [event for event in spans if event["tid"] == stream]
        assert all(a["ts"] + a["dur"] <= b["ts"] * (1 + 1e-9) for a, b in itertools.pairwise(own))
    assert json.loads(found.to_json())["overlapped"] == pytest.approx(0.75)
    assert str(found).startswith("75.0% of the communication is hidden")


@pytest.mark.parametrize(
    "work, ranks, message",
    [
        (GradientBuckets([1.0], [1, 2], 1), 8, "need as many"),
        (GradientBuckets([], [], 1), 8, "at least one"),
        (GradientBuckets([1.0], [1], 0), 8, "bucket_bytes=0"),
        (GradientBuckets([1.0], [1], 1, "rings"), 8, "no algorithm 'rings'"),
        (ChunkedMatmul("all_gather", 1.0, 1, 0), 8, "chunks=0"),
        (ChunkedMatmul("all_reduce", 1.0, 1, 1), 8, "not with 'all_reduce'"),
        (RingMatmul("broadcast", 1.0, 1), 8, "not with 'broadcast'"),
        (RingMatmul("all_gather", 1.0, 1), 1, "at least 2 ranks"),
        (RingMatmul("all_gather", 1.0, 1), 9, "has 8 ranks"),
    ],
)
def test_mistakes(work, ranks, message):
    with pytest.raises(errors.CollectiveError, match=message):
        plan_overlap(work, SWITCH, ranks=ranks)
