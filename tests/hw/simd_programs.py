"""Programs of register operations, and what the tests of SIMD regions have in common.

Every expression under test is evaluated in one program, so that a whole table of them costs one compilation: its
result is stored as 256 bytes, a predicate as its 32.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir import serialization
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model import executor
from tests.hw import programs

FLOATS = ("float32", "float16", "bfloat16")
SIGNED = ("int32", "int16", "int8")
UNSIGNED = ("uint32", "uint16", "uint8")
INTEGERS = SIGNED + UNSIGNED
DTYPES = FLOATS + INTEGERS


def lanes(dtype: str) -> int:
    return 256 // jnp.dtype(dtype).itemsize


def kind(dtype: str) -> str:
    """The register type with elements ``dtype``."""
    return f"{dtype}x{lanes(dtype)}"


def register(name: str, *args: ir.Expr, dtype: str, modes: Sequence[str] = ()) -> ir.Register:
    """An operation that gives a register of elements ``dtype``, ``"bool"`` for a predicate."""
    full = "boolx256" if dtype == "bool" else kind(dtype)
    return ir.Register(name, args, tuple(modes), full)


def address(buffer: str, *indices: int | str | ir.Expr, offset: int | ir.Expr = 0) -> ir.Address:
    return ir.Address(buffer, tuple(map(programs.expr, indices)), offset)


def vld(buffer: str, *indices: int | str | ir.Expr, dtype: str, dist: str = "NORM") -> ir.Register:
    return register("vld", address(buffer, *indices), dtype=dtype, modes=(dist,))


def vsts(buffer: str, *indices: int | str | ir.Expr, value: ir.Expr, mask: ir.Expr | None = None, dist: str) -> ir.Op:
    return ir.Op(
        "vsts", (address(buffer, *indices), value, pset(int(dist[-2:].strip("B"))) if mask is None else mask, dist)
    )


def pset(bits: int, pattern: str = "ALL") -> ir.Register:
    return register("pset", programs.const(bits), dtype="bool", modes=(f"PAT_{pattern}",))


def item(pair: ir.Expr, number: int, dtype: str) -> ir.Register:
    return register("pair_get", pair, programs.const(number), dtype=dtype)


def operand(dtype: str, row: int = 0) -> ir.Register:
    """Row ``row`` of the operands of that type."""
    return vld(f"{dtype}_ub", row, 0, dtype=dtype)


def predicate(row: int = 0) -> ir.Register:
    """A predicate of random bits."""
    return register("pld", address("bits_ub", row, 0), dtype="bool", modes=("NORM",))


def operands() -> dict[str, np.ndarray]:
    """Three registers of operands of every type, and the bits of four predicates: random, special values among them."""
    rng = np.random.default_rng(0)
    found = {"bits": rng.integers(0, 256, (4, 32)).astype(np.uint8)}
    for dtype in DTYPES:
        shape = (3, lanes(dtype))
        if dtype in FLOATS:
            values = (4 * rng.standard_normal(shape)).astype(jnp.dtype(dtype))
            values[:, :4] = np.array([0.0, 1.0, -1.0, 0.5])
        else:
            limits = np.iinfo(dtype)
            values = rng.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype)
            values[0, :2], values[1, :2] = (limits.min, limits.max), (1, limits.max)
            values[1][values[1] == 0] = 3
        found[dtype] = values
    return found


def active(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Which elements of type ``dtype`` the bits of a predicate select."""
    return np.unpackbits(bits, bitorder="little")[:: jnp.dtype(dtype).itemsize].astype(bool)


def run(body: Sequence[ir.Stmt], arrays: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The contents of the UB buffers ``outputs`` after a SIMD region, which they begin with.

    Each array and output ``x`` is a parameter that is copied to a UB buffer ``x_ub`` of its shape and type.
    """
    all_arrays = arrays | {name: np.asarray(value) for name, value in outputs.items()}
    params = [programs.buffer(name, Space.GM, x.shape, x.dtype.name) for name, x in all_arrays.items()]
    results = [programs.buffer(f"{name}_out", Space.GM, x.shape, x.dtype.name) for name, x in outputs.items()]
    local = [programs.buffer(f"{name}_ub", Space.UB, x.shape, x.dtype.name) for name, x in all_arrays.items()]
    extra = [programs.buffer(name, Space.FRAGMENT, shape, dtype) for name, shape, dtype in REGISTERS]
    loads = [programs.copy(src, dst) for src, dst in zip(params, local, strict=True)]
    stores = [programs.copy(src, dst) for src, dst in zip(local[len(arrays) :], results, strict=True)]
    kernel = programs.program([*params, *results], [*local, *extra], *loads, ir.Simd(tuple(body)), *stores)
    text = serialization.to_json(kernel)
    assert serialization.to_json(serialization.from_json(text)) == text
    positions = tuple(range(len(params), len(params) + len(results)))
    run_kernel = jax.jit(lambda *args: executor.run(kernel, args, positions))
    return [np.asarray(x) for x in run_kernel(*map(jnp.asarray, all_arrays.values()))]


# Mutable registers that every program has: name, shape, element type.
REGISTERS = [("acc", (1, 64), "float32"), ("regs", (4, 64), "float32"), ("halves", (1, 128), "float16")]


def evaluate(expressions: Sequence[ir.Expr]) -> list[np.ndarray]:
    """The bytes of each expression's value, 256 of a register, 32 of a predicate."""
    body = []
    for number, expr in enumerate(expressions):
        if expr.dtype == "boolx256":
            body.append(ir.Op("pst", (address("out_ub", number, 0), expr, "NORM")))
        else:
            octets = register("reinterpret", expr, dtype="uint8")
            body.append(vsts("out_ub", number, 0, value=octets, dist="NORM_B8"))
    (out,) = run(body, operands(), {"out": np.zeros((len(expressions), 256), np.uint8)})
    return [row[:32] if e.dtype == "boolx256" else row for row, e in zip(out, expressions, strict=True)]
