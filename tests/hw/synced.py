"""Small kernels that synchronize themselves, written by hand, with what they compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from tests.hw import programs as p

GM, L1, L0A, L0B, L0C, UB = Space.GM, Space.L1, Space.L0A, Space.L0B, Space.L0C, Space.UB


def set_flag(event: str, number: int | str = 0, loc: str | None = None) -> ir.Op:
    return ir.Op("ascend_set_flag", (event, p.expr(number)), {}, loc)


def wait_flag(event: str, number: int | str = 0, loc: str | None = None) -> ir.Op:
    return ir.Op("ascend_wait_flag", (event, p.expr(number)), {}, loc)


def cross_set(mode: int, pipe: str, flag: int | ir.Expr, loc: str | None = None) -> ir.Op:
    return ir.Op("ascend_cross_core_set_flag", (p.const(mode), f"PIPE_{pipe}", p.expr(flag)), {}, loc)


def cross_wait(mode: int, pipe: str, flag: int | ir.Expr, loc: str | None = None) -> ir.Op:
    return ir.Op("ascend_cross_core_wait_flag", (p.const(mode), f"PIPE_{pipe}", p.expr(flag)), {}, loc)


def barrier(pipe: str = "ALL") -> ir.Op:
    return ir.Op("ascend_pipe_barrier", (f"PIPE_{pipe}",))


def lock(pipe: str, number: int | ir.Expr) -> ir.Op:
    return ir.Op("ascend_get_buf", (f"PIPE_{pipe}", p.expr(number), p.const(0)))


def unlock(pipe: str, number: int | ir.Expr) -> ir.Op:
    return ir.Op("ascend_rls_buf", (f"PIPE_{pipe}", p.expr(number), p.const(0)))


def manual(program: ir.Program) -> ir.Program:
    return dataclasses.replace(program, manual=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel, the arrays it is given, and what its last parameter is to hold."""

    name: str
    program: ir.Program
    args: tuple[np.ndarray, ...]
    expected: np.ndarray
    outputs: tuple[int, ...]


