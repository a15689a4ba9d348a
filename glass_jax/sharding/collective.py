"""What a collective is: its ranks, its algorithm, its schedule, and which collective is its transpose."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from glass_jax.sharding import algorithms
from glass_jax.sharding.primitive import Over
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
    """All that is static about a collective of one array.

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
        dst = None if self.dst is None else tuple(sources(np.asarray(self.dst)).tolist())
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


def sources(dst: np.ndarray) -> np.ndarray:
    """The source of each rank, -1 where none, from the destination of each."""
    sources = np.full(len(dst), -1, dst.dtype)
    sources[dst[dst >= 0]] = np.flatnonzero(dst >= 0)
    return sources
