"""Copies between all memories on the NPU model: clamped, padded, transposed, converted, split between the units."""

import ml_dtypes
import npu
import numpy as np
import pytest
import tilelang.ascend.language as T
from tilelang.layout import make_ascend_compact_nz_layout
from tvm import tirx

from glass_jax import errors
from glass_jax.hw.ir import program as ir

RNG = np.random.default_rng(2)
IDENTITY = np.eye(64, dtype=np.float16)


def floats(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "float16", "bfloat16", "int32", "float32", "float8_e4m3fn"]
)
def test_tiles_that_reach_over_the_edges(dtype):
    """GM to UB keeps what UB held beyond the edge; UB to GM drops it."""

    @T.prim_func
    def kernel(x: T.Tensor((70, 96), dtype), y: T.Tensor((96, 128), dtype), z: T.Tensor((70, 96), dtype)):
        with T.Kernel(3) as bx:
            tile = T.alloc_shared((32, 128), dtype)
            T.fill(tile, 3)
            T.copy(x[bx * 32 : bx * 32 + 32, 0:128], tile)
            T.copy(tile, y[bx * 32, 0])
            T.copy(tile, z[bx * 32 : bx * 32 + 32, 0:128])

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = RNG.integers(0, 100, (70, 96)).astype(kind)
    y, z = npu.run(kernel, x, outputs=(1, 2))
    want = np.full((96, 128), 3).astype(kind)
    want[:70, :96] = x
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(z, x)


