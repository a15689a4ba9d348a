"""What all products share: the types that they multiply, and the type of the result."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glass_jax import errors
from glass_jax.lowering.xla.gemm import accumulator
from glass_jax.primitives.checks import FLOATS

FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
OPERANDS = (*FLOATS, *FLOAT8, jnp.dtype(jnp.int8))


def operand_dtype(operation: str, lhs: jnp.dtype, rhs: jnp.dtype) -> jnp.dtype:
    """The type both operands are multiplied in; of two fp8 formats, which mix freely, that of ``lhs``.

    Raises:
      HardwareConstraintError: a type that is not multiplied, or two that have no product.
    """
    for name, dtype in (("lhs", lhs), ("rhs", rhs)):
        if dtype not in OPERANDS:
            raise errors.HardwareConstraintError(
                f"{operation}: {name} is {dtype}; use float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8"
            )
    if lhs == rhs or (lhs in FLOAT8 and rhs in FLOAT8):
        return lhs
    if lhs in FLOATS and rhs in FLOATS:
        return jnp.promote_types(lhs, rhs)
    raise errors.HardwareConstraintError(
        f"{operation}: {lhs} times {rhs} has no meaning without a scale; cast one of them"
    )


def result_dtype(operation: str, operand: jnp.dtype, preferred: jax.typing.DTypeLike | None) -> jnp.dtype:
    """The type of the result: ``preferred``, or the operands' own; float32 for fp8, int32 for int8.

    Raises:
      HardwareConstraintError: sums of ``operand`` products are not rounded to ``preferred``.
    """
    if preferred is None:
        return operand if operand in FLOATS else accumulator(operand)
    preferred = jax.dtypes.canonicalize_dtype(preferred)
    allowed = (jnp.dtype(jnp.int32),) if operand == jnp.int8 else FLOATS
    if preferred not in allowed:
        names = ", ".join(map(str, allowed[::-1]))
        raise errors.HardwareConstraintError(
            f"{operation}: preferred_element_type={preferred} of {operand} operands; use one of {names}"
        )
    return preferred


def promoted(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both operands in the wider of their types, as products that derivatives consist of need it; fp8 as float32."""
    if lhs.dtype == rhs.dtype or (lhs.dtype in FLOAT8 and rhs.dtype in FLOAT8):
        return lhs, rhs
    wide = [jnp.dtype(jnp.float32) if x.dtype in FLOAT8 else x.dtype for x in (lhs, rhs)]
    dtype = jnp.promote_types(*wide)
    return lhs.astype(dtype), rhs.astype(dtype)
