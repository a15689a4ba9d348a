"""moe_dispatch: where each row lands, against NumPy, on devices and on simulated ranks."""

import dataclasses
import math
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import moe_reference as ref
import numpy as np
import pytest
from moe_reference import DEVICES, PLACES, SIMULATED

from glass_jax import errors
from glass_jax.sharding.expert_parallel import moe_combine, moe_dispatch, moe_redispatch

KINDS = ("uniform", "skewed", "one", "none", "ranks")


def tokens(seed, ranks, count, width, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((ranks, count, width)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """moe_dispatch with these arguments; equal ones are compiled once."""

    axis_name: tuple[str, ...]
    num_experts: int
    capacity: int | None = None
    alignment: int = 1
    payload_dtype: type | None = None
    fixed_buffers: bool = False

    def __call__(self, x, idx, weights):
        return moe_dispatch(x, idx, weights, **vars(self))


def dispatch(place, x, idx, weights, experts, axes=None, **options):
    f = Dispatch(tuple(axes or "x"), experts, **options)
    return ref.run(place, f, x, idx, weights, axes=axes)


def check_rows(rows, handle, x, idx, experts, *, quota=None, alignment=1, weights=None):
    """Everything that a rank receives: rows, where they begin, zeros elsewhere, and their weights."""
    ranks, width = x.shape[0], x.shape[-1]
    expected = ref.rows_of_experts(idx, experts, quota)
    rows = np.asarray(rows).reshape(ranks, -1, width)
    sizes, starts, row_weights = (np.asarray(a) for a in (handle.group_sizes, handle.group_starts, handle.row_weights))
    for rank in range(ranks):
        want, want_weights = np.zeros_like(rows[rank]), np.zeros(rows.shape[1])
        first, end = rank * experts // ranks, 0
        mine = expected[first : (rank + 1) * experts // ranks]
        for expert, (group, start, size) in enumerate(zip(mine, starts[rank], sizes[rank], strict=True), first):
            assert size == len(group) and start >= end and start % alignment == 0
            for row, (source, token) in enumerate(group, start):
                want[row] = x[source, token]
                if weights is not None:
                    want_weights[row] = weights[source, token][idx[source, token] == expert].sum()
            end = start + size
        np.testing.assert_array_equal(rows[rank], want)
        if weights is not None:
            np.testing.assert_allclose(row_weights[rank], want_weights, rtol=1e-6)


# Shapes repeat, so that each is compiled once: ranks, tokens, k, experts, width.
SHAPES = [(1, 5, 2, 3, 4), (4, 6, 4, 8, 2), (32, 16, 2, 64, 1)]


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1), st.sampled_from(KINDS))
def test_rows_are_in_order_of_expert_rank_and_token(shape, seed, kind):
    ranks, count, k, experts, width = shape
    x = tokens(seed, ranks, count, width)
    idx, weights = ref.routing(seed, ranks, count, k, experts, kind)
    rows, handle = dispatch(SIMULATED, x, idx, weights, experts)
    assert rows.shape == (ranks, ranks * count * min(k, experts // ranks), width)
    assert not np.any(handle.dropped)
    check_rows(rows, handle, x, idx, experts, weights=weights)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_devices_and_simulated_ranks_agree_to_the_bit(ranks):
    x = tokens(0, ranks, 40, 5)
    idx, weights = ref.routing(1, ranks, 40, 4, 16, "skewed")
    (rows, handle), simulated = (dispatch(place, x, idx, weights, 16, alignment=4) for place in PLACES)
    check_rows(rows, handle, x, idx, 16, alignment=4, weights=weights)
    jax.tree.map(np.testing.assert_array_equal, (rows, handle), simulated)


def test_thousand_ranks():
    ranks, experts = 1024, 2048
    x = tokens(0, ranks, 2, 1)
    idx, weights = ref.routing(0, ranks, 2, 2, experts)
    rows, handle = dispatch(SIMULATED, x, idx, weights, experts, capacity=4 * ranks)
    check_rows(rows, handle, x, idx, experts)


@pytest.mark.parametrize("kind", ["uniform", "skewed", "ranks"])
@pytest.mark.parametrize(
    ("place", "axes"),
    [(DEVICES, {"node": 2, "device": 4}), (SIMULATED, {"node": 4, "device": 2})],
    ids=["devices_2x4", "simulated_4x2"],
)
def test_two_axes_give_the_same_rows_as_one(place, axes, kind):
    x = tokens(0, 8, 80, 3)
    idx, weights = ref.routing(1, 8, 80, 4, 32, kind)
    rows, handle = dispatch(place, x, idx, weights, 32, axes=axes)
    check_rows(rows, handle, x, idx, 32, weights=weights)
    flat, flat_handle = dispatch(SIMULATED, x, idx, weights, 32)
    np.testing.assert_array_equal(rows, flat)
    np.testing.assert_array_equal(handle.row_weights, flat_handle.row_weights)


def test_groups_begin_at_multiples_of_the_alignment():
    alignment = 8
    x = tokens(0, 4, 12, 2)
    idx, weights = ref.routing(0, 4, 12, 3, 8)
    rows, handle = dispatch(SIMULATED, x, idx, weights, 8, alignment=alignment)
    assert rows.shape[1] % alignment == 0
    check_rows(rows, handle, x, idx, 8, alignment=alignment)
    ends = np.asarray(jax.vmap(lambda h: h.group_ends)(handle))
    following = ref.round_up(
        ends[:, :-1], alignment
    )  # the psum layout: groups begin where the one before ends, aligned
    np.testing.assert_array_equal(handle.group_starts[:, 1:], following)
    padded = np.asarray(jax.vmap(lambda h: h.padded_group_sizes)(handle))
    np.testing.assert_array_equal(np.cumsum(padded, axis=1)[:, :-1], handle.group_starts[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_buffers_hold_every_token_of_every_rank(kind):
    x = tokens(0, 4, 6, 3)
    idx, weights = ref.routing(3, 4, 6, 2, 8, kind)
    rows, handle = dispatch(SIMULATED, x, idx, weights, 8, fixed_buffers=True)
    assert rows.shape == (4, 2, 4 * 6, 3)
    assert not np.any(handle.dropped)
    check_rows(rows, handle, x, idx, 8, alignment=4 * 6)


@pytest.mark.parametrize("kind", ["uniform", "skewed"])
def test_too_small_a_capacity_counts_what_it_leaves_out(kind):
    x = tokens(0, 4, 30, 2)
    idx, weights = ref.routing(5, 4, 30, 3, 8, kind)
    rows, handle = dispatch(DEVICES, x, idx, weights, 8, capacity=46)
    assert rows.shape == (4, 46, 2)
    check_rows(rows, handle, x, idx, 8, quota=46 // 4)
    all_rows, kept = ref.rows_of_experts(idx, 8), ref.rows_of_experts(idx, 8, 46 // 4)
    lost = np.zeros(4, int)
    for full, some in zip(all_rows, kept, strict=True):
        for rank, _ in set(full) - set(some):
            lost[rank] += 1
    np.testing.assert_array_equal(np.ravel(handle.dropped), lost)
    assert lost.sum() > 0

    with pytest.raises(errors.CollectiveError, match=rf"dropped {lost.sum()} .*capacity=46") as raised:
        handle.check()
    enough = int(re.search(r"capacity=(\d+) or more", str(raised.value))[1])
    _, handle = dispatch(DEVICES, x, idx, weights, 8, capacity=enough)
    handle.check()
    _, handle = dispatch(DEVICES, x, idx, weights, 8, capacity=enough - 4)
    with pytest.raises(errors.CollectiveError):
        handle.check()


def test_two_axes_count_what_they_leave_out():
    x = tokens(0, 8, 30, 2)
    idx, weights = ref.routing(5, 8, 30, 3, 16, "skewed")
    rows, handle = dispatch(SIMULATED, x, idx, weights, 16, axes={"node": 2, "device": 4}, capacity=64)
    assert rows.shape == (8, 64, 2)
    pairs = sum(map(len, ref.rows_of_experts(idx, 16)))
    assert int(np.sum(handle.group_sizes)) + int(np.sum(handle.dropped)) == pairs
    assert int(np.sum(handle.dropped)) > 0
    with pytest.raises(errors.CollectiveError, match="capacity=64 rows a rank is too little"):
        handle.check()


def test_experts_that_do_not_exist_are_counted():
    idx = np.array([[[0, 4], [-2, 1], [-1, 7]]], np.int32)
    x, weights = tokens(0, 1, 3, 2), np.ones((1, 3, 2), np.float32)
    _, handle = dispatch(SIMULATED, x, idx, weights, 4)
    assert np.ravel(handle.dropped) == [3]
    np.testing.assert_array_equal(handle.group_sizes, [[1, 1, 0, 0]])
    with pytest.raises(errors.CollectiveError, match="3 choices of experts that do not exist"):
        handle.check()


@pytest.mark.parametrize(("dtype", "width"), [(ml_dtypes.float8_e4m3fn, 200), (ml_dtypes.float8_e5m2, 5)])
def test_eight_bit_payload_is_rounded_as_in_numpy(dtype, width):
    x = tokens(0, 4, 6, width) * np.logspace(-6, 3, 6)[:, None].astype(np.float32)
    x[0, 0] = 0
    idx, weights = ref.routing(0, 4, 6, 2, 8)
    rows, handle = dispatch(DEVICES, x, idx, weights, 8, payload_dtype=dtype)
    assert rows.dtype == np.float32
    check_rows(rows, handle, ref.quantized(x, dtype)[0], idx, 8)


def test_payload_of_sixteen_bits():
    x = tokens(0, 4, 6, 9)
    idx, weights = ref.routing(0, 4, 6, 2, 8)
    rows, handle = dispatch(SIMULATED, x, idx, weights, 8, payload_dtype=jnp.bfloat16)
    check_rows(rows, handle, x.astype(ml_dtypes.bfloat16).astype(np.float32), idx, 8)


def test_quantized_tokens_travel_with_their_scales():
    values, scales = tokens(0, 4, 6, 256).astype(ml_dtypes.float8_e4m3fn), tokens(1, 4, 6, 2)
    idx, weights = ref.routing(0, 4, 6, 2, 8)
    (got_values, got_scales), handle = dispatch(DEVICES, (values, scales), idx, weights, 8)
    assert got_values.dtype == values.dtype
    check_rows(got_values.astype(np.float32), handle, values.astype(np.float32), idx, 8)
    check_rows(got_scales, handle, scales, idx, 8)


_COLLECTIVE = re.compile(r" = (\S.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(compiled):
    """Kind and bytes of the result of every collective in the compiled program."""
    found = []
    for result, kind in _COLLECTIVE.findall(compiled.as_text()):
        sizes = [math.prod(map(int, filter(None, dims.split(",")))) for _, dims in _ARRAY.findall(result)]
        width = {"f32": 4, "s32": 4, "u8": 1}[_ARRAY.search(result)[1]]
        found.append((kind, sum(sizes) * width))
    return sorted(found)


def test_tokens_travel_once_to_a_rank_and_a_handle_saves_the_layout():
    ranks, count, k, experts, width = 8, 16, 4, 64, 32
    x = jnp.zeros((ranks * count, width))
    idx, weights = jnp.zeros((ranks * count, k), jnp.int32), jnp.zeros((ranks * count, k))

    payload = ("all-to-all", ranks * count * width * 4)  # T places for each rank, though a token has up to K rows there
    layout = ("all-to-all", ranks * (experts // ranks + 2 * count * k) * 4)
    row_weights, lengths = ("all-to-all", ranks * count * k * 4), ("all-reduce", 4 * 4)
    first = ref.sharded(DEVICES, Dispatch(("x",), experts), (("x", ranks),))
    assert collectives(first.lower(x, idx, weights).compile()) == sorted([payload, layout, row_weights, lengths])
    _, handle = first(x, idx, weights)
    again = ref.sharded(DEVICES, moe_redispatch, (("x", ranks),))
    assert collectives(again.lower(x, handle).compile()) == [payload]


def test_a_handle_leaves_and_enters_shard_map():
    x, other = tokens(0, 8, 6, 3), tokens(1, 8, 6, 5)
    idx, weights = ref.routing(0, 8, 6, 2, 16)
    _, handle = dispatch(DEVICES, x, idx, weights, 16)
    rows = ref.run(DEVICES, moe_redispatch, other, handle)
    check_rows(rows, handle, other, idx, 16)


def test_another_mesh_axis_whose_parts_take_different_numbers_of_steps():
    x = tokens(0, 8, 300, 2)
    idx, weights = ref.routing(0, 8, 300, 4, 16)
    idx[:4], idx[4:] = idx[:4] % 16, -1  # the first part of the data has choices, and all of them are of one rank
    idx[:4] = idx[:4] % 4

    def f(x, idx, weights):
        rows, handle = moe_dispatch(x, idx, weights, axis_name="x", num_experts=16)
        return moe_combine(rows, handle)

    out = ref.run(DEVICES, f, x, idx, weights, axes={"data": 2, "x": 4})
    expected = ref.mixture(x, idx, weights, np.broadcast_to(np.eye(2), (16, 2, 2)))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_no_tokens_at_all():
    x, idx = np.zeros((4, 0, 3), np.float32), np.zeros((4, 0, 2), np.int32)
    rows, handle = dispatch(SIMULATED, x, idx, idx.astype(np.float32), 8)
    assert rows.shape == (4, 0, 3)
    assert not np.any(handle.group_sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 10}, r"num_experts=10 is not a multiple of the 4 ranks of \('x',\); take 12"),
        ({"capacity": 3}, "capacity=3 is less than one row from each of the 4 ranks"),
        ({"alignment": 0}, "alignment=0 must be 1 or more"),
        ({"axis_name": ("a", "b", "c")}, "one axis or two"),
        ({"topk_idx": np.zeros((4, 6, 2))}, "topk_idx of float.* must be integers"),
        ({"topk_weights": np.zeros((4, 6, 3))}, "must both be"),
        ({"x": np.zeros((4, 5, 3))}, r"x of shape \(5, 3\) is not \[6, H\]"),
        ({"payload_dtype": jnp.int8}, "cannot travel as int8"),
        ({"payload_dtype": jnp.float4_e2m1fn}, "float4_e2m1fn; use float8_e4m3fn or float8_e5m2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_errors_come_before_anything_runs(change, message):
    arguments = {"x": np.zeros((4, 6, 3)), "topk_idx": np.zeros((4, 6, 2), int), "topk_weights": np.zeros((4, 6, 2))}
    arrays = {name: change.get(name, value) for name, value in arguments.items()}
    options = {"axis_name": "x", "num_experts": 8} | {k: v for k, v in change.items() if k not in arrays}
    with pytest.raises(errors.CollectiveError, match=message):
        jax.eval_shape(jax.vmap(lambda *args: moe_dispatch(*args, **options), axis_name="x"), *arrays.values())
