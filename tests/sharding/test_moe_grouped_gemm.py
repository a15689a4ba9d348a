"""Experts on several devices as grouped products: dispatch, each device's own experts, combine."""

import dataclasses

import jax
import moe_reference as ref
import numpy as np
import pytest

import glass_jax as glass

RANKS, TOKENS, CHOICES, EXPERTS, WIDTH, OUT = 4, 6, 2, 8, 16, 8


@dataclasses.dataclass(frozen=True)
class Layer:
    """Linear experts: a rank's tokens, choices, weights and matrices."""

    implementation: str
    fixed_buffers: bool
    alignment: int = 1

    def __call__(self, x, idx, weights, matrices):
        rows, handle = glass.sharding.moe_dispatch(
            x, idx, weights, axis_name="x", num_experts=EXPERTS, fixed_buffers=self.fixed_buffers,
            alignment=self.alignment,
        )  # fmt: skip
        if self.fixed_buffers:
            y = glass.masked_grouped_gemm(rows, matrices, handle.group_sizes, implementation=self.implementation)
        else:
            # Of groups that begin at multiples of something, the padding belongs to them, and is zero.
            sizes = handle.padded_group_sizes if self.alignment > 1 else handle.group_sizes
            y = glass.grouped_gemm(rows, matrices, sizes, implementation=self.implementation)
        return glass.sharding.moe_combine(y, handle)


def problem(kind):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((RANKS, TOKENS, WIDTH)).astype(np.float32)
    idx, weights = ref.routing(0, RANKS, TOKENS, CHOICES, EXPERTS, kind)
    return x, idx, weights, rng.standard_normal((RANKS, EXPERTS // RANKS, WIDTH, OUT)).astype(np.float32)


@pytest.mark.parametrize("options", [(False, 1), (False, 8), (True, 1)], ids=["rows", "aligned", "buffers"])
@pytest.mark.parametrize(
    ("kind", "implementation"), [("uniform", "xla"), ("none", "xla"), ("skewed", "xla"), ("skewed", "npu_model")]
)
def test_a_mixture_of_experts(kind, options, implementation):
    x, idx, weights, matrices = problem(kind)
    out = ref.run(ref.DEVICES, Layer(implementation, *options), x, idx, weights, matrices)
    expected = ref.mixture(x, idx, weights, matrices.reshape(EXPERTS, WIDTH, OUT))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fixed_buffers", "implementation"), [(False, "xla"), (True, "xla"), (False, "npu_model")], ids=str
)
def test_its_gradients(fixed_buffers, implementation):
    """Of a sum that is linear in tokens and in matrices: the change along a direction is the mixture's of it."""
    x, idx, weights, matrices = problem("skewed")
    program = ref.sharded(ref.DEVICES, Layer(implementation, fixed_buffers), (("x", RANKS),))
    flat = [a.reshape(-1, *a.shape[2:]) for a in (x, idx, weights, matrices)]
    by_x, by_matrices = jax.grad(lambda x, m: program(x, *flat[1:3], m).sum(), (0, 1))(flat[0], flat[3])
    step = np.random.default_rng(2).standard_normal(x.shape)
    change = ref.mixture(step, idx, weights, matrices.reshape(EXPERTS, WIDTH, OUT)).sum()
    np.testing.assert_allclose(np.sum(np.asarray(by_x, np.float64) * step.reshape(by_x.shape)), change, rtol=1e-4)
    step = np.random.default_rng(3).standard_normal(by_matrices.shape)
    change = ref.mixture(x, idx, weights, step).sum()
    np.testing.assert_allclose(np.sum(np.asarray(by_matrices, np.float64) * step), change, rtol=1e-4)
