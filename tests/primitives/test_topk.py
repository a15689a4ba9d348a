"""topk against NumPy and by its properties: every implementation that runs here; special values; errors; the chips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import glass_jax as glass
import topk_reference
from benchmarks.shapes.topk import SHAPES

RUNS_HERE = ("xla", "npu_model")


def _random(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32).astype(dtype)


def _topk(implementation, k, **options):
    call = functools.partial(glass.topk, k=k, implementation=implementation, **options)
    return jax.jit(lambda x, end, start=None: call(x, start=start, end=end))


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(
    ("shape", "k", "dtype"),
    [
        ((7,), 3, "float32"),
        ((3, 2, 300), 17, "bfloat16"),  # 16-bit elements are rarely unique
        ((2, 5000), 1000, "float16"),
        ((2, 20000), 64, "float32"),  # three tiles
        ((2, 33000), 40, "bfloat16"),
        ((66, 40), 5, "float32"),  # more rows than vector units
        ((2, 250), 300, "bfloat16"),  # less elements than are asked for
    ],
    ids=str,
)
def test_any_shape(shape, k, dtype, implementation):
    x = _random(shape, dtype)
    rows, select = x.shape[:-1], _topk(implementation, k)
    rng = np.random.default_rng(1)
    for bound in (np.full(rows, shape[-1]), rng.integers(0, shape[-1] + 1, rows)):
        start = rng.integers(0, bound + 1)
        for first, end in ((np.zeros(rows, int), bound), (start, bound), (bound, start)):
            values, indices = select(x, end, first)
            topk_reference.check(x, k, values, indices, end, start=first)
            expected = topk_reference.topk(x, k, end, first)[1]
            np.testing.assert_array_equal(np.sort(indices, axis=-1), np.sort(expected, axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("name", SHAPES)
def test_model_shapes(name, implementation):
    shape = SHAPES[name]
    rows = min(shape.rows, 8 if implementation == "xla" else 1)
    x = _random((rows, shape.columns), shape.dtype)
    values, indices = _topk(implementation, shape.k)(x, np.full(rows, shape.columns))
    topk_reference.check(x, shape.k, values, indices)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_orders(implementation):
    x, end = _random((4, 300), "float32").round(1), np.array([300, 5, 0, 1])
    values, indices = topk_reference.topk(x, 17, end)
    by_value = _topk(implementation, 17, sorted=True)(x, end)
    np.testing.assert_array_equal(by_value[0], values)
    np.testing.assert_array_equal(by_value[1], indices)
    by_index = _topk(implementation, 17, sorted_index=True)(x, end)
    np.testing.assert_array_equal(by_index[1], np.sort(indices, axis=-1))
    topk_reference.check(x, 17, *by_index, end)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_fills(implementation):
    x, end = _random((4, 300), "float32"), np.array([2, 0, 300, 1])
    fills = {"value_fill": 0.5, "index_fill": -1}
    values, indices = _topk(implementation, 17, **fills)(x, end)
    topk_reference.check(x, 17, values, indices, end, **fills)
    # Indices that could be the row's own ones do no harm, to derivatives either.
    total = lambda x: _topk(implementation, 17, index_fill=0)(x, end)[0][:, :1].sum()  # noqa: E731
    assert jnp.isneginf(total(x)) and jax.grad(total)(x).sum() == 3


SPECIAL = [-np.inf, -3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.5, 3e38, np.inf]


@pytest.mark.parametrize("implementation", RUNS_HERE)
@settings(max_examples=25)
@given(data=st.data())
def test_properties(data, implementation):
    """One shape, so that nothing is compiled twice; few different values, so that most are equal to others."""
    v = _length(implementation)
    pool = data.draw(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=4))
    seed = data.draw(st.integers(0, 2**32 - 1))
    x = np.random.default_rng(seed).choice(np.array(pool, np.float32), (4, v))
    start, end = np.array(
        data.draw(st.lists(st.tuples(st.integers(0, v), st.integers(0, v)), min_size=4, max_size=4))
    ).T
    values, indices = _of_one_shape(implementation)(x, end, start)
    topk_reference.check(x, 17, values, indices, end, start=start)
    if implementation == "xla":  # whose order is that of lax.top_k
        np.testing.assert_array_equal(indices, topk_reference.topk(x, 17, end, start)[1])


@functools.cache
def _of_one_shape(implementation):
    return _topk(implementation, 17)


def _length(implementation):
    return 5000 if implementation == "xla" else 300  # long enough for chunks


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_bounds_beyond_the_row_count_as_its_own(implementation):
    x = _random((4, _length(implementation)), "float32")
    values, indices = _of_one_shape(implementation)(x, np.array([-3, 99999, 2**31 - 1, 12]), [-9, -(2**31), 5, 99])
    v = x.shape[-1]
    topk_reference.check(x, 17, values, indices, np.array([0, v, v, 12]), start=np.array([0, 0, 5, 12]))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_minus_infinity_counts_where_it_is_inside(implementation):
    """It is an element like others, and what is outside is never taken for one."""
    v = _length(implementation)
    x = jnp.full((4, v), -jnp.inf).at[:, 40].set(1).at[3, 41:].set(-2)
    start, end = np.array([0, 30, 39, v - 3]), np.array([v, 45, 200, v])
    values, indices = _of_one_shape(implementation)(x, end, start)
    topk_reference.check(x, 17, values, indices, end, start=start)
    firsts = [*range(16), 40], [*range(30, 45)], [*range(39, 56)], [*range(v - 3, v)]
    for row, first in zip(np.sort(indices, axis=-1), firsts, strict=True):
        np.testing.assert_array_equal(row[: len(first)], first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(max_examples=5)
@given(v=st.integers(1, 3000), k=st.integers(1, 12), distinct=st.integers(1, len(SPECIAL)), seed=st.integers(0, 99))
def test_order_is_that_of_lax(v, k, distinct, seed, dtype):
    """With rows short and long for k, whose length is and is not one of whole chunks."""
    rng, k = np.random.default_rng(seed), min(k, v)
    pool = rng.choice(SPECIAL, distinct, replace=False)
    x = jnp.asarray(rng.choice(pool, (2, v)), jnp.float32).astype(dtype)
    values, indices = jax.jit(functools.partial(glass.topk, k=k, sorted=True, implementation="xla"))(x)
    expected = lax.top_k(x, k)
    np.testing.assert_array_equal(topk_reference.bits(values), topk_reference.bits(expected[0]))
    np.testing.assert_array_equal(indices, expected[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_elements_of_two_chunks_come_in_their_order(dtype):
    """The chunk of the second is searched for the sake of a larger element beside it."""
    x = jnp.zeros(4096, dtype).at[jnp.array([10, 3001])].set(1).at[3000].set(2)
    values, indices = jax.jit(functools.partial(glass.topk, k=3, sorted=True, implementation="xla"))(x)
    assert indices.tolist() == [3000, 10, 3001] and values.tolist() == [2, 1, 1]


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_with_a_nan_is_poisoned(dtype, implementation):
    x = _random((4, 300), dtype)
    x = x.at[1, 7].set(jnp.nan).at[2, 200].set(-jnp.nan).at[3, 9].set(jnp.nan)
    end = np.array([300, 300, 250, 9])  # that of the last row is beyond its end
    values, indices = _topk(implementation, 17)(x, end)
    assert jnp.isnan(values[1:3]).all() and (indices[1:3] == topk_reference.NOTHING).all()
    topk_reference.check(x[::3], 17, values[::3], indices[::3], end[::3])
    start = np.array([0, 8, 200, 10])  # behind that of the second and the last row
    values, indices = _topk(implementation, 17)(x, np.full(4, 300), start)
    assert jnp.isnan(values[2]).all() and (indices[2] == topk_reference.NOTHING).all()
    others = np.array([0, 1, 3])
    topk_reference.check(x[others], 17, values[others], indices[others], start=start[others])


@pytest.mark.parametrize("v", [300, 5000], ids=["short", "in_chunks"])
def test_a_nan_raises_outside_of_jit(v):
    x = _random((2, 3, v), "float32").at[1, 2, 7].set(jnp.nan)
    with pytest.raises(glass.errors.NotANumberError, match=r"1 of 6 rows of x hold a NaN, the first one at \(1, 2\)"):
        glass.topk(x, 5)
    topk_reference.check(x, 5, *glass.topk(x, 5, end=np.full((2, 3), 7)), end=np.full((2, 3), 7))


def test_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 700)))
        topk_reference.check(x, 2, *glass.topk(x, 2))
        with pytest.raises(glass.errors.UnsupportedError, match="float64"):
            glass.topk(x, 2, implementation="npu_model")


@pytest.mark.parametrize("implementation", [*RUNS_HERE, None])
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (2, 0, 8)], ids=str)
def test_empty(shape, implementation):
    values, indices = glass.topk(jnp.ones(shape, jnp.bfloat16), 4, implementation=implementation)
    topk_reference.check(jnp.ones(shape, jnp.bfloat16), 4, values, indices)


# --- on the chips --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", ["950DT", pytest.param("950PR", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SHAPES)
def test_the_chips_take_every_model_shape(name, chip):
    shape = SHAPES[name]
    assert glass.verify(functools.partial(glass.topk, k=shape.k), shape.argument(), chip=chip) == []


def test_export(tmp_path):
    shape = SHAPES["odd"]
    call = functools.partial(glass.topk, k=shape.k, sorted=True)
    glass.export(call, shape.argument(), path=tmp_path / "bundle")
    (source,) = (tmp_path / "bundle" / "kernels").glob("*.asc")
    assert "topk_float16_5x1001_37" in source.read_text()


def test_nothing_is_padded():
    """The kernel takes rows of any length: what is strict about alignment has nothing to refuse."""
    x = _random((2, 7), "float16")
    with glass.configure(alignment="strict"):
        topk_reference.check(x, 3, *glass.topk(x, 3, implementation="npu_model"))


def test_debug_shows_the_tiles(capsys):
    with glass.configure(debug=True):
        glass.topk(_random((2, 7), "float16"), 3, implementation="npu_model")
    assert "2 rows on 2 vector units in 1 waves, each read 3 times in tiles of 256" in capsys.readouterr().err


# --- errors, each before anything compiles -------------------------------------------------------------------------

X = jnp.ones((4, 8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: glass.topk(jnp.float32(1), 1), r"x has shape \(\)"),
        (lambda: glass.topk(X.astype(jnp.int32), 1), "x is int32; use float32, float16 or bfloat16"),
        (lambda: glass.topk(X, 0), "k=0 must be at least 1"),
        (lambda: glass.topk(X, 1, end=jnp.ones(4)), "end is float32; use int32"),
        (lambda: glass.topk(X, 1, start=jnp.ones(4)), "start is float32; use int32"),
        (lambda: glass.topk(X, 1, end=jnp.ones(8, int)), r"end has shape \(8,\), expected \(4,\): one number for each"),
        (lambda: glass.topk(X, 1, start=jnp.ones(8, int)), r"start has shape \(8,\), expected \(4,\)"),
        (lambda: glass.topk(X, 1, sorted=True, sorted_index=True), "sorted and sorted_index are two orders"),
        (lambda: glass.topk(X, 1, value_fill=np.nan), "value_fill is NaN"),
        (lambda: glass.topk(X, 1, index_fill=2**31), "index_fill=2147483648 is not an int32"),
        (lambda: glass.topk(X, 1, implementation="cuda"), "implementation='cuda' is not one of"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_k_that_the_kernel_has_no_room_for():
    x = _random((1, 5000), "float32")
    with pytest.raises(glass.errors.UnsupportedError, match="k=4097 is more than 4096"):
        glass.topk(x, 4097, implementation="npu_model")
    topk_reference.check(x, 4097, *glass.topk(x, 4097, implementation="xla"))
