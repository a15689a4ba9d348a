"""Every rule of the verifier: one program that breaks it and one that just does not."""

import dataclasses

import pytest

from glass_jax import errors
from glass_jax.hw import chips, memory, verifier
from glass_jax.hw.ir import printer
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Allocation, Space
from glass_jax.hw.rules import bounds, sync

CHIP = chips.get("950DT")
ZERO = ir.Const(0, "int32")


def buffer(name, space, shape, dtype="float16", **fields):
    return ir.Buffer(name, space, shape, dtype, fields.pop("storage", name), **fields)


def whole(item, starts=None, extents=None):
    return ir.Region(item.name, starts or (ZERO,) * len(item.shape), extents or item.shape)


def program(buffers, body, blocks=32, **fields):
    params = tuple(item.name for item in buffers if item.space is Space.GM)
    table = {item.name: item for item in buffers}
    return ir.Program("kernel", params, table, ir.Var("bx"), blocks, tuple(body), **fields)


def product(
    m=128, n=128, k=64, dtype="float16", acc="float32", spaces=(Space.L1, Space.L1, Space.L0C), stages=2, **fields
):
    """A kernel that multiplies one tile, operands loaded in a pipelined loop."""
    a_gm, b_gm = buffer("a_gm", Space.GM, (m, k), dtype), buffer("b_gm", Space.GM, (n, k), dtype)
    out = buffer("out", Space.GM, (m, n), acc)
    a, b, c = (
        buffer("a", spaces[0], (m, k), dtype, loc="user.py:7"),
        buffer("b", spaces[1], (n, k), dtype),
        buffer("c", spaces[2], (m, n), acc),
    )
    gemm = ir.Gemm(
        whole(a), whole(b), whole(c), False, fields.pop("transpose_b", True), ir.Const(True, "bool"), loc="user.py:12"
    )
    load = (ir.Copy(whole(a_gm), whole(a)), ir.Copy(whole(b_gm), whole(b)), gemm)
    loop = ir.For(ir.Var("k"), ZERO, ir.Const(4, "int32"), "pipelined", load, {"num_stages": stages})
    return program((a_gm, b_gm, out, a, b, c), (loop, ir.Copy(whole(c), whole(out))), **fields)


def transfer(src, dst, src_region=None, dst_region=None, **attrs):
    return program((src, dst), (ir.Copy(src_region or whole(src), dst_region or whole(dst), attrs),))


def load_rows(columns, width=None, *, dtype="float16", rows=64, **attrs):
    """Copies ``rows`` x ``columns`` of a wider array in GM to a UB buffer that is ``width`` wide."""
    gm, ub = buffer("x", Space.GM, (rows, 1000), dtype), buffer("u", Space.UB, (rows, width or columns), dtype)
    return transfer(gm, ub, whole(gm, extents=(rows, columns)), whole(ub, extents=(rows, columns)), **attrs)


def wide(rows):
    """Fills ``rows`` rows of 2 KiB in UB."""
    return load_rows(992, width=1024, rows=rows)


def part_of_a(start, rows=128, lead=()):
    """A product of a part of an operand in L1."""
    a, b = buffer("a", Space.L1, (*lead, 128, 256)), buffer("b", Space.L1, (64, 64))
    c = buffer("c", Space.L0C, (rows, 64), "float32")
    starts = tuple(ir.Const(at, "int32") if isinstance(at, int) else at for at in start)
    part = whole(a, starts, (*(1 for _ in lead), rows, 64))
    return program(
        (a, b, c), (ir.Gemm(part, whole(b), whole(c), False, True, ir.Const(True, "bool"), loc="user.py:3"),)
    )


def rows_of_c(rows, columns=64, cut="both"):
    """Stores some rows of a tile in L0C of 128."""
    c, out = buffer("c", Space.L0C, (128, columns), "float32"), buffer("out", Space.GM, (128, columns), "float32")
    part = whole(c, extents=(128 if cut == "destination" else rows, columns))
    return transfer(c, out, part, whole(out, extents=(rows, columns)))


