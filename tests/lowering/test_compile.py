"""What TileLang makes of a kernel: the launch, the memory map against the generated source, and its refusals."""

import importlib.util
import re

import pytest
import tilelang
import tilelang.ascend.language as T

from glass_jax import errors
from glass_jax.hw.ir import program as ir
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang.kernels.gemm import GemmKernel
from glass_jax.lowering.tilelang.user import user_kernel
from glass_jax.lowering.tiling import GemmTiles

CHIP = "950DT"


def add(rows=64, columns=128, dtype="float32"):
    @T.prim_func
    def add_rows(
        b: T.Tensor((rows, columns), dtype), a: T.Tensor((rows, columns), dtype), out: T.Tensor((rows, columns), dtype)
    ):
        with T.Kernel(rows // 8) as bx:
            x = T.alloc_shared((8, columns), dtype)
            y = T.alloc_shared((8, columns), dtype)
            T.copy(b[bx * 8 : bx * 8 + 8, 0:columns], x)
            T.copy(a[bx * 8 : bx * 8 + 8, 0:columns], y)
            with T.SimtVF(threads=128):
                for i, j in T.Parallel(8, columns):
                    x[i, j] = x[i, j] + y[i, j]
            T.copy(x, out[bx * 8 : bx * 8 + 8, 0:columns])

    return add_rows


@pytest.fixture(scope="module")
def gemm():
    kernel = GemmKernel(
        1,
        False,
        False,
        512,
        2112,
        1024,
        "bfloat16",
        "bfloat16",
        bias=True,
        activation="gelu",
        tiles=GemmTiles(128, 192, 256, 2),
    )
    return cache.compile(kernel, CHIP)


def test_launch(gemm):
    assert gemm.block_dim == gemm.program.blocks == 32
    assert gemm.arch == "dav-3510"
    assert set(gemm.versions) == {"tilelang", "apache-tvm-ffi"}
    assert re.search(rf"__global__ \S+ ?\S* void {gemm.entry}\(", gemm.source)


def test_launch_order_is_that_of_the_generated_function(gemm):
    for made in (gemm, cache.compile(user_kernel(add()), CHIP)):
        signature = re.search(rf"{made.entry}\(([^)]*)\)", made.source)[1]
        names = [param.split()[-1] for param in signature.split(",")]
        assert [made.arguments[position].name for position in made.launch_order] == names


def test_addresses_are_those_in_the_source(gemm):
    by_name = {allocation.buffer: allocation for allocation in gemm.memory}
    assert {name: a.versions for name, a in by_name.items()} == {
        "a": 2, "b": 2, "c": 2, "sums": 2, "result": 2, "row": 2, "gemm.a": 2, "gemm.b": 2,
    }  # fmt: skip
    # The epilogue reads and writes the unified buffer at "counter * elements of a version + ... + elements before it".
    body = gemm.source[: gemm.source.index("__global__")]
    for name, size in (("row", 4), ("result", 2)):
        version, offset = by_name[name].nbytes // size, by_name[name].offset // size
        assert re.search(rf"& 1\) \* {version}\).*\+ {offset}\)", body), name
    # The operands lie one behind the other in L1.
    l1 = sorted((a for a in gemm.memory if a.space is ir.Space.L1), key=lambda a: a.offset)
    assert [a.offset for a in l1] == [0, l1[0].nbytes * 2]
    assert by_name["a"].nbytes == 128 * 256 * 2 and by_name["b"].nbytes == 192 * 256 * 2
    assert re.search(rf"& 1\) \* {128 * 256}\) \+ {by_name['a'].offset // 2}\)", gemm.source)
    # L0 tiles as deep as the generated call says.
    depth = int(re.search(r"ascend_gemm_l1<128, 256, 192, (\d+),", gemm.source)[1])
    assert (by_name["gemm.a"].nbytes, by_name["gemm.b"].nbytes) == (128 * depth * 2, 192 * depth * 2)
    ub_end = max(a.offset + a.nbytes * a.versions for a in gemm.memory if a.space is ir.Space.UB)
    assert ub_end <= gemm.dynamic_ub_bytes < ub_end + 32


@pytest.mark.parametrize(
    "operand, out", [("float32", "bfloat16"), ("float16", "float32"), ("int8", "int32"), ("float8_e4m3fn", "float16")]
)
@pytest.mark.parametrize("transpose", [False, True])
def test_every_dtype_compiles(operand, out, transpose):
    activation = "relu" if operand == "int8" else "silu"
    kernel = GemmKernel(
        2,
        True,
        False,
        64,
        128,
        256,
        operand,
        out,
        transpose_lhs=transpose,
        transpose_rhs=transpose,
        bias=True,
        activation=activation,
    )
    made = cache.compile(kernel, CHIP)
    assert f"ascend_gemm_l1<{made.program.buffers['a'].shape[0]}, " in made.source
    assert (
        "asc_copy_gm2l1_dn2nz" in made.source
    ) is True  # exactly one of the operands is transposed on the way, or both


def test_a_users_kernel():
    made = cache.compile(user_kernel(add(dtype="float16"), out_idx=-1), CHIP)
    assert made.entry == "add_rows_kernel" and made.block_dim == 8
    assert [(a.name, a.shape, a.dtype, a.output) for a in made.arguments] == [
        ("b", (64, 128), "float16", False), ("a", (64, 128), "float16", False), ("out", (64, 128), "float16", True),
    ]  # fmt: skip
    assert made.program.units == 1  # nothing but vector work: a block is one vector unit
    assert [(a.buffer, a.nbytes) for a in made.memory] == [("x", 2048), ("y", 2048)]


def test_memory_has_the_names_of_the_program():
    @T.prim_func
    def reused(tile: T.Tensor((64, 64), "float32"), other: T.Tensor((64, 128), "float32")):
        with T.Kernel(8) as bx:
            a = T.alloc_shared((8, 64), "float32")
            b = T.alloc_shared((8, 64), "float32")
            c = T.alloc_shared((8, 64), "float32")
            flat = T.view(b, (512,))
            T.copy(tile[bx * 8 : bx * 8 + 8, 0:64], a)
            T.copy(tile[bx * 8 : bx * 8 + 8, 0:64], c)
            with T.SimtVF(threads=128):
                for i in T.Parallel(512):
                    flat[i] = a[i // 64, i % 64] + c[i // 64, i % 64]
            T.copy(b, other[bx * 8 : bx * 8 + 8, 0:64])

    made = cache.compile(user_kernel(reused), CHIP)
    assert sorted(a.buffer for a in made.memory) == ["a", "b", "c"]
    assert all(made.program.buffers[a.buffer].storage == a.buffer for a in made.memory)


def test_a_users_jit_function():
    @tilelang.jit(out_idx=[2], target="ascend")
    def factory(rows, columns):
        return add(rows, columns)

    kernel = user_kernel(factory, 16, 256)
    assert kernel.outputs == (2,) and kernel.arguments[0].shape == (16, 256)
    assert kernel == user_kernel(factory, 16, 256) and kernel != user_kernel(factory, 32, 256)
    assert hash(kernel) == hash(user_kernel(factory, 16, 256))
    assert cache.compile(kernel, CHIP).block_dim == 2


@pytest.mark.parametrize("out_idx, match", [(3, r"out_idx \[3\] of 3 parameters"), ([0, -4], r"\[-4\]")])
def test_outputs_that_are_not_parameters(out_idx, match):
    with pytest.raises(errors.HardwareConstraintError, match=match):
        user_kernel(add(), out_idx=out_idx)


def test_what_is_not_a_kernel():
    with pytest.raises(errors.HardwareConstraintError, match="got function"):
        user_kernel(add)
    with pytest.raises(errors.HardwareConstraintError, match=r"arguments are for @tilelang\.jit"):
        user_kernel(add(), 64)


def test_a_refusal_names_the_kernel_and_the_reason(capfd):
    @T.prim_func
    def untransposed(
        x: T.Tensor((16, 64), "float16"), y: T.Tensor((64, 16), "float16"), z: T.Tensor((16, 16), "float32")
    ):
        with T.Kernel(1):
            a = T.alloc_l1((16, 64), "float16")
            b = T.alloc_l1((64, 16), "float16")
            c = T.alloc_l0c((16, 16), "float32")
            T.copy(x, a)
            T.copy(y, b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, z)

    with pytest.raises(
        errors.GlassError, match=r"test_compile\.py:\d+: TileLang refused kernel untransposed.*trans_B=True"
    ):
        cache.compile(user_kernel(untransposed), CHIP)


def test_a_kernel_that_moved_in_its_file_names_its_new_lines(tmp_path):
    """The text of a kernel does not say where it stands, so that a cached one would point to its old lines."""
    text = (
        "import tilelang.ascend.language as T\n@T.prim_func\n"
        "def moved(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):\n    with T.Kernel(1) as bx:\n"
        "        u = T.alloc_shared((64,), 'float32')\n        T.copy(x, u)\n        T.copy(u, y)\n"
    )
    found = []
    for above in (0, 5):
        path = tmp_path / f"kernel_{above}.py"
        path.write_text("\n" * above + text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made = cache.compile(user_kernel(module.moved), CHIP)
        found.append([stmt.loc for stmt in ir.walk(made.program.body) if isinstance(stmt, ir.Copy)])
    assert found == [[f"{tmp_path}/kernel_{above}.py:{line + above}" for line in (6, 7)] for above in (0, 5)]
