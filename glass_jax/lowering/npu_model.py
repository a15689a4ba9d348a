"""The ``npu_model`` implementation: a kernel's program, executed by the model of the NPU as ordinary JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from glass_jax.lowering import artifact, cache


def call(
    kernel: artifact.Kernel, *operands: jax.Array, chip: str, inputs: Sequence[int] | None = None
) -> tuple[jax.Array, ...]:
    """The results of ``kernel`` on ``operands``, in the order of ``kernel.outputs``; traceable.

    Args:
      kernel: the kernel.
      *operands: its operands.
      chip: the chip it is compiled for.
      inputs: positions of the operands among its parameters; by default of those that are no results.

    Raises:
      OutOfOnChipMemoryError: the kernel's buffers do not fit ``chip``; the message shows the memory map.
      UnsupportedError: the kernel has a statement that the model does not run.
    """
    # Loaded with the first kernel: most programs import the library and never run the model.
    from glass_jax.hw import chips, verifier
    from glass_jax.hw.model import executor

    made = cache.compile(kernel, chip)
    verifier.check_memory(made.program, chips.get(chip), made.memory)
    return executor.run(made.program, operands, kernel.outputs, inputs)
