"""The threads of a SIMT region."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from glass_jax.hw.ir.varying import Varying


@dataclasses.dataclass
class Threads:
    """The threads of a SIMT region.

    Attributes:
      extents: number of threads by the variable of each dimension, the fastest first; dimensions of 1 left out.
      varying: what differs between threads.
      shared: whether statements run in lanes already, or in a parallel loop, whose iterations the threads share out;
        they are then run as they are.
    """

    extents: dict[str, int]
    varying: Varying
    shared: bool = False

    @contextlib.contextmanager
    def sharing(self) -> Iterator[None]:
        """Statements run inside are ``shared``."""
        self.shared = True
        try:
            yield
        finally:
            self.shared = False