def _rows(shape: tuple[int, ...], seed: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# --- vector kernels: out = 2 x + 1, in chunks -------------------------------------------------------------------------

CHUNK = 64


def _vector(trips: int, buffers: int, body: Callable[[ir.Buffer, ir.Buffer, Callable], tuple], name: str) -> Case:
    """``body(x_ub, y_ub, parts)`` orders load, compute and store, which ``parts`` gives for the buffer's number."""
    size = 2 * trips * CHUNK
    x, y = p.buffer("x", GM, (size,), "float32"), p.buffer("y", GM, (size,), "float32")
    u, v = (p.buffer(n, UB, (buffers, CHUNK), "float32") for n in "uv")
    start = p.op("mul", p.op("add", p.op("mul", "t", 2), "bx"), CHUNK)

    def parts(f: ir.Expr) -> tuple[ir.Stmt, ir.Stmt, ir.Stmt]:
        load = p.copy(p.region(x, start, extents=(CHUNK,)), p.region(u, f, 0, extents=(1, CHUNK)), "k.py:1")
        value = p.op("add", p.op("mul", p.load(u, f, "i"), p.const(2.0, "float32")), p.const(1.0, "float32"))
        compute = p.simt(p.parallel({"i": CHUNK}, p.store(v, (f, "i"), value, "k.py:2")))
        store = p.copy(p.region(v, f, 0, extents=(1, CHUNK)), p.region(y, start, extents=(CHUNK,)), "k.py:3")
        return load, dataclasses.replace(compute, loc="k.py:2"), store

    program = manual(p.program([x, y], [u, v], *body(trips, parts), blocks=2))
    data = _rows((size,), 1)
    return Case(name, program, (data,), 2 * data + 1, (1,))


def vector_flags(buffers: int, trips: int = 5) -> Case:
    """Load, compute and store with ``buffers`` of each, ordered by flags of their numbers."""

    def body(trips: int, parts: Callable) -> tuple:
        f = p.op("floormod", "t", buffers)
        load, compute, store = parts(f)
        free = [stmt for n in range(buffers) for stmt in (set_flag("V_MTE2", n), set_flag("MTE3_V", n))]
        drain = [stmt for n in range(buffers) for stmt in (wait_flag("V_MTE2", n), wait_flag("MTE3_V", n))]
        step = (
            wait_flag("V_MTE2", f), load, set_flag("MTE2_V", f),
            wait_flag("MTE2_V", f), wait_flag("MTE3_V", f), compute, set_flag("V_MTE2", f), set_flag("V_MTE3", f),
            wait_flag("V_MTE3", f), store, set_flag("MTE3_V", f),
        )  # fmt: skip
        return (*free, p.loop("t", trips, *step), *drain)

    return _vector(trips, buffers, body, f"vector_flags_{buffers}")


def vector_locks(trips: int = 5) -> Case:
    """The same with two buffers, ordered by locks."""

    def body(trips: int, parts: Callable) -> tuple:
        f = p.op("floormod", "t", 2)
        load, compute, store = parts(f)
        inputs, results = p.op("add", f, 2), f
        step = (
            lock("MTE2", inputs), load, unlock("MTE2", inputs),
            lock("V", inputs), lock("V", results), compute, unlock("V", results), unlock("V", inputs),
            lock("MTE3", results), store, unlock("MTE3", results),
        )  # fmt: skip
        return (p.loop("t", trips, *step),)

    return _vector(trips, 2, body, "vector_locks")


def vector_barriers(trips: int = 3) -> Case:
    """The same with one buffer, every pipe waiting for all others."""

    def body(trips: int, parts: Callable) -> tuple:
        load, compute, store = parts(p.const(0))
        return (p.loop("t", trips, load, barrier(), compute, barrier(), store),)

    return _vector(trips, 1, body, "vector_barriers")


# --- products ---------------------------------------------------------------------------------------------------------

TILE, DEPTH = 32, 3  # rows, columns and depth of a tile; tiles in K


def _operands() -> tuple[ir.Buffer, ir.Buffer, ir.Buffer, tuple[np.ndarray, ...], np.ndarray]:
    x, w = p.buffer("x", GM, (4 * TILE, DEPTH * TILE), "float16"), p.buffer("w", GM, (TILE, DEPTH * TILE), "float16")
    y = p.buffer("y", GM, (4 * TILE, TILE), "float32")
    a, b = _rows(x.shape, 2, np.float16), _rows(w.shape, 3, np.float16)
    return x, w, y, (a, b), a.astype(np.float64) @ b.astype(np.float64).T


def _row(tile: str) -> ir.Expr:
    """First row of a core's tile: each of two blocks has two."""
    return p.op("mul", p.op("add", p.op("mul", tile, 2), "bx"), TILE)


def _k_loop(x: ir.Buffer, w: ir.Buffer, a: ir.Buffer, b: ir.Buffer, c: ir.Buffer) -> tuple[ir.Stmt, ...]:
    """Loads tiles in turns into two buffers each, and multiplies them."""
    f, k0 = p.op("floormod", "k", 2), p.op("mul", "k", TILE)
    tiles = [p.region(item, f, 0, 0, extents=(1, TILE, TILE)) for item in (a, b)]
    step = (
        wait_flag("MTE1_MTE2", f),
        p.copy(p.region(x, _row("t"), k0, extents=(TILE, TILE)), tiles[0]),
        p.copy(p.region(w, 0, k0, extents=(TILE, TILE)), tiles[1]),
        set_flag("MTE2_MTE1", f),
        wait_flag("MTE2_MTE1", f),
        ir.If(p.op("eq", "k", 0), (wait_flag("FIX_M"),)),
        ir.Gemm(*tiles, p.region(c), False, True, p.op("eq", "k", 0), {}, "k.py:4"),
        set_flag("MTE1_MTE2", f),
    )
    return (p.loop("k", DEPTH, *step), set_flag("M_FIX"), wait_flag("M_FIX"))


def _cube(*steps: ir.Stmt) -> tuple[ir.Stmt, ...]:
    """Two tiles a core, with the flags that are free at first."""
    flags = [("MTE1_MTE2", 0), ("MTE1_MTE2", 1), ("FIX_M", 0)]
    before, after = [set_flag(*flag) for flag in flags], [wait_flag(*flag) for flag in flags]
    return (*before, p.loop("t", 2, *steps), *after)


def _l1() -> tuple[ir.Buffer, ir.Buffer, ir.Buffer]:
    a, b = (p.buffer(n, L1, (2, TILE, TILE), "float16") for n in "ab")
    return a, b, p.buffer("c", L0C, (TILE, TILE), "float32")


def cube_product() -> Case:
    """A product on the cube alone."""
    x, w, y, args, expected = _operands()
    a, b, c = _l1()
    store = p.copy(c, p.region(y, _row("t"), 0, extents=(TILE, TILE)))
    body = _cube(*_k_loop(x, w, a, b, c), store, set_flag("FIX_M"))
    return Case("cube_product", manual(p.program([x, w, y], [a, b, c], *body, blocks=2)), args, expected, (2,))


def cube_product_l0() -> Case:
    """A product whose operands the kernel brings to L0 itself, one tile of K."""
    x, w = (p.buffer(n, GM, (TILE, TILE), "float16") for n in "xw")
    y = p.buffer("y", GM, (TILE, TILE), "float32")
    a, b = (p.buffer(n, L1, (TILE, TILE), "float16") for n in "ab")
    a0, b0 = p.buffer("a0", L0A, (TILE, TILE), "float16"), p.buffer("b0", L0B, (TILE, TILE), "float16")
    c = p.buffer("c", L0C, (TILE, TILE), "float32")
    body = (
        p.copy(x, a), p.copy(w, b), set_flag("MTE2_MTE1"), wait_flag("MTE2_MTE1"),
        p.copy(a, a0), p.copy(b, b0), set_flag("MTE1_M"), wait_flag("MTE1_M"),
        ir.Gemm(p.region(a0), p.region(b0), p.region(c), False, True, p.const(True, "bool")),
        set_flag("M_FIX"), wait_flag("M_FIX"), p.copy(c, y),
    )  # fmt: skip
    args = (_rows(x.shape, 4, np.float16), _rows(w.shape, 5, np.float16))
    expected = args[0].astype(np.float64) @ args[1].astype(np.float64).T
    return Case("cube_product_l0", manual(p.program([x, w, y], [a, b, a0, b0, c], *body)), args, expected, (2,))


def mixed_product(mode: int = 4, buffers: int = 1) -> Case:
    """The cube multiplies and hands each tile to both vector units, which double it and write it.

    With two ``buffers`` the cube is a tile ahead.
    """
    x, w, y, args, expected = _operands()
    a, b, c = _l1()
    u = p.buffer("u", UB, (buffers, TILE // 2, TILE), "float32")
    v = p.buffer("v", UB, (buffers, TILE // 2, TILE), "float32")
    f = p.op("floormod", "t", buffers)
    g = p.op("floormod", "s", buffers)
    half = (1, TILE // 2, TILE)

    def flags(make: Callable, pipe: str, number: ir.Expr) -> list[ir.Op]:
        """For both vector units."""
        return [make(4, pipe, number), make(4, pipe, p.op("add", number, 16))] if mode == 4 else [make(2, pipe, number)]

    free, full = p.op("add", f, 4), p.op("add", f, 8)
    cube = _cube(
        *_k_loop(x, w, a, b, c),
        *flags(cross_wait, "FIX", free),
        p.copy(p.region(c), p.region(u, f, 0, 0, extents=half), "k.py:5", dual="rows"),
        *flags(cross_set, "FIX", full),
        set_flag("FIX_M"),
    )
    cube = (*cube, *(stmt for n in range(buffers) for stmt in flags(cross_wait, "FIX", p.const(4 + n))))
    value = p.op("mul", p.load(u, g, "i", "j"), p.const(2.0, "float32"))
    compute = p.simt(p.parallel({"i": TILE // 2, "j": TILE}, p.store(v, (g, "i", "j"), value, "k.py:6")))
    row = p.op("add", _row("s"), p.op("mul", "sid", TILE // 2))
    step = (
        cross_wait(mode, "V", p.op("add", g, 8)), wait_flag("MTE3_V"), compute, cross_set(mode, "V", p.op("add", g, 4)),
        set_flag("V_MTE3"), wait_flag("V_MTE3"),
        p.copy(p.region(v, g, 0, 0, extents=half), p.region(y, row, 0, extents=(TILE // 2, TILE)), "k.py:7"),
        set_flag("MTE3_V"),
    )  # fmt: skip
    ready = [cross_set(mode, "V", 4 + n) for n in range(buffers)]
    vector = (*ready, set_flag("MTE3_V"), p.loop("s", 2, *step), wait_flag("MTE3_V"))
    body = (ir.Section("cube", cube), ir.Section("vector", vector))
    program = manual(p.program([x, w, y], [a, b, c, u, v], *body, blocks=2, units=2, unit="sid"))
    return Case(f"mixed_product_mode{mode}_{buffers}", program, args, 2 * expected, (2,))


# --- all cores --------------------------------------------------------------------------------------------------------


def exchange(blocks: int = 4, rounds: int = 2) -> Case:
    """Every block hands its chunk to the next one through GM, ``rounds`` times; the compiler orders its pipes."""
    x, y = (p.buffer(n, GM, (blocks, CHUNK), "float32") for n in "xy")
    through = p.buffer("through", GM, (rounds, blocks, CHUNK), "float32")
    u = p.buffer("u", UB, (CHUNK,), "float32")
    other = p.op("floormod", p.op("add", "bx", 1), blocks)

    def row(of: ir.Buffer, *starts: ir.Expr | str) -> ir.Region:
        return p.region(of, *starts, 0, extents=(1,) * len(starts) + (CHUNK,))

    body = (
        p.copy(row(x, "bx"), p.region(u)),
        p.loop(
            "r", rounds, p.copy(p.region(u), row(through, "r", "bx")),
            cross_set(0, "MTE3", 1), cross_wait(0, "MTE2", 1), p.copy(row(through, "r", other), p.region(u)),
        ),
        p.copy(p.region(u), row(y, "bx")),
    )  # fmt: skip
    data = _rows((blocks, CHUNK), 6)
    program = p.program([x, through, y], [u], *body, blocks=blocks)
    return Case("exchange", program, (data,), np.roll(data, -rounds, 0), (1, 2))


def scheduled_product() -> Case:
    """A product that the compiler synchronizes."""
    program = p.gemm(64, 32, 64, (32, 32, 32), "bfloat16", "float32", cores=2, transpose_rhs=True)
    lhs, rhs, bias = (_rows(s, n, ml_dtypes.bfloat16) for n, s in enumerate(((1, 64, 64), (32, 64), (32,))))
    bias = bias.astype(np.float32)
    expected = lhs.astype(np.float64) @ rhs.astype(np.float64).T + bias
    return Case("scheduled_product", program, (lhs, rhs, bias), expected, (3,))


def all_cases() -> list[Case]:
    return [
        vector_flags(1), vector_flags(2), vector_locks(), vector_barriers(), cube_product(), cube_product_l0(),
        mixed_product(4), mixed_product(4, buffers=2), mixed_product(2), exchange(), scheduled_product(),
    ]  # fmt: skip
