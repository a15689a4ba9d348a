"""Scalars, shapes, views, launches, schedules, random numbers and messages of TileLang kernels on the NPU model."""

import jax
import npu
import numpy as np
import pytest
import tilelang.ascend.language as T

from glass_jax import errors
from glass_jax.hw.ir import serialization
from glass_jax.lowering.tilelang.decode import decode

RNG = np.random.default_rng(4)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def scaled_rows():
    rows, columns = T.dynamic("rows"), T.dynamic("columns")

    @T.prim_func
    def kernel(
        x: T.Tensor((rows, columns * 2), "float32"), bias: T.Tensor((columns,), "float32"),
        y: T.Tensor((rows, columns * 2), "float32"), factor: T.float32, count: T.int32,
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(rows, 16)) as bx:
            tile = T.alloc_shared((16, 128), "float32")
            for c in T.serial(T.ceildiv(columns * 2, 128)):
                T.copy(x[bx * 16 : bx * 16 + 16, c * 128 : c * 128 + 128], tile)
                for step in T.serial(count):
                    with T.SimtVF(threads=128):
                        for i, j in T.Parallel(16, 128):
                            if c * 128 + j < columns:
                                tile[i, j] = tile[i, j] * factor + bias[c * 128 + j] + T.cast(step, "float32")
                T.copy(tile, y[bx * 16 : bx * 16 + 16, c * 128 : c * 128 + 128])

    return kernel


@pytest.mark.parametrize("rows, columns", [(16, 64), (50, 100)])
def test_dynamic_shapes_and_scalar_parameters(rows, columns):
    program = decode(scaled_rows())
    x, bias = floats(rows, 2 * columns), floats(columns)
    (got,) = npu.run(program, x, bias, np.float32(0.5), np.int32(3), outputs=(2,))
    want = x.astype(np.float64)
    for step in range(3):
        want[:, :columns] = want[:, :columns] * 0.5 + bias + step
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_shape_that_does_not_fit_the_others():
    program = decode(scaled_rows())
    with pytest.raises(errors.HardwareConstraintError, match="columns|parameter 'x'"):
        npu.run(program, floats(16, 60), floats(20), np.float32(1), np.int32(1), outputs=(2,))


def test_strides_that_a_call_decides():
    """Arrays are dense: the variables of their strides have the values that follow from the shape."""
    rows, stride = T.dynamic("rows"), T.dynamic("stride")

    @T.prim_func
    def kernel(x: T.StridedTensor((rows, 32), (stride, 1), "float32"), y: T.Tensor((rows, 32), "float32")):
        with T.Kernel(rows) as bx, T.SimtVF(threads=32):
            for j in T.Parallel(32):
                y[bx, j] = x[bx, j] + T.cast(stride, "float32")

    x = floats(5, 32)
    np.testing.assert_array_equal(npu.run(kernel, x)[0], x + np.float32(32))


def test_launches_one_after_the_other():
    """The second grid, of another size, reads what all blocks of the first wrote."""

    @T.prim_func
    def kernel(x: T.Tensor((64, 32), "float32"), sums: T.Tensor((64,), "float32"), y: T.Tensor((64, 32), "float32")):
        with T.Kernel(8) as bx:
            tile = T.alloc_shared((8, 32), "float32")
            total = T.alloc_shared((8,), "float32")
            T.copy(x[bx * 8 : bx * 8 + 8, :], tile)
            with T.SimtVF(threads=64):
                T.reduce_sum(tile, total, dim=1)
            T.copy(total, sums[bx * 8])
        with T.Kernel(2) as bx:
            tile = T.alloc_shared((32, 32), "float32")
            everything = T.alloc_shared((64,), "float32")
            T.copy(x[bx * 32 : bx * 32 + 32, :], tile)
            T.copy(sums, everything)
            with T.SimtVF(threads=64):
                for i, j in T.Parallel(32, 32):
                    tile[i, j] = tile[i, j] - everything[63 - (bx * 32 + i)]
            T.copy(tile, y[bx * 32 : bx * 32 + 32, :])

    program = decode(kernel)
    assert program.next.blocks == 2 and program.next.next is None
    assert set(program.next.buffers) == {"x", "sums", "y", "tile_1", "everything"}
    assert serialization.from_json(serialization.to_json(program)) == program
    x = floats(64, 32)
    sums, y = npu.run(program, x, outputs=(1, 2))
    np.testing.assert_allclose(sums, x.sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, x - x.sum(1)[::-1, None], rtol=1e-5, atol=1e-5)


