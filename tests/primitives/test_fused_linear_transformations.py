"""ln_gelu_linear and linear_ln_gelu under vmap, derivatives, checkpoint, scan, shard_map and jit on meshes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.test_util import check_grads

import fused_linear_reference as judge
import glass_jax as glass
import numpy_reference as ref

M, K, N = 8, 64, 32
BEFORE = [(M, K), (K,), (K,), (K, N), (N,)]
AFTER = [(M, K), (K, N), (N,), (N,), (N,)]
SHAPES = {"ln_gelu_linear": BEFORE, "linear_ln_gelu": AFTER}


def _arrays(shapes, dtype="float32"):
    rng = np.random.default_rng(0)
    return [ref.random(rng, shape, dtype) for shape in shapes]


def _op(name, **options):
    return functools.partial(getattr(glass, name), **options)


# --- vmap ----------------------------------------------------------------------------------------------------------


def _mapped(args, in_axes, size):
    """Each position's operands, as NumPy sees them."""
    moved = [ref.f64(x) if d is None else np.moveaxis(ref.f64(x), d, 0) for x, d in zip(args, in_axes, strict=True)]
    return [[x if d is None else x[i] for x, d in zip(moved, in_axes, strict=True)] for i in range(size)]


@pytest.mark.parametrize(
    "in_axes",
    [
        (0, None, None, None, None),
        (None, 0, None, None, None),
        (None, None, -1, None, None),
        (None, None, None, 0, None),
        (None, None, None, None, 0),
        (1, 0, 0, -1, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", SHAPES)
def test_vmap(name, in_axes):
    shapes = [s if d is None else tuple(np.insert(s, d % (len(s) + 1), 3)) for s, d in zip(SHAPES[name], in_axes)]  # noqa: B905
    args = _arrays(shapes)
    out = jax.jit(jax.vmap(_op(name), in_axes))(*args)
    ref.assert_close(out, np.stack([getattr(judge, name)(*each) for each in _mapped(args, in_axes, 3)]))


@pytest.mark.parametrize("name", SHAPES)
def test_vmap_on_the_npu(name):
    """Rows are folded; with weights of its own, each position is a launch."""
    op = _op(name, implementation="npu_model")
    args = _arrays([(3, *SHAPES[name][0]), *SHAPES[name][1:]])
    ref.assert_close(jax.vmap(op, (0, *[None] * 4))(*args), getattr(judge, name)(*args))
    args = _arrays([SHAPES[name][0], *((3, *s) for s in SHAPES[name][1:])])
    in_axes = (None, *[0] * 4)
    expected = np.stack([getattr(judge, name)(*each) for each in _mapped(args, in_axes, 3)])
    ref.assert_close(jax.vmap(op, in_axes)(*args), expected)


@pytest.mark.parametrize("name", SHAPES)
def test_nested_vmap_over_different_operands(name):
    x, *others, last = _arrays([(2, *SHAPES[name][0]), *SHAPES[name][1:4], (3, *SHAPES[name][4])])
    axes = [None] * 5
    inner = jax.vmap(_op(name), (*axes[1:], 0))
    out = jax.vmap(inner, (0, *axes[1:]))(x, *others, last)
    expected = [[getattr(judge, name)(row, *others, vector) for vector in last] for row in x]
    ref.assert_close(out, np.array(expected))


def test_vmap_does_not_copy_weights():
    args = [jax.ShapeDtypeStruct(s, "float32") for s in ((64, 2, 32), (32,), (32,), (32, 256))]
    compiled = jax.jit(jax.vmap(glass.ln_gelu_linear, (0, None, None, None))).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 32 * 256 * 4 / 8


# --- derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bias", "approximate", "order"),
    [(True, True, 2), pytest.param(True, False, 2, marks=pytest.mark.slow), (True, False, 1), (False, True, 1)],
)
@pytest.mark.parametrize("name", SHAPES)
def test_first_and_second_derivatives(name, bias, approximate, order):
    width = 4 if name == "ln_gelu_linear" else 3
    with jax.enable_x64(True):
        x, w, gamma, beta, b = (a.astype("float64") for a in _arrays([(2, 4), (4, 3), (width,), (width,), (3,)]))

        def fn(x, w, gamma, beta, b=None):
            operands = (x, gamma, beta, w, b) if name == "ln_gelu_linear" else (x, w, b, gamma, beta)
            return getattr(glass, name)(*operands, approximate=approximate)

        args = (x, w, gamma, beta, b) if bias else (x, w, gamma, beta)
        check_grads(jax.jit(fn), args, order=order, modes=("fwd", "rev"))


@pytest.mark.parametrize("name", SHAPES)
def test_gradient_is_the_same_on_every_implementation(name):
    args, weight = _arrays(SHAPES[name]), _arrays([(M, N)])[0]

    def gradients(implementation):
        loss = lambda *a: jnp.sum(_op(name, implementation=implementation)(*a) * weight)  # noqa: E731
        return jax.jit(jax.grad(loss, range(5)))(*args)

    for on_npu, here in zip(gradients("npu_model"), gradients("xla"), strict=True):
        ref.assert_close(on_npu, ref.f64(here))


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_keep_the_dtype_of_the_operands(name):
    args = _arrays(SHAPES[name], "bfloat16")
    grads = jax.grad(lambda *a: _op(name)(*a).astype("float32").sum(), range(5))(*args)
    assert [g.dtype for g in grads] == [jnp.dtype("bfloat16")] * 5


@pytest.mark.parametrize("name", SHAPES)
def test_checkpoint_scan_and_jvp(name):
    x, *rest = _arrays([(M, 16), *[(16, 16) if len(s) == 2 else (16,) for s in SHAPES[name][1:]]])
    stacked = [jnp.stack([a, a + 0.1]) for a in rest]
    step = lambda x, p: (_op(name)(x, *p), None)  # noqa: E731
    scanned = lambda p: jax.lax.scan(jax.checkpoint(step), x, p)[0]  # noqa: E731
    plain = lambda p: functools.reduce(lambda x, i: _op(name)(x, *(a[i] for a in p)), range(2), x)  # noqa: E731
    chex.assert_trees_all_close(scanned(stacked), plain(stacked), rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(
        jax.grad(lambda p: scanned(p).sum())(stacked), jax.grad(lambda p: plain(p).sum())(stacked), rtol=1e-3, atol=1e-3
    )
    chex.assert_trees_all_close(
        jax.jvp(scanned, (stacked,), (stacked,)), jax.jvp(plain, (stacked,), (stacked,)), rtol=1e-3, atol=1e-3
    )


# --- meshes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
@pytest.mark.parametrize("name", SHAPES)
def test_shard_map_data_parallel(name, implementation):
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices()[:8], axis_types=(AxisType.Auto,))
    args = _arrays(SHAPES[name])
    f = jax.shard_map(
        lambda *a: _op(name, implementation=implementation)(*a),
        mesh=mesh,
        in_specs=(jax.P("data"), *[jax.P()] * 4),
        out_specs=jax.P("data"),
        check_vma=True,
    )
    ref.assert_close(jax.jit(f)(*args), getattr(judge, name)(*args))
    if implementation == "xla":  # the invariant operands' gradients are summed over the axis, as on one device
        grads = jax.jit(jax.grad(lambda *a: f(*a).sum(), range(5)))(*args)
        whole = jax.grad(lambda *a: _op(name)(*a).sum(), range(5))(*args)
        for one, other in zip(grads, whole, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)


# Each operand's spec by the dimension that is shared out: rows, columns, or both.
SPECS = {
    "ln_gelu_linear": {
        "m": [("x", None), (), (), (), ()],
        "n": [(), (), (), (None, "y"), ("y",)],
        "mn": [("x", None), (), (), (None, "y"), ("y",)],
    },
    "linear_ln_gelu": {"m": [("x", None), (), (), (), ()], "mm": [(("x", "y"), None), (), (), (), ()]},
}
CASES = [(name, case) for name, cases in SPECS.items() for case in cases]


def _on_mesh(name, specs, axis_type):
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8], axis_types=(axis_type,) * 2)
    arrays = _arrays(SHAPES[name])
    return mesh, [jax.device_put(a, jax.NamedSharding(mesh, jax.P(*s))) for a, s in zip(arrays, specs, strict=True)]


