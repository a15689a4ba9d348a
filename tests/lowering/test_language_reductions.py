"""Reductions, scans, reducers and atomics of TileLang kernels on the NPU model, against NumPy."""

import npu
import numpy as np
import pytest
import tilelang.ascend.language as T

RNG = np.random.default_rng(0)
NUMPY = {
    "sum": lambda x, axis: x.sum(axis),
    "max": lambda x, axis: x.max(axis),
    "min": lambda x, axis: x.min(axis),
    "abssum": lambda x, axis: np.abs(x).sum(axis),
    "absmax": lambda x, axis: np.abs(x).max(axis),
    "bitand": lambda x, axis: np.bitwise_and.reduce(x, axis),
    "bitor": lambda x, axis: np.bitwise_or.reduce(x, axis),
    "bitxor": lambda x, axis: np.bitwise_xor.reduce(x, axis),
}


def values(shape, dtype):
    if np.dtype(dtype).kind == "f":
        return RNG.standard_normal(shape).astype(dtype)
    return RNG.integers(-1000, 1000, shape).astype(dtype)


def reduction(kind, dim, dtype, shape=(4, 24, 8), unified_buffer=False, clear=True):
    out_shape = shape[:dim] + shape[dim + 1 :]
    options = {} if kind in ("abssum", "bitand", "bitor", "bitxor") else {"clear": clear}

    @T.prim_func
    def kernel(x: T.Tensor(shape, dtype), start: T.Tensor(out_shape, dtype), y: T.Tensor(out_shape, dtype)):
        with T.Kernel(1):
            tile = T.alloc_shared(shape, dtype)
            result = T.alloc_shared(out_shape, dtype)
            T.copy(x, tile)
            T.copy(start, result)
            with T.SimtVF(threads=64):
                if unified_buffer:
                    getattr(T, f"reduce_{kind}")(tile, result, dim=dim, **options)
                else:
                    terms = T.alloc_fragment(shape, dtype)
                    sums = T.alloc_fragment(out_shape, dtype)
                    T.copy(tile, terms)
                    T.copy(result, sums)
                    getattr(T, f"reduce_{kind}")(terms, sums, dim=dim, **options)
                    T.copy(sums, result)
            T.copy(result, y)

    return kernel


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    "kind, dtype",
    [("sum", "float32"), ("max", "float32"), ("min", "float16"), ("sum", "int32"), ("abssum", "float32"),
     ("absmax", "int32"), ("bitand", "int32"), ("bitor", "int32"), ("bitxor", "int32")],
)  # fmt: skip
def test_reductions(kind, dtype, dim):
    x = values((4, 24, 8), dtype)
    want = NUMPY[kind](x.astype(np.float64) if dtype == "float32" else x, dim)
    (got,) = npu.run(reduction(kind, dim, dtype), x, values(want.shape, dtype))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("unified_buffer", [False, True])
