"""sparse_mla_prefill against NumPy float64: what runs here; its promises about queries and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glass_jax as glass
import sparse_mla_prefill_reference as ref
from benchmarks.shapes import sparse_mla_prefill as shapes

RUNS_HERE = ("xla", "npu_model")
OPTIONS = {"softmax_scale": 512**-0.5, "head_dim_v": 512}


def call(implementation="xla", **options):
    return functools.partial(glass.sparse_mla_prefill, implementation=implementation, **OPTIONS | options)


def check(arrays, implementation, **options):
    out, largest, lse = jax.jit(call(implementation, **options))(*arrays)
    assert out.dtype == arrays[0].dtype and largest.dtype == lse.dtype == jnp.float32
    ref.check((out, largest, lse), ref.attention(*arrays, **OPTIONS | options))


CASES = {  # queries, heads, tokens, topk; options of the operands; options of the call
    "one_query": ((1, 16, 40, 24), {}, {}),
    "more_indices_than_tokens": ((3, 2, 95, 128), {"depth": 576}, {}),
    "invalid_ones_among_the_others": ((4, 3, 300, 160), {"scattered": True}, {}),
    "lengths": ((5, 2, 60, 40), {"scattered": True}, {"topk_length": [0, 1, -3, 17, 99]}),
    "sinks": ((3, 3, 60, 40), {}, {"attn_sink": [-2.0, 0.5, 6.0]}),
    "more_heads_than_a_block": ((2, 80, 60, 40), {}, {}),
    "odd": ((5, 3, 41, 23), {"depth": 72, "dtype": "float16"}, {"head_dim_v": 40, "softmax_scale": 0.1}),
    "float32": ((2, 4, 200, 130), {"dtype": "float32"}, {}),
}


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("case", CASES)
def test_it_is_attention_over_the_named_tokens_alone(case, implementation):
    """Tokens that are not named are NaN."""
    sizes, operands, options = CASES[case]
    options = {name: jnp.array(x) if isinstance(x, list) else x for name, x in options.items()}
    check(ref.operands(*sizes, **operands), implementation, **options)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_a_nan_that_is_named_stays_one(implementation):
    """In the queries that name it; as in ``nn.MLA`` where an indexer does."""
    rng = np.random.default_rng(0)
    q, kv = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 2, 24), (6, 1, 24)))
    kv, indices = kv.at[5].set(jnp.nan), jnp.array([[[0, 5, -1]], [[1, 2, 3]]])
    for result in jax.jit(call(implementation, head_dim_v=16))(q, kv, indices):
        assert np.isnan(result[0]).all() and np.isfinite(result[1]).all()


@pytest.mark.parametrize("tokens, topk", [(128, 128), (95, 128), (153, 256), (114, 384)])
@pytest.mark.parametrize(
    "queries, heads, depth",
    [
        (1, 64, 512),
        (1, 128, 576),
        *(
            pytest.param(queries, heads, depth, marks=pytest.mark.slow)
            for queries in (62, 213)
            for heads in (64, 128)
            for depth in (512, 576)
        ),
    ],
)
def test_matrix_on_xla(queries, heads, depth, tokens, topk):
    check(ref.operands(queries, heads, tokens, topk, depth=depth), "xla")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("name", shapes.SHAPES)
def test_named_shapes(name, implementation):
    shape = shapes.SHAPES[name]
    arrays = ref.operands(
        min(shape.queries, 3), shape.heads, shape.tokens, shape.topk, depth=shape.depth, dtype=shape.dtype
    )
    check(arrays, implementation, **shape.options)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_an_index_that_occurs_twice_counts_twice(implementation):
    q, kv, _ = ref.operands(2, 2, 20, 4, depth=32, unnamed=0.1)
    indices = jnp.array([[[3, 7, 3, 3, 7]], [[-1, 5, -1, 5, 20]]])
    check((q, kv, indices), implementation, head_dim_v=16)


def test_float64_on_xla_only():
    with jax.enable_x64(True):
        arrays = ref.operands(3, 2, 60, 40, dtype="float64", scattered=True)
        want = ref.attention(*arrays, **OPTIONS)
        for x, y in zip(call()(*arrays), want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)
        with pytest.raises(glass.errors.UnsupportedError, match="no float64"):
            call("npu_model")(*arrays)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_sinks_that_take_all_or_nothing(implementation):
    arrays = ref.operands(2, 2, 40, 16, depth=32)
    arrays = (*arrays[:2], arrays[2].at[1].set(-1))  # a query without tokens has nothing to lose
    out, largest, lse = call(implementation, head_dim_v=16, attn_sink=jnp.array([jnp.inf, -jnp.inf]))(*arrays)
    want, *rest = ref.attention(*arrays, **OPTIONS | {"head_dim_v": 16})
    want[:, 0] = 0
    ref.check((out, largest, lse), (want, *rest))


# --- a query depends on its own tokens only -------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_queries_are_the_same_bit_for_bit_in_any_company(implementation):
    q, kv, indices = ref.operands(6, 3, 300, 140, depth=96, scattered=True)
    lengths = jnp.array([140, 3, 0, 129, 128, 70])
    f = jax.jit(lambda q, kv, indices, n: call(implementation, head_dim_v=64, topk_length=n)(q, kv, indices))
    together = [np.asarray(x) for x in f(q, kv, indices, lengths)]

    def same(actual, expected):
        for x, y in zip(actual, expected, strict=True):
            assert np.asarray(x).tobytes() == y.tobytes()

    order = np.array([3, 0, 5, 2, 1, 4])
    same(f(q[order], kv, indices[order], lengths[order]), [x[order] for x in together])
    same(f(q[1:2], kv, indices[1:2], lengths[1:2]), [x[1:2] for x in together])


@pytest.mark.parametrize("queries, topk", [(4, 2048), (16, 2048), (4, 8192)])
def test_tokens_of_one_step_are_gathered_at_a_time(queries, topk):
    shape = shapes.Shape(queries, 8192, topk, 64)
    compiled = jax.jit(call()).lower(*shape.arguments()).compile()
    results_and_indices = queries * (64 * 512 * 2 + 4 * topk)
    # A step has 1024 tokens and their scores, 1.2 MB and 0.3 MB, and sums of the values.
    assert compiled.memory_analysis().temp_size_in_bytes < 2**22 + 2 * results_and_indices


@pytest.mark.parametrize("implementation", [*RUNS_HERE, None])
@pytest.mark.parametrize("sizes", [(0, 20, 4, 2), (2, 0, 4, 2), (2, 20, 0, 2), (2, 20, 4, 0)], ids=str)
def test_empty(sizes, implementation):
    shape = shapes.Shape(*sizes, depth=32, head_dim_v=16)
    arrays = [jnp.zeros(x.shape, x.dtype) for x in shape.arguments()]
    out, largest, lse = call(implementation, head_dim_v=16)(*arrays)
    assert out.shape == (shape.queries, shape.heads, 16) and out.dtype == jnp.bfloat16
    assert largest.shape == lse.shape == (shape.queries, shape.heads)
    assert not out.any() and (largest == -jnp.inf).all() and (lse == jnp.inf).all()
    gradients = jax.grad(lambda q, kv: call(implementation, head_dim_v=16)(q, kv, arrays[2])[0].sum(), (0, 1))
    assert not any(x.any() for x in gradients(*arrays[:2]))


# --- errors and configuration ---------------------------------------------------------------------------------------


def _call(**changes):
    arrays = dict(zip(("q", "kv", "indices"), ref.operands(3, 4, 20, 8, depth=32, dtype="float32"), strict=True))
    return lambda: glass.sparse_mla_prefill(**{"head_dim_v": 16, "softmax_scale": 1.0} | arrays | changes)


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (_call(q=jnp.ones((1, 3, 4, 32))), r"q has shape \(1, 3, 4, 32\), expected \[Sq, H, D\]"),
        (_call(kv=jnp.ones((20, 1, 16))), r"kv has shape .* expected \[Skv, 1, D\] with D = 32 \(of q\)"),
        (_call(kv=jnp.ones((20, 2, 32))), r"kv has shape \(20, 2, 32\)"),
        (_call(indices=jnp.ones((4, 1, 8), int)), r"indices has shape \(4, 1, 8\), .* Sq = 3 \(of q\)"),
        (_call(indices=jnp.ones((3, 8), int)), r"indices has shape \(3, 8\), expected \[Sq, 1, topk\]"),
        (_call(indices=jnp.ones((3, 1, 8))), r"indices is float32; use int32"),
        (_call(topk_length=jnp.ones((3, 1), int)), r"topk_length has shape \(3, 1\), expected \[Sq\]"),
        (_call(topk_length=jnp.ones(3)), r"topk_length is float32; use int32"),
        (_call(q=jnp.ones((3, 4, 32), int)), r"q is int32; use float32"),
        (_call(q=jnp.ones((3, 4, 32), jnp.bfloat16)), r"q is bfloat16 and kv is float32; cast q to float32"),
        (_call(head_dim_v=33), r"head_dim_v=33 of tokens of 32 numbers .* pass 1 to 32"),
        (_call(attn_sink=jnp.ones(3)), r"attn_sink has shape \(3,\), expected \[H\] with H = 4 \(of q\)"),
        (_call(attn_sink=jnp.ones(4, int)), r"attn_sink is int32; use float32"),
        (_call(implementation="cuda"), r"implementation='cuda' is not one of"),
    ],
)
def test_errors(fails, message):
    with pytest.raises(ValueError, match=message):
        fails()


def test_a_kernel_for_tokens_that_do_not_fit():
    arrays = shapes.Shape(2, 20, 8, 4, depth=4096).arguments()
    with pytest.raises(glass.errors.OutOfOnChipMemoryError, match="l1"):
        jax.jit(call("npu_model")).lower(*arrays)


@pytest.mark.parametrize(("depth", "value", "name"), [(40, 16, "D is 40"), (48, 40, "HEAD_DIM_V is 40")])
def test_strict_alignment(depth, value, name):
    arrays = ref.operands(2, 2, 20, 8, depth=depth)
    message = f"sparse_mla_prefill: {name}, not a multiple of 16 .* size is 48"
    with glass.configure(alignment="strict"), pytest.raises(glass.errors.HardwareConstraintError, match=message):
        call(head_dim_v=value)(*arrays)


def test_debug_says_what_is_padded(capfd):
    arrays = ref.operands(2, 3, 20, 8, depth=72)
    with glass.configure(debug=True):
        jax.jit(call("npu_model", head_dim_v=40)).lower(*arrays)
    error = capfd.readouterr().err
    assert "glass: sparse_mla_prefill" in error and "padding ROWS 3 -> 16, D 72 -> 80, HEAD_DIM_V 40 -> 48" in error


def test_ascend_does_not_run_on_a_cpu():
    with pytest.raises(glass.errors.UnsupportedError, match="glass.export"):
        call("ascend")(*ref.operands(2, 2, 20, 8))
