"""Random TileLang kernels with their meaning in NumPy.

A kernel is drawn as two texts, statement by statement: TileLang's, and NumPy's with the same names. The second is the
judge: it knows neither TileLang nor the NPU model. All numbers are small integers, so that results are exact whatever
the order of operations.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

_COUNT = itertools.count()
TILES = ("u", "v")


@dataclasses.dataclass(frozen=True)
class Expr:
    """An expression in TileLang's and in NumPy's words."""

    tile: str
    numpy: str


@dataclasses.dataclass(frozen=True)
class RandomKernel:
    """A kernel ``(x, p, y)`` over [rows, columns] arrays and an index of its rows, and what it does.

    Attributes:
      rows, columns: shape of x and y; p has ``rows`` elements.
      dtype: type of x and y.
      tile: lines of TileLang.
      numpy: lines of NumPy.
    """

    rows: int
    columns: int
    dtype: str
    tile: str
    numpy: str

    def build(self) -> Any:
        """The PrimFunc."""
        return _execute(self.tile)["kernel"]

    def meaning(self) -> Callable[[np.ndarray, np.ndarray, np.ndarray], None]:
        """A function of x, p and y that changes y as the kernel does."""
        return _execute(self.numpy)["kernel"]


def _execute(text: str) -> dict[str, Any]:
    """The names that ``text`` defines; its lines can be found, as TileLang needs them."""
    name = f"<random kernel {next(_COUNT)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {}
    exec(compile(text, name, "exec"), names)
    return names


class _Writer:
    """Draws one kernel."""

    def __init__(self, draw: Callable[[Any], Any]):
        self.draw = draw
        self.dtype = draw(st.sampled_from(["float32", "int32"]))
        self.rows, self.columns = draw(st.integers(1, 20)), draw(st.integers(1, 24))
        self.height, self.width = draw(st.integers(1, 9)), draw(st.sampled_from([1, 3, 8, 16, 17]))
        self.blocks = -(-self.rows // self.height)
        self.depth = 0
        self.scalars = ["bx"]

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    # --- expressions ---

    def index(self, variables: tuple[str, ...], size: int) -> Expr:
        """An index below ``size``."""
        name = self.pick(*variables, *self.scalars, self.scalars[-1])
        kind = self.pick("plain", "shifted", "reversed", "scaled")
        inner = {
            "plain": name,
            "shifted": f"({name} + {self.number(0, 5)})",
            "reversed": f"({40 - self.number(0, 5)} - {name})",
            "scaled": f"({name} * {self.number(2, 3)})",
        }[kind]
        text = f"{inner} % {size}"
        return Expr(text, text)

    def value(self, variables: tuple[str, ...], own: tuple[str, ...], depth: int = 2) -> Expr:
        """A value of the kernel's type; ``own`` are the elements that may be read as they are written."""
        deep = ("binary", "binary", "choice", "load", "own")
        kind = self.pick("load", "const", "own") if depth == 0 else self.pick(*deep)
        if kind == "const":
            number = self.number(-4, 4)
            return Expr(f"T.cast({number}, '{self.dtype}')", f"np.{self.dtype}({number})")
        if kind == "own":
            text = self.pick(*own)
            return Expr(text, text)
        if kind == "load":
            # Not what the loop writes: another iteration might have written it already.
            others = [tile for tile in (*TILES, "w") if not any(text.startswith(tile) for text in own)]
            i, j = self.index(variables, self.height), self.index(variables, self.width)
            tile = self.pick(*others)
            text = f"w[{i.tile}]" if tile == "w" else f"{tile}[{i.tile}, {j.tile}]"
            return Expr(text, text)
        a, b = self.value(variables, own, depth - 1), self.value(variables, own, depth - 1)
        if kind == "choice":
            condition = self.condition(variables, own)
            tile = f"T.if_then_else({condition.tile}, {a.tile}, {b.tile})"
            return Expr(tile, f"np.where({condition.numpy}, {a.numpy}, {b.numpy})")
        op = self.pick("+", "-", "min", "max")
        if op in "+-":
            return Expr(f"({a.tile} {op} {b.tile})", f"({a.numpy} {op} {b.numpy})")
        return Expr(f"T.{op}({a.tile}, {b.tile})", f"np.{op}imum({a.numpy}, {b.numpy})")

    def condition(self, variables: tuple[str, ...], own: tuple[str, ...] = ()) -> Expr:
        if own and self.pick(True, False):
            a, op = self.pick(*own), self.pick("<", ">=", "==")
            number = self.number(-3, 3)
            return Expr(f"{a} {op} T.cast({number}, '{self.dtype}')", f"{a} {op} {number}")
        a, op = self.pick(*variables, *self.scalars), self.pick("<", ">=", "==")
        text = f"{a} % {self.number(2, 4)} {op} {self.number(0, 3)}"
        return Expr(text, text)

    # --- statements: lines of TileLang and lines of NumPy ---

    def statement(self) -> tuple[list[str], list[str]]:
        kinds = ["parallel", "parallel", "threads", "copy", "reduce", "fill", "scalar"]
        if self.depth < 2:
            kinds += ["loop", "branch"]
        return getattr(self, "_" + self.pick(*kinds))()

    def block(self, least: int = 1, most: int = 3) -> tuple[list[str], list[str]]:
        tile, numpy = [], []
        for _ in range(self.number(least, most)):
            more = self.statement()
            tile += more[0]
            numpy += more[1]
        return tile, numpy

    def _parallel(self) -> tuple[list[str], list[str]]:
        """An element-wise loop over part of a tile, or over the rows, with a predicate or without."""
        on = self.pick(*TILES, "w")
        height, width = self.number(1, self.height), self.number(1, self.width)
        i0, j0 = self.number(0, self.height - height), self.number(0, self.width - width)
        loops, names = (f"{height}, {width}", "i, j") if on != "w" else (f"{height}", "i")
        target = f"{on}[i + {i0}, j + {j0}]" if on != "w" else f"w[i + {i0}]"
        variables = ("i", "j") if on != "w" else ("i",)
        value = self.value(variables, (target,))
        guard = self.condition(variables, (target,)) if self.pick(True, False) else None
        store = [f"{target} = {value.tile}"] if guard is None else [f"if {guard.tile}:", f"    {target} = {value.tile}"]
        tile = ["with T.SimtVF(threads=32):", f"    for {names} in T.Parallel({loops}):"]
        tile += ["        " + line for line in store]
        grid = f"i, j = np.ogrid[:{height}, :{width}]" if on != "w" else f"i = np.arange({height})"
        new = value.numpy if guard is None else f"np.where({guard.numpy}, {value.numpy}, {target})"
        return tile, [grid, f"{target} = {new}"]

    def _threads(self) -> tuple[list[str], list[str]]:
        """A thread for each row of a tile, which changes elements of its row, as many as it likes, one by one."""
        on = self.pick(*TILES)
        target = f"{on}[tx, (q * {self.number(0, 3)} + {self.number(0, 5)}) % {self.width}]"
        value = self.value(("tx", "q"), (target,))
        guard = self.condition(("tx", "q"), (target,))
        extent = self.pick(str(self.number(1, 4)), f"tx % {self.number(1, 4)}", "n % 4")
        stop = f"if q * {self.number(1, 3)} > tx + {self.number(0, 3)}:" if self.pick(True, False) else None

        def lines(condition: str, new: str, leave: str) -> list[str]:
            inner = [f"if {condition}:", f"    {target} = {new}"] + ([stop, f"    {leave}"] if stop else [])
            return ["        " + line for line in inner]

        tile = [
            f"with T.SimtVF(threads={self.height}):",
            "    tx = T.get_thread_binding()",
            f"    for q in T.serial({extent}):",
            *lines(guard.tile, value.tile, "T.loop_break()"),
        ]
        loops = [f"for tx in range({self.height}):", f"    for q in range({extent}):"]
        return tile, [*loops, *lines(guard.numpy, value.numpy, "break")]

    def _copy(self) -> tuple[list[str], list[str]]:
        """A tile from or to an array, over its edges, or a row of a tile."""
        kind, on = self.pick("in", "out", "row"), self.pick(*TILES)
        row, column = f"{self.pick('bx', 'bx', '0')} * {self.height}", self.number(0, self.columns - 1)
        where = f"[{row} : {row} + {self.height}, {column} : {column + self.width}]"
        if kind == "in":
            put = f"{on}[: inside.shape[0], : inside.shape[1]] = inside"
            return [f"T.copy(x{where}, {on})"], [f"inside = x{where}", put]
        if kind == "out":
            return [f"T.copy({on}, y{where})"], [f"y{where} = {on}[: y{where}.shape[0], : y{where}.shape[1]]"]
        source = self.pick(*TILES)
        to, of = (self.index(("bx",), self.height).tile for _ in range(2))
        return [f"T.copy({source}[{of}, :], {on}[{to}, :])"], [f"{on}[{to}, :] = {source}[{of}, :].copy()"]

    def _reduce(self) -> tuple[list[str], list[str]]:
        kind, on = self.pick("sum", "max", "min", "absmax"), self.pick(*TILES)
        numpy = f"np.abs({on}).max(1)" if kind == "absmax" else f"{on}.{kind}(1)"
        return ["with T.SimtVF(threads=32):", f"    T.reduce_{kind}({on}, w, dim=1)"], [f"w[:] = {numpy}"]

    def _fill(self) -> tuple[list[str], list[str]]:
        on, number = self.pick(*TILES, "w"), self.number(-3, 3)
        return [f"T.fill({on}, {number})"], [f"{on}[...] = {number}"]

    def _scalar(self) -> tuple[list[str], list[str]]:
        """The scalar variable counts, or takes an element of p."""
        if self.pick(True, False):
            index = self.index(("bx",), self.rows)
            text = f"n = p[{index.tile}]"
            return [text], [text]
        text = f"n = (n * {self.number(1, 2)} + {self.pick(*self.scalars, '1')}) % 11"
        return [text], [text]

    def _loop(self) -> tuple[list[str], list[str]]:
        name = f"k{len(self.scalars)}"
        extent = self.pick(str(self.number(0, 4)), "n % 3", f"{self.pick(*self.scalars)} % 2 + 1")
        start = self.pick("0", "2", "n % 3")
        self.scalars.append(name)
        self.depth += 1
        tile, numpy = self.block()
        self.depth -= 1
        self.scalars.pop()
        loops = ("T.serial", "T.Pipelined") if start == "0" else ("T.serial",)
        bounds = extent if start == "0" else f"{start}, {start} + {extent}"
        return [f"for {name} in {self.pick(*loops)}({bounds}):", *("    " + s for s in tile)], [
            f"for {name} in range({bounds}):", *("    " + s for s in numpy)
        ]  # fmt: skip

    def _branch(self) -> tuple[list[str], list[str]]:
        condition = self.pick(self.condition(("n",)), self.condition(()) if self.scalars else self.condition(("n",)))
        self.depth += 1
        then, orelse = self.block(1, 2), self.block(1, 2) if self.pick(True, False) else None
        self.depth -= 1
        texts = []
        for side, test in enumerate((condition.tile, condition.numpy)):
            lines = [f"if {test}:", *("    " + line for line in then[side])]
            if orelse is not None:
                lines += ["else:", *("    " + line for line in orelse[side])]
            texts.append(lines)
        return texts[0], texts[1]

    def kernel(self) -> RandomKernel:
        self.scalars.append("n")
        tile, numpy = self.block(2, 6)
        shape, of = f"({self.rows}, {self.columns})", f"({self.height}, {self.width})"
        head = f"""
            import numpy as np
            import tilelang.ascend.language as T

            @T.prim_func
            def kernel(
                x: T.Tensor({shape}, "{self.dtype}"), p: T.Tensor(({self.rows},), "int32"),
                y: T.Tensor({shape}, "{self.dtype}"),
            ):
                with T.Kernel({self.blocks}) as bx:
                    u = T.alloc_shared({of}, "{self.dtype}")
                    v = T.alloc_shared({of}, "{self.dtype}")
                    w = T.alloc_shared(({self.height},), "{self.dtype}")
                    n = T.alloc_var("int32", init=1)
                    T.fill(u, 1)
                    T.fill(w, 3)
                    T.copy(x[bx * {self.height} : bx * {self.height} + {self.height}, 0 : {self.width}], u)
                    with T.SimtVF(threads=32):
                        for i, j in T.Parallel({self.height}, {self.width}):
                            v[i, j] = T.cast(i * 3 - j, "{self.dtype}")
        """
        # What is in any of the buffers at the end shows in the result.
        last = f"""with T.SimtVF(threads=32):
    for i, j in T.Parallel({self.height}, {self.width}):
        u[i, j] = u[i, j] * 3 + v[i, j] * 5 + w[i] * 7 + T.cast(n, "{self.dtype}")
T.copy(u, y[bx * {self.height} : bx * {self.height} + {self.height}, 0 : {self.width}])"""
        tile_text = textwrap.dedent(head).rstrip() + "\n" + textwrap.indent("\n".join([*tile, last]), " " * 8) + "\n"
        of_y = f"y[bx * {self.height} : bx * {self.height} + {self.height}, 0 : {self.width}]"
        of_x = "x" + of_y[1:]
        body = [
            f"u = np.full({of}, 1, np.{self.dtype})",
            f"v = np.fromfunction(lambda i, j: i * 3 - j, {of}).astype(np.{self.dtype})",
            f"u[: {of_x}.shape[0], : {of_x}.shape[1]] = {of_x}",
            f"w, n = np.full({self.height}, 3, np.{self.dtype}), 1",
            *numpy,
            f"u = u * 3 + v * 5 + w[:, None] * 7 + np.{self.dtype}(n)",
            f"{of_y} = u[: {of_y}.shape[0], : {of_y}.shape[1]]",
        ]
        numpy_head = f"import numpy as np\n\ndef kernel(x, p, y):\n    for bx in range({self.blocks}):\n"
        numpy_text = numpy_head + textwrap.indent("\n".join(body), " " * 8) + "\n"
        return RandomKernel(self.rows, self.columns, self.dtype, tile_text, numpy_text)


@st.composite
def kernels(draw: Callable[[Any], Any]) -> RandomKernel:
    """Random kernels."""
    return _Writer(draw).kernel()
