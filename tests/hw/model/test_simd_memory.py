"""Loads and stores: distributions, blocks, gathers, scatters, layouts and mutable registers, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glass_jax import errors
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model import executor
from tests.hw import programs
from tests.hw import simd_programs as simd
from tests.hw.simd_programs import active, address, evaluate, item, lanes, operands, predicate, pset, register

ZEROING = ("MODE_ZEROING",)
ROWS = 2  # of the memory that loads read: so many registers


def _memory(dtype):
    rng = np.random.default_rng(2)
    if jnp.dtype(dtype).kind in "iu":
        return rng.integers(0, np.iinfo(dtype).max, ROWS * lanes(dtype) + 64).astype(dtype)
    return rng.standard_normal(ROWS * lanes(dtype) + 64).astype(jnp.dtype(dtype))


def _spread(x, step):
    wide = np.zeros(len(x) * step, x.dtype)
    wide[::step] = x
    return wide


def _distributions():
    """Distribution, type, and what a load of ``n`` lanes makes of memory ``m``."""
    block = {2: 16, 4: 8}
    for dtype in ("float32", "float16", "uint8", "int16", "int32"):
        size = jnp.dtype(dtype).itemsize
        yield "NORM", dtype, lambda m, n: m[:n]
        yield f"NORM_B{8 * size}", dtype, lambda m, n: m[:n]
        yield f"BRC_B{8 * size}", dtype, lambda m, n: np.repeat(m[:1], n)
        yield "BLK", dtype, lambda m, n: np.resize(m[: n // 8], n)
        yield f"UNPK_B{8 * size}", dtype, lambda m, n: _spread(m[: n // 2], 2)
        if size < 4:
            yield f"US_B{8 * size}", dtype, lambda m, n: np.repeat(m[: n // 2], 2)
            yield f"DS_B{8 * size}", dtype, lambda m, n: m[: 2 * n : 2]
        if size > 1:
            yield f"E2B_B{8 * size}", dtype, lambda m, n, size=size: np.repeat(m[:8], block[size])
        else:
            yield "UNPK4_B8", dtype, lambda m, n: _spread(m[: n // 4], 4)


def test_loads():
    start = 32  # elements from the beginning of memory
    cases = list(_distributions())
    dtypes = sorted({dtype for _, dtype, _ in cases})
    arrays = {f"m_{dtype}": _memory(dtype) for dtype in dtypes}
    body = []
    for number, (dist, dtype, _) in enumerate(cases):
        octets = register("reinterpret", simd.vld(f"m_{dtype}_ub", start, dtype=dtype, dist=dist), dtype="uint8")
        body.append(simd.vsts("out_ub", number, 0, value=octets, dist="NORM_B8"))
    wide = register("vld", address("m_uint8_ub", 2), dtype="uint16", modes=("BRC_B16",))
    body.append(simd.vsts("wide_ub", 0, value=wide, dist="NORM_B16"))
    outputs = {"out": np.zeros((len(cases), 256), np.uint8), "wide": np.zeros(128, np.uint16)}
    out, wide = simd.run(body, arrays, outputs)
    for (dist, dtype, expected), row in zip(cases, out, strict=True):
        want = expected(arrays[f"m_{dtype}"][start:], lanes(dtype))
        np.testing.assert_array_equal(row, np.ascontiguousarray(want).view(np.uint8), err_msg=f"{dist} {dtype}")
    # A broadcast of a wider element than the buffer's takes its neighbour too.
    np.testing.assert_array_equal(wide, np.repeat(arrays["m_uint8"][2:4].view(np.uint16), 128))


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_loads_of_two_registers(dtype):
    x, n = _memory(dtype), lanes(dtype)
    pair = register("vld2", address("m_ub", 0), dtype=dtype, modes=(f"DINTLV_B{8 * x.dtype.itemsize}",))
    dist = f"NORM_B{8 * x.dtype.itemsize}"
    body = [simd.vsts("out_ub", part, 0, value=item(pair, part, dtype), dist=dist) for part in (0, 1)]
    (out,) = simd.run(body, {"m": x}, {"out": np.zeros((2, n), x.dtype)})
    np.testing.assert_array_equal(out, x[: 2 * n].reshape(n, 2).T)


def test_predicates_in_memory():
    bits = operands()["bits"]
    flat = np.unpackbits(bits.ravel(), bitorder="little")
    loads = {"NORM": flat[:256], "US": np.repeat(flat[:128], 2), "DS": flat[:512:2]}
    rows = evaluate([register("pld", address("bits_ub", 0, 0), dtype="bool", modes=(dist,)) for dist in loads])
    for want, row in zip(loads.values(), rows, strict=True):
        np.testing.assert_array_equal(np.unpackbits(row, bitorder="little"), want)
    store = ir.Op("pst", (address("out_ub", 8), predicate(1), "PK"))
    (out,) = simd.run([store], operands(), {"out": np.full(32, 7, np.uint8)})
    np.testing.assert_array_equal(
        np.unpackbits(out[8:24], bitorder="little"), np.unpackbits(bits[1], bitorder="little")[::2]
    )
    assert (out[:8] == 7).all() and (out[24:] == 7).all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_stores(dynamic):
    """What the mask leaves out stays, but a store of one element has no mask."""
    values, bits = operands(), operands()["bits"][0]
    mask = predicate(0) if dynamic else pset(8, "VL32")
    row = bits if dynamic else np.packbits(np.arange(256) < 32, bitorder="little")
    sources = {"NORM": "int16", "ONEPT": "int16", "PK_B16": "uint16", "PK_B32": "float32", "PK4_B32": "uint32"}
    stored = {"NORM": 2, "ONEPT": 2, "PK_B16": 1, "PK_B32": 2, "PK4_B32": 1}
    body = []
    for number, (name, dtype) in enumerate(sources.items()):
        dist = f"{name}_B16" if name in ("NORM", "ONEPT") else name
        body.append(simd.vsts("out_ub", number, 32, value=simd.operand(dtype), mask=mask, dist=dist))
    before = np.full((len(sources), 320), 9, np.uint8)
    (out,) = simd.run(body, values, {"out": before})
    for number, (name, dtype) in enumerate(sources.items()):
        want, x = before[number].copy(), values[dtype][0]
        part = x.view(np.uint8).reshape(len(x), -1)[:, : stored[name]]
        chosen = np.arange(len(x)) < 1 if name == "ONEPT" else active(row, dtype)
        part = np.where(chosen[:, None], part, 9).ravel()
        want[32 : 32 + len(part)] = part
        np.testing.assert_array_equal(out[number], want, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "float32", "uint8"])
def test_stores_of_blocks(dtype):
    """Eight blocks of 32 bytes, three blocks apart."""
    x, bits = operands()[dtype][0], operands()["bits"][1]
    size, block = x.dtype.itemsize, 32 // x.dtype.itemsize
    store = ir.Op("vsstb", (simd.operand(dtype), address("out_ub", block), programs.const(3 << 16 | 1), predicate(1)))
    before = np.zeros(25 * block, x.dtype)
    (out,) = simd.run([store], operands(), {"out": before})
    want = before.copy()
    want[block:].reshape(8, 3, block)[:, 0] = np.where(active(bits, dtype), x, want[0]).reshape(8, block)
    np.testing.assert_array_equal(out.view(np.uint8), want.view(np.uint8))
    assert size * block == 32


def _register_of(numbers):
    return {"index": np.resize(numbers, (1, len(numbers)))}


@pytest.mark.parametrize(
    ("dtype", "index", "result"),
    [
        ("float32", "uint32", "float32"),
        ("float16", "uint16", "float16"),
        ("int16", "uint32", "int16"),
        ("int8", "uint16", "int16"),
        ("uint8", "uint16", "uint16"),
        ("float8_e4m3fn", "uint16", "float8_e4m3fn"),
    ],
)
def test_gathers(dtype, index, result):
    x = _memory("uint8").view(jnp.dtype(dtype)) if dtype.startswith("float8") else _memory(dtype)
    numbers = np.random.default_rng(3).integers(0, len(x), lanes(index)).astype(index)
    index_of = simd.vld("index_ub", 0, 0, dtype=index)
    value = register("vgather2", address("m_ub", 0), index_of, predicate(0), dtype=result)
    octets = register("reinterpret", value, dtype="uint8")
    body = [simd.vsts("out_ub", 0, value=octets, dist="NORM_B8")]
    arrays = {"m": x, "bits": operands()["bits"]} | _register_of(numbers)
    (out,) = simd.run(body, arrays, {"out": np.zeros(256, np.uint8)})
    found = np.where(active(operands()["bits"][0], index), x[numbers], np.zeros_like(x[numbers]))
    if result != dtype:  # bytes are widened with zeros
        found = found.view(np.uint8).astype(np.uint16).view(result)
    want = _spread(found, lanes(result) // len(found))
    np.testing.assert_array_equal(out, want.view(np.uint8))


def test_gathers_of_blocks():
    x = _memory("float32")
    starts = np.arange(64, dtype=np.uint32)
    starts[:8] = 32 * np.array([3, 0, 0, 7, 5, 2, 9, 1])
    index = simd.vld("index_ub", 0, 0, dtype="uint32")
    bits = active(operands()["bits"][0], "uint32")[:8]
    body = [
        simd.vsts(
            "out_ub",
            number,
            0,
            value=register("vgatherb", address("m_ub", 0), index, *mask, dtype="float32"),
            dist="NORM_B32",
        )
        for number, mask in enumerate(([], [predicate(0)]))
    ]
    arrays = {"m": x, "bits": operands()["bits"]} | _register_of(starts)
    (out,) = simd.run(body, arrays, {"out": np.zeros((2, 64), np.float32)})
    blocks = x[: len(x) // 8 * 8].reshape(-1, 8)[starts[:8] // 32]
    np.testing.assert_array_equal(out[0], blocks.ravel())
    np.testing.assert_array_equal(out[1], np.where(bits[:, None], blocks, 0).ravel())


@pytest.mark.parametrize(("dtype", "index"), [("float32", "uint32"), ("int16", "uint16"), ("uint8", "uint16")])
def test_scatters(dtype, index):
    x = operands()[dtype][0]
    numbers = np.random.default_rng(4).permutation(300)[: lanes(index)].astype(index)
    store = ir.Op(
        "vscatter", (simd.operand(dtype), address("out_ub", 8), simd.vld("index_ub", 0, 0, dtype=index), predicate(0))
    )
    before = np.full(400, 5, x.dtype)
    (out,) = simd.run([store], operands() | _register_of(numbers), {"out": before})
    want, mask = before.copy(), active(operands()["bits"][0], index)
    want[8 + numbers[mask].astype(int)] = x[:: len(x) // len(numbers)][mask]  # of bytes those at even places
    np.testing.assert_array_equal(out, want)


# --- addresses ------------------------------------------------------------------------------------------------------


def test_what_lies_outside_an_allocation():
    """A load finds poison there, a store leaves everything as it is."""
    x = np.arange(40, dtype=np.float32)
    body = [
        simd.vsts("out_ub", 0, value=simd.vld("m_ub", 0, dtype="float32"), dist="NORM_B32"),
        simd.vsts("small_ub", 8, value=simd.vld("m_ub", 0, dtype="float32"), dist="NORM_B32"),
    ]
    out, small = simd.run(body, {"m": x}, {"out": np.zeros(64, np.float32), "small": np.zeros(16, np.float32)})
    np.testing.assert_array_equal(out[:40], x)
    assert np.isnan(out[40:]).all()
    np.testing.assert_array_equal(small, [*np.zeros(8), *x[:8]])


def test_an_address_that_is_not_a_multiple_of_the_element():
    store = simd.vsts("out_ub", 2, value=simd.operand("float32"), dist="NORM_B32")
    with pytest.raises(errors.HardwareConstraintError, match="elements of 4 bytes at byte 2"):
        simd.run([store], operands(), {"out": np.zeros(512, np.uint8)})


def test_a_store_that_interleaves_needs_two_registers():
    store = simd.vsts("out_ub", 0, value=simd.operand("float32"), dist="INTLV_B32")
    with pytest.raises(errors.UnsupportedError, match="INTLV_B32: it takes two registers"):
        simd.run([store], operands(), {"out": np.zeros(128, np.float32)})


def test_compact_nz_is_written_by_address_and_read_by_index():
    """Rows stored as columns of blocks, as attention stores its probabilities; a copy to L1 reads elements."""
    rows, columns, pad = 4, 128, 1
    m = programs.buffer("m", Space.GM, (rows, columns), "float16")
    out = programs.buffer("out", Space.GM, (rows, columns), "float16")
    raw = programs.buffer("raw", Space.GM, (columns // 16, rows + pad, 16), "float16")
    u = programs.buffer("u", Space.UB, (rows, columns), "float16")
    nz = ir.Buffer("nz", Space.UB, (rows + pad, columns), "float16", "nz", "nz")
    l1 = programs.buffer("l1", Space.L1, (rows, columns), "float16")
    flat = programs.buffer("flat", Space.UB, (columns // 16, rows + pad, 16), "float16")
    stride = programs.const((rows + pad) << 16 | 1)
    store = ir.Op("vsstb", (simd.vld("u", "r", 0, dtype="float16"), address("nz", "r", 0), stride, pset(16)))
    # Every block of the buffer by its address: the second block of row 1 is one column of blocks further on.
    numbers = address("nz", 0, 0, offset=programs.op("mul", "b", 256))
    load = register("vld", numbers, dtype="float16", modes=("NORM",))
    copies = programs.loop("b", 2, simd.vsts("flat", 0, 0, 0, value=load, dist="NORM_B16"))
    kernel = programs.program(
        [m, out, raw],
        [u, nz, l1, flat],
        ir.Fill(programs.region(nz), programs.const(0.0, "float16")),
        programs.copy(m, u),
        ir.Simd((programs.loop("r", rows, store), copies)),
        programs.copy(programs.region(nz, 0, 0, extents=(rows, columns)), l1),
        programs.copy(l1, out),
        programs.copy(flat, raw),
    )
    x = np.random.default_rng(5).standard_normal((rows, columns)).astype(np.float16)
    result, blocks = jax.jit(lambda a: executor.run(kernel, (a,), (1, 2)))(x)
    np.testing.assert_array_equal(result, x)
    physical = np.zeros((columns // 16, rows + pad, 16), np.float16)
    physical[:, :rows] = x.reshape(rows, columns // 16, 16).transpose(1, 0, 2)
    # The last load, of the 128 elements from the 128th on.
    np.testing.assert_array_equal(np.asarray(blocks).ravel()[:128], physical.ravel()[128:256])


# --- mutable registers ----------------------------------------------------------------------------------------------


def test_an_array_of_registers():
    def reg(number):
        return ir.Load("regs", (programs.expr(number),), "float32x64")

    body = [
        *(ir.Store("regs", (programs.const(n),), simd.vld("m_ub", 64 * n, dtype="float32")) for n in range(4)),
        ir.Let(ir.Var("old", "float32x64"), reg(1)),
        ir.Store(
            "regs", (programs.const(1),), register("vadd", reg(0), reg(3), pset(32), dtype="float32", modes=ZEROING)
        ),
        simd.vsts("out_ub", 0, 0, value=reg(1), dist="NORM_B32"),
        simd.vsts("out_ub", 1, 0, value=ir.Var("old", "float32x64"), dist="NORM_B32"),
        programs.loop("i", 4, simd.vsts("out_ub", programs.op("add", "i", 2), 0, value=reg("i"), dist="NORM_B32")),
    ]
    x = np.arange(256, dtype=np.float32)
    (out,) = simd.run(body, {"m": x}, {"out": np.zeros((6, 64), np.float32)})
    rows = x.reshape(4, 64)
    np.testing.assert_array_equal(out, [rows[0] + rows[3], rows[1], rows[0], rows[0] + rows[3], rows[2], rows[3]])


def test_what_is_in_compact_nz_goes_to_gm_as_it_lies():
    m, out = (programs.buffer(name, Space.GM, (4, 32), "float16") for name in ("m", "out"))
    u, nz = (
        programs.buffer("u", Space.UB, (4, 32), "float16"),
        ir.Buffer("nz", Space.UB, (4, 32), "float16", "nz", "nz"),
    )

    def kernel(*copied):
        copies = (programs.copy(m, u), programs.copy(u, nz), *copied)
        return programs.program([m, out], [u, nz], *copies)

    x = np.arange(128, dtype=np.float16).reshape(4, 32)
    whole = kernel(programs.copy(nz, out))
    (result,) = jax.jit(lambda a: executor.run(whole, (a,), (1,)))(x)
    np.testing.assert_array_equal(np.asarray(result).reshape(2, 4, 16), x.reshape(4, 2, 16).transpose(1, 0, 2))
    part = kernel(
        programs.copy(programs.region(nz, 0, 0, extents=(2, 32)), programs.region(out, 0, 0, extents=(2, 32)))
    )
    with pytest.raises(errors.UnsupportedError, match="a part of 'nz' to GM"):
        executor.run(part, (x,), (1,))
