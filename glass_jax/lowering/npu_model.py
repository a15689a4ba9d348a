"""The ``npu_model`` implementation: a kernel's program, executed by the model of the NPU as ordinary JAX."""

from __future__ import annotations

import jax

from glass_jax.hw import executor
from glass_jax.lowering import artifact


def call(kernel: artifact.Kernel, *operands: jax.Array, chip: str) -> tuple[jax.Array, ...]:
    """The results of ``kernel`` on ``operands``, in the order of its signature; traceable."""
    return executor.run(artifact.compile(kernel, chip).program, operands, kernel.outputs)
