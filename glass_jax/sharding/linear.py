"""Collectives as linear maps: the program of one rank, and the transposed collective."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from glass_jax.sharding import algorithms, profiler
from glass_jax.sharding.execute import Ranks, execute
from glass_jax.sharding.primitive import Over, ranked
from glass_jax.sharding.schedule import Chunks, Phase, Schedule, Transfer, everywhere
from glass_jax.sharding.simulated import SimulatedMesh

TRANSPOSES = {
    "all_reduce": "all_reduce",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "send_recv": "send_recv",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of one array: the program of a rank, and all that is static about it.

    reduce_scatter and all_to_all take, and all_gather and all_to_all return, a first dimension of P blocks, one a rank.

    Attributes:
      name: a key of ``TRANSPOSES``. A reduce gives zeros on every rank but the root.
      algorithm: one of the collective's, or ``"xla"``.
      over: the ranks.
      accumulate: name of the dtype that sums are formed in.
      root: of a broadcast or reduce.
      dst: of a send_recv, the destination of each rank, -1 where none.
      levels: of ``"hierarchical"``.
      invariant: whether the result's type says that it is equal on all ranks.
      mesh: the simulated mesh that it runs on, if it does.
    """

    name: str
    algorithm: str
    over: Over
    accumulate: str
    root: int = 0
    dst: tuple[int, ...] | None = None
    levels: tuple[int, ...] | None = None
    invariant: bool = False
    mesh: SimulatedMesh | None = None

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a rank's result."""
        shapes = {"all_gather": (self.over.ranks, *x.shape), "reduce_scatter": x.shape[1:]}
        return jax.ShapeDtypeStruct(shapes.get(self.name, x.shape), x.dtype)

    def transposed(self) -> Collective:
        """The transposed linear map, as a collective whose result varies over the axes."""
        dst = None if self.dst is None else tuple(_sources(np.asarray(self.dst)).tolist())
        return dataclasses.replace(self, name=TRANSPOSES[self.name], dst=dst, invariant=False)

    def schedule(self) -> Schedule | None:
        """The schedule; None if it is JAX's own collective."""
        if self.name == "send_recv":
            whole = Chunks((everywhere(1, self.over.ranks),))
            phases = (Phase((Transfer(np.asarray(self.dst), whole, whole),)),)
            return Schedule("send_recv", self.algorithm, self.over.ranks, 1, phases, whole, whole)
        if self.algorithm == "xla":
            return None
        return algorithms.build(self.name, self.algorithm, self.over.ranks, root=self.root, levels=self.levels)

    def marked(self, x: jax.Array, *, simulated: tuple[str | None, ...]) -> tuple[jax.Array]:
        """The operand of all simulated ranks, by way of a mark for the profiler if there is one."""
        if profiler.is_active() and self.mesh is not None:
            return (profiler.marked_simulated(x, self, simulated),)
        return (x,)

    def run(self, x: jax.Array, *, ranks: Ranks) -> jax.Array:
        """A rank's result."""
        run = functools.partial(self._run, ranks=ranks)
        return profiler.marked(run, x, self) if profiler.is_active() and not ranks.simulated else run(x)

    def _run(self, x: jax.Array, *, ranks: Ranks) -> jax.Array:
        shape = self.result(x).shape
        if not x.size:
            return jnp.zeros_like(x, shape=shape)
        if self.name == "send_recv":
            dst = np.asarray(self.dst)
            receives = jnp.asarray(_sources(dst) >= 0)[ranks.index()]
            return jnp.where(receives, ranks.permute(x, dst), jnp.zeros_like(x))
        result = self._by_xla(x, ranks) if self.algorithm == "xla" else self._by_schedule(x, ranks)
        result = result.reshape(shape)
        return (
            result if self.name != "reduce" else jnp.where(ranks.index() == self.root, result, jnp.zeros_like(result))
        )

    def _by_schedule(self, x: jax.Array, ranks: Ranks) -> jax.Array:
        """Cuts ``x`` into chunks, padding the last of each block, and takes the padding out of the result."""
        schedule = self.schedule()
        blocks_in = self.over.ranks if self.name in ("reduce_scatter", "all_to_all") else 1
        blocks_out = self.over.ranks if self.name in ("all_gather", "all_to_all") else 1
        blocks = x.reshape(blocks_in, -1)
        size, chunks = blocks.shape[1], schedule.placed.count // blocks_in
        padding = chunks * (-(-size // chunks)) - size
        blocks = jnp.pad(blocks, ((0, 0), (0, padding))) if padding else blocks
        result = execute(
            schedule, blocks.reshape(schedule.placed.count, -1), ranks, accumulate=jnp.dtype(self.accumulate)
        )
        return result.reshape(blocks_out, -1)[:, :size]

    def _by_xla(self, x: jax.Array, ranks: Ranks) -> jax.Array:
        """JAX's own collective."""

        def total(x: jax.Array) -> jax.Array:
            return lax.psum(x.astype(self.accumulate), ranks.axis_name).astype(x.dtype)

        match self.name:
            case "reduce_scatter":
                x = x if ranks.numbers is None else x[np.argsort(ranks.numbers)]
                return lax.psum_scatter(x.astype(self.accumulate), ranks.axis_name).astype(x.dtype)
            case "all_gather":
                return ranks.all_gather(x)
            case "all_to_all":
                return ranks.all_to_all(x)
            case "broadcast":
                return total(jnp.where(ranks.index() == self.root, x, jnp.zeros_like(x)))  # loses the sign of a zero
        return total(x)


def _sources(dst: np.ndarray) -> np.ndarray:
    """The source of each rank, -1 where none, from the destination of each."""
    sources = np.full(len(dst), -1, dst.dtype)
    sources[dst[dst >= 0]] = np.flatnonzero(dst >= 0)
    return sources


collective_p = ranked("glass_collective")


def _transpose(ct, x, *, program: Collective, simulated: tuple[str | None, ...]):
    if isinstance(ct, ad.Zero):
        return (ad.Zero(x.aval),)
    if not program.invariant:
        return (collective_p.bind(ct, program=program.transposed(), simulated=simulated),)
    axes = program.over.mesh_axes
    ct = lax.pcast(ct, axes, to="varying")  # equal everywhere, so there is nothing to send
    if program.name == "broadcast":
        ct = jnp.where(program.over.devices().index() == program.root, ct, jnp.zeros_like(ct))
    return (ct,)


ad.deflinear2(collective_p, _transpose)
