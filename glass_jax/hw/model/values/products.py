"""Products of whole arrays, which K loops take their tiles from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

Axes = tuple[tuple[int, ...], tuple[int, ...]]  # of a and of b


@dataclasses.dataclass(frozen=True)
class Pairing:
    """How two whole arrays are multiplied; each field for a and for b.

    Attributes:
      contracted: the dimension that is summed over.
      batch: dimensions of a and of b that go together.
      free: the other dimensions.
    """

    contracted: tuple[int, int]
    batch: Axes
    free: Axes

    def of_product(self, a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
        """What the dimensions of the product have, given what those of a and b have.

        The product has the paired dimensions, then the free ones of a, then the free ones of b.
        """
        return (*(a[d] for d in (*self.batch[0], *self.free[0])), *(b[d] for d in self.free[1]))


@dataclasses.dataclass(frozen=True)
class WholeProduct:
    """The product of the whole arrays of which a K loop multiplies tiles."""

    value: jax.Array
    pairing: Pairing
