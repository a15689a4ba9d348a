"""A Program executed statement by statement in NumPy: slow, small, and independent of the NPU model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from glass_jax.hw.ir import program as ir

_BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power,
    "floordiv": np.floor_divide, "floormod": np.mod, "truncdiv": lambda a, b: np.trunc(a / b).astype(np.int32),
    "truncmod": np.fmod, "min": np.minimum, "max": np.maximum, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "and": np.logical_and, "or": np.logical_or,
    "bitand": np.bitwise_and, "shl": np.left_shift, "shr": np.right_shift,
}  # fmt: skip
_FUNCTIONS = {
    "exp": np.exp, "tanh": np.tanh, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "abs": np.abs, "log": np.log,
    "not": np.logical_not, "floor": np.floor,
}  # fmt: skip
_REDUCTIONS = {"sum": np.sum, "max": np.max, "min": np.min}


def dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def run(program: ir.Program, *args: np.ndarray, outputs: Sequence[int]) -> list[np.ndarray]:
    """The parameters ``outputs`` after every block ran once for each vector unit, the cube's part repeated."""
    operands = iter(args)
    gm = {}
    for position, name in enumerate(program.params):
        buffer = program.buffers[name]
        gm[name] = _poisoned(buffer.shape, dtype(buffer.dtype)) if position in outputs else np.array(next(operands))
    for block in range(program.blocks):
        for unit in range(program.units):
            _Unit(program, gm, block, unit).block(program.body)
    return [gm[program.params[position]] for position in outputs]


def _poisoned(shape: Sequence[int], kind: np.dtype) -> np.ndarray:
    return np.full(shape, 77 if kind.kind in "iub" else np.nan, kind)


