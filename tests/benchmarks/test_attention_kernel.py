"""The flash-attention kernel on the NPU model against NumPy in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glass_jax as glass
from benchmarks.kernels import attention
from glass_jax.hw.program import Space
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang import user

FLOAT16_SMALLEST = 2.0**-24


def operands(heads, length, dtype, size=1.0):
    """Queries are ``size`` times as long, so that scores are."""
    rng = np.random.default_rng(heads * length)
    factors = (size, 1.0, 1.0)
    return [jnp.asarray(factor * rng.standard_normal((heads, length, 128)), dtype) for factor in factors]


def expected(q, k, v, causal):
    """Attention in float64, and how far the kernel may be from it.

    A probability is rounded to 16 bits, by half a unit in the last place of numbers near one or by half the smallest
    number, and so is the result; the sums in float32 add little, which the other half of each unit is for.
    """
    epsilon = float(jnp.finfo(v.dtype).eps)
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    s = np.einsum("hqd,hkd->hqk", q, k) / np.sqrt(128)
    if causal:
        s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    want, sizes = (np.einsum("hqk,hkd->hqd", p, x) for x in (v, abs(v)))
    return want, epsilon * (sizes + abs(want)) + FLOAT16_SMALLEST * abs(v).sum(1, keepdims=True)


def check(q, k, v, causal):
    out = jax.jit(lambda *args: attention.attention(*args, causal=causal))(q, k, v)
    want, bound = expected(q, k, v, causal)
    assert out.shape == q.shape and out.dtype == q.dtype
    excess = abs(np.asarray(out).astype(np.float64) - want) / bound
    assert excess.max() <= 1, f"{excess.max()} times the bound"  # also where a NaN makes the comparison false


@pytest.mark.parametrize("heads, length, dtype, causal", [
    (1, 256, "float16", False),
    (2, 300, "bfloat16", False),
    (1, 300, "float16", True),
    (2, 77, "bfloat16", True),
], ids=str)  # fmt: skip
def test_it_is_attention(heads, length, dtype, causal):
    check(*operands(heads, length, dtype), causal)


def test_maxima_that_grow_from_tile_to_tile():
    """Long queries make one key win; keys that grow make the maxima of later tiles the larger ones."""
    q, k, v = operands(1, 300, "float16", size=20.0)
    k *= jnp.linspace(0.2, 1.0, 300, dtype="float16")[:, None]
    check(q, k, v, True)


def compiled(dtype, causal, chip="950DT"):
    kernel = attention.flash_attention(1, 300, dtype, causal)
    return kernel, cache.compile(user.user_kernel(kernel), chip)


@pytest.mark.parametrize("chip", ["950DT", "950PR"])
def test_no_chip_of_its_kind_rejects_it(chip):
    kernel, artifact = compiled("float16", True, chip)
    assert glass.verify(kernel, chip=chip) == []
    versions = {(room.space, room.buffer): room.versions for room in artifact.memory}
    doubled = {(Space.L1, "k_l1"), (Space.L1, "v_l1"), (Space.L0C, "s_l0c"), (Space.L0C, "o_l0c")}
    doubled |= {(Space.UB, name) for name in ("s", "p", "new")}
    assert {place for place, count in versions.items() if count == 2} >= doubled


def test_rows_are_computed_together():
    """Of the loops those over blocks and keys are left, and what is affine is sliced."""
    text = jax.jit(lambda *args: attention.attention(*args, causal=True)).lower(*operands(1, 300, "float16")).as_text()
    assert len(re.findall(r"stablehlo\.while\"?\(", text)) == 2
    assert "gather" not in text and "scatter" not in text
