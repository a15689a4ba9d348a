"""rebalance_experts against the published example and by properties; replicas in a dispatch."""

import hypothesis
import hypothesis.strategies as st
import moe_reference as ref
import numpy as np
import pytest
from moe_reference import DEVICES, SIMULATED

from glass_jax import errors
from glass_jax.sharding.expert_parallel import moe_combine, moe_dispatch
from glass_jax.sharding.rebalance import choose_replicas, rebalance_experts

# The example of the README of github.com/deepseek-ai/EPLB.
WEIGHT = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PLACED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_the_published_example():
    physical_to_logical, _, _ = rebalance_experts(WEIGHT, 16, 4, 2, 8)
    np.testing.assert_array_equal(physical_to_logical, PLACED)


@st.composite
def placements(draw):
    nodes, groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    divide = groups % nodes == 0  # otherwise the algorithm ignores both, and nothing has to divide by them
    devices = (nodes if divide else 1) * draw(st.integers(1, 3))
    experts = (groups if divide else 1) * draw(st.integers(1, 8))
    replicas = -(-experts // devices) * devices + devices * draw(st.integers(0, 3))
    seed = draw(st.integers(0, 2**32 - 1))
    weight = np.random.default_rng(seed).integers(0, 200, (2, experts))
    return weight, replicas, groups, nodes, devices


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(placements())
def test_every_expert_is_placed_and_the_maps_are_inverse(placement):
    weight, replicas, groups, nodes, _ = placement
    to_logical, to_physical, counts = rebalance_experts(*placement)
    layers, experts = weight.shape
    assert to_logical.shape == (layers, replicas)
    assert counts.min() >= 1
    assert to_physical.shape == (layers, experts, counts.max())
    for layer in range(layers):
        np.testing.assert_array_equal(np.bincount(to_logical[layer], minlength=experts), counts[layer])
        for expert in range(experts):
            copies = to_physical[layer, expert]
            np.testing.assert_array_equal(copies[counts[layer, expert] :], -1)
            places = np.flatnonzero(to_logical[layer] == expert)
            np.testing.assert_array_equal(np.sort(copies[: counts[layer, expert]]), places)
    if groups % nodes == 0:
        group_of = to_logical // (experts // groups)
        for layer in group_of:
            on_nodes = [set(part.tolist()) for part in np.split(layer, nodes)]
            assert sum(map(len, on_nodes)) == groups  # no group is on two nodes


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(placements())
def test_no_other_expert_deserves_the_last_copy_more(placement):
    """Greedy replication: an expert with copies had, before its last one, at least every other's load a copy."""
    weight, replicas, _, _, devices = placement
    _, _, counts = rebalance_experts(weight, replicas, 1, 1, devices)
    for load, count in zip(weight, counts, strict=True):
        copied = count > 1
        before_last = load[copied] / (count[copied] - 1)
        assert (before_last[:, None] >= (load / count)[None] - 1e-9).all()


def test_skewed_loads_become_even():
    rng = np.random.default_rng(0)
    load = np.stack(
        [rng.permutation(1 / np.arange(8, 264)) for _ in range(4)]
    )  # the busiest expert has 8 times the mean
    to_logical, _, counts = rebalance_experts(load, 288, 1, 1, 32)
    after = np.take_along_axis(load / counts, to_logical, axis=1).reshape(4, 32, 9).sum(axis=2)
    before = load.reshape(4, 32, 8).sum(axis=2)
    assert (before.max(axis=1) > 1.8 * before.mean(axis=1)).all()
    assert (after.max(axis=1) < 1.1 * after.mean(axis=1)).all()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((11, 4, 2, 8), "replicas=11 is less than one of each of 12"),
        ((16, 8, 2, 8), "12 experts do not divide into 8"),
        ((16, 3, 3, 8), "8 devices do not divide among 3"),
        ((20, 4, 2, 8), "replicas=20 is not a multiple of 8"),
        ((16, 4, 0, 8), "nodes=0"),
        ((16.0, 4, 2, 8), "replicas is 16.0, a float"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(numbers, message):
    with pytest.raises(errors.CollectiveError, match=message):
        rebalance_experts(WEIGHT, *numbers)


def test_groups_that_do_not_divide_among_the_nodes_are_ignored_with_the_nodes():
    """As the published algorithm does, which then neither divides the experts nor the devices by them."""
    weight = np.random.default_rng(0).integers(1, 100, (2, 41))
    for ours, alone in zip(
        rebalance_experts(weight, 60, 8, 3, 20), rebalance_experts(weight, 60, 1, 1, 20), strict=True
    ):
        np.testing.assert_array_equal(ours, alone)


def test_no_layers_have_no_places():
    to_logical, to_physical, counts = rebalance_experts(np.zeros((0, 12)), 16, 4, 2, 8)
    assert to_logical.shape == (0, 16) and to_physical.shape[:2] == counts.shape == (0, 12)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([[1.0, -1.0]], "not negative"),
        (np.zeros((2, 0)), r"\(2, 0\) must be \[layers, experts\]"),
        ([[1, 2], [3]], "is no array of numbers"),
    ],
)
def test_weights_must_be_loads(weight, message):
    with pytest.raises(errors.CollectiveError, match=message):
        rebalance_experts(weight, 2, 1, 1, 1)


@pytest.mark.parametrize(("place", "axes"), [(SIMULATED, {"x": 8}), (DEVICES, {"node": 2, "device": 4})])
def test_copies_share_the_tokens_of_their_expert(place, axes):
    to_logical, to_physical, counts = (part[0] for part in rebalance_experts(WEIGHT, 16, 4, 2, 8))
    idx, weights = ref.routing(0, 8, 50, 3, 12, "skewed")
    idx[0, 0] = [12, -1, 0]  # an expert that does not exist
    x = np.random.default_rng(0).standard_normal((8, 50, 2)).astype(np.float32)
    names = tuple(axes)

    def f(x, idx, weights):
        physical = choose_replicas(idx, to_physical, counts, axis_name=names)
        rows, handle = moe_dispatch(x, physical, weights, axis_name=names, num_experts=16)
        return physical, handle.dropped, moe_combine(rows, handle)

    physical, dropped, out = (np.asarray(part) for part in ref.run(place, f, x, idx, weights, axes=axes))
    assert dropped.sum() == 1
    valid = (idx >= 0) & (idx < 12)
    np.testing.assert_array_equal(to_logical[physical[valid]], idx[valid])
    np.testing.assert_array_equal(physical[idx == -1], -1)
    for rank in range(8):
        loads = np.bincount(physical[rank][valid[rank]], minlength=16)
        for copies in to_physical:
            assert np.ptp(loads[copies[copies >= 0]]) <= 1
    total = np.bincount(physical[valid], minlength=16)
    assert all(np.ptp(total[copies[copies >= 0]]) <= 8 for copies in to_physical)
    want = ref.mixture(x, idx, weights, np.broadcast_to(np.eye(2), (12, 2, 2)))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
