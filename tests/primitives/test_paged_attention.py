"""paged_attention against NumPy float64: every implementation that runs here; its promises about rows and pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glass_jax as glass
import numpy_reference as ref
from benchmarks.shapes import paged_attention as shapes
from paged_attention_reference import operands, paged_attention

RUNS_HERE = ("xla", "npu_model")
CASES = {  # heads, key-value heads, D, page, lengths
    "grouped": (8, 2, 128, 16, [1, 257, 300]),
    "multi_head": (2, 2, 64, 16, [255, 0, 16]),
    "one_key_value_head": (5, 1, 64, 64, [64, 130]),
    "more_heads_than_rows": (71, 1, 64, 64, [70]),
    "large_pages": (4, 2, 64, 576, [577, 40]),
    "odd_pages_and_heads": (3, 1, 24, 3, [41, 5]),
    "large_heads": (2, 1, 256, 32, [140, 128]),
}


def call(implementation="xla", **options):
    return functools.partial(glass.paged_attention, implementation=implementation, **options)


def assert_close(out, expected):
    """COMPONENTS' measure for decoding, a unit in the last place of float16 for float16, 1e-5 for float32."""
    limit = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2, "float64": 1e-12}[str(out.dtype)]
    assert ref.error(out, expected) <= limit


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("case", CASES)
def test_it_is_attention_over_the_context_alone(case, implementation):
    arrays = operands(*CASES[case])
    out = jax.jit(call(implementation))(*arrays)
    assert out.dtype == jnp.float32
    assert_close(out, paged_attention(*arrays))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits(dtype, implementation):
    arrays = operands(8, 2, 128, 16, [300, 20], dtype)
    out = jax.jit(call(implementation, softmax_scale=0.25))(*arrays)
    assert out.dtype == dtype
    expected = paged_attention(*arrays, scale=0.25)
    assert_close(out, expected)
    cosine = 1 - 2 * np.sum(ref.f64(out) * expected) / np.sum(ref.f64(out) ** 2 + expected**2)
    assert cosine < (5e-6 if dtype == "bfloat16" else 1e-6)


def test_float64_on_xla_only():
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) if x.dtype == jnp.float32 else x for x in operands(4, 2, 32, 16, [40, 3])]
        assert_close(call()(*arrays), paged_attention(*arrays))
        with pytest.raises(glass.errors.UnsupportedError, match="no float64"):
            call("npu_model")(*arrays)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("name", shapes.SHAPES)
def test_named_shapes(name, implementation):
    shape = shapes.SHAPES[name]
    longest = shape.page * shape.table_pages
    lengths = [max(longest - 37 * row, 0) for row in range(shape.batch)]
    arrays = operands(shape.heads, shape.kv_heads, shape.head_dim, shape.page, lengths, shape.dtype)
    assert_close(jax.jit(call(implementation))(*arrays), paged_attention(*arrays))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_large_scores_and_infinite_ones_of_other_rows(implementation):
    q, k, v, table, lengths = operands(4, 2, 64, 16, [300, 20])
    q = q.at[0].mul(40.0).at[1].set(jnp.inf)
    out = call(implementation)(q, k, v, table, lengths)
    assert_close(out[:1], paged_attention(q[:1], k, v, table[:1], lengths[:1]))


# --- a row depends on its own context only --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("implementation", "dtype"), [("xla", "float32"), ("xla", "bfloat16"), ("npu_model", "bfloat16")]
)
def test_rows_are_the_same_bit_for_bit_in_any_company(dtype, implementation):
    q, k, v, table, lengths = operands(4, 2, 64, 16, [300, 1, 0, 256, 40, 513, 16], dtype)
    f = jax.jit(call(implementation))
    together = np.asarray(f(q, k, v, table, lengths))
    order = np.array([3, 6, 0, 5, 1, 2, 4])
    np.testing.assert_array_equal(f(q[order], k, v, table[order], lengths[order]), together[order])
    others = lengths.at[1:].set(jnp.array([0, 256, 5, 300, 200, 0])).at[6].set(16)
    np.testing.assert_array_equal(f(q, k, v, table.at[1:6].set(table[0]), others)[0], together[0])
    wider = jnp.pad(table, ((0, 0), (0, 9)), constant_values=-5)
    np.testing.assert_array_equal(f(q, k, v, wider, lengths), together)
    for row in (0, 1, 5):
        alone = f(q[row : row + 1], k, v, table[row : row + 1], lengths[row : row + 1])
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_lengths_beyond_the_table_and_below_zero_count_as_its_ends(implementation):
    q, k, v, table, lengths = operands(4, 2, 64, 16, [32, 32, 0])
    out = call(implementation)(q, k, v, table, jnp.array([33, 2**31 - 1, -5]))
    np.testing.assert_array_equal(out, call(implementation)(q, k, v, table, lengths))
    np.testing.assert_array_equal(out[2], np.zeros((4, 64)))


