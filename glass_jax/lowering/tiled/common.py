"""What every operation needs to reach its kernel: an implementation to run it, and padding."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from glass_jax import config, errors
from glass_jax.lowering import artifact, ascend, npu_model

_RUNNERS = {"npu_model": npu_model.call, "ascend": ascend.call}


def run(kernel: artifact.Kernel, *operands: jax.Array, implementation: str, chip: str) -> tuple[jax.Array, ...]:
    """The results of ``kernel`` by ``implementation``, ``"npu_model"`` or ``"ascend"``."""
    return _RUNNERS[implementation](kernel, *operands, chip=chip)


def next_multiple(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def pad(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """``x`` with zeros appended up to ``shape``; ``x`` itself if it has that shape."""
    if x.shape == tuple(shape):
        return x
    return jnp.pad(x, [(0, want - have) for have, want in zip(x.shape, shape, strict=True)])


def say_padding(name: str, sizes: dict[str, int], padded: dict[str, int]) -> None:
    """With ``debug`` on, says what of the operation ``name`` is padded for the hardware."""
    if config.current().debug:
        changes = [f"{dim.upper()} {size} -> {padded[dim]}" for dim, size in sizes.items() if padded[dim] != size]
        print(f"glass: {name} {sizes}: padding {', '.join(changes) or 'none'}", file=sys.stderr, flush=True)


def check_aligned(name: str, sizes: Mapping[str, int], multiples: Mapping[str, int]) -> None:
    """Raises HardwareConstraintError unless every one of ``sizes`` is a multiple that the hardware takes unpadded.

    Args:
      name: the operation, for the message.
      sizes: size of each dimension, by its name.
      multiples: what the size must be a multiple of, by the same names; others are free.
    """
    for dim, multiple in multiples.items():
        if sizes[dim] % multiple:
            raise errors.HardwareConstraintError(
                f"{name}: {dim.upper()} is {sizes[dim]}, not a multiple of {multiple} (rows of 32 bytes); the next "
                f'valid size is {next_multiple(sizes[dim], multiple)}. Use alignment="pad" to have it padded'
            )
