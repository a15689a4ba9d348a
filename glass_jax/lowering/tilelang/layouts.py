"""Layouts that a kernel annotates its UB buffers with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from glass_jax.hw import memory

_BLOCK_BITS = 256  # of a data block


def is_compact_nz(layout: Any, dtype: str) -> bool:
    """Whether ``layout`` of elements ``dtype`` is compact NZ: columns of 32-byte blocks, each from the first row down.

    Compared where it puts the first, the last and some elements between.
    """
    shape = [int(size) for size in layout.get_input_shape()]
    packed = [int(size) for size in layout.get_output_shape()]
    block = _BLOCK_BITS // memory.bits(dtype)
    if len(shape) < 2 or shape[-1] % block or math.prod(shape) != math.prod(packed):
        return False
    *lead, rows, columns = shape
    samples = ({0, 1, size // 2, size - 1} & set(range(size)) for size in shape)
    for point in itertools.product(*samples):
        *outer, row, column = point
        place = _flat((*outer, column // block, row, column % block), (*lead, columns // block, rows, block))
        if _flat([int(index) for index in layout.map_forward_index(list(point))], packed) != place:
            return False
    return True


def _flat(indices: Sequence[int], shape: Sequence[int]) -> int:
    return sum(index * math.prod(shape[axis + 1 :]) for axis, index in enumerate(indices))
