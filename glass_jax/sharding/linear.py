"""Collectives as linear maps: the program of one rank, and the transposed collective."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from glass_jax.sharding import profiler
from glass_jax.sharding.collective import Collective, sources
from glass_jax.sharding.execute import Ranks, execute
from glass_jax.sharding.primitive import ranked


class CollectiveProgram(Collective):
    """A collective as a program that every rank runs."""

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
            receives = jnp.asarray(sources(dst) >= 0)[ranks.index()]
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


collective_p = ranked("glass_collective")


def _transpose(ct, x, *, program: CollectiveProgram, simulated: tuple[str | None, ...]):
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
