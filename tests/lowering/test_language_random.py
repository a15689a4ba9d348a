"""Random kernels on the NPU model against their meaning in NumPy."""

import npu
import numpy as np
import pytest
import random_kernels
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st


def check(kernel, seed):
    rng = np.random.default_rng(seed)
    shape = (kernel.rows, kernel.columns)
    x, y = (rng.integers(-5, 6, shape).astype(kernel.dtype) for _ in range(2))
    p = rng.integers(0, 11, kernel.rows).astype(np.int32)
    want = y.copy()
    kernel.meaning()(x, p, want)
    *_, got = npu.update(kernel.build(), x, p, y)
    np.testing.assert_array_equal(got, want, err_msg=f"{kernel.tile}\n{kernel.numpy}")


def check_many(count, start):
    @seed(start)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(random_kernels.kernels(), st.integers(0, 2**32 - 1))
    def examples(kernel, numbers):
        check(kernel, numbers)

    examples()


@pytest.mark.parametrize("start", [0, 1])
def test_random_kernels(start):
    check_many(100, start)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 120))
def test_ten_thousand_random_kernels(start):
    check_many(500, start)
