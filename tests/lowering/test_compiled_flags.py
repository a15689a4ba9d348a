"""The synchronization in compiled kernels, as programs of flags alone."""

import dataclasses

import pytest
import tilelang.ascend.language as T

from glass_jax.hw import chips, verifier
from glass_jax.hw.ir import program as ir
from glass_jax.hw.order import ordering, sync
from glass_jax.lowering import artifact, cache
from glass_jax.lowering.tilelang import user


def doubled(chunk=256, chunks=6):
    """y = 2 x in chunks, loaded, computed and stored at the same time."""

    @T.prim_func
    def doubled(x: T.Tensor((2 * chunks * chunk,), "float32"), y: T.Tensor((2 * chunks * chunk,), "float32")):
        with T.Kernel(2) as bx:
            u = T.alloc_shared((chunk,), "float32")
            v = T.alloc_shared((chunk,), "float32")
            for t in T.Pipelined(chunks, num_stages=2):
                start = (bx * chunks + t) * chunk
                T.copy(x[start : start + chunk], u)
                with T.SimtVF(threads=128):
                    for i in T.Parallel(chunk):
                        v[i] = u[i] * 2.0
                T.copy(v, y[start : start + chunk])

    return doubled


def product(depth=4, tile=32):
    """One tile of a product a block, handed to the vector units."""

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
            u = T.alloc_shared((tile // 2, tile), "float32")
            for k in T.Pipelined(depth, num_stages=2):
                T.copy(a[bx * tile : (bx + 1) * tile, k * tile : (k + 1) * tile], a_l1)
                T.copy(b[:, k * tile : (k + 1) * tile], b_l1)
                T.gemm(a_l1, b_l1, acc, transpose_B=True, clear_accum=(k == 0))
            T.dual_copy(acc, u)
            T.dual_copy(u, c[bx * tile : (bx + 1) * tile, :])

    return product


@pytest.fixture(scope="module", params=[doubled, product], ids=["doubled", "product"])
def made(request):
    return cache.compile(user.user_kernel(request.param()), "950DT")


def operations(program):
    return [stmt for stmt in ir.walk(program.body) if isinstance(stmt, ir.Op)]


def test_every_flag_of_the_code_is_there(made):
    """As often as it is written in the generated source."""
    for name, call in (("ascend_set_flag", "asc_sync_notify("), ("ascend_wait_flag", "asc_sync_wait(")):
        found = sum(operation.name == name for operation in operations(made.flags))
        assert found == made.source.count(call) > 0


def test_the_compilers_flags_are_sound(made):
    outcome = ordering.check(made.flags)
    assert outcome.findings == () and outcome.waits == () and len(outcome.used) > 5
    assert verifier.verify(made.program, chips.get("950DT"), made.memory, made.flags) == []


def test_each_lost_flag_is_reported(made):
    def without(statements, lost):
        return tuple(inside(stmt, lost) for stmt in statements if stmt is not lost)

    def inside(stmt, lost):
        names = [name for name in ("body", "then", "orelse") if hasattr(stmt, name)]
        return dataclasses.replace(stmt, **{name: without(getattr(stmt, name), lost) for name in names})

    for lost in operations(made.flags):
        if sync.parse(lost).kind in ("set", "wait", "cross_set", "cross_wait"):
            flags = dataclasses.replace(made.flags, body=without(made.flags.body, lost))
            found = verifier.verify(made.program, chips.get("950DT"), made.memory, flags)
            assert {violation.rule for violation in found} == {"compiled-sync"}, lost


def test_a_product_from_l1_orders_its_pipes_by_locks():
    """The device library takes a lock for L0 on the one pipe, then on the other; no flag of the code says so."""
    flags = cache.compile(user.user_kernel(product()), "950DT").flags
    locks = [op.args[0] for op in operations(flags) if op.name == "ascend_get_buf"]
    assert locks and locks == ["PIPE_MTE1", "PIPE_M"] * (len(locks) // 2)


def test_they_are_stored_with_the_kernel(made):
    assert artifact.from_json(artifact.to_json(made)).flags == made.flags
