"""``glass.verify`` on JAX functions, and on TileLang kernels that the compiler takes or refuses without saying why."""

import jax
import jax.numpy as jnp
import pytest
import tilelang
import tilelang.ascend.language as T

from glass_jax import config, errors
from glass_jax.primitives.gemm import gemm
from glass_jax.verification import verify


def vectors(rows, columns):
    """Loads and stores a tile in UB."""

    @T.prim_func
    def kernel(x: T.Tensor((rows, 256), "float32"), y: T.Tensor((rows, 256), "float32")):
        with T.Kernel(1) as _:
            u = T.alloc_shared((rows, columns), "float32")
            T.copy(x[0:rows, 0:columns], u)
            T.copy(u, y[0:rows, 0:columns])

    return kernel


def product(m=64, n=64, k=64, dtype="float16", transpose_b=True):
    """One product from L1."""
    b_shape = (n, k) if transpose_b else (k, n)

    @T.prim_func
    def kernel(a: T.Tensor((m, k), dtype), b: T.Tensor(b_shape, dtype), c: T.Tensor((m, n), "float32")):
        with T.Kernel(1) as _:
            a_l1 = T.alloc_l1((m, k), dtype)
            b_l1 = T.alloc_l1(b_shape, dtype)
            c_l0 = T.alloc_l0c((m, n), "float32")
            T.copy(a, a_l1)
            T.copy(b, b_l1)
            T.gemm(a_l1, b_l1, c_l0, transpose_B=transpose_b, clear_accum=True)
            T.copy(c_l0, c)

    return kernel


def rules(found):
    return sorted({violation.rule for violation in found})


@pytest.mark.parametrize(
    "kernel, expected",
    [
        (product(), []),
        (vectors(64, 64), []),
        (vectors(1024, 64), ["memory-overflow"]),  # 256 of 248 KiB of UB; the compiler takes it
        (product(m=512, n=512), ["memory-overflow"]),  # 1 MiB of 256 KiB of L0C
        (product(m=512, n=128, k=512), ["memory-overflow"]),  # 640 of 512 KiB of L1
        (product(m=16, n=1040, k=16), ["l0-overflow"]),  # the compiler refuses these two
        (product(transpose_b=False), ["gemm-transpose"]),
        (vectors(16, 63), ["copy-rows"]),
    ],
)
def test_kernels(kernel, expected):
    found = verify(kernel, chip="950DT")
    assert rules(found) == expected
    for violation in found:
        assert violation.kernel == "kernel"
        assert "test_verification.py:" in violation.loc
        assert any(character.isdigit() for character in violation.message) or violation.rule == "gemm-transpose"
        assert violation.remedy


def test_jit_function_with_arguments():
    jitted = tilelang.jit(out_idx=[-1])(product)
    assert rules(verify(jitted, 64, 64)) == []
    assert rules(verify(jitted, 512, 512)) == ["memory-overflow"]


def test_function():
    def model(x, w):
        return jnp.tanh(gemm(gemm(x, w, activation="gelu"), w.T)).sum()

    x, w = jax.ShapeDtypeStruct((40, 64), jnp.float32), jax.ShapeDtypeStruct((64, 96), jnp.float32)
    assert verify(model, x, w) == []
    assert verify(jax.jit(jax.grad(model)), x, w, chip="950PR") == []
    found = verify(model, x, w, chip="910B3")
    assert "copy-path" in rules(found)
    assert all(violation.kernel.startswith("gemm_float32") for violation in found)
    with config.configure(chip="910B3"):
        assert rules(verify(model, x, w)) == rules(found)


def test_function_without_kernels():
    assert verify(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32)) == []


def test_mistakes():
    with pytest.raises(errors.HardwareConstraintError, match="did you mean 950DT"):
        verify(product(), chip="950TD")
    with pytest.raises(errors.HardwareConstraintError, match="gemm"):
        verify(gemm, jnp.zeros((2, 3)), jnp.zeros((4, 5)))


def test_a_refusal_that_no_rule_explains_is_raised():
    with pytest.raises(errors.GlassError, match="TileLang refused"):
        verify(product(dtype="float8_e5m2"))
