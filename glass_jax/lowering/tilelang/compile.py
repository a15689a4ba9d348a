"""A kernel compiled by TileLang: Ascend C, how to launch it, its memory map, and its Program."""

from __future__ import annotations

import re
from typing import Any

import tilelang
import tvm
from tvm import tirx

from glass_jax import errors
from glass_jax.hw import program as ir
from glass_jax.lowering import artifact
from glass_jax.lowering.tilelang import memory
from glass_jax.lowering.tilelang.decode import Decoder

_SIGNATURE = re.compile(r"__global__[^{;]*?\b(?P<entry>\w+)\((?P<params>[^)]*)\)\s*\{")


def compile(  # noqa: A001
    kernel: artifact.Kernel, chip: str, key: str, arch: str, versions: dict[str, str]
) -> artifact.Artifact:
    """``kernel`` for ``chip``, by TileLang, uncached.

    Args:
      kernel: what to compile.
      chip: name of the chip it is built for.
      key: the artifact's cache key.
      arch: architecture of the chip.
      versions: versions of the compilers, to be recorded.

    Raises:
      UnsupportedError: the kernel uses something that has no form in a Program, or that a launch cannot pass.
      GlassError: TileLang refused the kernel; the message says why, and where the kernel is.
    """
    func = kernel.build(chip).with_attr("global_symbol", kernel.name)
    decoder = Decoder(func)
    program = decoder.program()
    compiled, kept = _lower(func, kernel, decoder.where)
    device = memory.device_function(compiled.device_mod)
    return artifact.Artifact(
        key=key,
        program=program,
        source=compiled.kernel_source,
        entry=str(device.attrs["global_symbol"]),
        arguments=_arguments(program, kernel.outputs),
        launch_order=_launch_order(compiled.kernel_source, program),
        block_dim=int(device.attrs["thread_extent"]["blockIdx.x"]),
        dynamic_ub_bytes=int(device.attrs.get("dyn_shared_memory_buf", 0)),
        workspace_bytes=0,  # scratch in GM would be a buffer that the kernel allocates there, which is not decoded
        arch=arch,
        memory=memory.allocations(kept, decoder.storages),
        versions=versions,
    )


def _lower(func: tirx.PrimFunc, kernel: artifact.Kernel, where: str) -> tuple[Any, dict[str, Any]]:
    """What TileLang makes of ``func``, and the modules between its passes that :mod:`memory` reads."""
    target = tvm.target.Target({"kind": "ascend"})
    instrument, kept = memory.watch()
    try:
        with target, tvm.transform.PassContext(config=dict(kernel.pass_configs), instruments=[instrument]):
            return tilelang.lower(func, target=target), kept
    except Exception as error:
        raise errors.GlassError(f"{where}: TileLang refused kernel {kernel.name}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The message of a TileLang error without the trace that it carries."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _arguments(program: ir.Program, outputs: tuple[int, ...]) -> tuple[artifact.Argument, ...]:
    arguments = []
    for position, name in enumerate(program.params):
        buffer = program.buffers[name]
        if not all(isinstance(size, int) for size in buffer.shape):
            raise errors.UnsupportedError(
                f"kernel {program.name}: the shape of {name} is dynamic; build the kernel for one shape"
            )
        arguments.append(artifact.Argument(name, buffer.shape, buffer.dtype, position in outputs))
    if not outputs or not all(0 <= position < len(arguments) for position in outputs):
        raise errors.HardwareConstraintError(
            f"kernel {program.name}: outputs {outputs} are not positions among its {len(arguments)} parameters"
        )
    return tuple(arguments)


def _launch_order(source: str, program: ir.Program) -> tuple[int, ...]:
    """Positions of the generated function's parameters, which are sorted by name, among those of the kernel."""
    signature = _SIGNATURE.search(source)
    names = [param.split()[-1].lstrip("*") for param in signature["params"].split(",") if param.strip()]
    if unknown := set(names) - set(program.params):
        raise errors.UnsupportedError(
            f"kernel {program.name}: it takes {', '.join(sorted(unknown))}, which are not tensors"
        )
    return tuple(program.params.index(name) for name in names)