def two_products(first, second, through_ub=False):
    """Two products of these depths; the second's operand comes from the vector units or from GM."""
    packed, c = buffer("packed", Space.UB, (64, second)), buffer("c", Space.L0C, (64, 128), "float32")
    tiles = [
        buffer(f"{name}{k}", Space.L1, (rows, k)) for k in (first, second) for name, rows in (("a", 64), ("b", 128))
    ]
    tiles = [dataclasses.replace(tile, name=f"t{i}", storage=f"t{i}") for i, tile in enumerate(tiles)]
    true = ir.Const(True, "bool")
    products = [ir.Gemm(whole(a), whole(b), whole(c), False, True, true) for a, b in (tiles[:2], tiles[2:])]
    between = [ir.Copy(whole(packed), whole(tiles[2]))] if through_ub else []
    return program((packed, c, *tiles), (products[0], *between, products[1]))


def counted(name, beside="u"):
    """A loop over a variable, beside a buffer in UB."""
    ub = buffer(beside, Space.UB, (16,))
    return program((ub,), (ir.For(ir.Var(name), ZERO, ir.Const(4, "int32"), "serial", (), loc="user.py:3"),))


def thin(k):
    """A product of L0 tiles that are deep and have 16 rows."""
    return product(m=16, n=16, k=k, spaces=(Space.L0A, Space.L0B, Space.L0C))


def between(src, dst, *shape):
    """Copies a whole buffer from one memory to another."""
    return transfer(buffer("x", src, shape or (64, 64)), buffer("y", dst, shape or (64, 64)))


def store_rows(columns, width):
    gm, ub = buffer("x", Space.GM, (64, 1000)), buffer("u", Space.UB, (64, width))
    return transfer(ub, gm, whole(ub, extents=(64, columns)), whole(gm, extents=(64, columns)))


def slice_of(space, start, shape=(64, 64), **fields):
    """Copies one row, which starts at ``start``, out of or into a buffer in ``space``."""
    gm, on_chip = buffer("x", Space.GM, (1, 16)), buffer("u", space, shape, **fields)
    region = ir.Region("u", start, (1, 16))
    copy = ir.Copy(whole(gm), region)
    loop = ir.For(ir.Var("i"), ZERO, ir.Const(4, "int32"), "serial", (copy,))
    return program((gm, on_chip), (loop,))


def all_cores_wait(blocks, mode=0, space=Space.UB):
    flag = ir.Op("ascend_cross_core_wait_flag", (ir.Const(mode, "int32"), "PIPE_MTE3", ir.Const(1, "int32")))
    return program((buffer("x", space, (16,)),), (flag,), blocks=blocks)


def simt(rows):
    """A kernel with a SIMT region and ``rows`` KiB in UB."""
    ub = buffer("u", Space.UB, (rows, 256), "float32")
    return program((ub,), (ir.Simt((ir.Var("tx"),), (32,), ()),))


def many(count, stages):
    """``count`` UB buffers that a pipelined loop fills."""
    gm = buffer("x", Space.GM, (16,))
    buffers = [buffer(f"u{i}", Space.UB, (16,)) for i in range(count)]
    body = tuple(ir.Copy(whole(gm), whole(item)) for item in buffers)
    return program(
        (gm, *buffers), (ir.For(ir.Var("k"), ZERO, ir.Const(4, "int32"), "pipelined", body, {"num_stages": stages}),)
    )


def upper_half(taken):
    """A product into the upper 64 of the 128 rows of an accumulator, of which ``taken`` leave it."""
    made = product()
    (loop, _), rows = made.body, lambda name, count: ir.Region(name, (ZERO, ZERO), (count, 128))
    gemm = dataclasses.replace(loop.body[2], a=ir.Region("a", (ZERO, ZERO), (64, 64)), c=rows("c", 64))
    store = ir.Copy(rows("c", taken), rows("out", taken))
    return dataclasses.replace(made, body=(dataclasses.replace(loop, body=(*loop.body[:2], gemm)), store))


