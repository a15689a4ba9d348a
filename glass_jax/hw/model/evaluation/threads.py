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
      shared: whether statements are inside a parallel loop or already run in lanes, so that nothing is left to sort.
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
