"""JAX primitives that run one program on every rank of some mesh axes.

The program of one rank is ordinary JAX with ``lax.ppermute`` in it, but nothing of it is differentiated or batched step
by step. Such a primitive is a linear (or bilinear) map with a transpose of its own kind. Under ``vmap`` over an axis of
the ranks, they become a dimension of the operands, which the primitive remembers, so that ``grad`` outside of ``vmap``
finds the map whole. The jaxpr of a model shows its communication as single equations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from glass_jax import errors
from glass_jax.sharding import checks
from glass_jax.sharding.execute import AxisName, Ranks

_RANKS = "glass_ranks"  # the vmapped axis of a simulation


@dataclasses.dataclass(frozen=True)
class Over:
    """Mesh axes whose ranks run a program.

    Attributes:
      axes: the slowest to vary first.
      sizes: their extents.
      mesh_axes: the same axes in the order of the device mesh, if they are of one.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    mesh_axes: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """P."""
        return math.prod(self.sizes)

    def devices(self) -> Ranks:
        """The ranks, as devices of a mesh; JAX counts them in the order of the mesh, whatever the order given."""
        if self.mesh_axes == self.axes:
            return Ranks(self.axes, simulated=False)
        numbers = np.arange(self.ranks).reshape([self.sizes[self.axes.index(axis)] for axis in self.mesh_axes])
        return Ranks(
            self.mesh_axes, False, numbers.transpose([self.mesh_axes.index(axis) for axis in self.axes]).ravel()
        )


class Program(Protocol):
    """What every rank runs: a frozen, hashable dataclass."""

    name: str
    over: Over
    invariant: bool  # whether the result's type says that it is equal on all ranks (check_vma=True)

    def result(self, *operands: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a rank's result."""

    def run(self, *operands: jax.Array, ranks: Ranks) -> jax.Array:
        """A rank's result."""

    def marked(self, *operands: jax.Array, simulated: tuple[str | None, ...]) -> Sequence[jax.Array]:
        """The operands of all simulated ranks, by way of a mark for the profiler, if there is one."""


def over(axis_name: AxisName, name: str) -> Over:
    """The ranks along mesh axes that are bound here; ``name`` is who asks, for the error if they are not."""
    axes, sizes = checks.axes(axis_name, name)
    return Over(axes, sizes, _on_mesh(axes) or axes)


def _on_mesh(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``axes`` that are axes of a device mesh, in its order."""
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().manual_axes if axis in axes)


def varying(x: jax.Array) -> frozenset[str]:
    """The axes of a device mesh that the type of ``x`` says it varies over; without ``check_vma``, none."""
    return jax.typeof(x).manual_axis_type.varying


def vary_alike(axes: tuple[str, ...], *arrays: jax.Array) -> list[jax.Array]:
    """``arrays``, whose types say that they vary over ``axes`` and over whatever any of them varies over.

    The cast's transpose is the sum that the gradient of an array that is equal on all ranks needs.
    """
    union = frozenset(_on_mesh(axes)).union(*map(varying, arrays))
    missing = [tuple(sorted(union - varying(x))) for x in arrays]
    return [lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing, strict=True)]


@functools.partial(jax.jit, static_argnames=("program", "simulated"))
def _run(*operands: jax.Array, program: Program, simulated: tuple[str | None, ...]) -> jax.Array:
    """The program of all ranks that the operands have dimensions for."""
    axes = program.over.axes
    here = [dim for dim, name in enumerate(simulated) if name in axes]
    others = len(simulated) - len(here)
    if not here:
        rank = functools.partial(program.run, ranks=program.over.devices())
    elif len(here) == len(axes):
        rank = functools.partial(program.run, ranks=Ranks(_RANKS, simulated=True))
        rank = jax.vmap(rank, axis_name=_RANKS, axis_size=program.over.ranks)
    else:
        raise errors.UnsupportedError(
            f"{program.name} over {axes}: {[simulated[dim] for dim in here]} are simulated and the others are axes "
            "of a device mesh; a collective runs over one kind"
        )
    for _ in range(others):
        rank = jax.vmap(rank)
    order = sorted(here, key=lambda dim: axes.index(simulated[dim]))
    places = range(others, len(simulated))
    if here:
        operands = program.marked(*operands, simulated=simulated)
        # The axes of the ranks come last, in their order, and become one.
        operands = [jnp.moveaxis(x, order, places) for x in operands]
        operands = [x.reshape(*x.shape[:others], program.over.ranks, *x.shape[len(simulated) :]) for x in operands]
    result = rank(*operands)
    if here:
        result = result.reshape(*result.shape[:others], *program.over.sizes, *result.shape[others + 1 :])
        result = jnp.moveaxis(result, places, order)
    return result


def _batch(primitive: Primitive, axis_data, operands, dims, *, program: Program, simulated: tuple[str | None, ...]):
    """An axis of the ranks becomes a dimension of them; any other axis, of a batch."""
    name = axis_data.name if axis_data.name in program.over.axes else None
    if name is None and all(dim is None for dim in dims):
        return primitive.bind(*operands, program=program, simulated=simulated), None
    operands = [
        jnp.broadcast_to(x, (axis_data.size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    return primitive.bind(*operands, program=program, simulated=(name, *simulated)), 0


def _abstract_eval(*operands: jax.core.ShapedArray, program: Program, simulated: tuple[str | None, ...]):
    lead = operands[0].shape[: len(simulated)]
    result = program.result(*(jax.ShapeDtypeStruct(x.shape[len(simulated) :], x.dtype) for x in operands))
    mat = operands[0].manual_axis_type
    mat = mat.update(varying=mat.varying - set(program.over.axes)) if program.invariant else mat
    return operands[0].update(shape=(*lead, *result.shape), dtype=result.dtype, weak_type=False, manual_axis_type=mat)


def ranked(name: str) -> Primitive:
    """A primitive with parameters ``program`` and ``simulated``, and every rule but those of differentiation.

    ``simulated`` says what the operands' leading dimensions are: names of simulated mesh axes, or None for a batch.
    """
    primitive = Primitive(name)
    primitive.def_impl(_run)
    primitive.def_abstract_eval(_abstract_eval)
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batch, primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(_run, multiple_results=False))
    return primitive
