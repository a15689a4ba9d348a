"""Kernels that synchronize themselves: decoded, compiled with TileLang's scheduler off, run and verified."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tilelang
import tilelang.ascend.language as T

from glass_jax import errors, verification
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir import serialization
from glass_jax.hw.model import executor
from glass_jax.lowering.tilelang import decode, user
from glass_jax.primitives.tilelang_call import tilelang_call

TILE, TILES = 32, 3


def scaled_product(forget=False):
    """out = 2 x w.T, tile by tile: the cube hands each product to both vector units, or forgets to tell the second."""

    @T.prim_func
    def scaled_product(
        x: T.Tensor((TILES * TILE, TILE), "float16"),
        w: T.Tensor((TILE, TILE), "float16"),
        y: T.Tensor((TILES * TILE, TILE), "float32"),
    ):
        with T.Kernel(1):
            a = T.alloc_l1((TILE, TILE), "float16")
            b = T.alloc_l1((TILE, TILE), "float16")
            c = T.alloc_l0c((TILE, TILE), "float32")
            u = T.alloc_shared((TILE // 2, TILE), "float32")
            v = T.alloc_shared((TILE // 2, TILE), "float32")
            with T.Cube():
                T.copy(w, b)
                T.ascend_set_flag("MTE1_MTE2", 0)
                T.ascend_set_flag("FIX_M", 0)
                for t in T.serial(TILES):
                    T.ascend_wait_flag("MTE1_MTE2", 0)
                    T.copy(x[t * TILE : (t + 1) * TILE, :], a)
                    T.ascend_set_flag("MTE2_MTE1", 0)
                    T.ascend_wait_flag("MTE2_MTE1", 0)
                    T.ascend_wait_flag("FIX_M", 0)
                    T.gemm(a, b, c, transpose_B=True, clear_accum=True)
                    T.ascend_set_flag("MTE1_MTE2", 0)
                    T.ascend_set_flag("M_FIX", 0)
                    T.ascend_wait_flag("M_FIX", 0)
                    T.ascend_cross_core_wait_flag(4, "PIPE_FIX", 2)
                    T.ascend_cross_core_wait_flag(4, "PIPE_FIX", 18)
                    T.dual_copy(c, u)
                    T.ascend_cross_core_set_flag(4, "PIPE_FIX", 3)
                    if not forget:
                        T.ascend_cross_core_set_flag(4, "PIPE_FIX", 19)
                    T.ascend_set_flag("FIX_M", 0)
                T.ascend_wait_flag("MTE1_MTE2", 0)
                T.ascend_wait_flag("FIX_M", 0)
                T.ascend_cross_core_wait_flag(4, "PIPE_FIX", 2)
                T.ascend_cross_core_wait_flag(4, "PIPE_FIX", 18)
            with T.Vector() as sid:
                T.ascend_cross_core_set_flag(4, "PIPE_V", 2)
                T.ascend_set_flag("MTE3_V", 0)
                for t in T.serial(TILES):
                    T.ascend_cross_core_wait_flag(4, "PIPE_V", 3)
                    T.ascend_wait_flag("MTE3_V", 0)
                    with T.SimtVF(threads=128):
                        for i, j in T.Parallel(TILE // 2, TILE):
                            v[i, j] = u[i, j] * 2.0
                    T.ascend_cross_core_set_flag(4, "PIPE_V", 2)
                    T.ascend_set_flag("V_MTE3", 0)
                    T.ascend_wait_flag("V_MTE3", 0)
                    T.copy(v, y[t * TILE + sid * (TILE // 2), 0])
                    T.ascend_set_flag("MTE3_V", 0)
                T.ascend_wait_flag("MTE3_V", 0)

    return scaled_product


def mutex(chunk=256, chunks=4):
    """y = x + 1, two buffers taken in turns, ordered by locks."""

    @tilelang.jit(target="ascend", out_idx=-1, pass_configs={tilelang.PassConfigKey.TL_ENABLE_AUTO_SCHEDULE: False})
    def kernel():
        @T.prim_func
        def mutex(x: T.Tensor((chunks * chunk,), "float32"), y: T.Tensor((chunks * chunk,), "float32")):
            with T.Kernel(1):
                u = T.alloc_shared((2, chunk), "float32")
                v = T.alloc_shared((2, chunk), "float32")
                for t in T.serial(chunks):
                    f = t % 2
                    T.ascend_get_buf("PIPE_MTE2", f)
                    T.copy(x[t * chunk : (t + 1) * chunk], u[f, :])
                    T.ascend_rls_buf("PIPE_MTE2", f)
                    T.ascend_get_buf("PIPE_V", f)
                    T.ascend_get_buf("PIPE_V", f + 2)
                    with T.SimtVF(threads=128):
                        for i in T.Parallel(chunk):
                            v[f, i] = u[f, i] + 1.0
                    T.ascend_rls_buf("PIPE_V", f + 2)
                    T.ascend_rls_buf("PIPE_V", f)
                    T.ascend_get_buf("PIPE_MTE3", f + 2)
                    T.copy(v[f, :], y[t * chunk : (t + 1) * chunk])
                    T.ascend_rls_buf("PIPE_MTE3", f + 2)

        return mutex

    return kernel


def data():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((TILES * TILE, TILE)), rng.standard_normal((TILE, TILE))
    return x.astype(np.float16), w.astype(np.float16)


def test_sections_become_the_programs_sections():
    program = decode.decode(scaled_product())
    sections = [stmt for stmt in ir.walk(program.body) if isinstance(stmt, ir.Section)]
    assert [section.core for section in sections] == ["cube", "vector"]
    assert program.manual and program.units == 2 and program.unit.name == "sid"
    assert serialization.from_json(serialization.to_json(program)) == program
    assert all(stmt.loc for section in sections for stmt in ir.walk(section.body) if isinstance(stmt, ir.Op))


def test_a_split_kernel_is_compiled_with_the_scheduler_off():
    kernel = user.user_kernel(scaled_product())
    assert dict(kernel.pass_configs)[decode.AUTO_SCHEDULE] is False
    assert verification.verify(scaled_product()) == []


def test_a_split_kernel_as_a_jax_operation():
    x, w = data()
    out = jax.ShapeDtypeStruct((TILES * TILE, TILE), jnp.float32)
    result = jax.jit(tilelang_call(scaled_product(), out_shape=out))(x, w)
    np.testing.assert_allclose(result, 2 * x.astype(np.float64) @ w.astype(np.float64).T, rtol=1e-4, atol=1e-4)


def test_a_lost_flag_is_a_deadlock_with_its_line():
    forgetful = scaled_product(forget=True)
    with pytest.raises(errors.DeadlockError, match="vector unit 1, pipe V waits for cross-core flag 3") as caught:
        executor.run(decode.decode(forgetful), data(), (2,))
    assert "test_hand_split.py:" in str(caught.value)
    assert {violation.rule for violation in verification.verify(forgetful)} == {"deadlock"}


def test_locks():
    kernel = mutex()
    x = np.arange(1024, dtype=np.float32)
    assert verification.verify(kernel) == []
    out = tilelang_call(kernel, out_shape=jax.ShapeDtypeStruct((1024,), jnp.float32))(x)
    np.testing.assert_array_equal(out, x + 1)
