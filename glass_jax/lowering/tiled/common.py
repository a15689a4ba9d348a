"""What every operation needs to reach its kernel: an implementation to run it, and padding."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from glass_jax import config, errors
from glass_jax.lowering import artifact, ascend, npu_model


def _host(kernel: artifact.Kernel, *operands: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    from glass_jax.lowering.host import call  # with the first kernel that runs so

    return call.call(kernel, *operands, **options)


_RUNNERS = {"npu_model": npu_model.call, "host": _host, "ascend": ascend.call}


def run(
    kernel: artifact.Kernel, *operands: jax.Array, implementation: str, chip: str, **options: Any
) -> tuple[jax.Array, ...]:
    """The results of ``kernel`` by ``implementation``, one of ``config.KERNEL_IMPLEMENTATIONS``."""
    return _RUNNERS[implementation](kernel, *operands, chip=chip, **options)


def next_multiple(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def pad(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """``x`` with zeros appended up to ``shape``; ``x`` itself if it has that shape."""
    if x.shape == tuple(shape):
        return x
    return jnp.pad(x, [(0, want - have) for have, want in zip(x.shape, shape, strict=True)])


def fold(
    batch: Sequence[int], left: Sequence[jax.Array], right: Sequence[jax.Array], *, fold_rows: bool = True
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The operands of a product with one batch dimension, of the full size or 1.

    Args:
      batch: batch dimensions of the result, as many as those of every operand, which are equal or 1.
      left: the left operand ``[*batch, rows, k]``, and what else has its rows and batch dimensions.
      right: the right operand, and what else has columns of the result.
      fold_rows: whether a batch that ``right`` serves as a whole becomes more rows of ``left``.
    """
    if fold_rows and all(size == 1 for x in right for size in x.shape[: len(batch)]):
        return [x.reshape(1, -1, x.shape[-1]) for x in left], [x.reshape(1, *x.shape[len(batch) :]) for x in right]

    def flat(x: jax.Array) -> jax.Array:
        tail = x.shape[len(batch) :]
        if all(size == 1 for size in x.shape[: len(batch)]):
            return x.reshape(1, *tail)
        # Only operands batched over some but not all of several batch dimensions are copied here.
        return jnp.broadcast_to(x, (*batch, *tail)).reshape(-1, *tail)

    return [flat(x) for x in left], [flat(x) for x in right]


def say_padding(name: str, sizes: dict[str, int], padded: dict[str, int]) -> None:
    """With ``debug`` on, says what of the operation ``name`` is padded for the hardware."""
    if config.current().debug:
        changes = [f"{dim.upper()} {size} -> {padded[dim]}" for dim, size in sizes.items() if padded[dim] != size]
        print(f"glass: {name} {sizes}: padding {', '.join(changes) or 'none'}", file=sys.stderr, flush=True)


def check_aligned(
    name: str, sizes: Mapping[str, int], multiples: Mapping[str, int], why: str = "rows of 32 bytes"
) -> None:
    """Raises HardwareConstraintError unless every one of ``sizes`` is a multiple that the hardware takes unpadded.

    Args:
      name: the operation, for the message.
      sizes: size of each dimension, by its name.
      multiples: what the size must be a multiple of, by the same names; others are free.
      why: the reason, for the message.
    """
    for dim, multiple in multiples.items():
        if sizes[dim] % multiple:
            raise errors.HardwareConstraintError(
                f"{name}: {dim.upper()} is {sizes[dim]}, not a multiple of {multiple} ({why}); the next "
                f'valid size is {next_multiple(sizes[dim], multiple)}. Use alignment="pad" to have it padded'
            )
