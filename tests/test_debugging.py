"""``glass.debug``: buffers at a moment, and the statement that makes the first NaN, with its line."""

import inspect

import numpy as np
import pytest
import tilelang.ascend.language as T

from glass_jax import debugging, errors


def product(depth=3, tile=32):
    """The product of two matrices, a step of K at a time, one tile of 16 rows for each of two blocks."""

    @T.prim_func
    def product(
        a: T.Tensor((2 * tile, depth * tile), "float16"),
        b: T.Tensor((tile, depth * tile), "float16"),
        c: T.Tensor((2 * tile, tile), "float32"),
    ):
        with T.Kernel(2) as bx:
            a_l1 = T.alloc_l1((tile, tile), "float16")
            b_l1 = T.alloc_l1((tile, tile), "float16")
            acc = T.alloc_l0c((tile, tile), "float32")
            for k in T.Pipelined(depth, num_stages=2):
                T.copy(a[bx * tile : (bx + 1) * tile, k * tile : (k + 1) * tile], a_l1)
                T.copy(b[:, k * tile : (k + 1) * tile], b_l1)
                T.gemm(a_l1, b_l1, acc, transpose_B=True, clear_accum=(k == 0))
            T.copy(acc, c[bx * tile, 0])

    return product


def ratios(steps=3, size=64):
    """(x - k) / (x - k), for k = 0, 1, ...: NaN where x is one of them."""

    @T.prim_func
    def ratios(x: T.Tensor((2 * size,), "float32"), y: T.Tensor((2 * size,), "float32")):
        with T.Kernel(2) as bx:
            u = T.alloc_shared((size,), "float32")
            v = T.alloc_shared((size,), "float32")
            for k in T.serial(steps):
                T.copy(x[bx * size : (bx + 1) * size], u)
                with T.SimtVF(threads=64):
                    for i in T.Parallel(size):
                        v[i] = (u[i] - T.cast(k, "float32")) / (u[i] - T.cast(k, "float32"))  # the line
                T.copy(v, y[bx * size : (bx + 1) * size])

    return ratios


def forgetful(size=64):
    """Stores a buffer that it has not filled."""

    @T.prim_func
    def forgetful(x: T.Tensor((size,), "float32"), y: T.Tensor((size,), "float32")):
        with T.Kernel(1):
            u = T.alloc_shared((size,), "float32")
            v = T.alloc_shared((size,), "float32")
            T.copy(x, u)
            T.copy(v, y)  # the line

    return forgetful


def line(function):
    """``file:line`` of the line of a function that is marked."""
    lines, first = inspect.getsourcelines(function)
    return f":{first + next(n for n, text in enumerate(lines) if 'the line' in text)}"


def operands():
    rng = np.random.default_rng(0)
    return rng.standard_normal((64, 96)).astype(np.float16), rng.standard_normal((32, 96)).astype(np.float16)


@pytest.mark.parametrize("block, k", [(0, 0), (1, 1), (1, 2)])
def test_buffers_at_an_iteration(block, k):
    a, b = operands()
    seen = debugging.debug(product())(a, b, watch=["acc", "a_l1"], at={"bx": block, "k": k})
    rows, columns = slice(32 * block, 32 * (block + 1)), slice(0, 32 * (k + 1))
    expected = a[rows, columns].astype(np.float64) @ b[:, columns].astype(np.float64).T
    np.testing.assert_allclose(seen["acc"], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(seen["a_l1"], a[rows, 32 * k : 32 * (k + 1)])


def test_without_a_moment_it_is_the_end_of_the_first_block():
    a, b = operands()
    seen = debugging.debug(product())(a, b, watch=["c"])
    np.testing.assert_allclose(seen["c"][:32], a[:32].astype(np.float64) @ b.astype(np.float64).T, rtol=1e-4, atol=1e-4)
    assert np.isnan(seen["c"][32:]).all()


def test_memories_of_vector_units_have_a_leading_axis():
    x = np.arange(128, dtype=np.float32) + 0.5
    seen = debugging.debug(ratios())(x, watch=["u"], at={"bx": 1, "k": 2})
    np.testing.assert_array_equal(seen["u"], x[None, 64:])


def test_first_nan_is_traced_to_its_line():
    x = np.arange(128, dtype=np.float32) + 0.5
    check = debugging.debug(ratios(), check_nans=True)
    np.testing.assert_array_equal(check(x), np.ones(128))
    x[70] = 2
    with pytest.raises(errors.NotANumberError) as caught:
        check(x)
    message = str(caught.value)
    assert caught.value.loc.endswith(line(ratios))
    assert "NaN in v" in message and "(0, 6)" in message and "bx = 1, k = 2" in message


def test_nan_of_memory_that_nobody_wrote():
    with pytest.raises(errors.NotANumberError, match="nobody has written it") as caught:
        debugging.debug(forgetful(), check_nans=True)(np.ones(64, np.float32))
    assert caught.value.loc.endswith(line(forgetful))


def test_names_that_are_not_there():
    a, b = operands()
    with pytest.raises(errors.HardwareConstraintError, match="no buffer acc2; it has .*acc"):
        debugging.debug(product())(a, b, watch=["acc2"])
    with pytest.raises(errors.HardwareConstraintError, match="no variable kk; it has bx, k"):
        debugging.debug(product())(a, b, watch=["acc"], at={"kk": 1})
    with pytest.raises(errors.HardwareConstraintError, match="never has k = 7"):
        debugging.debug(product())(a, b, watch=["acc"], at={"k": 7})
    with pytest.raises(errors.HardwareConstraintError, match="expected a TileLang kernel"):
        debugging.debug(np.sum)