def test_scalars_of_the_vector_units():
    """Scalars, branches, loops and slices that depend on the unit, or on what a unit has in its buffer."""

    @T.prim_func
    def kernel(x: T.Tensor((2, 8, 32), "float32"), pick: T.Tensor((2, 8), "int32"), y: T.Tensor((2, 3, 32), "float32")):
        with T.MixedKernel(1, sids=2) as (_, sid):
            tile = T.alloc_shared((8, 32), "float32")
            mine = T.alloc_shared((8,), "int32")
            total = T.alloc_var("int32", init=0)
            turns = T.alloc_var("int32", init=0)
            T.copy(x[sid, :, :], tile)
            T.copy(pick[sid, :], mine)
            for i in T.serial(2 + sid):
                total += mine[i] + sid
            if total % 2 == 1:
                T.copy(tile[total % 8, :], y[sid, 0, :])
            else:
                T.copy(tile[7, :], y[sid, 0, :])
            while total > 3:
                total = total // 2
                turns += 1
            T.copy(tile[mine[turns], :], y[sid, 1, :])
            T.copy(tile[total, :], y[sid, 2, :])

    x, pick = floats(2, 8, 32), RNG.integers(0, 8, (2, 8)).astype(np.int32)
    (y,) = npu.run(kernel, x, pick)
    for sid in range(2):
        total = int(sum(pick[sid, : 2 + sid])) + sid * (2 + sid)
        first = total % 8 if total % 2 == 1 else 7
        turns = 0
        while total > 3:
            total, turns = total // 2, turns + 1
        np.testing.assert_array_equal(y[sid], x[sid, [first, pick[sid, turns], total]])


def test_views_of_the_same_bytes():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32"), y: T.Tensor((64,), "float32"), z: T.Tensor((128,), "int16")):
        with T.Kernel(1):
            tile = T.alloc_shared((64,), "float32")
            square = T.reshape(tile, (8, 8))
            bits = T.view(tile, (64,), "int32")
            halves = T.view(tile, (128,), "int16")
            T.copy(x, tile)
            with T.SimtVF(threads=64):
                for i, j in T.Parallel(8, 8):
                    square[i, j] = square[i, j] * T.cast(i + 1, "float32")
                for i in T.Parallel(64):
                    bits[i] = bits[i] ^ (T.reinterpret(T.float32(1.0), "int32") & 0x00FFFFFF)
            T.copy(tile, y)
            T.copy(halves, z)

    x = floats(64)
    y, z = npu.run(kernel, x, outputs=(1, 2))
    want = (x.reshape(8, 8) * np.arange(1, 9, dtype=np.float32)[:, None]).reshape(64)
    want = (want.view(np.int32) ^ 0x00800000).view(np.float32)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(z, want.view(np.int16))


def test_schedules_do_not_change_results():
    """Stages, tasks, hints, buffer versions, a tile scheduler and a persistent loop: all in the order written."""

    @T.prim_func
    def kernel(x: T.Tensor((160, 224), "float32"), y: T.Tensor((160, 224), "float32"), z: T.Tensor((160,), "float32")):
        with T.Kernel(3) as bx:
            tile = T.alloc_shared((32, 32), "float32")
            row = T.alloc_shared((32,), "float32")
            T.annotate_buffer_versions({tile: 2})
            T.assume_no_conflict(row)
            scheduler = T.AscendTileScheduler(block_m=32, block_n=32, num_cores=3, shape_m=160, shape_n=224)
            scheduler.init(bx)
            while scheduler.valid():
                m, n = scheduler.m_idx * 32, scheduler.n_idx * 32
                T.copy(x[m : m + 32, n : n + 32], tile)
                T.copy(tile, y[m : m + 32, n : n + 32])
                scheduler.next_block()
            for block in T.Persistent([5], 3, bx):
                with T.Stage(0), T.Task(latency=20, ii=10):
                    T.copy(x[block * 32, 0:32], row)
                with T.PerCoreTask(), T.Task():
                    T.copy(row, z[block * 32 : block * 32 + 32])

    x = floats(160, 224)
    y, z = npu.run(kernel, x, outputs=(1, 2))
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(z.reshape(5, 32), x[::32, :32])


# --- random numbers -------------------------------------------------------------------------------------------------


