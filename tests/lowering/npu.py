"""Kernels of the tests, decoded and executed by the NPU model, with no compiler between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax.hw.ir import program as ir
from glass_jax.hw.model import executor
from glass_jax.lowering.tilelang.decode import decode

# The time of these tests is that of compiling many small programs.
_COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def run(
    kernel: Any, *args: Any, outputs: Sequence[int] = (-1,), inputs: Sequence[int] | None = None
) -> list[np.ndarray]:
    """The final contents of the parameters ``outputs`` of a PrimFunc or Program, from those of ``inputs``."""
    program = kernel if isinstance(kernel, ir.Program) else decode(kernel)
    count = len(program.params)
    outputs = [position % count for position in outputs]

    def execute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return executor.run(program, arrays, outputs, inputs)

    arrays = [jnp.asarray(arg) for arg in args]
    compiled = jax.jit(execute).lower(*arrays).compile(compiler_options=_COMPILER_OPTIONS)
    return [np.asarray(result) for result in compiled(*arrays)]


def update(kernel: Any, *args: Any) -> list[np.ndarray]:
    """The final contents of all parameters, from those at the start."""
    every = range(len(args))
    return run(kernel, *args, outputs=every, inputs=every)