class _Unit:
    def __init__(self, program: ir.Program, gm: dict[str, np.ndarray], block: int, unit: int):
        self.program, self.unit = program, unit
        self.storages = dict(gm)
        self.env: dict[str, object] = {program.block.name: np.int32(block)}
        if program.unit is not None:
            self.env[program.unit.name] = np.int32(unit)

    def array(self, name: str) -> np.ndarray:
        buffer = self.program.buffers[name]
        if buffer.storage not in self.storages:
            owner = self.program.buffers[buffer.storage]
            self.storages[buffer.storage] = _poisoned(owner.shape, dtype(owner.dtype))
        return self.storages[buffer.storage].reshape(-1).view(dtype(buffer.dtype)).reshape(buffer.shape)

    # --- expressions ---

    def value(self, expr: ir.Expr | int) -> object:
        match expr:
            case int():
                return expr
            case ir.Const():
                return dtype(expr.dtype).type(expr.value)
            case ir.Var():
                return self.env[expr.name]
            case ir.Load():
                return self.array(expr.buffer)[tuple(self.value(index) for index in expr.indices)]
            case ir.Binary():
                return _BINARY[expr.op](self.value(expr.lhs), self.value(expr.rhs))
            case ir.Cast():
                return np.asarray(self.value(expr.value)).astype(dtype(expr.dtype))[()]
            case ir.Select():
                return self.value(expr.then if self.value(expr.condition) else expr.orelse)
            case ir.Call():
                return _FUNCTIONS[expr.name](*(self.value(arg) for arg in expr.args))

    # --- statements ---

    def block(self, body: Sequence[ir.Stmt]) -> None:
        for stmt in body:
            self.run(stmt)

    def run(self, stmt: ir.Stmt) -> None:
        match stmt:
            case ir.For():
                start = int(self.value(stmt.start))
                for step in range(start, start + int(self.value(stmt.extent))):
                    self.env[stmt.var.name] = np.int32(step)
                    self.block(stmt.body)
            case ir.While():
                while self.value(stmt.condition):
                    self.block(stmt.body)
            case ir.If():
                self.block(stmt.then if self.value(stmt.condition) else stmt.orelse)
            case ir.Let():
                self.env[stmt.var.name] = self.value(stmt.value)
            case ir.Store():
                self.array(stmt.buffer)[tuple(self.value(index) for index in stmt.indices)] = self.value(stmt.value)
            case ir.Simt():
                self.block(stmt.body)
            case ir.Fill():
                self.slice(stmt.dst)[...] = self.value(stmt.value)
            case ir.Copy():
                self.copy(stmt)
            case ir.Gemm():
                self.gemm(stmt)
            case ir.Op(name="reduce"):
                src, dst = (self.slice(region) for region in stmt.args)
                total = _REDUCTIONS[stmt.attrs["kind"]](src, axis=stmt.attrs["dim"])
                dst[...] = total.reshape(dst.shape) if stmt.attrs["clear"] else total.reshape(dst.shape) + dst
            case _:
                raise NotImplementedError(stmt)

    def bounds(self, region: ir.Region) -> tuple[list[int], list[int]]:
        return [int(self.value(x)) for x in region.starts], [int(self.value(x)) for x in region.extents]

    def slice(self, region: ir.Region) -> np.ndarray:
        starts, extents = self.bounds(region)
        view = self.array(region.buffer)[tuple(slice(s, s + e) for s, e in zip(starts, extents, strict=True))]
        return view.reshape([size for size in view.shape if size != 1] or [1]) if view.ndim > 2 else view

    def copy(self, stmt: ir.Copy) -> None:
        sides = [self.bounds(stmt.src), self.bounds(stmt.dst)]
        if dual := stmt.attrs.get("dual"):
            starts, extents = sides[1 if stmt.attrs.get("double") else 0]
            axis = len(extents) - (2 if dual == "rows" and len(extents) > 1 else 1)
            extents[axis] //= 2
            starts[axis] += self.unit * extents[axis]
        arrays = [self.array(stmt.src.buffer), self.array(stmt.dst.buffer)]
        if self.program.buffers[stmt.dst.buffer].space is ir.Space.L1:
            arrays[1][...] = 0  # the tail of a tile that reaches over the edge is filled with zeros
        # Dimensions of extent 1 that only one side has say where, not how much.
        axes = [[d for d, size in enumerate(extents) if size != 1] for _, extents in sides]
        if len(axes[0]) != len(axes[1]):
            axes = [list(range(len(extents)))[-min(len(e) for _, e in sides) :] for _, extents in sides]
        order = axes[0][::-1] if stmt.attrs.get("transpose") else axes[0]
        room = [
            [max(0, min(e, n - s)) for s, e, n in zip(*side, array.shape, strict=True)]
            for side, array in zip(sides, arrays, strict=True)
        ]
        for a, b in zip(order, axes[1], strict=True):
            room[0][a] = room[1][b] = min(room[0][a], room[1][b])
        views = [
            array[tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))]
            for array, (starts, _), sizes in zip(arrays, sides, room, strict=True)
        ]
        if min(views[0].size, views[1].size) == 0:
            return
        source = views[0].reshape([room[0][a] for a in axes[0]])
        source = source.T if stmt.attrs.get("transpose") else source
        views[1][...] = source.astype(views[1].dtype).reshape(views[1].shape)

    def gemm(self, stmt: ir.Gemm) -> None:
        a, b, c = (self.slice(region) for region in (stmt.a, stmt.b, stmt.c))
        wide = np.int64 if c.dtype.kind == "i" else np.float64
        a, b = a.astype(wide), b.astype(wide)
        if scales := stmt.attrs.get("scales"):
            a, b = (self.scaled(x, region) for x, region in zip((a, b), scales, strict=True))
        total = (a.T if stmt.transpose_a else a) @ (b.T if stmt.transpose_b else b)
        c[...] = total.astype(c.dtype) if self.value(stmt.clear) else (c.astype(wide) + total).astype(c.dtype)

    def scaled(self, x: np.ndarray, region: ir.Region) -> np.ndarray:
        """``x`` ``[rows, k]`` times its scales of e8m0, a byte for 32 elements of a row."""
        exponents = np.ascontiguousarray(self.slice(region)).view(np.uint8).reshape(len(x), -1)
        scales = np.where(exponents == 255, np.nan, np.exp2(exponents.astype(np.float64) - 127))
        return x * np.repeat(scales, 32, axis=1)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative Frobenius error."""
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(got.astype(np.float64) - want) / (norm or 1.0)) if math.isfinite(norm) else math.inf