def _collectives(compiled) -> list[str]:
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    return [kind for kind in kinds if f" {kind}" in compiled.as_text()]


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case}" for name, case in CASES])
def test_parallel_dimensions_stay_where_they_are(name, case, axis_type, implementation):
    specs = SPECS[name][case]
    mesh, args = _on_mesh(name, specs, axis_type)
    with jax.set_mesh(mesh):
        f = jax.jit(_op(name, implementation=implementation))
        compiled = f.lower(*args).compile()
        out = f(*args)
    ref.assert_close(out, getattr(judge, name)(*args))
    assert _collectives(compiled) == []
    columns = "y" if "n" in case else None
    assert out.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P(specs[0][0] if specs[0] else None, columns)), 2)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("name", SPECS)
def test_other_dimensions_are_made_whole(name, axis_type):
    """K is normalized over, or summed over before the normalization: sharded operands are gathered."""
    specs = (
        [("x", "y"), ("y",), ("y",), ("y", None), ()] if name == "ln_gelu_linear" else [("x", "y"), ("y",), (), (), ()]
    )
    mesh, args = _on_mesh(name, specs, axis_type)
    with jax.set_mesh(mesh):
        f = jax.jit(_op(name))
        compiled = f.lower(*args).compile()
        ref.assert_close(f(*args), getattr(judge, name)(*args))
    assert _collectives(compiled) == ["all-gather"]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("name", SPECS)
def test_gradients_on_a_mesh(name, axis_type):
    mesh, args = _on_mesh(name, SPECS[name]["mn" if name == "ln_gelu_linear" else "m"], axis_type)
    loss = lambda *a: (_op(name)(*a) ** 2).sum()  # noqa: E731
    with jax.set_mesh(mesh):
        grads = jax.jit(jax.grad(loss, range(5)))(*args)
    for one, other in zip(grads, jax.grad(loss, range(5))(*_arrays(SHAPES[name])), strict=True):
        ref.assert_close(one, ref.f64(other), 1e-4)
