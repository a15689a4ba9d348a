"""Programs written by hand, so that the NPU model's tests need no compiler."""

from __future__ import annotations

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space

ZERO = ir.Const(0, "int32")


def const(value: float, dtype: str = "int32") -> ir.Const:
    return ir.Const(value, dtype)


def var(name: str) -> ir.Var:
    return ir.Var(name)


def expr(value: int | str | ir.Expr) -> ir.Expr:
    """An int as a constant, a name as an int32 variable."""
    if isinstance(value, int):
        return const(value)
    return var(value) if isinstance(value, str) else value


def op(name: str, lhs: int | str | ir.Expr, rhs: int | str | ir.Expr, dtype: str | None = None) -> ir.Binary:
    """``lhs name rhs``; the result is bool for a comparison, else of the left side's dtype."""
    lhs, rhs = expr(lhs), expr(rhs)
    boolean = name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or")
    return ir.Binary(name, lhs, rhs, dtype or ("bool" if boolean else lhs.dtype))


def load(buffer: ir.Buffer, *indices: int | str | ir.Expr) -> ir.Load:
    return ir.Load(buffer.name, tuple(map(expr, indices)), buffer.dtype)


def store(buffer: ir.Buffer, indices: tuple, value: ir.Expr, loc: str | None = None) -> ir.Store:
    return ir.Store(buffer.name, tuple(map(expr, indices)), value, loc)


def buffer(name: str, space: Space, shape: tuple[int, ...], dtype: str, storage: str | None = None) -> ir.Buffer:
    return ir.Buffer(name, space, shape, dtype, storage or name)


def region(of: ir.Buffer, *starts: int | str | ir.Expr, extents: tuple[int, ...] | None = None) -> ir.Region:
    """``of`` from ``starts`` (0 if none), by default as much as the whole buffer."""
    return ir.Region(of.name, tuple(map(expr, starts or (0,) * len(of.shape))), extents or of.shape)


def copy(src: ir.Region | ir.Buffer, dst: ir.Region | ir.Buffer, loc: str | None = None, **attrs: object) -> ir.Copy:
    src, dst = (region(side) if isinstance(side, ir.Buffer) else side for side in (src, dst))
    return ir.Copy(src, dst, attrs, loc)


def loop(name: str, extent: int | ir.Expr, *body: ir.Stmt, kind: str = "serial", start: int = 0) -> ir.For:
    return ir.For(var(name), const(start), expr(extent), kind, body)


def parallel(indices: dict[str, int], *body: ir.Stmt) -> ir.For:
    """A nest of parallel loops, the first index outermost."""
    for name, extent in reversed(indices.items()):
        body = (loop(name, extent, *body, kind="parallel"),)
    return body[0]


def simt(*body: ir.Stmt) -> ir.Simt:
    return ir.Simt((var("tx"),), (256,), body)


def program(
    params: list[ir.Buffer],
    others: list[ir.Buffer],
    *body: ir.Stmt,
    blocks: int = 1,
    units: int = 1,
    unit: str | None = None,
) -> ir.Program:
    buffers = {b.name: b for b in (*params, *others)}
    names = tuple(b.name for b in params)
    return ir.Program("kernel", names, buffers, var("bx"), blocks, body, var(unit) if unit else None, units)


def gemm(
    m: int,
    n: int,
    k: int,
    tiles: tuple[int, int, int],
    dtype: str = "float16",
    out: str = "float16",
    *,
    batch: int = 1,
    cores: int = 4,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    epilogue: str | None = None,
    fused: bool = True,
) -> ir.Program:
    """``out[g] = act(lhs[g] @ rhs + bias)``: persistent over ``cores``, as TileLang's front end writes it.

    lhs is [batch, m, k] ([batch, k, m] if transposed), rhs [k, n] ([n, k]), bias [n]; with ``fused=False`` the K loop
    holds a statement that keeps it from being run as one product.
    """
    bm, bn, bk = tiles
    mt, nt, kt = (-(-size // block) for size, block in ((m, bm), (n, bn), (k, bk)))
    accumulate = "int32" if dtype == "int8" else "float32"
    lhs = buffer("lhs", Space.GM, (batch, k, m) if transpose_lhs else (batch, m, k), dtype)
    rhs = buffer("rhs", Space.GM, (n, k) if transpose_rhs else (k, n), dtype)
    bias = buffer("bias", Space.GM, (n,), accumulate)
    result = buffer("result", Space.GM, (batch, m, n), out)
    a, b = buffer("a", Space.L1, (bm, bk), dtype), buffer("b", Space.L1, (bn, bk), dtype)
    c = buffer("c", Space.L0C, (bm, bn), accumulate)
    u, o = buffer("u", Space.UB, (bm // 2, bn), accumulate), buffer("o", Space.UB, (bm // 2, bn), out)
    bu = buffer("bu", Space.UB, (bn,), accumulate)

    number = op("add", op("mul", "w", cores), "bx")
    tile = op("add", op("mul", op("truncdiv", number, nt), nt), op("truncmod", number, nt))
    k0 = var("k0")
    from_lhs = (
        region(lhs, "g", k0, "m", extents=(1, bk, bm))
        if transpose_lhs
        else region(lhs, "g", "m", k0, extents=(1, bm, bk))
    )
    from_rhs = region(rhs, "n", k0, extents=(bn, bk)) if transpose_rhs else region(rhs, k0, "n", extents=(bk, bn))
    steps = [
        ir.Let(k0, op("mul", "k", bk)),
        copy(from_lhs, a, **({"transpose": True} if transpose_lhs else {})),
        copy(from_rhs, b, **({} if transpose_rhs else {"transpose": True})),
        ir.Gemm(region(a), region(b), region(c), False, True, op("eq", "k", 0)),
    ]
    if not fused:
        steps.append(ir.Op("ascend_pipe_barrier", ("PIPE_ALL",)))
    work = (
        ir.Let(var("g"), op("floordiv", "tile", mt * nt)),
        ir.Let(var("m"), op("mul", op("floormod", op("floordiv", "tile", nt), mt), bm)),
        ir.Let(var("n"), op("mul", op("floormod", "tile", nt), bn)),
        loop("k", kt, *steps, kind="pipelined"),
        copy(c, u, dual="rows"),
        copy(region(bias, "n", extents=(bn,)), bu),
        simt(parallel({"i": bm // 2, "j": bn}, store(o, ("i", "j"), ir.Cast(_epilogue(u, bu, epilogue), out)))),
        copy(o, region(result, "g", "m", "n", extents=(1, bm, bn)), dual="rows", double=True),
    )
    waves = -(-batch * mt * nt // cores)
    persistent = loop("w", waves, ir.Let(var("tile"), tile), ir.If(op("lt", tile, batch * mt * nt), work))
    return program([lhs, rhs, bias, result], [a, b, c, u, o, bu], persistent, blocks=cores, units=2)


def _epilogue(u: ir.Buffer, bu: ir.Buffer, name: str | None) -> ir.Expr:
    z = op("add", load(u, "i", "j"), load(bu, "j"))
    if name is None:
        return z
    if name == "relu":
        return op("max", z, const(0, u.dtype))

    def scaled(factor: float, x: ir.Expr) -> ir.Binary:
        return op("mul", const(factor, "float32"), x)

    cubic = op("add", z, scaled(0.044715, op("mul", z, op("mul", z, z))))
    tanh = ir.Call("tanh", (scaled(0.7978845608028654, cubic),), "float32")
    return op("mul", scaled(0.5, z), op("add", const(1.0, "float32"), tanh))
