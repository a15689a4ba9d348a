"""Every operation with small operands whose dimensions have names, and ways to spread these over a mesh."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import glass_jax as glass

_RNG = np.random.default_rng(0)


def _normal(*shape, dtype="float32"):
    return np.asarray(jnp.asarray(_RNG.normal(size=shape), dtype))


def _integers(low, high, *shape):
    return _RNG.integers(low, high, shape).astype("int32")


def _quantized_product(a, a_scale, b, b_scale):
    return glass.scaled_gemm(a, a_scale, b, b_scale, preferred_element_type=jnp.float32)


def _sparse(q, kv, indices, sink, length):
    options = {"softmax_scale": 0.3, "head_dim_v": 4, "attn_sink": sink, "topk_length": length}
    return glass.sparse_mla_prefill(q, kv, indices, **options)


_SIZES = np.array([3, 0, 4, 1], "int32")
_LENGTHS = np.array([16, 3, 0, 7], "int32")
_SEGMENTS = np.array([[0, 0, 1, 1]] * 4, "int32")

# The function, and each operand with its dimensions; those of size 1 are called 1.
OPERATIONS = {
    "gemm": (
        lambda a, b, bias: glass.gemm(a, b, bias=bias, activation="silu"),
        (_normal(4, 4, 8), "b m k"),
        (_normal(8, 4), "k n"),
        (_normal(4), "n"),
    ),
    "gemm_transposed": (
        lambda a, b: glass.gemm(a, b, transpose_rhs=True),
        (_normal(4, 4, 8), "b m k"),
        (_normal(4, 4, 8), "b n k"),
    ),
    "grouped_gemm": (
        glass.grouped_gemm,
        (_normal(8, 4), "m k"),
        (_normal(4, 4, 4), "g k n"),
        (_SIZES, "g"),
    ),
    "masked_grouped_gemm": (
        glass.masked_grouped_gemm,
        (_normal(4, 4, 4), "g m k"),
        (_normal(4, 4, 4), "g k n"),
        (_SIZES, "g"),
    ),
    "scaled_gemm": (
        _quantized_product,
        (_normal(4, 128, dtype=jnp.float8_e4m3fn), "m k"),
        (2 * np.ones((4, 4), "float32"), "m g"),
        (_normal(4, 128, dtype=jnp.float8_e4m3fn), "n k"),
        (np.ones((4, 4), "float32"), "n g"),
    ),
    "ln_gelu_linear": (
        glass.ln_gelu_linear,
        (_normal(4, 4, 8), "r s k"),
        (_normal(8), "k"),
        (_normal(8), "k"),
        (_normal(8, 4), "k n"),
        (_normal(4), "n"),
    ),
    "linear_ln_gelu": (
        glass.linear_ln_gelu,
        (_normal(4, 4, 8), "r s k"),
        (_normal(8, 4), "k n"),
        (_normal(4), "n"),
        (_normal(4), "n"),
        (_normal(4), "n"),
    ),
    "mla_prefill": (
        lambda q, k, v: glass.mla_prefill(q, k, v, segment_ids=_SEGMENTS),
        (_normal(4, 4, 4, 8), "b s h d"),
        (_normal(4, 4, 4, 8), "b t h d"),
        (_normal(4, 4, 4, 4), "b t h v"),
    ),
    "mla_decode": (
        lambda q, cache, table, lengths, sink: glass.mla_decode(q, cache, table, lengths, head_dim_v=4, attn_sink=sink),
        (_normal(4, 4, 4, 8), "b s h d"),
        (_normal(8, 4, 1, 8), "p o 1 d"),
        (_integers(0, 8, 4, 4), "b n"),
        (_LENGTHS, "b"),
        (_normal(4), "h"),
    ),
    "sparse_mla_prefill": (
        _sparse,
        (_normal(4, 4, 8), "s h d"),
        (_normal(8, 1, 8), "t 1 d"),
        (_integers(-1, 8, 4, 1, 4), "s 1 c"),
        (_normal(4), "h"),
        (_integers(1, 5, 4), "s"),
    ),
    "paged_attention": (
        glass.paged_attention,
        (_normal(4, 8, 8), "b h d"),
        (_normal(8, 4, 4, 8), "p o g d"),
        (_normal(8, 4, 4, 8), "p o g d"),
        (_integers(0, 8, 4, 4), "b n"),
        (_LENGTHS, "b"),
    ),
    "mqa_logits": (
        glass.mqa_logits,
        (_normal(4, 4, 8), "s h d"),
        (_normal(8, 8), "n d"),
        (_normal(8), "n"),
        (_normal(4, 4), "s h"),
        (_integers(0, 3, 4), "s"),
        (_integers(4, 9, 4), "s"),
    ),
    "topk": (
        lambda x, end: glass.topk(x, 2, end=end, sorted=True),
        (_normal(4, 4, 8), "r s v"),
        (_integers(1, 9, 4, 4), "r s"),
    ),
    "moe_gate": (
        lambda logits, bias: glass.moe_gate(logits, bias, k=2, num_groups=2),
        (_normal(4, 4, 8), "r s e"),
        (0.1 * _normal(8), "e"),
    ),
    "quantize": (lambda x: glass.quantize(x, block=(1, 4)), (_normal(4, 4, 16), "b m k")),
    "rms_norm": (glass.rms_norm, (_normal(4, 4, 8), "r s d"), (_normal(8), "d")),
    "layer_norm": (glass.layer_norm, (_normal(4, 4, 8), "r s d"), (_normal(8), "d"), (_normal(8), "d")),
    "swiglu": (glass.swiglu, (_normal(4, 4, 8), "r s d"), (_normal(4, 4, 8), "r s d")),
}
WITHOUT_GRADIENT = {"scaled_gemm", "mla_decode", "paged_attention", "quantize"}


def results_and_gradients(name):
    """The operation, and the gradients of all float operands if it has them, as one function of the operands."""
    function, *operands = OPERATIONS[name]
    floats = [i for i, (array, _) in enumerate(operands) if array.dtype == np.float32]

    def run(*arrays):
        def loss(*moving):
            given = dict(enumerate(arrays)) | dict(zip(floats, moving, strict=True))
            results = function(*given.values())
            real = [x for x in jax.tree.leaves(results) if x.dtype == jnp.float32]
            return sum(jnp.sum(jnp.square(jnp.where(jnp.isfinite(x), x, 0))) for x in real), results

        if name in WITHOUT_GRADIENT:
            return function(*arrays)
        gradients, results = jax.grad(loss, tuple(range(len(floats))), has_aux=True)(*(arrays[i] for i in floats))
        return results, gradients

    return run


def arrays(name):
    return [jnp.asarray(array) for array, _ in OPERATIONS[name][1:]]


# --- layouts: a PartitionSpec for each operand ----------------------------------------------------------------------


def _spec(names, *places):
    """Of an operand: ``places`` are mesh axes, each with a function of position and name that says if it is there."""
    entries = [tuple(axis for axis, there in places if there(i, name)) for i, name in enumerate(names)]
    return jax.P(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in entries))


def _dimensions(name):
    return [dims.split() for _, dims in OPERATIONS[name][1:]]


def of_one_axis(name):
    """The axis "x" anywhere or nowhere in each operand."""
    each = [
        [_spec(names, ("x", lambda i, _, place=place: i == place)) for place in (-1, *range(len(names)))
         if place < 0 or names[place] != "1"]
        for names in _dimensions(name)
    ]  # fmt: skip
    return set(itertools.product(*each))


def of_two_axes(name):
    """Two axes, each in one dimension of one operand, or in a dimension of that name in all operands."""
    dims = _dimensions(name)
    places = [(k, i) for k, names in enumerate(dims) for i, dim in enumerate(names) if dim != "1"]
    alone = {
        tuple(
            _spec(names, ("x", lambda i, _, k=k, at=at: (k, i) == at), ("y", lambda i, _, k=k, at=to: (k, i) == at))
            for k, names in enumerate(dims)
        )
        for at, to in itertools.product(places, repeat=2)
    }
    alike = {
        tuple(_spec(names, ("x", lambda _, dim, a=a: dim == a), ("y", lambda _, dim, b=b: dim == b)) for names in dims)
        for a, b in itertools.product(sorted({dim for names in dims for dim in names} - {"1"}), repeat=2)
    }
    return alone | alike


def scattered(name):
    """A layout that operands do not agree on: the axes move on by a dimension from one operand to the next."""
    layout = []
    for k, names in enumerate(_dimensions(name)):
        free = [i for i, dim in enumerate(names) if dim != "1"]
        x, y = (free[(k + step) % len(free)] for step in range(2))
        layout.append(_spec(names, ("x", lambda i, _, x=x: i == x), ("y", lambda i, _, y=y: i == y)))
    return tuple(layout)
