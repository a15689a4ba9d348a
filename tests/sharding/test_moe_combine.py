"""moe_combine and the gradients of both, against a dense mixture of experts in NumPy float64."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import moe_reference as ref
import numpy as np
import pytest
from moe_reference import DEVICES, SIMULATED

from glass_jax import errors
from glass_jax.sharding.expert_parallel import moe_combine, moe_dispatch

NODES = {"node": 2, "device": 4}


@dataclasses.dataclass(frozen=True)
class Layer:
    """Linear experts: ``x`` ``[T, H]``, choices ``[T, K]``, the rank's matrices ``[E/P, H, F]`` -> ``[T, F]``."""

    experts: int
    axis_name: tuple[str, ...] = ("x",)
    capacity: int | None = None
    fixed_buffers: bool = False
    weights_first: bool = False
    payload_dtype: type | None = None

    def __call__(self, x, idx, weights, matrices):
        names = {"axis_name": self.axis_name, "num_experts": self.experts, "capacity": self.capacity}
        names |= {"fixed_buffers": self.fixed_buffers, "payload_dtype": self.payload_dtype}
        rows, handle = moe_dispatch(x, idx, weights, **names)
        flat = rows.reshape(-1, rows.shape[-1])
        row = jnp.arange(len(flat))
        group = jnp.searchsorted(handle.group_starts, row, side="right") - 1
        y = jnp.sum(flat[:, :, None] * matrices[group], axis=1)
        y = jnp.where((row < handle.group_ends[group])[:, None], y, jnp.nan)  # a product may leave anything in padding
        if self.weights_first:
            y = (handle.row_weights[:, None] * y).astype(y.dtype)
        return moe_combine(y.reshape(*rows.shape[:-1], -1), handle, weighted=not self.weights_first)


@dataclasses.dataclass(frozen=True)
class Gradients:
    """A layer's value, its gradients by tokens, weights and matrices, and the derivative along tangents of the first
    two; equal ones are compiled once.
    """

    layer: Layer

    def __call__(self, x, idx, weights, matrices, cotangent, x_dot, weights_dot):
        out, back = jax.vjp(lambda x, w, m: self.layer(x, idx, w, m), x, weights, matrices)
        along = jax.jvp(lambda x, w: self.layer(x, idx, w, matrices), (x, weights), (x_dot, weights_dot))
        return out, back(cotangent), along


