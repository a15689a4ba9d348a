"""A mesh with no devices behind it: ranks are the elements of vmapped axes."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from glass_jax import errors
from glass_jax.sharding import checks
from glass_jax.sharding import topology as topologies
from glass_jax.sharding.faults import Fault, Faults, peer_failure
from glass_jax.sharding.network import Network
from glass_jax.sharding.schedule import Schedule
from glass_jax.sharding.topology import Topology

# Part of the trace key: a jitted part of a program is traced again on another mesh, which may have other faults.
_running = jax.make_user_context(default_value=None)


def current() -> SimulatedMesh | None:
    """The simulated mesh whose program is being traced, if it is one's."""
    return _running.value


class SimulatedMesh:
    """A mesh of any size, on one device.

    A program that is written for ``jax.shard_map`` runs on it unchanged, with the same bits in every collective of
    ``glass_jax.sharding``; JAX's own collectives run as well, except that their sums may differ in the last bit. All
    ranks' arrays must fit the memory together.

    Args:
      shape: extent of each named axis, the slowest to vary first, for example ``{"x": 1024}`` or
        ``{"node": 4, "device": 8}``.
      topology: the machine that profiles take times from: a name, a JSON file or a ``Topology``, see ``planner.plan``.
      faults: ``SlowLink``, ``LossyLink`` and ``DeadRank``. A profile shows the first two; no value changes, since what
        is lost is sent again. A collective that waits for a dead rank raises ``PeerFailureError`` when it is traced.

    Raises:
      CollectiveError: an extent is not positive, there is no such topology, or a fault is at no rank.

    Example:
      >>> mesh = SimulatedMesh({"x": 1024})
      >>> total = mesh.shard_map(lambda x: all_reduce(x, "x"), in_specs=P("x"), out_specs=P())(jnp.ones(4096))
    """

    def __init__(self, shape: Mapping[str, int], *, topology: str | Topology = "910b", faults: Sequence[Fault] = ()):
        self.shape = {name: checks.integer(size, f"the extent of {name!r}") for name, size in dict(shape).items()}
        if not self.shape or min(self.shape.values()) < 1:
            raise errors.CollectiveError(f"SimulatedMesh({shape}): it needs at least one axis, and extents from 1 up")
        self._abstract = AbstractMesh(
            tuple(self.shape.values()), self.axis_names, axis_types=(AxisType.Auto,) * len(self.shape)
        )
        self.topology = topologies.get(topology)
        self.faults = Faults(faults, self.size)

    def __repr__(self) -> str:
        return f"SimulatedMesh({self.shape})"

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, the slowest to vary first."""
        return tuple(self.shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape.values())

    @functools.cached_property
    def network(self) -> Network:
        """The links of as many ranks of the topology.

        Raises:
          CollectiveError: the topology has fewer.
        """
        return Network(self.topology, self.size)

    def groups(self, axes: Sequence[str]) -> np.ndarray:
        """The ranks of each group that a collective over ``axes`` runs in: ``[groups, ranks along the axes]``."""
        numbers = np.arange(self.size).reshape(tuple(self.shape.values()))
        places = [self.axis_names.index(axis) for axis in axes]
        numbers = np.moveaxis(numbers, places, range(numbers.ndim - len(places), numbers.ndim))
        return numbers.reshape(-1, math.prod(self.shape[axis] for axis in axes))

    def check_alive(self, axes: Sequence[str], schedule: Schedule | None) -> None:
        """Raises PeerFailureError if a rank waits for ever in a collective over ``axes``, because another is dead."""
        for group in self.groups(axes) if self.faults.dead else ():
            dead = np.flatnonzero(np.isin(group, self.faults.dead))
            if len(dead) and (failure := peer_failure(schedule, dead.tolist(), group)):
                raise failure

    def shard_map(
        self,
        f: Callable[..., Any],
        *,
        in_specs: Any,
        out_specs: Any,
        axis_names: AbstractSet[Hashable] = frozenset(),
        check_vma: bool = True,
    ) -> Callable[..., Any]:
        """``jax.shard_map`` with this mesh in place of devices, and with its checks.

        Args:
          f: the program of one rank.
          in_specs: how each argument is cut: a pytree of ``PartitionSpec`` that is a prefix of the arguments'.
          out_specs: how results are put together; an axis that a spec leaves out promises that they are equal along it.
          axis_names: the axes that ``f`` is manual over; by default all.
          check_vma: whether that promise is checked against the types in ``f``.

        Returns:
          A function of whole arrays.

        Raises:
          CollectiveError: (of that function) a spec names an unknown axis, or an array cannot be cut evenly.
          ValueError: (of that function) whatever else ``jax.shard_map`` finds wrong.
        """
        manual = tuple(name for name in self.axis_names if not axis_names or name in axis_names)

        @functools.wraps(f)
        def simulated(*args):
            specs = jax.tree.leaves(_broadcast(in_specs, args), is_leaf=_is_spec)
            leaves, structure = jax.tree.flatten(args)
            for number, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
                self._check(spec, jnp.shape(leaf), f"array {number} of the arguments")
            on_devices = jax.shard_map(
                f,
                mesh=self._abstract,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=set(manual),
                check_vma=check_vma,
            )
            with _running(self):
                results = jax.eval_shape(on_devices, *args)  # runs every check of jax.shard_map
            out = jax.tree.leaves(_broadcast(out_specs, results), is_leaf=_is_spec)

            def run(_, parts):
                return jax.tree.leaves(f(*jax.tree.unflatten(structure, parts)))

            for name in reversed(manual):
                mapped = [0 if name in _axes_of(spec) else None for spec in specs]
                run = jax.vmap(
                    run, in_axes=(None if name != manual[-1] else 0, mapped), axis_name=name, axis_size=self.shape[name]
                )
            parts = [self._cut(jnp.asarray(leaf), spec, manual) for leaf, spec in zip(leaves, specs, strict=True)]
            with _running(self), self._manual(manual):
                stacked = run(jnp.zeros(self.shape[manual[-1]]), parts)
            whole = [self._joined(part, spec, manual) for part, spec in zip(stacked, out, strict=True)]
            return jax.tree.unflatten(jax.tree.structure(results), whole)

        return simulated

    def _manual(self, names: Sequence[str]) -> contextlib.AbstractContextManager:
        """A block in which ``names`` are Manual axes, as inside of ``jax.shard_map``: there ``lax.pcast`` is allowed.

        Outside of ``jax.shard_map`` types do not say what varies, so that the cast changes nothing.
        """
        sizes = tuple(self.shape[name] for name in names)
        manual = AbstractMesh(sizes, tuple(names), axis_types=(AxisType.Manual,) * len(names))
        return jax.sharding.use_abstract_mesh(manual)

    def _check(self, spec: PartitionSpec, shape: Sequence[int], what: str) -> None:
        """Raises CollectiveError unless an array of ``shape`` can be cut by ``spec``."""
        if unknown := [name for name in _axes_of(spec) if name not in self.shape]:
            raise errors.CollectiveError(f"{what}: its spec {spec} names {unknown[0]!r}, which is no axis of {self}")
        if len(spec) > len(shape):
            raise errors.CollectiveError(
                f"{what}: its spec {spec} has {len(spec)} entries, and its shape {tuple(shape)} fewer"
            )
        for dim, entry in enumerate(spec):
            parts = math.prod(self.shape[name] for name in _names(entry))
            if shape[dim] % parts:
                raise errors.CollectiveError(
                    f"{what}, of shape {tuple(shape)}: dimension {dim}, {shape[dim]}, is to be cut into {parts} parts "
                    f"along {entry!r}; pad it to {-(-shape[dim] // parts) * parts}"
                )

    def _cut(self, x: jax.Array, spec: PartitionSpec, manual: Sequence[str]) -> jax.Array:
        """The parts of all ranks: a leading dimension for each axis that ``spec`` names, in the order of the mesh."""
        shape, axes = [], []
        for dim in range(x.ndim):
            names = _names(spec[dim]) if dim < len(spec) else ()
            axes += [*names, None]
            sizes = [self.shape[name] for name in names]
            shape += [*sizes, x.shape[dim] // math.prod(sizes)]
        order = [axes.index(name) for name in manual if name in axes]
        order += [place for place, name in enumerate(axes) if name is None]
        return x.reshape(shape).transpose(order)

    def _joined(self, parts: jax.Array, spec: PartitionSpec, manual: Sequence[str]) -> jax.Array:
        """The whole array from the parts of all ranks, which have a leading dimension for each manual axis."""
        named = _axes_of(spec)
        parts = parts[tuple(slice(None) if name in named else 0 for name in manual)]
        leading = [name for name in manual if name in named]
        local = parts.shape[len(leading) :]
        order, shape = [], []
        for dim, size in enumerate(local):
            names = _names(spec[dim]) if dim < len(spec) else ()
            order += [*(leading.index(name) for name in names), len(leading) + dim]
            shape.append(size * math.prod(self.shape[name] for name in names))
        return parts.transpose(order).reshape(shape)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _broadcast(specs: Any, tree: Any) -> Any:
    """``specs``, a prefix of ``tree``, with a spec for every leaf."""
    return jax.tree.broadcast(specs, tree, is_leaf=_is_spec)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes of one entry of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _axes_of(spec: PartitionSpec) -> list[str]:
    return [name for entry in spec for name in _names(entry)]
