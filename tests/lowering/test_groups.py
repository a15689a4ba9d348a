"""The tables that grouped products walk over, against lists made row by row in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import grouped_gemm_reference as reference
from glass_jax.lowering import groups

M, GROUPS = 40, 5
SIZES = st.lists(st.lists(st.integers(0, 20), min_size=GROUPS, max_size=GROUPS), min_size=2, max_size=2)
BLOCK = st.sampled_from([1, 16])

one_after_another = jax.jit(lambda sizes: groups.one_after_another(sizes, M))
tiles = jax.jit(lambda s, e, block: groups.tiles(s, e, M, block), static_argnums=2)
regroup = jax.jit(
    lambda s, e, block, join_lists: groups.regroup(s, e, M, block, join_lists=join_lists), static_argnums=(2, 3)
)


def bounds(sizes):
    return one_after_another(jnp.asarray(sizes, jnp.int32))


@given(sizes=SIZES)
def test_groups_follow_one_another(sizes):
    starts, ends = bounds(sizes)
    expected = np.array([reference.spans(each, M) for each in sizes])
    np.testing.assert_array_equal(starts, expected[:, :, 0])
    np.testing.assert_array_equal(ends, expected[:, :, 1])


@given(sizes=SIZES, block=BLOCK)
def test_tiles_are_the_rows_of_every_group_in_order(sizes, block):
    table = tiles(*bounds(sizes), block)
    expected = [
        (b, g, row, min(block, end - row))
        for b, each in enumerate(sizes)
        for g, (start, end) in enumerate(reference.spans(each, M))
        for row in range(start, end, block)
    ]
    assert int(table.count) == len(expected)
    found = np.stack(table[:4], axis=1)
    np.testing.assert_array_equal(found[: len(expected)].reshape(-1, 4), np.array(expected).reshape(-1, 4))
    assert not found[len(expected) :, 3].any()


@given(sizes=SIZES, join_lists=st.booleans())
def test_regrouped_rows_are_those_of_each_group(sizes, join_lists):
    block = 8
    made = regroup(*bounds(sizes), block, join_lists)
    rows = [[b * M + row for row in range(*span)] for b, each in enumerate(sizes) for span in reference.spans(each, M)]
    if join_lists:
        rows = [rows[g] + rows[GROUPS + g] for g in range(GROUPS)]
    none, end = 2 * M, 0
    for first, blocks, expected in zip(made.first.tolist(), made.blocks.tolist(), rows, strict=True):
        assert first == end and blocks == max(-(-len(expected) // block), 1)
        end = first + blocks * block
        places = made.source[first:end].tolist()
        assert places == expected + [none] * (len(places) - len(expected))
    assert end <= len(made.source) and (made.source[end:] == none).all()


@given(sizes=SIZES)
def test_rows_that_belong_to_a_group(sizes):
    starts, ends = bounds(sizes)
    expected = np.arange(M) < np.array([reference.spans(each, M)[-1][1] for each in sizes])[:, None]
    np.testing.assert_array_equal(groups.belongs(starts, ends, M), expected)
    # of the groups 1 and 3 only, as a device that has these
    some = groups.belongs(starts[:, 1::2], ends[:, 1::2], M)
    for b, each in enumerate(sizes):
        spans = reference.spans(each, M)[1::2]
        assert some[b].tolist() == [any(start <= row < end for start, end in spans) for row in range(M)]


@pytest.mark.parametrize("block", [1, 3, 16, 100])
@pytest.mark.parametrize(("count", "rows"), [(1, 1), (4, 3), (3, 50), (64, 64), (2, 0)])
def test_tables_have_room_for_the_worst_case(count, rows, block):
    """As many groups as rows allow, each with one row more than a multiple of the block."""
    ones = np.zeros(count, np.int64)
    ones[: min(count, rows)] = 1
    ones[0] += rows - ones.sum()
    blocks = -(-ones // block)
    assert blocks.sum() <= groups.most_tiles(count, rows, block)
    spread = np.full(count, rows // count)
    spread[: rows % count] += 1
    for sizes in (ones, spread, np.roll(ones, 1)):
        assert (-(-sizes // block)).sum() <= groups.most_tiles(count, rows, block)
        assert np.maximum(-(-sizes // block), 1).sum() <= groups.most_blocks(count, rows, block)
