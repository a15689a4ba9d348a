"""Expressions that also do something: they become a statement that stores what they return in a scalar variable."""

from __future__ import annotations

from typing import Any

from glass_jax.hw.ir import program as ir
from glass_jax.lowering.tilelang.decoding import Decoding

ATOMICS = {"atomic_add": "add", "atomic_max": "max", "atomic_min": "min", "atomic_or": "bitor"}
RETURNING = {f"{name}_ret_elem_op" for name in ATOMICS} | {"rng_rand", "rng_rand_float"}

RANDOM_STATE = "random_state"
_RANDOM_WORDS = 9  # see glass_jax.hw.model.vector.random


def returning(decoder: Decoding, name: str, expr: Any) -> ir.Load:
    """What the call ``expr`` of one of :data:`RETURNING` returns."""
    result = decoder.temporary(str(expr.dtype))
    if name.startswith("atomic"):
        kind = ATOMICS[name.removesuffix("_ret_elem_op")]
        args = decoder.element(expr.args[0]), decoder.expr(expr.args[1]), result
        decoder.before(ir.Op("atomic", args, {"kind": kind}, decoder.loc))
    else:
        kind = "bits" if name == "rng_rand" else str(expr.args[0].value)
        decoder.before(ir.Op("random", (random_state(decoder), result), {"kind": kind}, decoder.loc))
    return ir.Load(result, (ir.Const(0, "int32"),), str(expr.dtype))


def random_state(decoder: Decoding) -> str:
    """The name of the buffer that each thread keeps its random generator in."""
    return decoder.state(RANDOM_STATE, "uint32", _RANDOM_WORDS)