INDEX, STOP = ir.Var("i"), ir.Const(16, "int32")
GM, L1, L0A, L0B, L0C, UB = Space.GM, Space.L1, Space.L0A, Space.L0B, Space.L0C, Space.UB


def times(value):
    return ir.Binary("mul", INDEX, ir.Const(value, "int32"), "int32")


# rule, program that breaks it, program that just does not
CASES = [
    ("memory-overflow", product(m=256, n=512, k=16), product(m=256, n=256, k=16)),  # L0C: 512 and 256 of 256 KiB
    ("memory-overflow", product(m=128, n=128, k=1024), product(m=128, n=128, k=512)),  # L1: 1 MiB and 512 of 512 KiB
    ("memory-overflow", product(k=512, stages=3), product(k=512, stages=2)),  # L1: 3 and 2 versions of 256 KiB
    ("memory-overflow", wide(rows=128), wide(rows=124)),  # UB: 256 and 248 of 248 KiB
    ("memory-overflow", simt(217), simt(216)),  # UB: 248 KiB less 32 KiB of thread contexts
    ("l0-overflow", product(m=1040, n=16), product(m=1024, n=16)),
    ("l0-overflow", product(m=16, n=1040), product(m=16, n=1024)),
    ("buffer-count", many(33, stages=2), many(32, stages=2)),
    ("gemm-tile", product(m=24), product(m=32)),
    ("gemm-tile", product(n=8), product(n=16)),
    ("gemm-tile", product(k=24), product(k=48)),
    ("gemm-tile", product(k=16, dtype="int8", acc="int32"), product(k=32, dtype="int8", acc="int32")),
    ("gemm-tile", product(k=4, dtype="float32"), product(k=8, dtype="float32")),
    ("gemm-tile", product(m=0), product(m=16)),
    ("gemm-extent", thin(k=4096), thin(k=4080)),
    ("gemm-transpose", product(transpose_b=False), product(transpose_b=True)),
    ("gemm-transpose", product(transpose_b=False), product(transpose_b=False, spaces=(L0A, L0B, L0C))),
    ("gemm-dtype", product(dtype="float64"), product(dtype="bfloat16")),
    ("gemm-dtype", product(dtype="int8", acc="float32"), product(dtype="int8", acc="int32")),
    ("gemm-dtype", product(acc="float16"), product(acc="float32")),
    ("gemm-space", product(spaces=(L1, L0B, L0C)), product(spaces=(L0A, L0B, L0C))),
    ("gemm-space", product(spaces=(L1, L1, UB)), product(spaces=(L1, L1, L0C))),
    ("sliced-product", part_of_a(start=(0, 64)), part_of_a(start=(0, 0))),
    ("sliced-product", part_of_a(start=(0, ir.Var("k"))), part_of_a(start=(ir.Var("k"), 0, 0), lead=(4,))),
    ("sliced-product", part_of_a(start=(0, 0), rows=64), part_of_a(start=(0, 0), rows=128)),
    ("partial-l0c-copy", rows_of_c(112), rows_of_c(113)),
    ("partial-l0c-copy", rows_of_c(ir.Var("rows")), rows_of_c(ir.Var("rows"), cut="destination")),
    ("partial-l0c-copy", upper_half(taken=128), upper_half(taken=64)),
    ("partial-l0c-copy", rows_of_c(16), rows_of_c(16, columns=16)),
    ("product-slots", two_products(192, 128), two_products(128, 128)),
    ("product-slots", two_products(128, 192), two_products(128, 192, through_ub=True)),
    ("reserved-name", counted("new"), counted("newer")),
    ("reserved-name", counted("new_1", beside="new"), counted("new_1")),
    ("copy-unordered", between(UB, UB), between(UB, GM)),
    ("copy-path", between(GM, L0A), between(GM, L1)),
    ("copy-path", between(L1, GM), between(L0C, GM)),
    ("copy-path", between(GM, GM), between(UB, GM)),
    ("copy-rows", load_rows(33), load_rows(32)),
    ("copy-rows", load_rows(33, width=48), load_rows(33, width=48, pad=ZERO)),
    ("copy-rows", load_rows(33, width=40, pad=ZERO), load_rows(33, width=48, pad=ZERO)),
    ("copy-rows", load_rows(4, dtype="float32"), load_rows(8, dtype="float32")),
    ("copy-rows", store_rows(33, width=40), store_rows(33, width=48)),
    ("copy-rows", load_rows(1), load_rows(16)),
    ("copy-start", slice_of(UB, (ZERO, times(8))), slice_of(UB, (ZERO, times(16)))),
    ("copy-start", slice_of(UB, (INDEX, ZERO), shape=(64, 40)), slice_of(UB, (INDEX, ZERO), shape=(64, 48))),
    ("copy-start", slice_of(UB, (ZERO, ir.Const(8, "int32"))), slice_of(UB, (ZERO, ir.Const(16, "int32")))),
    ("copy-start", slice_of(L1, (INDEX, times(8))), slice_of(L1, (INDEX, times(16)), shape=(64, 40))),
    ("copy-limits", load_rows(16, rows=4096), load_rows(16, rows=4095)),
    ("copy-limits", between(GM, UB, 2**20), between(GM, UB, 2**20 - 16)),
    ("copy-limits", between(GM, L1, 16400, 16), between(GM, L1, 16384, 16)),
    ("grid-size", all_cores_wait(65), all_cores_wait(64)),
    ("grid-size", all_cores_wait(33, space=L1), all_cores_wait(32, space=L1)),
]  # fmt: skip


