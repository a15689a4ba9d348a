"""The ``ascend`` implementation: a kernel's generated Ascend C, launched through one custom call.

Importing this module makes the platform ``ascend`` known to JAX, so that functions can be lowered and exported for it
on a machine that has no NPU. Nothing is started: there are no ``ascend`` devices until a PJRT plugin brings them.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend

from glass_jax import errors
from glass_jax.lowering import artifact, cache

PLATFORM = "ascend"
TARGET = "glass_tilelang_call"
ABI = 1  # version of the custom call's attributes, checked by runtime/glass_ffi_handler.cc


def call(kernel: artifact.Kernel, *operands: jax.Array, chip: str) -> tuple[jax.Array, ...]:
    """The results of ``kernel`` on ``operands`` as the custom call ``glass_tilelang_call``; traceable.

    For use inside a lowering rule of the platform ``ascend``: the call can be lowered anywhere and runs only where the
    FFI handler of ``lowering/runtime`` is registered. Buffers are row-major; results are in the order of the kernel's
    signature. The attributes of the call:

    ====================  ========================================================================================
    ``abi``               version of this list, 1
    ``kernel``            sha256 of the generated source, the file name of the kernel in a bundle
    ``entry``             name of the kernel function
    ``arch``              architecture that the source is generated for, for example ``"dav-3510"``
    ``block_dim``         number of blocks to launch
    ``dynamic_ub_bytes``  unified buffer to reserve at launch
    ``workspace_bytes``   GM scratch to allocate for the launch
    ``launch_order``      the buffers in the order in which the kernel function takes them, numbered operands first,
                          then results, then the workspace
    ====================  ========================================================================================

    Args:
      kernel: what to launch.
      *operands: the kernel's inputs, in the order of its signature, with the shapes and dtypes of its signature.
      chip: the NPU to generate code for.

    Returns:
      The kernel's outputs, in the order of ``kernel.outputs``.

    Raises:
      HardwareConstraintError: the operands are not those of the kernel's signature.
    """
    made = cache.compile(kernel, chip)
    if made.launch_order is None:
        raise errors.UnsupportedError(
            f"kernel {made.entry} takes scalars or sizes by value, which the custom call does not pass: build it for "
            "one shape and pass a scalar as a tensor of one element; implementation='npu_model' runs it as it is"
        )
    positions = range(len(made.arguments))
    inputs, outputs = ([i for i in positions if made.arguments[i].output == wanted] for wanted in (False, True))
    _check_operands(made, [made.arguments[i] for i in inputs], operands)
    workspace = [len(made.arguments)] if made.workspace_bytes else []
    buffers = inputs + outputs + workspace
    results = jax.ffi.ffi_call(
        TARGET, [jax.ShapeDtypeStruct(made.arguments[i].shape, jnp.dtype(made.arguments[i].dtype)) for i in outputs]
    )(
        *operands,
        abi=np.int64(ABI),
        kernel=made.sha,
        entry=made.entry,
        arch=made.arch,
        block_dim=np.int64(made.block_dim),
        dynamic_ub_bytes=np.int64(made.dynamic_ub_bytes),
        workspace_bytes=np.int64(made.workspace_bytes),
        launch_order=np.array([buffers.index(position) for position in made.launch_order], np.int64),
    )
    return tuple(results[outputs.index(position)] for position in kernel.outputs)


def _check_operands(
    made: artifact.Artifact, expected: Sequence[artifact.Argument], operands: Sequence[jax.Array]
) -> None:
    if len(operands) != len(expected):
        names = ", ".join(argument.name for argument in expected)
        raise errors.HardwareConstraintError(
            f"kernel {made.entry} takes {len(expected)} operands ({names}), got {len(operands)}"
        )
    for argument, operand in zip(expected, operands, strict=True):
        if operand.shape != argument.shape or operand.dtype != jnp.dtype(argument.dtype):
            raise errors.HardwareConstraintError(
                f"kernel {made.entry} is compiled for {argument.name} = {argument.dtype}{list(argument.shape)}, got "
                f"{operand.dtype}{list(operand.shape)}: build the kernel for the shape and dtype it is called with"
            )


def _no_devices() -> None:
    raise errors.UnsupportedError(
        "no PJRT plugin for Ascend is installed, so this process has no ascend devices; glass_jax makes the platform "
        "known so that functions can be lowered for it. Run the model on the CPU (implementation='npu_model' executes "
        "the Ascend kernels there), or write a bundle for the NPU with glass.export(fn, *args, path=...)"
    )


def _register_platform() -> None:
    """Makes ``ascend`` a platform that JAX lowers for, unless a plugin already runs it."""
    try:
        backend.register_backend_factory(PLATFORM, _no_devices, priority=-1000, fail_quietly=True)
    except RuntimeError:  # JAX refuses to replace a backend that is initialized: a real one, which is better than ours
        pass


_register_platform()
