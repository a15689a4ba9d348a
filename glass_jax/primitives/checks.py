"""Checks of operands that operations share: one wording for shapes and dtypes that do not fit."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from glass_jax import errors

FLOATS = tuple(map(jnp.dtype, (jnp.float64, jnp.float32, jnp.float16, jnp.bfloat16)))


def dimensions(operation: str, **operands: tuple[Any, str]) -> dict[str, int]:
    """The sizes of the named dimensions of ``operands``, which agree wherever a name occurs.

    For example ``dimensions("ln_gelu_linear", x=(x, "... K"), w=(w, "K N"))`` is ``{"K": 16, "N": 32}``.

    Args:
      operation: name for the message.
      **operands: each an array and its dimensions, separated by spaces: names, numbers that the size must be, and at
        the front ``...`` for any number of others.

    Raises:
      HardwareConstraintError: an operand has another number of dimensions, or a size differs.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for name, (array, spec) in operands.items():
        names = spec.split()
        open_ended = names[0] == "..."
        names = names[open_ended:]
        shape = array.shape
        fits = len(shape) >= len(names) if open_ended else len(shape) == len(names)
        tail = shape[len(shape) - len(names) :]
        for dim, size in zip(names, tail, strict=True) if fits else ():
            if dim.isdigit():
                fits &= size == int(dim)
            else:
                origin.setdefault(dim, name)
                fits &= size == sizes.setdefault(dim, size)
        if not fits:
            known = [f"{dim} = {sizes[dim]} (of {origin[dim]})" for dim in names if origin.get(dim, name) != name]
            raise errors.HardwareConstraintError(
                f"{operation}: {name} has shape {tuple(shape)}, expected [{', '.join(spec.split())}]"
                + (f" with {', '.join(known)}" if known else "")
            )
    return sizes


def floats(operation: str, **operands: Any) -> None:
    """Raises HardwareConstraintError unless every operand is float32, float16, bfloat16 or float64."""
    for name, array in operands.items():
        if array.dtype not in FLOATS:
            raise errors.HardwareConstraintError(
                f"{operation}: {name} is {array.dtype}; use float32, float16 or bfloat16"
            )


def integers(operation: str, **operands: Any) -> None:
    """Raises HardwareConstraintError unless every operand is of an integer type."""
    for name, array in operands.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise errors.HardwareConstraintError(f"{operation}: {name} is {array.dtype}; use int32")
