"""ring_gather_kv_cache against NumPy, over mesh sizes, and what the compiled program moves."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import moe_reference as ref
import numpy as np
import pytest
from moe_reference import DEVICES, SIMULATED

from glass_jax import errors
from glass_jax.sharding.kv_cache import ring_gather_kv_cache

PAGE = (2, 3)  # tokens of a page, features


def gather(pages, slots, cache):
    return ring_gather_kv_cache(pages, "x", slots=slots, cache=cache)


def expected(pages, slots, cache):
    """The cache after all pages of all ranks in turn, and how many of each rank's pages are not there then."""
    holder = {}
    for rank, of_rank in enumerate(slots):
        for number, slot in enumerate(of_rank):
            if 0 <= slot < len(cache):
                cache[slot] = pages[rank, number]
                holder[int(slot)] = rank, number
    there = set(holder.values())
    lost = [
        sum(slot != -1 and (rank, number) not in there for number, slot in enumerate(of_rank))
        for rank, of_rank in enumerate(slots)
    ]
    return cache, lost


def check(place, pages, slots, cache):
    """``cache`` is what every rank's cache holds before."""
    ranks = len(pages)
    got, lost = ref.run(place, gather, pages, slots, np.broadcast_to(cache, (ranks, *cache.shape)))
    want, want_lost = expected(pages, slots, cache.copy())
    for rank in range(ranks):
        assert np.asarray(got[rank]).tobytes() == want.tobytes()
    np.testing.assert_array_equal(np.ravel(lost), want_lost)


def problem(seed, ranks, held, size, dtype=np.float32):
    """Pages in random slots, a third of them invalid, and a cache that is not empty."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(size)[: ranks * held].reshape(ranks, held)
    slots = np.where(rng.random(slots.shape) < 1 / 3, -1, slots).astype(np.int32)
    return (
        rng.standard_normal((ranks, held, *PAGE)).astype(dtype),
        slots,
        rng.standard_normal((size, *PAGE)).astype(dtype),
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_pages_land_where_the_page_table_says(ranks):
    check(DEVICES, *problem(ranks, ranks, 5, 6 * ranks))


@pytest.mark.parametrize("ranks", [5, 64, 512])
def test_pages_land_on_simulated_ranks(ranks):
    check(SIMULATED, *problem(ranks, ranks, 2, 2 * ranks))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.uint8])
def test_any_dtype_moves_bit_for_bit(dtype):
    check(DEVICES, *problem(0, 4, 3, 15, dtype))


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.lists(st.integers(-3, 8), min_size=12, max_size=12))
def test_slots_that_collide_or_do_not_exist_are_counted_and_all_ranks_agree(slots):
    pages, _, cache = problem(0, 4, 3, 12)
    check(SIMULATED, pages, np.reshape(slots, (4, 3)).astype(np.int32), cache[:6])


def test_a_page_is_sent_once_to_each_neighbour():
    ranks, held = 8, 5
    pages, slots, cache = problem(0, ranks, held, 40)
    caches = np.broadcast_to(cache, (ranks, *cache.shape))
    flat = [a.reshape(-1, *a.shape[2:]) for a in (pages, slots, caches)]
    text = ref.sharded(DEVICES, gather, (("x", ranks),)).lower(*flat).compile().as_text()
    (shape,) = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute\(", text)
    assert np.prod([int(n) for n in shape.split(",")]) == pages[0].size
    (loop,) = [line for line in text.splitlines() if " while(" in line and "collective" not in line and "f32[" in line]
    assert f'"known_trip_count":{{"n":"{ranks - 1}"}}' in loop.replace(" ", "")
    (slots_moved,) = re.findall(r"= s32\[([\d,]+)\]\S* all-gather\(", text)
    assert np.prod([int(n) for n in slots_moved.split(",")]) == ranks * held
    assert not re.search(r" (all-to-all|all-reduce|reduce-scatter)\(", text)


def test_gradients():
    pages, slots, cache = problem(0, 4, 3, 12)
    caches = np.broadcast_to(cache, (4, *cache.shape))
    cotangents = np.random.default_rng(1).standard_normal(caches.shape).astype(np.float32)

    def f(pages, slots, cache, cotangent):
        _, back = jax.vjp(lambda pages, cache: gather(pages, slots, cache)[0], pages, cache)
        return back(cotangent)

    to_pages, to_cache = ref.run(DEVICES, f, pages, slots, caches, cotangents)
    total = cotangents.sum(axis=0)
    np.testing.assert_allclose(to_pages, np.where((slots >= 0)[..., None, None], total[slots], 0), rtol=1e-5, atol=1e-5)
    want = cotangents.copy()
    want[:, slots[slots >= 0]] = 0
    np.testing.assert_array_equal(to_cache, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache": np.zeros((8, 2, 4), np.float32)}, "must agree in all but the number of pages"),
        ({"cache": jnp.zeros((8, *PAGE), jnp.bfloat16)}, "must agree"),
        ({"slots": np.zeros(4, int)}, "one integer for each of 3 pages"),
        ({"slots": np.zeros(3)}, "one integer"),
    ],
)
def test_errors_come_before_anything_runs(change, message):
    arguments = {
        "pages": np.zeros((3, *PAGE), np.float32),
        "slots": np.zeros(3, int),
        "cache": np.zeros((8, *PAGE), np.float32),
    }
    with pytest.raises(errors.CollectiveError, match=message):
        jax.vmap(lambda _: gather(**(arguments | change)), axis_name="x")(np.zeros(2))
