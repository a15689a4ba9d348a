"""Mesh axes by role: what a module's parameters and activations are split over."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from glass_jax import errors
from glass_jax.lowering import partition

Role = Literal["batch", "tensor", "expert"] | None
"""What splits a dimension: ``"batch"`` is the axes of data and expert together; None: nothing does."""


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Names of the mesh axes that play each role; modules look for them in the mesh of ``jax.set_mesh``.

    An axis that the mesh does not have, or that is Manual (inside of ``jax.shard_map``), splits nothing: a model built
    and called without a mesh is whole. The axes of a mesh are all Explicit or all Auto.

    Attributes:
      data: splits the tokens.
      tensor: splits heads, hidden features and the vocabulary.
      expert: splits the experts, and the tokens too.
    """

    data: str = "data"
    tensor: str = "tensor"
    expert: str = "expert"

    def of(self, role: Role) -> tuple[str, ...]:
        """Names of the axes of the current mesh that play ``role``."""
        names = {None: (), "batch": (self.data, self.expert), "tensor": (self.tensor,), "expert": (self.expert,)}[role]
        mesh = jax.sharding.get_abstract_mesh()
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        return tuple(name for name in names if types.get(name, AxisType.Manual) != AxisType.Manual)

    def size(self, role: Role) -> int:
        """How many parts ``role`` splits a dimension into on the current mesh."""
        shape = jax.sharding.get_abstract_mesh().shape
        return math.prod(shape[name] for name in self.of(role))

    def spec(self, *roles: Role) -> PartitionSpec:
        """The ``PartitionSpec`` of an array on the current mesh, given the role that splits each dimension."""
        return PartitionSpec(*(self.of(role) or None for role in roles))

    def fitting(self, shape: tuple[int, ...], *roles: Role) -> PartitionSpec:
        """As :meth:`spec`, with dimensions of ``shape`` left whole that do not divide evenly."""
        return self.spec(
            *(role if size % self.size(role) == 0 else None for size, role in zip(shape, roles, strict=True))
        )

    def constrain(self, x: jax.Array, *roles: Role) -> jax.Array:
        """``x`` split over the current mesh as ``roles`` say; dimensions that do not divide evenly stay whole."""
        if not (self.of("batch") or self.of("tensor")):
            return x
        spec = self.fitting(x.shape, *roles)
        if partition.types_tell(jax.sharding.get_abstract_mesh()):
            return jax.sharding.reshard(x, spec)
        return jax.lax.with_sharding_constraint(x, spec)

    def take_rows(self, table: jax.Array, rows: jax.Array, *roles: Role) -> jax.Array:
        """``table[rows]``, split as ``roles`` say: on Explicit axes a gather has to be told."""
        told = partition.types_tell(jax.sharding.get_abstract_mesh())
        spec = self.fitting((*rows.shape, *table.shape[1:]), *roles) if told else None
        return self.constrain(table.at[rows].get(mode="clip", out_sharding=spec), *roles)


DEFAULT_AXES = MeshAxes()
"""Axes called data, tensor and expert."""


def parameter(
    initializer: Callable, rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike, axes: MeshAxes, *roles: Role
) -> nnx.Param:
    """A trainable parameter, split over the current mesh as ``roles`` say.

    Raises:
      HardwareConstraintError: a dimension is no multiple of the parts that it is to be split into.
    """
    for dim, (size, role) in enumerate(zip(shape, roles, strict=True)):
        if size % (parts := axes.size(role)):
            raise errors.HardwareConstraintError(
                f"dimension {dim} of a parameter of shape {shape} does not split over {parts} devices of the mesh axis "
                f"{axes.of(role)}: {size} is no multiple of {parts}; use a mesh with fewer devices along that axis"
            )
    metadata = {"out_sharding": axes.spec(*roles)} if any(map(axes.of, roles)) else {}
    return nnx.Param(initializer(rngs.params(), shape, dtype), **metadata)
