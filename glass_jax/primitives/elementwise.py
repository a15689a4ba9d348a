"""Operations whose result depends, element for element, on operands of one shape and type: their rules."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from glass_jax.lowering import partition
from glass_jax.lowering.tiled import elementwise as tiled
from glass_jax.lowering.tilelang.kernels.elementwise import ElementwiseKernel
from glass_jax.primitives import axes
from glass_jax.primitives.operation import Operation, Params


def operation(formula: Callable[..., jax.Array], kernel: type[ElementwiseKernel]) -> Operation:
    """The operation of an elementwise kernel, of the type of its operands.

    Args:
      formula: ``(*operands) -> array``, in JAX that has derivatives.
      kernel: the same as tiles, from whose name that of the operation is.
    """

    def of_params(*operands, params: Params) -> jax.Array:
        return formula(*operands)

    def batch(operands, dims, *, params: Params):
        bound = made.bind(*jnp.broadcast_arrays(*axes.lead(operands, dims)), params=params)
        return bound, 0

    made = Operation(
        kernel.operation,
        abstract_eval=lambda *avals, params: jax.ShapeDtypeStruct(avals[0].shape, avals[0].dtype),
        dimensions=_dimensions,
        formula=of_params,
        tiled=functools.partial(tiled.run, kernel),
        batch=batch,
        derivative=of_params,
    )
    return made


def _dimensions(*avals, params: Params) -> partition.Dimensions:
    names = " ".join(f"d{d}" for d in range(avals[0].ndim))
    return partition.Dimensions(f"{', '.join([names] * len(avals))} -> {names}", parallel=names)
