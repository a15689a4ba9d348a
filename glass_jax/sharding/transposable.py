"""Linear maps with transposes of their own, which JAX differentiates forward, in reverse, and any number of times.

``jax.custom_vjp`` has no forward mode, ``jax.custom_jvp`` differentiates in reverse what its rule computes, and
``linear_call`` has no ``vmap``. A map here is one primitive equation: its tangent is the map of the tangent, its
transpose another map, and ``vmap`` over an axis, named or not, is remembered and done when the map runs.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from glass_jax.primitives import axes


class Map(Protocol):
    """A linear map of one array, given others: a frozen, hashable dataclass."""

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the result."""

    def run(self, x: jax.Array, *given: jax.Array) -> jax.Array:
        """The map of ``x``. It may use collectives over mesh axes."""

    def transposed(self, x: jax.ShapeDtypeStruct) -> Self:
        """The transpose, from the result back to arrays like ``x``, given the same."""


def apply(linear: Map, x: jax.Array, *given: jax.Array) -> jax.Array:
    """``linear`` of ``x``, given arrays that are not differentiated."""
    operands = axes.vary_alike(x, *map(jax.lax.stop_gradient, given))
    return map_p.bind(*operands, linear=linear, levels=())


def _run(*operands: jax.Array, linear: Map, levels: tuple[tuple, ...]) -> jax.Array:
    """The map, under the ``vmap`` of each level: name, size and the operands' dimensions, the outermost first."""
    run = linear.run
    for name, size, dims in reversed(levels):
        run = jax.vmap(run, dims, axis_name=name, axis_size=size)
    return run(*operands)


def _abstract_eval(x, *given, linear: Map, levels: tuple[tuple, ...]):
    result = linear.result(jax.ShapeDtypeStruct(x.shape[len(levels) :], x.dtype))
    return x.update(shape=(*x.shape[: len(levels)], *result.shape), dtype=result.dtype, weak_type=False)


def _batch(axis_data, operands, dims, *, linear: Map, levels: tuple[tuple, ...]):
    x, *given = operands
    x = jnp.broadcast_to(x, (axis_data.size, *x.shape)) if dims[0] is None else jnp.moveaxis(x, dims[0], 0)
    name = axis_data.name if isinstance(axis_data.name, str) else None
    levels = ((name, axis_data.size, (0, *dims[1:])), *levels)
    return map_p.bind(x, *given, linear=linear, levels=levels), 0


def _jvp(primals, tangents, *, linear: Map, levels: tuple[tuple, ...]):
    x, *given = primals
    out = map_p.bind(x, *given, linear=linear, levels=levels)
    if isinstance(tangents[0], ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, map_p.bind(tangents[0], *given, linear=linear, levels=levels)


def _transpose(cotangent, x, *given, linear: Map, levels: tuple[tuple, ...]):
    nothing: list[Any] = [None] * len(given)
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval), *nothing]
    linear = linear.transposed(jax.ShapeDtypeStruct(x.aval.shape[len(levels) :], x.aval.dtype))
    return [map_p.bind(cotangent, *given, linear=linear, levels=levels), *nothing]


map_p = Primitive("glass_linear_map")
map_p.def_impl(_run)
map_p.def_abstract_eval(_abstract_eval)
batching.fancy_primitive_batchers[map_p] = _batch
ad.primitive_jvps[map_p] = _jvp
ad.primitive_transposes[map_p] = _transpose
mlir.register_lowering(map_p, mlir.lower_fun(_run, multiple_results=False))
