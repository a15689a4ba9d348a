"""SIMT regions on the NPU model: code of single threads, barriers, warps, loops that threads leave one by one."""

import npu
import numpy as np
import pytest
import tilelang.ascend.language as T

from glass_jax import errors

RNG = np.random.default_rng(1)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def test_threads_read_what_others_wrote_before_a_barrier():
    @T.prim_func
    def kernel(x: T.Tensor((256,), "float32"), y: T.Tensor((256,), "float32")):
        with T.Kernel(2) as bx:
            shared = T.alloc_shared((128,), "float32")
            with T.SimtVF(threads=128):
                tx = T.get_thread_binding()
                shared[tx] = x[bx * 128 + tx]
                T.sync_threads()
                other = shared[127 - tx]
                T.sync_threads()
                shared[tx] = other + shared[tx]
                T.sync_threads()
                y[bx * 128 + tx] = shared[(tx + 1) % 128]

    x = floats(256)
    halves = x.reshape(2, 128)
    np.testing.assert_allclose(npu.run(kernel, x)[0].reshape(2, 128), np.roll(halves + halves[:, ::-1], -1, 1))


def test_two_dimensions_of_threads_and_a_tree_reduction():
    @T.prim_func
    def kernel(x: T.Tensor((8, 32), "float32"), y: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            part = T.alloc_shared((8, 32), "float32")
            with T.SimtVF(threads=[32, 8]):
                tx, ty = T.get_thread_binding(0), T.get_thread_binding(1)
                part[ty, tx] = x[ty, tx]
                T.sync_threads()
                for step in T.serial(5):
                    if tx < T.shift_right(16, step):
                        part[ty, tx] = part[ty, tx] + part[ty, tx + T.shift_right(16, step)]
                    T.sync_threads()
                if tx == 0:
                    y[ty] = part[ty, 0]

    x = floats(8, 32)
    np.testing.assert_allclose(npu.run(kernel, x)[0], x.sum(1), rtol=1e-5, atol=1e-5)


def test_threads_have_scalars_and_arrays_of_their_own():
    @T.prim_func
    def kernel(x: T.Tensor((64, 4), "float32"), y: T.Tensor((64, 4), "float32"), z: T.Tensor((64,), "float32")):
        with T.Kernel(1), T.SimtVF(threads=64):
            tx = T.get_thread_binding()
            mine = T.alloc_local((4,), "float32")
            total = T.alloc_var("float32", init=0.0)
            for q in T.vectorized(4):
                mine[q] = x[tx, q]
            for q in T.serial(4):
                total += mine[q] * T.cast(q, "float32")
                y[tx, q] = mine[3 - q]
            if tx % 2 == 1:
                total = -total
            z[tx] = total

    x = floats(64, 4)
    y, z = npu.run(kernel, x, outputs=(1, 2))
    np.testing.assert_array_equal(y, x[:, ::-1])
    np.testing.assert_allclose(z, (x * np.arange(4)).sum(1) * np.where(np.arange(64) % 2, -1, 1), rtol=1e-5, atol=1e-6)


def test_loops_of_different_lengths():
    """The sum of a ragged row, the Collatz length of a number, and the first element that is not larger."""

    @T.prim_func
    def kernel(
        x: T.Tensor((96, 16), "int32"), length: T.Tensor((96,), "int32"),
        sums: T.Tensor((96,), "int32"), steps: T.Tensor((96,), "int32"), first: T.Tensor((96,), "int32"),
    ):  # fmt: skip
        with T.Kernel(1), T.SimtVF(threads=96):
            tx = T.get_thread_binding()
            total = T.alloc_var("int32", init=0)
            for q in T.serial(length[tx]):
                total += x[tx, q]
            sums[tx] = total
            number = T.alloc_var("int32", init=0)
            count = T.alloc_var("int32", init=0)
            number = length[tx] + 1
            while number > 1:
                if number % 2 == 0:  # noqa: SIM108 (a branch is what is tested)
                    number = number // 2
                else:
                    number = 3 * number + 1
                count += 1
            steps[tx] = count
            first[tx] = -1
            for q in T.serial(16):
                if x[tx, q] <= 0:
                    first[tx] = q
                    T.loop_break()

    x = RNG.integers(-10, 100, (96, 16)).astype(np.int32)
    length = RNG.integers(0, 17, 96).astype(np.int32)
    sums, steps, first = npu.run(kernel, x, length, outputs=(2, 3, 4))
    np.testing.assert_array_equal(sums, [row[:n].sum() for row, n in zip(x, length, strict=True)])

    def collatz(n):
        return 0 if n == 1 else 1 + collatz(n // 2 if n % 2 == 0 else 3 * n + 1)

    np.testing.assert_array_equal(steps, [collatz(int(n) + 1) for n in length])
    small = x <= 0
    np.testing.assert_array_equal(first, np.where(small.any(1), small.argmax(1), -1))


def test_breaks_leave_serial_and_while_loops():
    @T.prim_func
    def kernel(x: T.Tensor((32,), "int32"), y: T.Tensor((3,), "int32")):
        with T.Kernel(1):
            total = T.alloc_var("int32", init=0)
            rounds = T.alloc_var("int32", init=0)
            for i in T.serial(32):
                if x[i] < 0:
                    T.loop_break()
                total += x[i]
            y[0] = total
            while rounds < 100:
                rounds += 1
                if rounds * rounds > total:  # noqa: SIM102
                    if rounds % 2 == 0:
                        T.loop_break()
            y[1] = rounds
            y[2] = 5

    x = np.arange(1, 33, dtype=np.int32)
    x[9] = -1
    (y,) = npu.run(kernel, x)
    np.testing.assert_array_equal(y, [45, 8, 5])


@pytest.mark.parametrize("kind, join", [("sum", np.sum), ("max", np.max), ("min", np.min)])
def test_warp_reductions_of_the_threads_that_take_part(kind, join):
    @T.prim_func
    def kernel(x: T.Tensor((80,), "float32"), y: T.Tensor((80,), "float32"), z: T.Tensor((80,), "float32")):
        with T.Kernel(1), T.SimtVF(threads=80):
            tx = T.get_thread_binding()
            y[tx] = getattr(T, f"warp_reduce_{kind}")(x[tx])
            z[tx] = 0.0
            if tx % 4 != 1:
                z[tx] = getattr(T, f"warp_reduce_{kind}")(x[tx])

    x = floats(80)
    y, z = npu.run(kernel, x, outputs=(1, 2))
    for warp in (slice(0, 32), slice(32, 64), slice(64, 80)):
        part = np.arange(80)[warp] % 4 != 1
        np.testing.assert_allclose(y[warp], join(x[warp].astype(np.float64)), rtol=1e-5, atol=1e-6)
        want = np.where(part, join(x[warp][part].astype(np.float64)), 0)
        np.testing.assert_allclose(z[warp], want, rtol=1e-5, atol=1e-6)


def test_shuffles():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "int32"), y: T.Tensor((4, 64), "int32")):
        with T.Kernel(1), T.SimtVF(threads=64):
            tx = T.get_thread_binding()
            y[0, tx] = T.shfl_xor(x[tx], 5)
            y[1, tx] = T.shfl_down(x[tx], 3)
            y[2, tx] = T.shfl_up(x[tx], 3)
            y[3, tx] = T.shfl_sync(x[tx], 7)

    x = np.arange(64, dtype=np.int32) * 3
    lane, warp = np.arange(64) % 32, np.arange(64) // 32 * 32
    want = [lane ^ 5, np.where(lane + 3 < 32, lane + 3, lane), np.where(lane >= 3, lane - 3, lane), np.full(64, 7)]
    np.testing.assert_array_equal(npu.run(kernel, x)[0], [x[warp + source] for source in want])


