"""A kernel compiled by TileLang: Ascend C, how to launch it, its memory map, and its Program."""

from __future__ import annotations

import re
from typing import Any

import tilelang
import tvm
from tvm import tirx

from glass_jax import errors
from glass_jax.hw.ir import program as ir
from glass_jax.lowering import artifact
from glass_jax.lowering.tilelang import flags, memory
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
    decoder = Decoder(func, dict(kernel.pass_configs))
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
        block_dim=program.blocks if isinstance(program.blocks, int) else None,
        dynamic_ub_bytes=int(device.attrs.get("dyn_shared_memory_buf", 0)),
        workspace_bytes=0,  # scratch in GM would be a buffer that the kernel allocates there, which is not decoded
        arch=arch,
        memory=memory.allocations(kept, decoder.storages),
        versions=versions,
        flags=flags.skeleton(device),
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
    places = [number for number, line in enumerate(lines) if line.startswith("-->")]
    if places and places[0]:  # the message, its place, and the line of source
        place = lines[places[0]].removeprefix("-->").strip()
        return f"{'; '.join(lines[max(places[0] - 3, 0) : places[0]])} ({place})"
    return lines[-1] if lines else type(error).__name__


def _arguments(program: ir.Program, outputs: tuple[int, ...]) -> tuple[artifact.Argument, ...]:
    arguments = []
    for position, name in enumerate(program.params):
        buffer = program.buffers[name]
        shape = tuple(size if isinstance(size, int) else None for size in buffer.shape)
        arguments.append(artifact.Argument(name, shape, buffer.dtype, position in outputs))
    if not outputs or not all(0 <= position < len(arguments) for position in outputs):
        raise errors.HardwareConstraintError(
            f"kernel {program.name}: outputs {outputs} are not positions among its {len(arguments)} parameters"
        )
    return tuple(arguments)


def _launch_order(source: str, program: ir.Program) -> tuple[int, ...] | None:
    """Positions of the generated function's parameters, which are sorted by name, among those of the kernel."""
    signature = _SIGNATURE.search(source)
    names = [param.split()[-1].lstrip("*") for param in signature["params"].split(",") if param.strip()]
    scalars = [name for name in program.params if not program.buffers[name].shape]
    if scalars or set(names) - set(program.params):
        return None
    return tuple(program.params.index(name) for name in names)
