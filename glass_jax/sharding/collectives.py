"""Collectives over mesh axes, each by an algorithm of choice.

They run inside ``jax.shard_map`` on devices and processes, and inside ``SimulatedMesh.shard_map`` on any number of
simulated ranks, with the same bits. Every rank ends with the same bits, too. All are linear and differentiable, any
number of times.

``algorithm`` is ``"auto"`` (the one of least predicted cost, see ``cost.choose``), ``"xla"`` (JAX's own collective), or
one of ``algorithms.ALGORITHMS``; ``axis_name`` is a mesh axis, or several, of which the first is the slowest to vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from glass_jax import errors
from glass_jax.sharding import checks, cost, primitive, simulated
from glass_jax.sharding.execute import AxisName
from glass_jax.sharding.linear import CollectiveProgram, collective_p


def all_reduce(
    x: ArrayLike, axis_name: AxisName, *, algorithm: str = "auto", accumulate_dtype: DTypeLike | None = None
) -> jax.Array:
    """The sum of every rank's ``x``, on every rank.

    Args:
      x: ``[...]``; bool counts as int32.
      axis_name: mesh axes to sum over.
      algorithm: see the module.
      accumulate_dtype: dtype that the sum is formed in, and rounded from once; by default float32 for floats of 16 bits
        and less, else ``x``'s.

    Returns:
      ``[...]`` of ``x``'s dtype. Under ``check_vma=True`` its type says that it is equal on all ranks, like
      ``lax.psum``'s.

    Raises:
      CollectiveError: the axis, algorithm or dtype is not one.
    """
    x = jnp.asarray(x)
    x = x.astype(jnp.int32) if x.dtype == bool else x
    return _bind(x, "all_reduce", axis_name, algorithm, accumulate_dtype=accumulate_dtype, invariant=True)


def broadcast(x: ArrayLike, axis_name: AxisName, *, root: int = 0, algorithm: str = "auto") -> jax.Array:
    """Rank ``root``'s ``x``, on every rank, bit by bit.

    Args:
      x: ``[...]``; the other ranks' values do not matter.
      axis_name: mesh axes to broadcast over.
      root: the rank along them that broadcasts.
      algorithm: see the module.

    Returns:
      ``[...]``. Under ``check_vma=True`` its type says that it is equal on all ranks.

    Raises:
      CollectiveError: the axis or algorithm is not one, or root not a rank.
    """
    return _bind(jnp.asarray(x), "broadcast", axis_name, algorithm, root=root, invariant=True)


def all_gather(x: ArrayLike, axis_name: AxisName, *, algorithm: str = "auto") -> jax.Array:
    """Every rank's ``x``, on every rank: ``[...] -> [P, ...]``, in the order of ranks.

    Args:
      x: ``[...]``.
      axis_name: mesh axes to gather over.
      algorithm: see the module.

    Raises:
      CollectiveError: the axis or algorithm is not one, or the algorithm is not defined for P.
    """
    return _bind(jnp.asarray(x), "all_gather", axis_name, algorithm)


def reduce_scatter(
    x: ArrayLike, axis_name: AxisName, *, algorithm: str = "auto", accumulate_dtype: DTypeLike | None = None
) -> jax.Array:
    """Block r of the sum of every rank's ``x``, on rank r: ``[P * n, ...] -> [n, ...]``.

    Args:
      x: ``[P * n, ...]``; bool counts as int32.
      axis_name: mesh axes to sum over.
      algorithm: see the module.
      accumulate_dtype: see :func:`all_reduce`.

    Raises:
      CollectiveError: the axis or algorithm is not one, the algorithm is not defined for P, or P does not divide the
        first dimension.
    """
    x = jnp.asarray(x)
    x = x.astype(jnp.int32) if x.dtype == bool else x
    blocks = _blocks(x, axis_name, "reduce_scatter")
    return _bind(blocks, "reduce_scatter", axis_name, algorithm, accumulate_dtype=accumulate_dtype)


def all_to_all(x: ArrayLike, axis_name: AxisName, *, algorithm: str = "auto") -> jax.Array:
    """Block r goes to rank r, and block r of the result came from rank r: ``[P * n, ...] -> [P * n, ...]``.

    Args:
      x: ``[P * n, ...]``.
      axis_name: mesh axes to exchange over.
      algorithm: see the module.

    Raises:
      CollectiveError: the axis or algorithm is not one, or P does not divide the first dimension.
    """
    x = jnp.asarray(x)
    return _bind(_blocks(x, axis_name, "all_to_all"), "all_to_all", axis_name, algorithm).reshape(x.shape)


def send_recv(
    x: ArrayLike, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, algorithm: str = "auto"
) -> jax.Array:
    """Each source's ``x``, on its destination; zeros on ranks that are nobody's.

    Args:
      x: ``[...]``.
      axis_name: mesh axes whose ranks are meant.
      perm: (source, destination) pairs; a rank is at most once a source and at most once a destination.
      algorithm: ``"auto"``, ``"direct"`` and ``"xla"`` are the same.

    Raises:
      CollectiveError: the axis or algorithm is not one, or ``perm`` is no partial permutation of the ranks.
    """
    ranks = primitive.over(axis_name, "send_recv").ranks
    dst = tuple(checks.permutation(perm, ranks).tolist())
    return _bind(jnp.asarray(x), "send_recv", axis_name, algorithm, dst=dst)


def _blocks(x: jax.Array, axis_name: AxisName, collective: str) -> jax.Array:
    """``[P * n, ...] -> [P, n, ...]``."""
    ranks = primitive.over(axis_name, collective).ranks
    checks.blocks(x.shape, ranks, collective)
    return x.reshape(ranks, x.shape[0] // ranks, *x.shape[1:])


def _bind(x: jax.Array, collective: str, axis_name: AxisName, algorithm: str, **options: Any) -> jax.Array:
    """Makes ``x`` vary over the axes, and runs the collective on it."""
    (x,) = primitive.vary_alike(primitive.over(axis_name, collective).axes, x)
    return collective_p.bind(x, program=prepare(x, collective, axis_name, algorithm, **options), simulated=())


def prepare(
    x: jax.Array,
    collective: str,
    axis_name: AxisName,
    algorithm: str,
    *,
    accumulate_dtype: DTypeLike | None = None,
    root: int = 0,
    dst: tuple[int, ...] | None = None,
    invariant: bool = False,
) -> CollectiveProgram:
    """The program of a collective of arrays like ``x``, after the checks that all collectives have in common."""
    over = primitive.over(axis_name, collective)
    checks.algorithm(collective, algorithm)
    checks.root(root, over.ranks, collective)
    levels = over.sizes if len(over.sizes) > 1 else None
    if algorithm == "auto":
        choice = cost.choose(collective, x.size * x.dtype.itemsize, over.ranks)
        algorithm, levels = choice.algorithm, choice.topology.grid(over.ranks)
    mesh = simulated.current()
    program = CollectiveProgram(
        name=collective,
        algorithm=algorithm,
        over=over,
        accumulate=_accumulate(x.dtype, accumulate_dtype, collective),
        root=root,
        dst=dst,
        levels=levels if algorithm == "hierarchical" else None,
        invariant=invariant and set(over.axes) <= primitive.varying(x),
        mesh=mesh,
    )
    schedule = program.schedule()  # raises if the algorithm is not defined here
    if mesh is not None:
        mesh.check_alive(over.axes, schedule)
    return program


def _accumulate(dtype: np.dtype, asked: DTypeLike | None, collective: str) -> str:
    """Name of the dtype that sums of ``dtype`` are formed in."""
    if asked is None:
        narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2
        return "float32" if narrow else dtype.name
    if jnp.promote_types(dtype, asked) != asked:
        raise errors.CollectiveError(
            f"{collective} of {dtype.name} cannot accumulate in {jnp.dtype(asked).name}, which does not hold every "
            f"{dtype.name}; use {jnp.promote_types(dtype, asked).name}"
        )
    return jnp.dtype(asked).name
