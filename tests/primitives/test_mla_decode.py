"""mla_decode against NumPy float64: every implementation that runs here; its promises about rows, pages and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glass_jax as glass
import mla_decode_reference as ref
from benchmarks.shapes import mla_decode as shapes

RUNS_HERE = ("xla", "npu_model")


def call(implementation="xla", **options):
    return functools.partial(glass.mla_decode, implementation=implementation, **options)


def check(arrays, implementation, **options):
    out, lse = jax.jit(call(implementation, **options))(*arrays)
    assert out.dtype == arrays[0].dtype and lse.dtype == jnp.float32
    ref.check((out, lse), ref.attention(*arrays, **{"head_dim_v": 512} | options))


CASES = {  # lengths, heads, options of the operands, options of the call
    "one_row": ([20], 16, {}, {}),
    "rows_of_all_lengths": ([140, 0, 1, 300, 64], 3, {"queries": 2}, {"causal": True}),
    "sinks": ([140, 0, 40], 3, {"queries": 2}, {"attn_sink": [-2.0, 0.5, 6.0]}),
    "more_rows_than_a_block": ([130, 20], 20, {"queries": 4, "depth": 512}, {"causal": True}),
    "pages_of_1": ([3, 140], 1, {"page": 1}, {}),
    "pages_of_576": ([577, 40], 2, {"page": 576, "dtype": "float16"}, {}),
    "odd": ([41, 5], 3, {"queries": 2, "page": 20, "depth": 72}, {"head_dim_v": 40, "softmax_scale": 0.1}),
    "float32": ([200, 3], 4, {"dtype": "float32"}, {}),
}


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("case", CASES)
def test_it_is_attention_over_the_sequence_alone(case, implementation):
    """Unused pages and ends of pages are NaN, unused table entries nonsense."""
    lengths, heads, operands, options = CASES[case]
    options = {name: jnp.array(x) if name == "attn_sink" else x for name, x in options.items()}
    check(ref.operands(lengths, heads, **operands), implementation, **options)


@pytest.mark.parametrize("queries, causal", [(1, False), (2, True), (4, True)])
@pytest.mark.parametrize("tokens", [20, 140, 1100])
@pytest.mark.parametrize("batch, heads", [(1, 128), (2, 1), (6, 16)])
def test_matrix_on_xla(batch, heads, tokens, queries, causal):
    lengths = [tokens - row * tokens // batch for row in range(batch)]
    check(ref.operands(lengths, heads, queries=queries), "xla", causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("name", shapes.SHAPES)
def test_named_shapes(name, implementation):
    shape = shapes.SHAPES[name]
    longest = shape.page * shape.table_pages
    arrays = ref.operands(
        [max(longest - 37 * row, 0) for row in range(shape.batch)], shape.heads, queries=shape.queries,
        depth=shape.depth, page=shape.page, spare=0, dtype=shape.dtype,
    )  # fmt: skip
    check(arrays, implementation, **shape.options)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [6, 64])
def test_long_sequences_in_large_batches(batch):
    check(ref.operands([4096 - 60 * row for row in range(batch)], 2, queries=2), "xla", causal=True)


def test_float64_on_xla_only():
    with jax.enable_x64(True):
        arrays = ref.operands([40, 3], 2, dtype="float64")
        out, lse = call()(*arrays)
        want, want_lse = ref.attention(*arrays, head_dim_v=512)
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-14)
        with pytest.raises(glass.errors.UnsupportedError, match="no float64"):
            call("npu_model")(*arrays)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_extreme_sinks_and_scores(implementation):
    """A sink that takes all or nothing; scores in the hundreds of one row, and infinite ones of another."""
    q, *rest = ref.operands([140, 30, 0], 2)
    sink = jnp.array([jnp.inf, -jnp.inf])
    out, lse = call(implementation, attn_sink=sink)(q.at[0].mul(100).at[1].set(jnp.inf), *rest)
    want, want_lse = ref.attention(q.at[0].mul(100), *rest, head_dim_v=512)
    want[:, :, 0] = 0
    rows = np.array([0, 2])
    ref.check((out[rows], lse[rows]), (want[rows], want_lse[rows]))


# --- a row depends on its own tokens only ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "implementation, dtype", [("xla", "float32"), ("xla", "bfloat16"), ("xla", "float16"), ("npu_model", "bfloat16")]
)
def test_rows_are_the_same_bit_for_bit_in_any_company(dtype, implementation):
    options = {"queries": 2, "depth": 96, "page": 16, "dtype": dtype}
    q, cache, table, lengths = ref.operands([700, 1, 0, 512, 40, 513, 16], 3, **options)
    f = jax.jit(call(implementation, head_dim_v=64, causal=True, attn_sink=jnp.arange(3.0)))

    def same(actual, expected):
        for x, y in zip(actual, expected, strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()

    def pick(results, rows):
        return [np.asarray(x)[rows] for x in results]

    together = f(q, cache, table, lengths)
    order = np.array([3, 6, 0, 5, 1, 2, 4])
    same(f(q[order], cache, table[order], lengths[order]), pick(together, order))
    others = lengths.at[1:].set(jnp.array([0, 256, 5, 300, 200, 0]))
    same(pick(f(q, cache, table.at[1:].set(table[0]), others), [0]), pick(together, [0]))
    same(f(q, cache, jnp.pad(table, ((0, 0), (0, 9)), constant_values=-5), lengths), together)
    for row in (0, 1, 5):
        one = slice(row, row + 1)
        same(f(q[one], cache, table[one], lengths[one]), pick(together, [row]))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_lengths_beyond_the_table_and_below_zero_count_as_its_ends(implementation):
    q, cache, table, _ = ref.operands([32, 32, 0], 2, page=16, spare=0)
    f = call(implementation)
    out, lse = f(q, cache, table, jnp.array([33, 2**31 - 1, -5]))
    expected = f(q, cache, table, jnp.array([32, 32, 0]))
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    assert not out[2].any() and (lse[2] == jnp.inf).all()


@pytest.mark.parametrize("batch, pages", [(2, 32), (16, 32), (2, 512)])
def test_memory_does_not_grow_with_batch_or_sequence(batch, pages):
    shape = shapes.Shape(batch, 1, 16, 64, pages)
    compiled = jax.jit(call()).lower(*shape.arguments()).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**22  # a step's 1024 tokens are 1.2 MB


@pytest.mark.parametrize("implementation", [*RUNS_HERE, None])
@pytest.mark.parametrize(
    "shape", [(0, 1, 2, 16, 2), (2, 0, 2, 16, 2), (2, 1, 0, 16, 2), (2, 1, 2, 16, 0), (2, 1, 2, 0, 2)], ids=str
)
def test_empty(shape, implementation):
    shape = shapes.Shape(*shape, depth=32, head_dim_v=16)
    out, lse = call(implementation, head_dim_v=16)(*(jnp.zeros(x.shape, x.dtype) for x in shape.arguments()))
    assert out.shape == (shape.batch, shape.queries, shape.heads, 16) and out.dtype == jnp.bfloat16
    assert lse.shape == (shape.batch, shape.heads, shape.queries) and lse.dtype == jnp.float32
    assert not out.any() and (lse == jnp.inf).all()


# --- errors and configuration ---------------------------------------------------------------------------------------


def _call(**changes):
    names = ("q", "kv_cache", "block_table", "cache_seqlens")
    arrays = dict(zip(names, ref.operands([20, 3], 4, depth=32, page=16, dtype="float32"), strict=True))
    return lambda: glass.mla_decode(**{"head_dim_v": 16} | arrays | changes)


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (_call(q=jnp.ones((2, 4, 32))), r"q has shape \(2, 4, 32\), expected \[B, Sq, H, D\]"),
        (
            _call(q=jnp.ones((2, 1, 4, 16))),
            r"kv_cache has shape .* expected \[pages, page, 1, D\] with D = 16 \(of q\)",
        ),
        (_call(kv_cache=jnp.ones((5, 16, 2, 32))), r"kv_cache has shape \(5, 16, 2, 32\)"),
        (_call(block_table=jnp.ones((3, 2), int)), r"block_table has shape \(3, 2\)"),
        (_call(cache_seqlens=jnp.ones((2, 1), int)), r"cache_seqlens has shape \(2, 1\)"),
        (_call(cache_seqlens=jnp.ones(2)), r"cache_seqlens is float32; use int32"),
        (_call(block_table=jnp.ones((2, 2))), r"block_table is float32; use int32"),
        (_call(q=jnp.ones((2, 1, 4, 32), int)), r"q is int32; use float32"),
        (_call(q=jnp.ones((2, 1, 4, 32), jnp.bfloat16)), r"q is bfloat16 and kv_cache is float32; cast q to float32"),
        (_call(head_dim_v=33), r"head_dim_v=33 of tokens of 32 numbers .* pass 1 to 32"),
        (_call(attn_sink=jnp.ones(3)), r"attn_sink has shape \(3,\), expected \[H\] with H = 4 \(of q\)"),
        (_call(attn_sink=jnp.ones(4, int)), r"attn_sink is int32; use float32"),
        (_call(implementation="cuda"), r"implementation='cuda' is not one of"),
    ],
)
def test_errors(fails, message):
    with pytest.raises(ValueError, match=message):
        fails()


def test_derivatives_name_what_to_use():
    q, *rest = ref.operands([20, 3], 4, depth=32, page=16, dtype="float32", unused=0)
    f = lambda q, cache: glass.mla_decode(q, cache, *rest[1:], head_dim_v=16)[0].sum()  # noqa: E731
    for transformed in (jax.grad(f), jax.grad(f, 1), lambda *args: jax.jvp(f, args, args)):
        with pytest.raises(glass.errors.UnsupportedError, match="glass.mla_prefill"):
            transformed(q, rest[0])
    held = lambda w: f(*map(jax.lax.stop_gradient, (w * q, rest[0]))) * w  # noqa: E731
    np.testing.assert_allclose(jax.grad(held)(1.0), f(q, rest[0]), rtol=1e-6)


@pytest.mark.parametrize(("depth", "value", "name"), [(40, 16, "D is 40"), (48, 40, "HEAD_DIM_V is 40")])
def test_strict_alignment(depth, value, name):
    arrays = ref.operands([40], 2, depth=depth)
    with (
        glass.configure(alignment="strict"),
        pytest.raises(glass.errors.HardwareConstraintError, match=f"{name}, not a multiple of 16 .* size is 48"),
    ):
        call(head_dim_v=value)(*arrays)


def test_debug_says_what_is_padded(capfd):
    arrays = ref.operands([41, 5], 3, queries=2, page=20, depth=72)
    with glass.configure(debug=True):
        jax.jit(call("npu_model", head_dim_v=40, softmax_scale=0.1)).lower(*arrays)
    assert "padding ROWS 6 -> 16, D 72 -> 80, HEAD_DIM_V 40 -> 48" in capfd.readouterr().err


def test_ascend_does_not_run_on_a_cpu():
    with pytest.raises(glass.errors.UnsupportedError, match="glass.export"):
        call("ascend")(*ref.operands([40], 2))