@pytest.mark.parametrize("kind, join", [("sum", np.add), ("max", np.maximum), ("min", np.minimum)])
def test_reductions_that_join_what_is_there(kind, join, unified_buffer):
    x, start = values((6, 32), "float32"), values((6,), "float32")
    kernel = reduction(kind, 1, "float32", (6, 32), unified_buffer, clear=False)
    (got,) = npu.run(kernel, x, start)
    np.testing.assert_allclose(got, join(start, NUMPY[kind](x.astype(np.float64), 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim, reverse", [(0, False), (1, False), (1, True)])
def test_cumulative_sum(dim, reverse):
    @T.prim_func
    def kernel(x: T.Tensor((8, 32), "float32"), y: T.Tensor((8, 32), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((8, 32), "float32")
            T.copy(x, tile)
            with T.SimtVF(threads=64):
                T.cumsum(tile, tile, dim=dim, reverse=reverse)
            T.copy(tile, y)

    x = values((8, 32), "float32")
    wide = np.flip(x, dim) if reverse else x
    want = wide.astype(np.float64).cumsum(dim)
    np.testing.assert_allclose(npu.run(kernel, x)[0], np.flip(want, dim) if reverse else want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.filterwarnings("ignore:alloc_reducer")
def test_reducers_written_as_updates(op):
    def joined(old, new):
        return old + new if op == "sum" else (T.max(old, new) if op == "max" else T.min(old, new))

    @T.prim_func
    def kernel(x: T.Tensor((16, 40), "float32"), y: T.Tensor((16,), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((16, 40), "float32")
            rows = T.alloc_shared((16,), "float32")
            T.copy(x, tile)
            with T.SimtVF(threads=64):
                acc = T.alloc_reducer((16,), "float32", op=op, replication="all")
                T.fill(acc, 0.0 if op == "sum" else (-T.infinity("float32") if op == "max" else T.infinity("float32")))
                for i, j in T.Parallel(16, 40):
                    acc[i] = joined(acc[i], tile[i, j])
                T.finalize_reducer(acc)
                for i in T.Parallel(16):
                    rows[i] = acc[i]
            T.copy(rows, y)

    x = values((16, 40), "float32")
    np.testing.assert_allclose(npu.run(kernel, x)[0], NUMPY[op](x.astype(np.float64), 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "op, dtype, start",
    [("sum", "float32", None), ("sum", "int32", 7), ("max", "int32", None), ("min", "float32", -3.0)],
)
def test_reducers(op, dtype, start):
    """Over columns, in a serial loop around parallel ones, with a starting value that counts once."""

    @T.prim_func
    def kernel(x: T.Tensor((3, 8, 64), dtype), y: T.Tensor((64,), dtype)):
        with T.Kernel(1), T.SimtVF(threads=64):
            acc = T.alloc_reducer((64,), dtype, op=op)
            T.reducer_init(acc, start) if start is not None else T.reducer_init(acc)
            for k in T.serial(3):
                for i, j in T.Parallel(8, 64):
                    if i < 7:
                        T.reducer_update(acc[j], x[k, i, j])
            result = T.alloc_fragment((64,), dtype)
            T.finalize_reducer(acc, result)
            T.copy(result, y)

    x = values((3, 8, 64), dtype)
    terms = x[:, :7].reshape(21, 64).astype(np.float64)
    want = NUMPY[op](terms if start is None else np.vstack([terms, np.full((1, 64), start)]), 0)
    np.testing.assert_allclose(npu.run(kernel, x)[0], want, rtol=1e-5, atol=1e-5)


# --- atomics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16"])
@pytest.mark.parametrize("op", ["add", "max", "min"])
def test_atomics_count_every_iteration(op, dtype):
    @T.prim_func
    def kernel(index: T.Tensor((256,), "int32"), x: T.Tensor((256,), dtype), y: T.Tensor((16,), dtype)):
        with T.Kernel(2) as bx, T.SimtVF(threads=128):
            for i in T.Parallel(128):
                if i % 3 != 0:
                    getattr(T, f"atomic_{op}")(y[index[bx * 128 + i]], x[bx * 128 + i])

    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    index, x = RNG.integers(0, 16, 256).astype(np.int32), RNG.integers(-8, 8, 256).astype(kind)
    start = RNG.integers(-8, 8, 16).astype(kind)
    want = start.astype(np.float64)
    active = np.arange(256) % 128 % 3 != 0
    {"add": np.add, "max": np.maximum, "min": np.minimum}[op].at(want, index[active], x[active].astype(np.float64))
    *_, got = npu.update(kernel, index, x, start)
    np.testing.assert_array_equal(got.astype(np.float64), want)


def test_atomics_of_a_bare_statement_count_every_thread():
    @T.prim_func
    def kernel(total: T.Tensor((2,), "float32")):
        with T.Kernel(8) as bx, T.SimtVF(threads=48):
            T.atomic_add(total[0], 1.0)
            if T.get_thread_binding() == 5:
                T.atomic_add(total[1], T.cast(bx, "float32"))

    np.testing.assert_array_equal(npu.update(kernel, np.array([3, 0], np.float32))[0], [3 + 8 * 48, 28])


def test_atomics_that_return_what_was_there():
    """Every thread gets a number of its own, in their order, and takes the place of that number."""

    @T.prim_func
    def kernel(x: T.Tensor((128,), "int32"), count: T.Tensor((1,), "int32"), y: T.Tensor((128,), "int32")):
        with T.Kernel(2) as bx, T.SimtVF(threads=64):
            tx = T.get_thread_binding()
            if x[bx * 64 + tx] > 0:
                place = T.atomic_add(count[0], 1, return_prev=True)
                y[place] = x[bx * 64 + tx]

    x = RNG.integers(-100, 100, 128).astype(np.int32)
    _, count, y = npu.update(kernel, x, np.zeros(1, np.int32), np.zeros(128, np.int32))
    kept = x[x > 0]
    assert count[0] == len(kept)
    np.testing.assert_array_equal(y, np.pad(kept, (0, 128 - len(kept))))


@pytest.mark.parametrize("op, join", [("add", np.sum), ("max", np.max), ("min", np.min)])
def test_stores_in_an_atomic_mode(op, join):
    @T.prim_func
    def kernel(x: T.Tensor((128, 40), "float32"), y: T.Tensor((20, 40), "float32"), z: T.Tensor((32, 40), "float32")):
        with T.Kernel(4) as bx:
            tile = T.alloc_shared((32, 40), "float32")
            T.copy(x[bx * 32, 0], tile)
            T.set_atomic(op, "float32")
            T.copy(tile, y[0:32, 0:40])
            T.set_atomic_none()
            T.copy(tile, z)

    x, start = values((128, 40), "float32"), values((20, 40), "float32")
    _, y, z = npu.update(kernel, x, start, np.zeros((32, 40), np.float32))
    parts = np.concatenate([start[None], x.reshape(4, 32, 40)[:, :20]]).astype(np.float64)
    np.testing.assert_allclose(y, join(parts, axis=0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(z, x[96:])


def test_a_split_k_product_joins_in_gm():
    """Four cores multiply a quarter of K each and add it to the result, from L0C and from both vector units."""

    @T.prim_func
    def kernel(
        a: T.Tensor((64, 256), "float16"), b: T.Tensor((32, 256), "float16"),
        c: T.Tensor((64, 32), "float32"), d: T.Tensor((64, 32), "float32"),
    ):  # fmt: skip
        with T.Kernel(4) as bx:
            a_l1 = T.alloc_l1((64, 64), "float16")
            b_l1 = T.alloc_l1((32, 64), "float16")
            acc = T.alloc_l0c((64, 32), "float32")
            half = T.alloc_shared((32, 32), "float32")
            T.copy(a[0:64, bx * 64 : bx * 64 + 64], a_l1)
            T.copy(b[0:32, bx * 64 : bx * 64 + 64], b_l1)
            T.gemm(a_l1, b_l1, acc, transpose_B=True, clear_accum=True)
            T.set_atomic("add", "float32")
            T.copy(acc, c)
            T.dual_copy(acc, half)
            T.dual_copy(half, d)
            T.set_atomic_none()

    a, b = values((64, 256), "float16"), values((32, 256), "float16")
    _, _, c, d = npu.update(kernel, a, b, np.zeros((64, 32), np.float32), np.zeros((64, 32), np.float32))
    want = a.astype(np.float64) @ b.astype(np.float64).T
    for got in (c, d):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def test_tiles_joined_atomically():
    @T.prim_func
    def kernel(x: T.Tensor((64, 32), "float32"), y: T.Tensor((32, 32), "float32")):
        with T.Kernel(2) as bx:
            tile = T.alloc_shared((32, 32), "float32")
            T.copy(x[bx * 32, 0], tile)
            T.atomic_add(y, tile)

    x, start = values((64, 32), "float32"), values((32, 32), "float32")
    _, y = npu.update(kernel, x, start)
    np.testing.assert_allclose(y, start + x[:32] + x[32:], rtol=1e-5, atol=1e-5)