@pytest.mark.parametrize("batch, pages", [(2, 128), (16, 128), (2, 1024)])
def test_memory_does_not_grow_with_batch_or_context(batch, pages):
    shape = shapes.Shape(batch, 8, 2, 128, 16, pages)
    compiled = jax.jit(call()).lower(*shape.arguments()).compile()
    tile = 2 * 256 * 2 * 128 * 4  # keys and values of a step in float32
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * tile


@pytest.mark.parametrize("implementation", [*RUNS_HERE, None])
@pytest.mark.parametrize(
    "shape", [(0, 4, 2, 16, 16, 2), (2, 0, 2, 16, 16, 2), (2, 4, 2, 16, 16, 0), (2, 4, 2, 16, 0, 2)], ids=str
)
def test_empty(shape, implementation):
    arrays = [jnp.zeros(x.shape, x.dtype) for x in shapes.Shape(*shape).arguments()]
    out = call(implementation)(*arrays)
    assert out.shape == arrays[0].shape
    np.testing.assert_array_equal(ref.f64(out), 0)


# --- errors and configuration ---------------------------------------------------------------------------------------


def _call(**changes):
    names = ("q", "k_cache", "v_cache", "page_table", "context_lens")
    arrays = dict(zip(names, operands(4, 2, 16, 16, [20, 3]), strict=True))
    return lambda: glass.paged_attention(**(arrays | changes))


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (_call(q=jnp.ones((2, 3, 16))), r"3 query heads .* cannot share 2 key-value heads"),
        (_call(q=jnp.ones((2, 4, 8))), r"k_cache has shape .* expected \[pages, page, Hk, D\] with D = 8 \(of q\)"),
        (_call(v_cache=jnp.ones((5, 8, 2, 16))), r"v_cache has shape \(5, 8, 2, 16\)"),
        (_call(page_table=jnp.ones((3, 2), int)), r"page_table has shape \(3, 2\)"),
        (_call(context_lens=jnp.ones((2, 1), int)), r"context_lens has shape \(2, 1\)"),
        (_call(context_lens=jnp.ones(2)), r"context_lens is float32; use int32"),
        (_call(page_table=jnp.ones((2, 2))), r"page_table is float32; use int32"),
        (_call(q=jnp.ones((2, 4, 16), int)), r"q is int32; use float32"),
        (_call(q=jnp.ones((2, 4, 16), jnp.bfloat16)), r"q is bfloat16, k_cache float32 and v_cache float32"),
        (_call(implementation="cuda"), r"implementation='cuda' is not one of"),
    ],
)
def test_errors(fails, message):
    with pytest.raises(ValueError, match=message):
        fails()


def test_derivatives_name_what_to_use():
    q, *rest = operands(4, 2, 16, 16, [20, 3])
    f = lambda q: glass.paged_attention(q, *rest).sum()  # noqa: E731
    for transformed in (jax.grad(f), lambda q: jax.jvp(f, (q,), (q,))):
        with pytest.raises(glass.errors.UnsupportedError, match="jax.nn.dot_product_attention"):
            transformed(q)
    held = lambda w: glass.paged_attention(jax.lax.stop_gradient(w * q), *rest).sum() * w  # noqa: E731
    np.testing.assert_allclose(jax.grad(held)(1.0), f(q), rtol=1e-6)


@pytest.mark.parametrize(("page", "dim", "name"), [(20, 32, "PAGE is 20"), (32, 24, "D is 24")])
def test_strict_alignment(page, dim, name):
    arrays = operands(2, 1, dim, page, [40])
    with (
        glass.configure(alignment="strict"),
        pytest.raises(glass.errors.HardwareConstraintError, match=f"{name}, not a multiple of 16 .* size is 32"),
    ):
        glass.paged_attention(*arrays)


def test_debug_says_what_is_padded(capfd):
    arrays = operands(2, 1, 24, 20, [40])
    with glass.configure(debug=True):
        jax.jit(call("npu_model")).lower(*arrays)
    assert "glass: paged_attention {'page': 20, 'd': 24}: padding PAGE 20 -> 64, D 24 -> 32" in capfd.readouterr().err


def test_ascend_does_not_run_on_a_cpu():
    with pytest.raises(glass.errors.UnsupportedError, match="glass.export"):
        call("ascend")(*operands(2, 1, 32, 16, [40]))