def verify(*args):
    """What the verifier reports, but for memory that nobody wrote: most of these programs are one statement."""
    return [violation for violation in verifier.verify(*args) if violation.rule != "unwritten-memory"]


def rules(violations):
    return [violation.rule for violation in violations]


@pytest.mark.parametrize("rule, bad, good", CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_rule(rule, bad, good):
    assert rule in rules(verify(bad, CHIP))
    assert rule not in rules(verify(good, CHIP))


def test_every_rule_has_a_case():
    elsewhere = {rule.id for rule in (*sync.RULES, *bounds.RULES)} - {"grid-size"}  # test_sync_rules.py
    assert {case[0] for case in CASES} | {"address-alignment"} | elsewhere == {rule.id for rule in verifier.RULES}


def test_sound_kernels_have_no_violation():
    assert verify(product(), CHIP) == []
    assert verify(product(spaces=(L0A, L0B, L0C)), CHIP)[0].rule == "copy-path"  # loaded from GM directly
    assert verify(load_rows(64), CHIP) == []


@pytest.mark.parametrize(
    "space, offset, nbytes, versions, misaligned",
    [
        (UB, 32, 64, 1, False), (UB, 16, 64, 1, True), (UB, 0, 48, 2, True), (UB, 0, 48, 1, False),
        (L0A, 512, 512, 2, False), (L0A, 256, 512, 1, True), (L0C, 1024, 1024, 1, False), (L0C, 64, 1024, 1, True),
    ],
)  # fmt: skip
def test_addresses_of_the_memory_map(space, offset, nbytes, versions, misaligned):
    name = {UB: "u", L0A: "a", L0C: "c"}[space]
    found = verify(product(), CHIP, [Allocation(name, space, offset, nbytes, versions)])
    assert ("address-alignment" in rules(found)) == misaligned


def test_the_given_memory_map_is_what_counts():
    fits = [Allocation("a", L1, 0, 16384, 1), Allocation("b", L1, 16384, 16384, 1)]
    too_many = [Allocation("a", L1, 0, 16384, 32), Allocation("b", L1, 524288, 32, 1)]
    shared = [
        Allocation("a", L1, 0, 524288, 1),
        Allocation("b", L1, 0, 524288, 1),
    ]  # one after the other in the same place
    assert verify(product(), CHIP, fits) == []
    assert verify(product(), CHIP, shared) == []
    (violation,) = verify(product(), CHIP, too_many)
    assert violation.rule == "memory-overflow"
    assert "L1 needs 524320 bytes and 950DT has 524288: over by 32" in violation.message
    assert violation.loc == "user.py:7"


def test_chips_differ():
    fp8 = product(dtype="float8_e4m3fn", k=64)
    assert verify(fp8, CHIP) == []
    (violation,) = verify(fp8, chips.get("910B3"))[:1]
    assert violation.rule == "gemm-dtype"
    assert str(violation).startswith(
        "user.py:12: [gemm-dtype] A (a) is float8_e4m3fn, which the cube of 910B3 does not take"
    )
    large = product(m=256, n=256)
    assert "memory-overflow" in rules(verify(large, chips.get("910B3")))  # L0C is 128 KiB there
    drain = between(L0C, UB)
    assert verify(drain, CHIP) == []
    assert rules(verify(drain, chips.get("910B3"))) == ["copy-path"]


def test_each_vector_unit_moves_its_half_of_a_dual_copy():
    ub, gm = buffer("u", UB, (64, 24)), buffer("x", GM, (128, 1000))
    region = whole(gm, extents=(128, 24))
    assert rules(verify(transfer(ub, gm, None, region, dual="rows"), CHIP)) == ["copy-rows"]
    ub = buffer("u", UB, (64, 32))
    assert verify(transfer(ub, gm, None, whole(gm, extents=(64, 64)), dual="columns"), CHIP) == []


def test_threads_may_copy_what_a_pipe_may_not():
    odd = load_rows(33)
    inside = dataclasses.replace(odd, body=(ir.Simt((ir.Var("tx"),), (32,), odd.body),))
    assert rules(verify(odd, CHIP)) == ["copy-rows"]
    assert verify(inside, CHIP) == []
    to_registers = transfer(
        buffer("u", UB, (64,)), buffer("f", Space.FRAGMENT, (4,)), ir.Region("u", (times(4),), (4,))
    )
    assert verify(to_registers, CHIP) == []


def test_contiguous_rows_are_one_row():
    assert verify(transfer(buffer("x", GM, (64, 33)), buffer("u", UB, (64, 33))), CHIP) == []


def test_what_is_known_only_at_run_time_is_not_judged():
    rows = ir.Var("m")
    gm, ub = buffer("x", GM, (rows, 64)), buffer("u", UB, (64, 64))
    loaded = ir.Load("x", (ZERO, ZERO), "int32")
    copy = ir.Copy(whole(gm, extents=(64, 64)), ir.Region("u", (loaded, ZERO), (64, 64)))
    assert verify(program((gm, ub), (copy,)), CHIP) == []
    assert verify(all_cores_wait(rows), CHIP) == []
    assert verify(all_cores_wait(1000, mode=1), CHIP) == []


def test_memory_check_raises_with_the_memory_map():
    verifier.check_memory(product(), CHIP)
    verifier.check_memory(product(m=24), CHIP)  # broken, but it fits
    with pytest.raises(errors.OutOfOnChipMemoryError) as caught:
        verifier.check_memory(product(m=256, n=512, k=16), CHIP)
    message = str(caught.value)
    assert "kernel kernel does not fit 950DT" in message
    assert "L0C needs 524288 bytes and 950DT has 262144: over by 262144" in message
    assert "512.0 KiB of  256.0 KiB [####################] 200%  over by 256.0 KiB" in message


def test_estimated_allocations():
    found = {a.buffer: (a.space, a.nbytes, a.versions) for a in memory.allocations(product(m=32, n=48, k=64, stages=3))}
    assert found == {"a": (L1, 4096, 3), "b": (L1, 6144, 3), "c": (L0C, 6144, 1)}
    wide, narrow = buffer("u", UB, (8,), "float32"), buffer("v", UB, (8,), "int8", storage="u")
    assert [(a.buffer, a.nbytes) for a in memory.allocations(program((wide, narrow), ()))] == [("u", 32)]


@pytest.mark.parametrize(
    "dtype, bits",
    [
        ("float32", 32),
        ("bfloat16", 16),
        ("float8_e4m3fn", 8),
        ("float4_e2m1fn", 4),
        ("int4", 4),
        ("bool", 8),
        ("float32x64", 2048),
    ],
)
def test_bits(dtype, bits):
    assert memory.bits(dtype) == bits


def test_memory_map_shows_each_buffer():
    text = memory.memory_map([Allocation("u", UB, 0, 2048, 2), Allocation("w", UB, 4096, 1024, 1)], CHIP)
    assert "UB" in text and "5.0 KiB" in text and "248.0 KiB" in text
    assert "0x000000  u  2 x 2.0 KiB" in text
    assert "0x001000  w  1 x 1.0 KiB" in text
    assert memory.memory_map([], CHIP) == "no on-chip buffers"


def test_printed_program_is_readable():
    text = printer.text(product())
    assert "param a_gm  gm       float16[128, 64]" in text
    assert "for k in pipelined(4) num_stages=2:" in text
    assert "copy a_gm[0:+128, 0:+64] -> a[0:+128, 0:+64]" in text
    assert "gemm c[0:+128, 0:+128] += a[0:+128, 0:+64] @ b[0:+128, 0:+64].T clear=True" in text


def test_printed_expressions_keep_their_meaning():
    x, y, z = (ir.Const(value, "int32") for value in (7, 5, 3))

    def combine(op, lhs, rhs):
        return ir.Binary(op, lhs, rhs, "int32")

    for outer in ("add", "sub", "mul", "floordiv", "floormod"):
        for inner in ("add", "sub", "mul", "floordiv", "floormod"):
            functions = {
                "add": int.__add__,
                "sub": int.__sub__,
                "mul": int.__mul__,
                "floordiv": int.__floordiv__,
                "floormod": int.__mod__,
            }
            left, right = combine(outer, combine(inner, x, y), z), combine(outer, x, combine(inner, y, z))
            assert eval(printer.expression(left)) == functions[outer](functions[inner](7, 5), 3)
            if functions[inner](5, 3):
                assert eval(printer.expression(right)) == functions[outer](7, functions[inner](5, 3))


def test_every_statement_prints():
    u = buffer("u", UB, (16,), "float32")
    load = ir.Load("u", (INDEX,), "float32")
    store = ir.Store(
        "u",
        (INDEX,),
        ir.Select(
            ir.Binary("lt", load, ZERO, "bool"), ir.Cast(ZERO, "float32"), ir.Call("exp", (load,), "float32"), "float32"
        ),
    )
    body = (
        ir.Simt((ir.Var("tx"),), (32,), (ir.For(INDEX, ZERO, ir.Const(16, "int32"), "parallel", (store,)),)),
        ir.Simd((ir.Op("vadd", (whole(u), load, "MODE"), {"part": 1}),)),
        ir.If(ir.Binary("min", INDEX, STOP, "bool"), (ir.Let(ir.Var("j"), INDEX),), (ir.Fill(whole(u), ZERO),)),
        ir.While(ir.Const(True, "bool"), ()),
    )
    text = printer.text(dataclasses.replace(program((u,), body), unit=ir.Var("sid")))
    lines = (
        "simt tx < 32:", "u[i] = select(u[i] < 0, float32(0), exp(u[i]))", "simd:",
        "vadd(u[0:+16], u[i], MODE) part=1", "if min(i, 16):", "j = i", "else:", "fill u[0:+16] = 0", "while True:",
        "blocks bx < 32, sid < 2:",
    )  # fmt: skip
    assert [line for line in lines if line not in text] == []
