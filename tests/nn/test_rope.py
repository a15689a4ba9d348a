import math

import jax.numpy as jnp
import numpy as np
import pytest

import deepseek_reference as reference
from glass_jax.nn import YaRN, rope

YARNS = {
    "none": None,
    "v3": YaRN(factor=40, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
    "v2-lite": YaRN(factor=40, original_length=4096, mscale=0.707, mscale_all_dim=0.707),
    "unequal scales": YaRN(factor=4, original_length=512, mscale=1.0, mscale_all_dim=0.5),
    "no scales": YaRN(factor=8, original_length=64, beta_fast=16, beta_slow=2),
    "no extension": YaRN(factor=1, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
}


def raw(features, yarn, interleave=True):
    scaling = yarn and {
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }
    return {"qk_rope_head_dim": features, "rope_scaling": scaling, "rope_interleave": interleave}


@pytest.mark.parametrize("features", [4, 8, 64])
@pytest.mark.parametrize("yarn", YARNS.values(), ids=YARNS)
def test_frequencies_and_scales(features, yarn):
    speeds, turned, scores = reference.rotation(raw(features, yarn))
    np.testing.assert_allclose(rope.frequencies(features, 10000.0, yarn), speeds, rtol=1e-6)
    if yarn is not None:
        assert yarn.rotation_scale == pytest.approx(turned)
        assert yarn.score_scale == pytest.approx(scores)


def test_published_scale_of_v3():
    """0.1 ln 40 + 1, squared, is what V3's attention scores are multiplied by; its rotation is not scaled."""
    assert YARNS["v3"].score_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert YARNS["v3"].rotation_scale == 1.0


@pytest.mark.parametrize("interleave", [True, False])
def test_scores_against_numpy(interleave):
    rng, yarn = np.random.default_rng(0), YARNS["unequal scales"]
    q, k = rng.standard_normal((2, 9, 8))
    positions = np.arange(9) * 37
    angles = jnp.asarray(positions[:, None] * rope.frequencies(8, 10000.0, yarn))
    turned = [rope.rotate(jnp.asarray(x), angles, interleave=interleave, scale=yarn.rotation_scale) for x in (q, k)]
    want = [
        [reference.rotate(x, p, raw(8, yarn, interleave)) for x, p in zip(y, positions, strict=True)] for y in (q, k)
    ]
    np.testing.assert_allclose(turned[0] @ turned[1].T, np.array(want[0]) @ np.array(want[1]).T, atol=2e-4)


def test_result_keeps_the_dtype():
    x = jnp.ones((3, 8), jnp.bfloat16)
    assert rope.rotate(x, jnp.zeros((3, 4)), interleave=True).dtype == jnp.bfloat16
