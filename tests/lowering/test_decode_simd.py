"""SIMD regions as TileLang writes them: every operation has its form in a Program and runs on the NPU model."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tilelang.ascend.language as T
from tilelang.ascend.language import simd as S
from tilelang.layout import make_ascend_compact_nz_layout, make_ascend_nz_layout

import glass_jax as glass
from glass_jax import errors
from glass_jax.hw.ir import printer
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model import executor
from glass_jax.lowering.tilelang import decode

N = 64


@T.prim_func
def everything(a: T.Tensor((256,), "float32"), b: T.Tensor((256,), "int32"), c: T.Tensor((256,), "uint8")):
    """Every operation of ``tl.simd`` once; what it computes is tested in tests/hw."""
    with T.Kernel(1):
        f = T.alloc_shared((256,), "float32")
        i = T.alloc_shared((256,), "int32")
        h = T.alloc_shared((256,), "int16")
        u = T.alloc_shared((512,), "uint8")
        T.copy(a, f)
        T.copy(b, i)
        T.copy(c, u[0:256])
        with T.SimdVF():
            m8, m16, m32 = S.pset(8), S.pge(16, "PAT_VL8"), S.update_mask(T.int32(7), 32)
            x, y = S.vld(f[0]), S.vld(f[64], dist="BRC_B32")
            k, j = S.vld(i[0]), S.vld(i[64])
            v, w = S.vld(u[0]), S.vld(h[0])
            even, odd = S.vld2(f[0], dist="DINTLV_B32")
            bits = S.pld(u[0], dist="US")
            p = S.pand(m32, S.por(m8, S.pxor(m16, bits, m8), m8), m8)
            p = S.psel(p, S.pnot(p, m8), m32)
            p0, p1 = S.pintlv(S.ppack(p, "LOWER"), S.punpack(p, "HIGHER"), 32)
            q0, q1 = S.pdintlv(p0, p1, 16)
            s = S.vadd(S.vsub(x, y), S.vmul(S.vdiv(even, odd), S.vmax(x, S.vmin(x, y))))
            s = S.vexp(S.vln(S.vsqrt(S.vabs(S.vneg(S.vrelu(s))))), precision="ftz_false")
            s = S.vprelu(S.vlrelu(s, T.float32(0.5)), S.vabsdif(x, S.vexpdif(x, y)))
            s = S.vadds(S.vmuls(S.vmaxs(S.vmins(s, 2.0), 1.0), 3.0), 4.0)
            t = S.vand(S.vor(k, j), S.vxor(k, S.vnot(j)))
            t = S.vshl(S.vshr(t, j), S.vshls(S.vshrs(k, T.int32(1)), T.int32(2)))
            carry0, t0 = S.vaddc(k, j)
            carry1, t1 = S.vsubc(k, j)
            carry2, t2 = S.vaddcs(t0, t1, carry0)
            carry3, t3 = S.vsubcs(t1, t2, carry1)
            low, high = S.vmull(t2, t3)
            acc = S.alloc_local(2, "float32")
            acc[0] = S.vdup(1.0, "float32")
            acc[1] = S.vdupv(x, m32, "POS_HIGHEST")
            S.vmula(acc[0], x, y)
            S.vmadd(acc[1], x, y, m32, "MODE_MERGING")
            S.vaxpy(acc[0], x, T.float32(2.0))
            acc[0] = S.vadds(x, 1.0, m32, mode="MODE_MERGING")
            counts = S.alloc_var("uint16")
            counts = S.vdup(T.uint16(0), "uint16")
            S.dhistv2(counts, v, m8, bin=1)
            S.chistv2(counts, v)
            r = S.vadd(S.vcadd(x), S.vadd(S.vcmax(x), S.vadd(S.vcmin(x), S.vcpadd(x))))
            r = S.vadd(r, S.vadd(S.vcgadd(x), S.vadd(S.vcgmax(x), S.vcgmin(x))))
            r = S.vsqz(S.vsel(r, acc[0], S.vcmp(x, y, m32, "ge")), S.vcmps(x, T.float32(0.0), m32, "lt"))
            z0, z1 = S.vintlv(r, acc[1])
            z2, z3 = S.vdintlv(z0, z1)
            z = S.vselr(z2, S.vci(T.int32(0), "int32"))
            z = S.vadd(z, T.reinterpret(S.vusqz(p), "float32x64"))
            g = S.vgather2(f[0], S.vci(T.uint32(0), "uint32"))
            g = S.vadd(g, S.vgatherb(f[0], S.vmuls(S.vci(T.uint32(0), "uint32"), T.uint32(32)), m32))
            packed = S.vpack(S.vunpack(w, "LOWER"), "HIGHER")
            half = S.vcvt(s, "float16", m32, part=1)
            S.vsts(f[0], S.vadd(s, S.vadd(z, S.vadd(z3, g))), m32)
            S.vsts(i[0], S.vadd(t, S.vadd(low, S.vadd(high, t3))), m32)
            S.vsts(h[0], packed, dist="NORM_B16")
            S.vsts(u[256], T.reinterpret(half, "uint8x256"), m8, dist="NORM_B8")
            S.vsstb(x, f[0], T.int32(1 << 16), m32)
            S.vscatter(x, f[0], S.vci(T.uint32(0), "uint32"), q0)
            S.pst(u[0], S.por(q1, S.por(carry2, carry3, m32), m8), dist="PK")
            S.mem_bar("VST_VLD")
        T.copy(f, a)
        T.copy(i, b)


def _operations(program):
    """The names of the register operations of a program."""
    names = {stmt.name for stmt in ir.walk(program.body) if isinstance(stmt, ir.Op)}
    for stmt in ir.walk(program.body):
        names |= {expr.name for expr in ir.subexpressions(stmt) if isinstance(expr, ir.Register)}
    return names


def test_every_operation_of_the_language_is_decoded():
    public = {name for name, value in vars(S).items() if inspect.isfunction(value) and value.__module__ == S.__name__}
    # What allocates, or makes an address, is no operation.
    operations = {name for name in public if not name.startswith("_")} - {
        "alloc_var",
        "alloc_local",
        "make_ubuf_ptr",
        "access_ptr",
    }
    assert operations - _operations(decode.decode(everything)) == set()


def test_every_operation_of_the_language_runs():
    run = glass.tilelang_call(everything, out_shape=[jax.ShapeDtypeStruct((256,), "float32")] * 1, out_idx=[0])
    out = jax.jit(run)(np.arange(256, dtype=np.int32), np.arange(256, dtype=np.uint8))
    assert out[0].shape == (256,)


# --- forms ----------------------------------------------------------------------------------------------------------


@T.prim_func
def pointers(x: T.Tensor((32, 128), "bfloat16"), out: T.Tensor((32, 128), "bfloat16")):
    with T.Kernel(1):
        source = T.alloc_shared((32, 128), "bfloat16")
        packed = T.alloc_shared((33, 128), "bfloat16")
        l1 = T.alloc_l1((32, 128), "bfloat16")
        T.annotate_layout({packed: make_ascend_compact_nz_layout(packed)})
        T.copy(x, source)
        with T.SimdVF():
            full = S.pset(16)
            src = S.make_ubuf_ptr(T.access_ptr(source[0, 0], "r", 32, 128), "bfloat16")
            dst = S.make_ubuf_ptr(T.access_ptr(packed[0, 0], "w", 33, 128), "bfloat16")
            for _ in range(16):
                first, src = S.vld(src, post_inc=128)
                second, src = S.vld(src, post_inc=128)
                dst = S.vsstb(first, dst, T.int32(33 << 16 | 1), full, update=True)
                dst = S.vsstb(second, dst, T.int32(33 << 16 | 1), full, update=True)
        T.copy(packed[0:32, :], l1)
        T.copy(l1, out)


def test_pointers_become_addresses_in_closed_form():
    text = printer.text(decode.decode(pointers))
    for line in ("src_offset = _ * 512", "&source[0, 0] + src_offset + 256 bytes", "dst_offset = _ * 64"):
        assert line in text, text
    assert "&packed[0, 0] + dst_offset bytes" in text and "&packed[0, 0] + dst_offset + 32 bytes" in text


def _call(kernel, out, *args, **kwargs):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out]
    return jax.jit(glass.tilelang_call(kernel, out_shape=shapes, **kwargs))(*args)


@T.prim_func
def conditional_pointer(x: T.Tensor((256,), "float32"), out: T.Tensor((256,), "float32")):
    with T.Kernel(1):
        source = T.alloc_shared((256,), "float32")
        T.copy(x, source)
        with T.SimdVF():
            src = S.make_ubuf_ptr(T.access_ptr(source[0], "r", 256), "float32")
            for i in range(4):
                if source[i] > 0.0:
                    v, src = S.vld(src, post_inc=64)
                    S.vsts(source[0], v)
        T.copy(source, out)


def test_a_pointer_that_depends_on_a_condition_is_refused():
    with pytest.raises(errors.UnsupportedError, match="where the pointer src points depends on a condition"):
        decode.decode(conditional_pointer)


@T.prim_func
def other_layout(x: T.Tensor((33, 128), "float16"), out: T.Tensor((33, 128), "float16")):
    with T.Kernel(1):
        rows = T.alloc_shared((33, 128), "float16")
        T.annotate_layout({rows: make_ascend_nz_layout(rows)})
        T.copy(x, rows)
        T.copy(rows, out)


def test_a_layout_with_padded_rows_is_refused():
    with pytest.raises(errors.UnsupportedError, match="of rows is not decoded"):
        decode.decode(other_layout)


# --- kernels --------------------------------------------------------------------------------------------------------


@T.prim_func
def quantize(
    x: T.Tensor((16, 256), "float32"), q: T.Tensor((16, 256), "float8_e4m3fn"), scale: T.Tensor((16, 2), "float32")
):
    """Blocks of 128 elements of a row, divided by their largest over 448."""
    with T.Kernel(1):
        rows = T.alloc_shared((16, 256), "float32")
        small = T.alloc_shared((16, 256), "float8_e4m3fn")
        scales = T.alloc_shared((16, 8), "float32")
        T.copy(x, rows)
        with T.SimdVF():
            least = S.vdup(1e-4, "float32")
            largest = S.vdup(448.0, "float32")
            for r in range(16):
                for g in range(2):
                    first = S.vld(rows[r, g * 128])
                    second = S.vld(rows[r, g * 128 + 64])
                    peak = S.vmax(S.vcmax(S.vmax(S.vabs(first), S.vabs(second))), least)
                    s = S.vdiv(peak, largest)
                    S.vsts(scales[r, g], s, dist="ONEPT_B32")
                    every = S.vdupv(s)
                    S.vsts(small[r, g * 128], S.vcvt(S.vdiv(first, every), "float8_e4m3fn"), dist="PK4_B32")
                    S.vsts(small[r, g * 128 + 64], S.vcvt(S.vdiv(second, every), "float8_e4m3fn"), dist="PK4_B32")
        T.copy(small, q)
        T.copy(scales[:, 0:2], scale)


def test_a_quantization_by_blocks():
    x = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    q, scale = _call(quantize, [((16, 256), jnp.float8_e4m3fn), ((16, 2), "float32")], x)
    want = np.maximum(abs(x).reshape(16, 2, 128).max(-1), np.float32(1e-4)) / np.float32(448)
    np.testing.assert_allclose(scale, want, rtol=1e-6)
    # The device's quotient is rounded before the conversion; so is this one.
    exact = (x.reshape(16, 2, 128) / want[..., None]).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(q).astype(np.float32), exact.reshape(16, 256))


@T.prim_func
def best(x: T.Tensor((N,), "float32"), places: T.Tensor((8,), "int32")):
    """The places of the eight largest numbers, smaller places first among equals."""
    with T.Kernel(1):
        values = T.alloc_shared((N,), "float32")
        found = T.alloc_shared((8,), "int32")
        T.copy(x, values)
        with T.SimdVF():
            full = S.pset(32)
            one = S.pset(32, "PAT_VL1")
            lowest = S.vdup(-T.infinity("float32"), "float32", full)
            none = S.vdup(T.max_value("int32"), "int32", full)
            lane = S.vci(T.int32(0), "int32")
            left = S.alloc_local(1, "float32")
            left[0] = S.vld(values[0])
            for k in range(8):
                peak = S.vdupv(S.vcmax(left[0], full), full)
                place = S.vdupv(S.vcmin(S.vsel(lane, none, S.vcmp(left[0], peak, full, "eq")), full), full)
                S.vsts(found[k], place, one, "ONEPT_B32")
                left[0] = S.vsel(lowest, left[0], S.vcmp(lane, place, full, "eq"))
        T.copy(found, places)


def test_a_selection_of_the_largest():
    x = np.random.default_rng(1).integers(0, 20, N).astype(np.float32)
    (places,) = _call(best, [((8,), "int32")], x)
    np.testing.assert_array_equal(places, np.argsort(-x, kind="stable")[:8])


def test_pointers_move_rows_into_compact_nz():
    x = np.random.default_rng(2).standard_normal((32, 128)).astype(ml_dtypes.bfloat16)
    program = decode.decode(pointers)  # the device has no way from L1 to GM, but the model has
    (out,) = jax.jit(lambda a: executor.run(program, (a,), (1,)))(x)
    np.testing.assert_array_equal(np.asarray(out), x)