def philox(seed, sequence, block):
    """Four words of Philox 4x32-10 in Python's integers."""
    x = [block & 0xFFFFFFFF, block >> 32, sequence & 0xFFFFFFFF, sequence >> 32]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ key[0], b & 0xFFFFFFFF, (a >> 32) ^ x[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def test_philox_has_its_published_words():
    """Known answers of the authors' library (Random123): counter and key 0, and all bits set."""
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 2**64 - 1
    assert philox(ones, ones, ones) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def words(seed, sequence, offset, count):
    first = -(-offset // 4)
    return [word for block in range(-(-count // 4)) for word in philox(seed, sequence, first + block)][:count]


def test_random_numbers_of_threads():
    """Each thread's stream, whatever it draws: words, uniform and normal numbers, under a condition or not."""

    @T.prim_func
    def kernel(bits: T.Tensor((2, 5, 64), "uint32"), real: T.Tensor((2, 3, 64), "float32")):
        with T.Kernel(2) as bx, T.SimtVF(threads=64):
            tx = T.get_thread_binding()
            T.rng_init(123456789, off=5)
            for q in T.serial(5):
                if tx % 2 == 0 or q < 2:
                    bits[bx, q, tx] = T.rng_rand()
                else:
                    bits[bx, q, tx] = T.uint32(0)
            real[bx, 0, tx] = T.rng_rand_float()
            real[bx, 1, tx] = T.rng_rand_float(dist="normal")
            real[bx, 2, tx] = T.rng_rand_float(dist="normal")

    bits, real = npu.run(kernel, outputs=(0, 1))
    for block in range(2):
        for thread in (0, 1, 31, 62, 63):
            stream = words(123456789, thread + 64 * block, 5, 8)
            drawn = 5 if thread % 2 == 0 else 2
            assert list(bits[block, :, thread]) == stream[:drawn] + [0] * (5 - drawn)
            uniform = [word * 2.0**-32 + 2.0**-33 for word in stream[drawn:]]
            radius = np.sqrt(-2 * np.log(uniform[1]))
            want = [uniform[0], *(radius * f(2 * np.pi * uniform[2]) for f in (np.cos, np.sin))]
            np.testing.assert_allclose(real[block, :, thread], want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("count", [32, 96, 80])
def test_random_numbers_of_parallel_loops(count):
    """Iteration i takes the next number of thread i modulo the number of threads."""

    @T.prim_func
    def kernel(first: T.Tensor((count,), "uint32"), second: T.Tensor((count,), "uint32")):
        with T.Kernel(1), T.SimtVF(threads=32):
            T.rng_init(7)
            for i in T.Parallel(count):
                first[i] = T.rng_rand()
            for i in T.Parallel(count):
                second[i] = T.rng_rand()

    first, second = npu.run(kernel, outputs=(0, 1))
    rounds = -(-count // 32)
    streams = np.array([words(7, thread, 0, 2 * rounds) for thread in range(32)], np.uint32)
    np.testing.assert_array_equal(first, streams[:, :rounds].T.ravel()[:count])
    np.testing.assert_array_equal(second, streams[:, rounds:].T.ravel()[:count])


# --- messages -------------------------------------------------------------------------------------------------------


def test_print(capfd):
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32"), y: T.Tensor((4,), "float32")):
        with T.Kernel(2) as bx:
            tile = T.alloc_shared((4,), "float32")
            T.copy(x, tile)
            T.print(bx * 10, msg="{block} is")
            if bx == 1:
                T.print(tile, msg="tile")
            T.copy(tile, y)

    npu.run(kernel, np.arange(4, dtype=np.float32))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(
        ["{block} is 0", "{block} is 10", *(f"tile tile {i} {i}.0" for i in range(4))]
    )


def test_device_assert(capfd):
    @T.prim_func
    def kernel(x: T.Tensor((32,), "float32"), y: T.Tensor((32,), "float32")):
        with T.Kernel(2) as bx:
            tile = T.alloc_shared((16,), "float32")
            T.copy(x[bx * 16], tile)
            T.device_assert(tile[3] >= 0.0)
            with T.SimtVF(threads=16):
                tx = T.get_thread_binding()
                if tx < 8:
                    T.device_assert(tile[tx] < 100.0)
            T.copy(tile, y[bx * 16])

    x = np.arange(32, dtype=np.float32)
    x[9] = 1000  # a thread that does not check
    np.testing.assert_array_equal(npu.run(kernel, x)[0], x)
    for place, value in ((3, -1.0), (17, 200.0)):
        broken = x.copy()
        broken[place] = value
        message = rf"DeviceAssertionError: .*test_language_scalars\.py:\d+: .* \(block {place // 16}, 1 of"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            npu.run(kernel, broken)


# --- what is not decoded --------------------------------------------------------------------------------------------


def test_an_effect_inside_a_choice():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "int32"), y: T.Tensor((64,), "int32")):
        with T.Kernel(1), T.SimtVF(threads=64):
            tx = T.get_thread_binding()
            y[tx] = T.if_then_else(x[tx] > 0, T.atomic_add(y[0], 1, return_prev=True), 0)

    message = r"test_language_scalars\.py:\d+: atomic inside one side of a choice"
    with pytest.raises(errors.UnsupportedError, match=message):
        decode(kernel)


def test_c_functions():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32")):
        with T.Kernel(1):
            T.call_extern("handle", "my_function", x[0])

    with pytest.raises(errors.UnsupportedError, match=r"test_language_scalars\.py:\d+: the function my_function"):
        decode(kernel)
