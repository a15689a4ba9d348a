"""mla_prefill against NumPy float64 on every implementation that runs here, its gradient, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import glass_jax as glass
import mla_prefill_reference as ref
from glass_jax import errors

RUNS_HERE = ("xla", "npu_model")

# batch, queries, keys, heads, d, dv, dtype; then causal and the number of packed sequences
CASES = {
    "one_token": ((2, 1, 1, 2, 192, 128, "bfloat16"), True, None),
    "62_float16": ((1, 62, 62, 2, 192, 128, "float16"), True, None),
    "213_packed": ((2, 213, 213, 1, 192, 128, "bfloat16"), True, 3),
    "later_queries_float32": ((1, 40, 153, 2, 192, 128, "float32"), True, None),
    "odd_heads_see_everything": ((1, 153, 95, 2, 40, 72, "bfloat16"), False, None),
    "queries_that_see_nothing": ((1, 150, 62, 1, 64, 64, "float32"), True, None),
    "all_ids_differ": ((1, 130, 130, 1, 64, 64, "float32"), False, 0),
}


def run(operands, implementation, **options):
    q, k, v, ids = operands
    fn = jax.jit(lambda q, k, v: glass.mla_prefill(q, k, v, segment_ids=ids, implementation=implementation, **options))
    return fn(q, k, v)


def gradients(operands, implementation, d_out, d_lse, **options):
    """Those of q, k and v, from the gradients of both results."""
    _, pullback = jax.vjp(
        lambda q, k, v: glass.mla_prefill(q, k, v, segment_ids=operands[3], implementation=implementation, **options),
        *operands[:3],
    )
    return jax.jit(pullback)((d_out, d_lse))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("case", CASES)
def test_it_is_attention(case, implementation):
    sizes, causal, packed = CASES[case]
    operands = ref.operands(*sizes, ids=packed)
    out, lse = run(operands, implementation, causal=causal)
    assert out.dtype == sizes[-1] and lse.dtype == jnp.float32
    expected = ref.attention(*operands[:3], causal=causal, segment_ids=operands[3])
    ref.assert_attention((out, lse), expected)
    assert np.isposinf(lse).any() == (case == "queries_that_see_nothing")


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("case", ["213_packed", "later_queries_float32", "queries_that_see_nothing", "all_ids_differ"])
def test_its_gradient(case, implementation):
    sizes, causal, packed = CASES[case]
    operands = ref.operands(*sizes, ids=packed)
    rng = np.random.default_rng(1)
    out, lse = jax.eval_shape(glass.mla_prefill, *operands[:3])
    d_out = jnp.asarray(rng.standard_normal(out.shape), out.dtype)
    d_lse = jnp.asarray(rng.standard_normal(lse.shape), lse.dtype)
    expected = ref.attention(*operands[:3], causal=causal, segment_ids=operands[3], d_out=d_out, d_lse=d_lse)
    for actual, want in zip(gradients(operands, implementation, d_out, d_lse, causal=causal), expected[2], strict=True):
        assert actual.dtype == sizes[-1]
        ref.assert_close(actual, want, 2 * ref.TOLERANCE[sizes[-1]])  # probabilities and their gradients are rounded


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [None, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 129), (127, 128), (129, 300), (300, 129), (257, 257)], ids=str)
def test_every_edge(lengths, dtype, packed, causal):
    if packed is not None and lengths[0] != lengths[1]:
        pytest.skip("packed sequences have as many keys as queries")
    operands = ref.operands(1, *lengths, 2, 192, 128, dtype, ids=packed)
    rng = np.random.default_rng(1)
    d_out = jnp.asarray(rng.standard_normal((1, lengths[0], 2, 128)), dtype)
    d_lse = jnp.asarray(rng.standard_normal((1, 2, lengths[0])), jnp.float32)
    expected = ref.attention(*operands[:3], causal=causal, segment_ids=operands[3], d_out=d_out, d_lse=d_lse)
    for implementation in RUNS_HERE:
        ref.assert_attention(run(operands, implementation, causal=causal), expected[:2])
        grads = gradients(operands, implementation, d_out, d_lse, causal=causal)
        for actual, want in zip(grads, expected[2], strict=True):
            ref.assert_close(actual, want, 2 * ref.TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_maxima_that_grow_from_block_to_block(implementation):
    """Long queries make one key win; keys that grow make the maxima of later blocks the larger ones."""
    q, k, v, _ = ref.operands(1, 300, 300, 1, 64, 64, "float32", size=20.0)
    k = k * jnp.linspace(0.2, 1.0, 300)[:, None, None]
    results = run((q, k, v, None), implementation, softmax_scale=0.2)
    ref.assert_attention(results, ref.attention(q, k, v, softmax_scale=0.2))


@pytest.mark.parametrize("implementation", [*RUNS_HERE, None])
@pytest.mark.parametrize("sizes", [(0, 4, 4, 2), (2, 0, 3, 2), (2, 3, 0, 2), (1, 2, 2, 0)], ids=str)
def test_empty(sizes, implementation):
    operands = ref.operands(*sizes, 16, 8, "float32")
    results = run(operands, implementation)
    ref.assert_attention(results, ref.attention(*operands[:3]))
    grads = gradients(operands, implementation, *map(jnp.ones_like, results))
    assert [g.shape for g in grads] == [x.shape for x in operands[:3]]
    assert not any(g.any() for g in grads)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    d=st.integers(1, 20),
    dv=st.integers(1, 20),
    causal=st.booleans(),
    packed=st.sampled_from([None, 0, 1, 5]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_call_agrees_with_numpy(lengths, d, dv, causal, packed, dtype, seed):
    queries, keys = lengths if packed is None else (lengths[0], lengths[0])
    operands = ref.operands(1, queries, keys, 1, d, dv, dtype, ids=packed, seed=seed)
    expected = ref.attention(*operands[:3], causal=causal, segment_ids=operands[3])
    ref.assert_attention(run(operands, None, causal=causal), expected)


def test_operands_of_different_types_are_promoted():
    q, k, v, _ = ref.operands(1, 5, 5, 1, 8, 8, "bfloat16")
    out, _ = glass.mla_prefill(q.astype(jnp.float32), k, v)
    assert out.dtype == jnp.float32


def test_memory_does_not_grow_with_the_square_of_the_length():
    def temporary(length, fn):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        return jax.jit(fn).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    forward = lambda *a: glass.mla_prefill(*a)[0]  # noqa: E731
    for fn in (forward, jax.grad(lambda *a: forward(*a).sum(), (0, 1, 2))):
        assert temporary(4096, fn) < 3 * temporary(2048, fn)
        assert temporary(4096, fn) < 2 * 4096**2 * 4 / 8


# --- errors, each before anything compiles -------------------------------------------------------------------------

X = jnp.ones((2, 4, 3, 16))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: glass.mla_prefill(X[0], X, X), r"q has shape \(4, 3, 16\), expected \[B, Sq, H, D\]"),
        (lambda: glass.mla_prefill(X, X[..., :8], X), r"k has shape .* D = 16 \(of q\)"),
        (lambda: glass.mla_prefill(X, X[:, :, :1], X), r"k has shape .* H = 3 \(of q\)"),
        (lambda: glass.mla_prefill(X, X, X[:, :2]), r"v has shape .* Skv = 4 \(of k\)"),
        (lambda: glass.mla_prefill(X.astype(jnp.int32), X, X), r"q is int32; use float32"),
        (lambda: glass.mla_prefill(X[..., :0], X[..., :0], X), r"D is 0 and Dv 16"),
        (lambda: glass.mla_prefill(X, X, X, softmax_scale=-1.0), r"softmax_scale=-1.0; pass a positive number"),
        (lambda: glass.mla_prefill(X, X, X, softmax_scale=float("nan")), r"pass a positive number"),
        (lambda: glass.mla_prefill(X, X, X, segment_ids=jnp.zeros((2, 4))), r"segment_ids is float32; use int32"),
        (lambda: glass.mla_prefill(X, X, X, segment_ids=jnp.zeros((2, 5), int)), r"segment_ids has shape \(2, 5\)"),
        (
            lambda: glass.mla_prefill(X[:, :2], X, X, segment_ids=jnp.zeros((2, 2), int)),
            r"k has shape .* S = 2 \(of q\)",
        ),
        (lambda: glass.mla_prefill(X, X, X, implementation="cuda"), r"'cuda' is not one of xla, npu_model, host"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_strict_alignment_names_dimension_multiple_and_next_size():
    with glass.configure(alignment="strict"):
        with pytest.raises(
            errors.HardwareConstraintError, match="DV is 16, not a multiple of 64 .* next valid size is 64"
        ):
            glass.mla_prefill(X, X, X)
        wide = jnp.ones((1, 4, 1, 64))
        glass.mla_prefill(wide[..., :48], wide[..., :48], wide)


def test_debug_says_what_is_padded(capsys):
    with glass.configure(debug=True):
        glass.mla_prefill(X, X, X, implementation="npu_model")
    assert "mla_prefill {'d': 16, 'dv': 16}: padding DV 16 -> 64" in capsys.readouterr().err


def test_float64_is_refused_by_the_npu():
    with jax.enable_x64(True), pytest.raises(errors.UnsupportedError, match="no float64"):
        glass.mla_prefill(*[X.astype(jnp.float64)] * 3, implementation="npu_model")


def test_ascend_does_not_run_on_a_cpu():
    with pytest.raises(errors.UnsupportedError, match="glass.export"):
        glass.mla_prefill(X, X, X, implementation="ascend")


def test_heads_that_no_chip_has_room_for():
    wide = jnp.ones((1, 4, 1, 1024))
    with pytest.raises(errors.OutOfOnChipMemoryError, match="l1 .* of 524288 bytes.*Take smaller head dimensions"):
        glass.mla_prefill(wide, wide, wide, implementation="npu_model")