def test_votes():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "int32"), y: T.Tensor((6, 64), "int32")):
        with T.Kernel(1), T.SimtVF(threads=64):
            tx = T.get_thread_binding()
            y[0, tx] = T.cast(T.ballot(x[tx] > 0), "int32")
            y[1, tx] = T.cast(T.any_sync(x[tx] > 90), "int32")
            y[2, tx] = T.cast(T.all_sync(x[tx] > -95), "int32")
            y[3, tx] = T.syncthreads_count(x[tx] > 0)
            y[4, tx] = T.cast(T.syncthreads_and(x[tx] > -200), "int32")
            y[5, tx] = T.cast(T.syncthreads_or(x[tx] > 200), "int32")

    x = RNG.integers(-100, 100, 64).astype(np.int32)
    got = npu.run(kernel, x)[0]
    warps = x.reshape(2, 32)
    ballots = ((warps > 0) * 2 ** np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32).view(np.int32)
    want = [ballots, (warps > 90).any(1), (warps > -95).all(1), [(x > 0).sum()] * 2, [1, 1], [0, 0]]
    np.testing.assert_array_equal(got, np.repeat(np.array(want, np.int32), 32, axis=1))


def test_parallel_loops_beside_code_of_single_threads():
    @T.prim_func
    def kernel(x: T.Tensor((128,), "float32"), y: T.Tensor((128,), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((128,), "float32")
            bias = T.alloc_shared((1,), "float32")
            with T.SimtVF(threads=64):
                tx = T.get_thread_binding()
                if tx == 63:
                    bias[0] = x[0] + 1.0
                for step in T.serial(2):
                    for i in T.Parallel(128):
                        tile[i] = x[i] + bias[0] + T.cast(step, "float32")
                    y[tx] = tile[tx] * 2.0
                    y[tx + 64] = tile[tx + 64]

    x = floats(128)
    want = x + (x[0] + 1) + 1
    np.testing.assert_allclose(npu.run(kernel, x)[0], want * np.where(np.arange(128) < 64, 2, 1), rtol=1e-6, atol=1e-6)


def test_the_last_thread_stays_where_threads_write_one_element():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "int32"), y: T.Tensor((2, 8), "int32")):
        with T.Kernel(1), T.SimtVF(threads=64):
            tx = T.get_thread_binding()
            y[0, 0] = x[tx]
            if x[tx] > 0:
                y[1, tx // 8] = x[tx]
                y[0, 1] = tx

    x = RNG.integers(-100, 100, 64).astype(np.int32)
    _, y = npu.update(kernel, x, np.zeros((2, 8), np.int32))
    assert y[0, 0] == x[-1] and y[0, 1] == np.flatnonzero(x > 0)[-1]
    np.testing.assert_array_equal(y[1], [([0, *row[row > 0]])[-1] for row in x.reshape(8, 8)])


def test_a_parallel_loop_cannot_use_the_index_of_a_thread():
    @T.prim_func
    def kernel(y: T.Tensor((64,), "int32")):
        with T.Kernel(1), T.SimtVF(threads=64):
            tx = T.get_thread_binding()
            for i in T.Parallel(64):
                y[i] = tx

    with pytest.raises(errors.UnsupportedError, match=r"test_language_threads\.py:\d+: .* for itself, tx"):
        npu.run(kernel)


def test_a_parallel_loop_cannot_add_to_what_a_thread_has():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32"), y: T.Tensor((64,), "float32")):
        with T.Kernel(1), T.SimtVF(threads=32):
            tx = T.get_thread_binding()
            mine = T.alloc_var("float32", init=0.0)
            for i in T.Parallel(64):
                mine += x[i]
            y[tx] = T.warp_reduce_sum(mine)

    with pytest.raises(errors.UnsupportedError, match=r"test_language_threads\.py:\d+: .* for itself, mine"):
        npu.run(kernel, floats(64))


def test_arrays_of_threads_are_filled():
    @T.prim_func
    def kernel(x: T.Tensor((32, 3), "int32"), y: T.Tensor((32, 3), "int32")):
        with T.Kernel(1), T.SimtVF(threads=32):
            tx = T.get_thread_binding()
            count = T.alloc_local((3,), "int32")
            T.clear(count)
            for j in T.serial(3):
                count[x[tx, j]] += 1
            if tx % 2 == 0:
                T.fill(count, tx)
            for j in T.serial(3):
                y[tx, j] = count[j]

    x = RNG.integers(0, 3, (32, 3)).astype(np.int32)
    counts = np.array([np.bincount(row, minlength=3) for row in x])
    even = np.arange(32)[:, None]
    np.testing.assert_array_equal(npu.run(kernel, x)[0], np.where(even % 2 == 0, even, counts))


def test_a_tile_operation_by_some_threads_only():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32"), y: T.Tensor((64,), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((64,), "float32")
            with T.SimtVF(threads=64):
                if T.get_thread_binding() < 3:
                    T.copy(x, tile)
            T.copy(tile, y)

    with pytest.raises(errors.UnsupportedError, match=r"test_language_threads\.py:\d+: .* some of the threads"):
        npu.run(kernel, floats(64))


@pytest.mark.parametrize("op, count", [("serial", 3), ("unroll", 3), ("vectorized", 4)])
def test_predicates_of_parallel_loops(op, count):
    @T.prim_func
    def kernel(
        x: T.Tensor((count, 50), "float32"), limit: T.Tensor((50,), "int32"), y: T.Tensor((count, 50), "float32")
    ):
        with T.Kernel(1), T.SimtVF(threads=64):
            for j in T.Parallel(50):
                for i in getattr(T, op)(count):
                    if i < limit[j]:
                        y[i, j] = x[i, j] * 2.0
                    elif x[i, j] > 0.0 and j % 2 == 0:
                        y[i, j] = 1.0
                    else:
                        y[i, j] = T.if_then_else(i > 0, x[i - 1, j], -1.0)

    x, limit = floats(count, 50), RNG.integers(0, count + 1, 50).astype(np.int32)
    i, j = np.mgrid[:count, :50]
    want = np.where(i < limit, x * 2, np.where((x > 0) & (j % 2 == 0), 1, np.where(i > 0, np.roll(x, 1, 0), -1)))
    np.testing.assert_array_equal(npu.run(kernel, x, limit)[0], want)