def problem(seed, ranks, tokens, k, experts, kind="uniform", width=3, out=2):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ranks, tokens, width)).astype(np.float32)
    idx, weights = ref.routing(seed, ranks, tokens, k, experts, kind)
    matrices = rng.standard_normal((ranks, experts // ranks, width, out)).astype(np.float32)
    return x, idx, weights, matrices


def expected(x, idx, weights, matrices):
    return ref.mixture(x, idx, weights, matrices.reshape(-1, *matrices.shape[2:]))


CASES = {
    # place, axes, options of the layer, and the routing
    "devices": (DEVICES, {"x": 8}, {}, "uniform"),
    "devices_skewed": (DEVICES, {"x": 8}, {}, "skewed"),
    "simulated_fixed_buffers": (SIMULATED, {"x": 8}, {"fixed_buffers": True}, "ranks"),
    "devices_weights_first": (DEVICES, {"x": 8}, {"weights_first": True}, "one"),
    "devices_of_two_nodes": (DEVICES, NODES, {"axis_name": ("node", "device")}, "skewed"),
    "simulated_nodes": (SIMULATED, NODES, {"axis_name": ("node", "device")}, "uniform"),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_of_a_mixture_of_experts(case):
    place, axes, options, kind = CASES[case]
    x, idx, weights, matrices = problem(0, 8, 80, 4, 32, kind)
    layer = Layer(32, **options)
    rng = np.random.default_rng(1)
    cotangent, x_dot, weights_dot = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((8, 80, 2), x.shape, weights.shape)
    )

    args = (x, idx, weights, matrices, cotangent, x_dot, weights_dot)
    out, (to_x, to_weights, to_matrices), along = ref.run(place, Gradients(layer), *args, axes=axes)
    np.testing.assert_allclose(out, expected(x, idx, weights, matrices), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(along[0], out)
    want = expected(x_dot, idx, weights, matrices) + expected(x, idx, weights_dot, matrices)
    np.testing.assert_allclose(along[1], want, rtol=1e-5, atol=2e-5)

    chosen = idx >= 0
    flat = matrices.reshape(32, 3, 2).astype(np.float64)
    per_choice = np.where(chosen[..., None, None], flat[idx], 0)  # [P, T, K, H, F]
    want = np.einsum("ptk,ptkhf,ptf->pth", weights, per_choice, cotangent)
    np.testing.assert_allclose(to_x, want, rtol=1e-5, atol=1e-5)
    want = np.einsum("pth,ptkhf,ptf->ptk", x, per_choice, cotangent)
    np.testing.assert_allclose(to_weights, want, rtol=1e-5, atol=1e-5)
    want = np.zeros((32, 3, 2))
    outer = weights[..., None, None] * (x[..., :, None] * cotangent[..., None, :])[:, :, None].astype(np.float64)
    np.add.at(want, idx[chosen], outer[chosen])
    np.testing.assert_allclose(to_matrices.reshape(32, 3, 2), want, rtol=1e-4, atol=1e-4)


def test_what_a_small_capacity_leaves_out_has_no_part_in_value_and_gradient():
    x, idx, weights, matrices = problem(0, 4, 20, 3, 8, "skewed")
    rows = ref.rows_of_experts(idx, 8, quota=10)
    kept = np.full_like(idx, -1)
    for expert, places in enumerate(rows):
        for rank, token in places:
            kept[rank, token][idx[rank, token] == expert] = expert
    layer = Layer(8, capacity=40)

    def run(x, idx, weights, matrices):
        out, back = jax.vjp(lambda x: layer(x, idx, weights, matrices), x)
        return out, back(jnp.ones_like(out))[0]

    out, to_x = ref.run(SIMULATED, run, x, idx, weights, matrices)
    assert (kept != idx).any()
    np.testing.assert_allclose(out, expected(x, kept, weights, matrices), rtol=1e-5, atol=1e-5)
    per_choice = np.where((kept >= 0)[..., None], matrices.reshape(8, 3, 2)[kept].sum(-1), 0)
    np.testing.assert_allclose(to_x, np.einsum("ptk,ptkh->pth", weights, per_choice), rtol=1e-5, atol=1e-5)


def test_tangents_of_a_dispatch_are_dispatched():
    """Bit for bit, and unlike the tokens not in 8 bits; under vmap, and in reverse over forward mode."""
    x, idx, weights, _ = problem(0, 4, 20, 3, 8, width=4)
    x_dot = np.random.default_rng(1).standard_normal((3, *x.shape)).astype(np.float32)

    def run(x, idx, weights, tangents):
        def dispatch(x, **options):
            return moe_dispatch(x, idx, weights, axis_name="x", num_experts=8, **options)[0]

        tangents = jnp.moveaxis(tangents, 1, 0)
        along = jax.vmap(lambda t: jax.jvp(lambda x: dispatch(x, payload_dtype=jnp.float8_e4m3fn), (x,), (t,))[1])
        square = lambda x: jnp.sum(jax.jvp(lambda x: dispatch(x**2), (x,), (tangents[0],))[1])  # noqa: E731
        return jnp.moveaxis(along(tangents), 0, 1), jax.vmap(dispatch, out_axes=1)(tangents), jax.grad(square)(x)

    along, dispatched, gradient = ref.run(SIMULATED, run, x, idx, weights, np.moveaxis(x_dot, 0, 2))
    np.testing.assert_array_equal(along, dispatched)
    chosen = np.array([[len(set(token) - {-1}) for token in rank] for rank in idx.tolist()])
    np.testing.assert_allclose(gradient, 2 * x_dot[0] * chosen[..., None], rtol=1e-6)


def test_second_derivatives():
    x, idx, weights, matrices = problem(0, 4, 5, 3, 8)
    layer = Layer(8)

    def loss(out):
        return jnp.sum(jnp.sin(out))

    def square_of_gradient(f):
        def inner(x, weights):
            gradients = jax.grad(lambda *args: loss(f(*args)), argnums=(0, 1))(x, weights)
            return sum(jnp.sum(g**2) for g in gradients)

        return jax.grad(inner, argnums=(0, 1))

    def run(x, idx, weights, matrices):
        return square_of_gradient(lambda x, w: layer(x, idx, w, matrices))(x, weights)

    def dense(x, weights):
        chosen = jnp.where((idx >= 0)[..., None, None], matrices.reshape(8, 3, 2)[idx], 0)
        return jnp.einsum("ptk,ptkhf,pth->ptf", weights, chosen, x)

    got = ref.run(SIMULATED, run, x, idx, weights, matrices)
    for part, want in zip(got, square_of_gradient(dense)(x, weights), strict=True):
        np.testing.assert_allclose(part, want, rtol=1e-4, atol=1e-4)


def test_an_input_that_is_the_same_on_all_ranks_has_the_sum_of_their_gradients():
    x, idx, weights, matrices = problem(0, 4, 6, 2, 8)
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.P("x")

    def loss(x, idx, weights, matrices):
        out = Layer(8)(x, idx, weights, matrices)
        return jax.lax.psum(jnp.sum(out), "x")

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(jax.P(), split, split, split), out_specs=jax.P())
    flat = [a.reshape(-1, *a.shape[2:]) for a in (idx, weights, matrices)]
    got = jax.jit(jax.grad(sharded))(x[0], *flat)
    per_choice = np.where((idx >= 0)[..., None], matrices.reshape(8, 3, 2)[idx].sum(-1), 0)
    np.testing.assert_allclose(got, np.einsum("ptk,ptkh->th", weights, per_choice), rtol=1e-4, atol=1e-4)


def test_sums_are_in_float32_in_order_of_k_from_the_bias_on_any_number_of_ranks():
    """Experts whose results differ so much in size that every other order has another sum."""
    rng = np.random.default_rng(0)
    tokens, k, experts = 24, 6, 8
    size = np.float32(10) ** rng.integers(-6, 7, experts).astype(np.float32)
    x = rng.standard_normal((tokens, 2)).astype(np.float32)
    bias = rng.standard_normal((tokens, 2)).astype(np.float32) * 1e3
    idx = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    weights = np.ones((tokens, k), np.float32)

    def f(x, idx, weights, bias, size):
        rows, handle = moe_dispatch(x, idx, weights, axis_name="x", num_experts=experts)
        group = jnp.searchsorted(handle.group_starts, jnp.arange(len(rows)), side="right") - 1
        return moe_combine(rows * size[group][:, None], handle, weighted=False, bias=bias)

    want = bias.copy()
    for j in range(k):
        want += x * size[idx[:, j]][:, None]
    for ranks in (1, 8):
        parts = [a.reshape(ranks, -1, *a.shape[1:]) for a in (x, idx, weights, bias, size)]
        out = ref.run(SIMULATED if ranks < 8 else DEVICES, f, *parts)
        np.testing.assert_array_equal(out.reshape(tokens, 2), want)


@pytest.mark.parametrize(("payload", "limit"), [(None, 5e-6), (ml_dtypes.float8_e4m3fn, 9e-4)], ids=["bf16", "fp8"])
def test_sixteen_bit_tokens(payload, limit):
    """The measure and the limits of the public implementation's own tests: 1 - 2 xy / (x^2 + y^2)."""
    x, idx, weights, _ = problem(0, 8, 30, 4, 16, width=256)
    eye = np.broadcast_to(np.eye(256, dtype=np.float32), (8, 2, 256, 256))

    def f(x, idx, weights):
        rows, handle = moe_dispatch(x, idx, weights, axis_name="x", num_experts=16, payload_dtype=payload)
        return moe_combine(rows, handle)

    x = x.astype(ml_dtypes.bfloat16)
    out = ref.run(DEVICES, f, x, idx, weights)
    assert out.dtype == x.dtype
    out, want = np.asarray(out, np.float64), expected(x, idx, weights, eye)
    assert 1 - 2 * np.sum(out * want) / np.sum(out**2 + want**2) < limit


def test_rows_of_the_wrong_number_are_refused():
    x, idx, weights, _ = problem(0, 4, 6, 2, 8)

    def f(x, idx, weights):
        rows, handle = moe_dispatch(x, idx, weights, axis_name="x", num_experts=8)
        return moe_combine(rows[1:], handle)

    with pytest.raises(errors.CollectiveError, match=r"y of shape \(47, 3\) is not one row for each .* \[48, H\]"):
        jax.eval_shape(jax.vmap(f, axis_name="x"), x, idx, weights)
