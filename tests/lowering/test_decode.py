"""TileLang's front-end IR as a Program: what is in it, that it means the same, and that nothing is lost on the way."""

import inspect
import pathlib

import interpreter
import numpy as np
import pytest
import tilelang.ascend.language as T

from glass_jax import errors
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir import serialization
from glass_jax.lowering.tilelang.decode import decode
from glass_jax.lowering.tilelang.kernels.gemm import GemmKernel
from glass_jax.lowering.tiling import GemmTiles


def rows(rows_=64, columns=96):
    """Two vector units, a row reduction, a view, a mutable scalar, a loop of each kind."""

    @T.prim_func
    def rows_kernel(
        x: T.Tensor((rows_, columns), "float32"),
        total: T.Tensor((rows_,), "float32"),
        y: T.Tensor((rows_, columns), "float16"),
    ):
        with T.MixedKernel(rows_ // 8, sids=2) as (bx, sid):
            tile = T.alloc_shared((4, columns), "float32")
            terms = T.alloc_fragment((4, columns), "float32")
            sums = T.alloc_fragment((4,), "float32")
            out = T.alloc_shared((4, columns), "float16")
            flat = T.view(out, (4 * columns,))
            count = T.alloc_var("int32", init=0)
            base = bx * 8 + sid * 4
            while count < 3:
                count += 1
            for step in T.unroll(2):
                count = count + step
            T.copy(x[base : base + 4, 0:columns], tile)
            with T.SimtVF(threads=128):
                for i, j in T.Parallel(4, columns):
                    terms[i, j] = T.if_then_else(tile[i, j] > 0, T.exp(tile[i, j]), T.abs(tile[i, j]) * T.sqrt(2.0))
                T.reduce_sum(terms, sums, dim=1)
                for i in T.Parallel(4):
                    if i < count:
                        total[base + i] = sums[i]
                for i, j in T.Parallel(4, columns):
                    flat[i * columns + j] = T.cast(terms[i, j] / sums[i], "float16")
            T.copy(out, y[base : base + 4, 0:columns])

    return rows_kernel


@pytest.fixture(scope="module")
def rows_program():
    return decode(rows())


@pytest.fixture(scope="module")
def gemm_program():
    kernel = GemmKernel(
        1,
        False,
        False,
        1000,
        576,
        1024,
        "float16",
        "float16",
        bias=True,
        activation="silu",
        tiles=GemmTiles(64, 64, 128, 2),
    )
    return decode(kernel.build("950DT"))


def statements(program, kind):
    return [stmt for stmt in ir.walk(program.body) if isinstance(stmt, kind)]


def test_program_means_what_the_kernel_says(rows_program):
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    total, y = interpreter.run(rows_program, x, outputs=(1, 2))
    wide = x.astype(np.float64)
    terms = np.where(wide > 0, np.exp(wide), np.abs(wide) * np.sqrt(2))
    np.testing.assert_allclose(total, terms.sum(1), rtol=1e-5)
    np.testing.assert_allclose(y, terms / terms.sum(1, keepdims=True), rtol=2e-3, atol=1e-6)


def test_grid_and_vector_units(rows_program, gemm_program):
    assert (rows_program.blocks, rows_program.units, rows_program.unit) == (8, 2, ir.Var("sid"))
    assert (gemm_program.blocks, gemm_program.units, gemm_program.unit) == (32, 2, None)


def test_buffers_of_every_space(rows_program, gemm_program):
    def spaces(program):
        return {name: buffer.space for name, buffer in program.buffers.items()}

    assert spaces(gemm_program) == dict.fromkeys(("lhs", "rhs", "bias", "out"), ir.Space.GM) | {
        "a": ir.Space.L1, "b": ir.Space.L1, "c": ir.Space.L0C,
        "sums": ir.Space.UB, "result": ir.Space.UB, "row": ir.Space.UB,
    }  # fmt: skip
    assert gemm_program.params == ("lhs", "rhs", "bias", "out")
    assert spaces(rows_program)["terms"] is ir.Space.FRAGMENT
    assert spaces(rows_program)["count"] is ir.Space.SCALAR


def test_a_view_shares_its_storage(rows_program):
    views = [buffer for buffer in rows_program.buffers.values() if buffer.name != buffer.storage]
    assert [(view.storage, view.shape) for view in views] == [("out", (384,))]


def test_product_loop(gemm_program):
    (loop,) = [stmt for stmt in statements(gemm_program, ir.For) if stmt.kind == "pipelined"]
    assert loop.attrs == {"num_stages": 2} and loop.extent == ir.Const(8, "int32")
    loads = [stmt for stmt in loop.body if isinstance(stmt, ir.Copy)]
    assert [(c.src.buffer, c.src.extents, c.dst.buffer, c.dst.extents, c.attrs) for c in loads] == [
        ("lhs", (1, 64, 128), "a", (64, 128), {}),
        ("rhs", (1, 128, 64), "b", (64, 128), {"transpose": True}),
    ]
    (product,) = statements(gemm_program, ir.Gemm)
    assert (product.a.buffer, product.b.buffer, product.c.buffer) == ("a", "b", "c")
    assert (product.transpose_a, product.transpose_b) == (False, True)
    assert product.clear == ir.Binary("eq", loop.var, ir.Const(0, "int32"), "bool")


def test_split_copies_say_which_side_is_whole(gemm_program):
    dual = [stmt for stmt in statements(gemm_program, ir.Copy) if "dual" in stmt.attrs]
    assert [(c.src.buffer, c.src.extents, c.dst.extents, c.attrs["dual"], "double" in c.attrs) for c in dual] == [
        ("c", (64, 64), (32, 64), "rows", False),
        ("result", (32, 64), (1, 64, 64), "rows", True),
    ]


def test_coordinates_of_a_persistent_loop_are_bound_inside_it(gemm_program):
    (wave,) = [stmt for stmt in gemm_program.body if isinstance(stmt, ir.For)]
    assert wave.extent == ir.Const(5, "int32")  # 16 x 9 tiles over 32 cores
    tile = wave.body[0]
    assert isinstance(tile, ir.Let) and tile.var.name == "tile"
    assert {e.name for e in ir.subexpressions(tile.value) if isinstance(e, ir.Var)} == {
        wave.var.name,
        gemm_program.block.name,
    }
    assert wave.attrs == {"multi_buffer_eligible": ("c",)}


@pytest.mark.parametrize("name", ["rows_program", "gemm_program"])
def test_names_are_unique_and_bound(name, request):
    program = request.getfixturevalue(name)
    bound = [program.block.name, *([program.unit.name] if program.unit else [])]
    for stmt in ir.walk(program.body):
        bound += [stmt.var.name] if isinstance(stmt, ir.For | ir.Let) else []
        bound += [var.name for var in stmt.threads] if isinstance(stmt, ir.Simt) else []
    names = [*bound, *program.buffers]
    assert len(set(names)) == len(names)
    for stmt in ir.walk(program.body):
        for expr in ir.subexpressions(stmt):
            assert not isinstance(expr, ir.Var) or expr.name in bound
            assert not isinstance(expr, ir.Load) or expr.buffer in program.buffers


@pytest.mark.parametrize("name", ["rows_program", "gemm_program"])
def test_json_round_trip(name, request):
    program = request.getfixturevalue(name)
    assert serialization.from_json(serialization.to_json(program)) == program


def test_statements_know_their_line(rows_program):
    source, _ = inspect.getsourcelines(inspect.getmodule(rows))
    for kind, text in ((ir.Copy, "T.copy("), (ir.While, "while "), (ir.Simt, "T.SimtVF("), (ir.Store, "=")):
        for stmt in statements(rows_program, kind):
            file, line = stmt.loc.rsplit(":", 1)
            assert pathlib.Path(file).name == "test_decode.py" and text in source[int(line) - 1]
    assert pathlib.Path(rows_program.source).name == "test_decode.py"


@pytest.mark.parametrize("shape, half", [((8, 32), (4, 32)), ((8, 32), (8, 16)), ((64,), (32,))])
def test_split_copies_cover_the_tile(shape, half):
    @T.prim_func
    def through(x: T.Tensor(shape, "float32"), y: T.Tensor(shape, "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared(half, "float32")
            T.dual_copy(x, tile)
            T.dual_copy(tile, y)

    program = decode(through)
    assert program.units == 2
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    (y,) = interpreter.run(program, x, outputs=(1,))
    np.testing.assert_array_equal(y, x)


def test_scalar_functions_and_operators():
    @T.prim_func
    def scalars(x: T.Tensor((64,), "int32"), y: T.Tensor((64,), "int32"), z: T.Tensor((64,), "float32")):
        with T.Kernel(1), T.SimtVF(threads=64):
            for i in T.Parallel(64):
                v = x[i]
                y[i] = T.Select(v % 3 == 0, v // 4, (v << 2) & 255) + T.min(v, 7) - (v >> 1) * 2
                z[i] = T.rsqrt(T.cast(v, "float32") + 1.0) + T.floor(T.log(T.cast(v + 1, "float32")))

    x = np.arange(64, dtype=np.int32)
    y, z = interpreter.run(decode(scalars), x, outputs=(1, 2))
    np.testing.assert_array_equal(y, np.where(x % 3 == 0, x // 4, (x << 2) & 255) + np.minimum(x, 7) - (x >> 1) * 2)
    np.testing.assert_allclose(z, 1 / np.sqrt(x + 1.0) + np.floor(np.log(x + 1.0)), rtol=1e-6)


def test_padded_copy():
    @T.prim_func
    def padded(x: T.Tensor((4, 10), "float32"), y: T.Tensor((4, 16), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((4, 16), "float32")
            T.copy(x[0:4, 0:10], tile[0:4, 0:10], pad_value=-1.0)
            T.copy(tile, y)

    load, store = statements(decode(padded), ir.Copy)
    assert load.attrs == {"pad": ir.Const(-1.0, "float32")} and load.src.extents == (4, 10)
    assert store.attrs == {}


def test_hints_are_kept_as_operations():
    @T.prim_func
    def hinted(x: T.Tensor((8, 16), "float32"), y: T.Tensor((8, 16), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((8, 16), "float32")
            T.assume_no_conflict(tile)
            T.copy(x, tile)
            with T.Stage(1):
                T.copy(tile, y)

    assert [op.name for op in statements(decode(hinted), ir.Op)] == ["conflict_hint", "stage"]
    assert len(statements(decode(hinted), ir.Copy)) == 2


def test_what_has_no_form_raises_with_its_place():
    @T.prim_func
    def swizzled(x: T.Tensor((8, 16), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((8, 16), "float32")
            T.copy(x, tile, annotations={"swizzle": 3})

    with pytest.raises(errors.UnsupportedError, match=r"test_decode\.py:\d+: a copy with swizzle=3"):
        decode(swizzled)


def test_parameters_of_one_type_object_are_refused():
    shared = T.Tensor((8, 16), "float32")

    @T.prim_func
    def aliased(x: shared, y: shared):
        with T.Kernel(1):
            tile = T.alloc_shared((8, 16), "float32")
            T.copy(x, tile)
            T.copy(tile, y)

    with pytest.raises(errors.HardwareConstraintError, match="with one T.Tensor object"):
        decode(aliased)