@pytest.mark.parametrize("dtype, value", [("float32", -1.5), ("float16", 2.0), ("int8", 7), ("int32", -9)])
def test_padded_rows(dtype, value):
    """Rows are padded to 32 bytes with the value of the call or of the register; what lies beyond stays."""
    size = np.dtype(dtype).itemsize
    columns, room = 40 // size, 96 // size

    @T.prim_func
    def kernel(x: T.Tensor((5, columns), dtype), y: T.Tensor((8, room), dtype), z: T.Tensor((8, room), dtype)):
        with T.Kernel(1):
            first = T.alloc_shared((8, room), dtype)
            second = T.alloc_shared((8, room), dtype)
            T.fill(first, 1)
            T.fill(second, 1)
            T.copy(x[0:5, 0:columns], first[0:5, 0:columns], pad_value=value)
            T.copy(x[2:10, 0:columns], second[0:8, 0:columns], data_select=True)
            T.copy(first, y)
            T.copy(second, z)

    x = RNG.integers(-50, 50, (5, columns)).astype(dtype)
    y, z = npu.run(kernel, x, outputs=(1, 2))
    want = np.ones((8, room), dtype)
    want[:5, : 64 // size] = value
    want[:5, :columns] = x
    np.testing.assert_array_equal(y, want)
    want[:3] = want[2:5]
    want[3:5] = 1
    np.testing.assert_array_equal(z, want)


def test_padding_that_does_not_fit():
    @T.prim_func
    def kernel(x: T.Tensor((4, 10), "float32"), y: T.Tensor((4, 12), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((4, 12), "float32")
            T.copy(x[0:4, 0:10], tile[0:4, 0:10], pad_value=0.0)
            T.copy(tile, y)

    message = r"test_language_copies\.py:\d+: rows of 10 .* padded to 16"
    with pytest.raises(errors.HardwareConstraintError, match=message):
        npu.run(kernel, floats(4, 10))


def through_the_cube(copies):
    """A kernel in which ``copies(x, a_l1)`` fetch a [64, 64] operand in L1, which is multiplied by the identity."""

    @T.prim_func
    def kernel(x: T.Tensor((64, 64), "float16"), unit: T.Tensor((64, 64), "float16"), y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1):
            operand = T.alloc_l1((64, 64), "float16")
            identity = T.alloc_l1((64, 64), "float16")
            result = T.alloc_l0c((64, 64), "float32")
            T.copy(unit, identity)
            copies(x, operand)
            T.gemm(operand, identity, result, transpose_B=True, clear_accum=True)
            T.copy(result, y)

    return kernel


@T.macro
def by_ub(x, operand):
    tile = T.alloc_shared((64, 64), "float16")
    T.copy(x, tile)
    T.copy(tile, operand)


@T.macro
def by_halves(x, operand):
    rows = T.alloc_shared((32, 64), "float16")
    T.dual_copy(x, rows)
    T.dual_copy(rows, operand)


@T.macro
def by_columns(x, operand):
    columns = T.alloc_shared((64, 32), "float16")
    T.dual_copy(x, columns)
    T.dual_copy(columns, operand)


@T.macro
def in_nz_order(x, operand):
    """By way of a tile in compact NZ order, with a row of padding as the layout has it."""
    tile = T.alloc_shared((64, 64), "float16")
    staged = T.alloc_shared((65, 64), "float16")
    T.annotate_layout({staged: make_ascend_compact_nz_layout(staged)})
    T.copy(x, tile)
    T.copy(tile, staged[:64, :])
    T.copy(staged[:64, :], operand)


@pytest.mark.parametrize(
    "copies", [lambda x, a: T.copy(x, a), lambda x, a: T.copy(x, a, transpose=True), by_ub, by_halves, by_columns,
               in_nz_order],
    ids=["gm", "transposed", "ub", "rows", "columns", "nz"],
)  # fmt: skip
def test_ways_to_l1(copies, request):
    x = floats(64, 64, dtype=np.float16)
    want = x.T if "transposed" in request.node.name else x
    np.testing.assert_array_equal(npu.run(through_the_cube(copies), x, IDENTITY)[0], want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_ways_from_l0c(dtype):
    """To GM, converted on the way and clamped; to the unified buffers by halves, and to that of one vector unit."""

    @T.prim_func
    def kernel(
        x: T.Tensor((64, 64), "float16"), unit: T.Tensor((64, 64), "float16"),
        gm: T.Tensor((50, 40), dtype), rows: T.Tensor((64, 64), "float32"), columns: T.Tensor((64, 64), "float32"),
        second: T.Tensor((64, 64), "float32"),
    ):  # fmt: skip
        with T.MixedKernel(1, sids=2) as (_, sid):
            a = T.alloc_l1((64, 64), "float16")
            b = T.alloc_l1((64, 64), "float16")
            c = T.alloc_l0c((64, 64), "float32")
            upper = T.alloc_shared((32, 64), "float32")
            left = T.alloc_shared((64, 32), "float32")
            whole = T.alloc_shared((64, 64), "float32")
            T.copy(x, a)
            T.copy(unit, b)
            T.gemm(a, b, c, transpose_B=True, clear_accum=True)
            T.copy(c, gm[0:64, 0:64])
            T.dual_copy(c, upper)
            T.dual_copy(c, left)
            T.fill(whole, -1.0)
            T.copy(c, whole, sub_blockid=1)
            T.dual_copy(upper, rows)
            T.dual_copy(left, columns)
            if sid == 1:
                T.copy(whole, second)

    x = floats(64, 64, dtype=np.float16)
    gm, *others = npu.run(kernel, x, IDENTITY, outputs=(2, 3, 4, 5))
    np.testing.assert_array_equal(gm, x[:50, :40].astype(getattr(ml_dtypes, dtype, dtype)))
    for got in others:
        np.testing.assert_array_equal(got, x)


def test_vectors_split_between_the_units():
    @T.prim_func
    def kernel(x: T.Tensor((128,), "float32"), y: T.Tensor((128,), "float32")):
        with T.MixedKernel(1, sids=2) as (_, sid):
            half = T.alloc_shared((64,), "float32")
            T.dual_copy(x, half)
            with T.SimtVF(threads=64):
                for i in T.Parallel(64):
                    half[i] = half[i] * T.cast(sid + 1, "float32")
            T.dual_copy(half, y)

    x = floats(128)
    np.testing.assert_array_equal(npu.run(kernel, x)[0], x * np.repeat([1, 2], 64))


def test_copies_inside_a_simt_region_convert():
    @T.prim_func
    def kernel(x: T.Tensor((16, 64), "float16"), y: T.Tensor((16, 64), "float16"), z: T.Tensor((64,), "int32")):
        with T.Kernel(1), T.SimtVF(threads=64):
            wide = T.alloc_fragment((16, 64), "float32")
            total = T.alloc_fragment((64,), "float32")
            T.copy(x, wide)
            T.reduce_sum(wide, total, dim=0)
            for i, j in T.Parallel(16, 64):
                wide[i, j] = wide[i, j] * 1.0009765625
            T.copy(wide, y)
            T.copy(total, z)

    x = floats(16, 64, dtype=np.float16)
    y, z = npu.run(kernel, x, outputs=(1, 2))
    np.testing.assert_array_equal(y, (x.astype(np.float32) * np.float32(1.0009765625)).astype(np.float16))
    np.testing.assert_array_equal(z, np.trunc(x.astype(np.float32).sum(0, dtype=np.float32)).astype(np.int32))


def test_slices_of_every_rank():
    """Single rows, and tiles of arrays of more dimensions, chosen by an index that is read."""

    @T.prim_func
    def kernel(
        x: T.Tensor((4, 3, 8, 32), "float32"), pick: T.Tensor((4,), "int32"), y: T.Tensor((4, 8, 32), "float32")
    ):
        with T.Kernel(4) as bx:
            tile = T.alloc_shared((2, 8, 32), "float32")
            T.copy(x[bx, pick[bx], :, :], tile[1, :, :])
            T.copy(tile[1, 2, :], tile[0, 0, :])
            T.copy(tile[1, 0:7, :], y[bx, 1:8, :])
            T.copy(tile[0, 0, :], y[bx, 0, :])

    x, pick = floats(4, 3, 8, 32), np.array([2, 0, 1, 2], np.int32)
    chosen = x[np.arange(4), pick]
    np.testing.assert_array_equal(npu.run(kernel, x, pick)[0], np.concatenate([chosen[:, 2:3], chosen[:, :7]], axis=1))


def test_extents_known_at_run_time():
    """Rows of a ragged array, one after the other, and part of a tile back; the rest stays, in L1 too."""

    @T.prim_func
    def kernel(
        x: T.Tensor((8, 40), "float32"), length: T.Tensor((8,), "int32"), h: T.Tensor((64, 64), "float16"),
        unit: T.Tensor((64, 64), "float16"), y: T.Tensor((8, 48), "float32"), z: T.Tensor((64, 64), "float32"),
    ):  # fmt: skip
        with T.Kernel(8) as bx:
            tile = T.alloc_shared((2, 48), "float32")
            a = T.alloc_l1((64, 64), "float16")
            b = T.alloc_l1((64, 64), "float16")
            c = T.alloc_l0c((64, 64), "float32")
            T.fill(tile, -1.0)
            n = T.max(T.min(length[bx], 48), 0)
            T.copy(x[bx, 0:n], tile[1, 0:n])
            T.copy(tile[1, 0 : n // 2], tile[0, 0 : n // 2])
            T.copy(tile[0, :], y[bx, :])
            if bx == 7:
                T.fill(a, 2.0)
                T.copy(h[0:n, :], a[0:n, :])
                T.copy(unit, b)
                T.gemm(a, b, c, transpose_B=True, clear_accum=True)
                T.copy(c, z)

    x, h = floats(8, 40), floats(64, 64, dtype=np.float16)
    length = np.array([0, 1, 39, 40, 45, 48, 60, 20], np.int32)
    y, z = npu.run(kernel, x, length, h, IDENTITY, outputs=(4, 5))
    want = np.full((8, 48), -1, np.float32)
    for row, n in enumerate(np.minimum(length, 48) // 2):
        want[row, :n] = x[row, :n]
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(z[:20], h[:20])
    np.testing.assert_array_equal(z[20:], 2)


def test_the_instruction_that_gathers_rows():
    """Two rows at a distance that is read, to each vector unit its own."""

    @T.prim_func
    def kernel(x: T.Tensor((16, 64), "float16"), pick: T.Tensor((2, 2), "int32"), y: T.Tensor((2, 4, 64), "float16")):
        with T.MixedKernel(1, sids=2) as (_, sid):
            tile = T.alloc_shared((4, 64), "float16")
            T.fill(tile, 0.0)
            first = pick[sid, 0]
            T.call_intrin(
                "void", tirx.op.Op.get("tl.ascend_copy_gm_to_ubuf"), T.access_ptr(tile[1, 0], "w"),
                T.access_ptr(x[first, 0], "r"), 0, 2, 128, 0, 0, 0, 0, (pick[sid, 1] - first) * 128, 256,
            )  # fmt: skip
            T.copy(tile, y[sid, :, :])

    x, pick = floats(16, 64, dtype=np.float16), np.array([[3, 9], [0, 15]], np.int32)
    want = np.zeros((2, 4, 64), np.float16)
    want[:, 1::2] = x[pick]
    np.testing.assert_array_equal(npu.run(kernel, x, pick)[0], want)


def test_modes_must_be_known():
    @T.prim_func
    def kernel(x: T.Tensor((32, 32), "float32"), y: T.Tensor((32, 32), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((32, 32), "float32")
            for _ in T.serial(2):
                T.copy(x, tile)
                T.copy(tile, y)
                T.set_atomic("add", "float32")

    with pytest.raises(errors.UnsupportedError, match=r"test_language_copies\.py:\d+: the loop leaves another atomic"):
        npu.run(kernel, floats(32, 32))


def test_modes_on_the_two_ways_of_a_branch():
    @T.prim_func
    def kernel(x: T.Tensor((3, 32), "float32"), y: T.Tensor((32,), "float32")):
        with T.Kernel(3) as bx:
            tile = T.alloc_shared((32,), "float32")
            T.copy(x[bx, :], tile)
            if bx == 1:
                T.set_atomic("max", "float32")
                T.copy(tile, y)
            else:
                T.set_atomic("add", "float32")
                T.copy(tile, y)
            T.set_atomic_none()

    x = floats(3, 32)
    _, y = npu.update(kernel, x, np.zeros(32, np.float32))
    np.testing.assert_allclose(y, np.maximum(x[0], x[1]) + x[2], rtol=1e-6)


def test_an_attribute_that_the_model_does_not_know():
    copy = ir.Copy(ir.Region("x", (), ()), ir.Region("x", (), ()), {"swizzle": 1}, "kernel.py:3")
    buffers = {"x": ir.Buffer("x", ir.Space.GM, (), "float32", "x")}
    program = ir.Program("kernel", ("x",), buffers, ir.Var("bx"), 1, (copy,))
    with pytest.raises(errors.UnsupportedError, match="kernel.py:3: .* swizzle"):
        npu.run(program, np.float32(0), inputs=(0,))
