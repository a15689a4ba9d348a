"""The ``host`` implementation: the Ascend C generated for a kernel, compiled for this machine and called by XLA."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax.hw import chips, verifier
from glass_jax.lowering import artifact, cache
from glass_jax.lowering.host import build, launch

TARGET = "glass_host_call"


def call(
    kernel: artifact.Kernel, *operands: jax.Array, chip: str, inputs: Sequence[int] | None = None
) -> tuple[jax.Array, ...]:
    """The results of ``kernel`` on ``operands``, in the order of ``kernel.outputs``; traceable.

    Args:
      kernel: the kernel.
      *operands: its operands.
      chip: the chip that it is compiled for.
      inputs: positions of the operands among its parameters; by default of those that are no results.

    Raises:
      MissingDependencyError: there is no C++ compiler, or TileLang is not installed.
      OutOfOnChipMemoryError: the kernel's buffers do not fit ``chip``; the message shows the memory map.
      UnsupportedError: the code makes a call that the runtime does not have, or the launch needs more than arrays.
    """
    made = cache.compile(kernel, chip)
    verifier.check_memory(made.program, chips.get(chip), made.memory)
    launch.check_launchable(made)
    if inputs is None:
        inputs = [i for i, argument in enumerate(made.arguments) if not argument.output]
    outputs = [i for i, argument in enumerate(made.arguments) if argument.output]
    types = [jax.ShapeDtypeStruct(made.arguments[i].shape, jnp.dtype(made.arguments[i].dtype)) for i in outputs]
    if _recording.launches is not None:
        results = jax.pure_callback(_recording.recorder(made, tuple(inputs)), types, *operands)
    else:
        slots = {position: number for number, position in enumerate(inputs)}
        slots |= {
            position: len(inputs) + number for number, position in enumerate(outputs)
        }  # of one that is both, last
        _register()
        results = jax.ffi.ffi_call(TARGET, types)(
            *operands,
            library=str(build.kernel_library(made.source, made.entry)),
            kernel=made.entry,
            order=np.array([slots[position] for position in made.launch_order], np.int64),
            updates=np.array([inputs.index(i) if i in inputs else -1 for i in outputs], np.int64),
            block_dim=np.int64(made.block_dim),
            dynamic_ub_bytes=np.int64(made.dynamic_ub_bytes),
        )
    return tuple(results[outputs.index(position)] for position in kernel.outputs)


@functools.cache
def _register() -> None:
    """Makes the handler known to XLA, once a process."""
    library = ctypes.CDLL(str(build.handler_library()))
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.GlassHostCall), platform="cpu")


# --- launches that are looked at -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Launch:
    """A kernel and the operands that it was launched with.

    Attributes:
      made: the kernel.
      inputs: positions of the operands among its parameters.
      operands: the operands.
    """

    made: artifact.Artifact
    inputs: tuple[int, ...]
    operands: list[np.ndarray]


class _Recording(threading.local):
    """The launches of functions that this thread lowers, None while nobody asks."""

    launches: list[Launch] | None = None

    def recorder(self, made: artifact.Artifact, inputs: tuple[int, ...]) -> Any:
        launches = self.launches

        def launched(*operands: Any) -> list[np.ndarray]:
            each = Launch(made, inputs, [np.asarray(operand) for operand in operands])
            launches.append(each)
            return launch.run(made, each.operands, inputs, checks=0)[0]

        return launched


_recording = _Recording()


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """The launches of every function that is traced, lowered and run inside, as they happen."""
    _recording.launches = launches = []
    try:
        yield launches
    finally:
        _recording.launches = None
