"""A compiled kernel on NumPy arrays, under any order of its pipes, with what the runtime finds wrong in it."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from glass_jax import errors
from glass_jax.lowering import artifact
from glass_jax.lowering.host import build

_ABI = 1  # GLASS_HOST_ABI
RACES, BOUNDS, UNWRITTEN = 1, 2, 4  # what a launch looks for, see runtime/glass_host.h
EVERYTHING = RACES | BOUNDS | UNWRITTEN


@dataclasses.dataclass(frozen=True)
class Policy:
    """An order in which pipes that could go do go. A kernel without races gives the same bits under all."""

    name: str
    number: int
    seed: int = 0


POLICIES = (
    Policy("by turns", 0),
    *(Policy(f"at random (seed {seed})", 1, seed) for seed in range(3)),
    Policy("loads first", 2),
    Policy("loads last", 3),
)


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("result", ctypes.c_uint32),
    )


_Report = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)


class _Launch(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("num_buffers", ctypes.c_uint32),
        ("block_dim", ctypes.c_uint32),
        ("dynamic_ub_bytes", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("checks", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("report", _Report),
        ("context", ctypes.c_void_p),
    )


def run(
    made: artifact.Artifact,
    operands: Sequence[np.ndarray],
    inputs: Sequence[int] | None = None,
    policy: Policy = POLICIES[0],
    checks: int = EVERYTHING,
) -> tuple[list[np.ndarray], list[dict]]:
    """Executes the generated code of a kernel.

    Args:
      made: the kernel.
      operands: arrays of the parameters in ``inputs``, with the kernel's shapes and dtypes.
      inputs: positions of the operands among the parameters; by default of those that are no results. A result among
        them starts as its operand, any other as bytes 0xFF.
      policy: the order of the pipes.
      checks: what to look for.

    Returns:
      The results in the order of the parameters, and the findings: dictionaries with the keys of ``glass_host.h``. If
      the kernel did not run to its end one of them says why.
    """
    check_launchable(made)
    if inputs is None:
        inputs = [i for i, argument in enumerate(made.arguments) if not argument.output]
    given = dict(zip(inputs, operands, strict=True))
    arrays = [_array(argument, given.get(i)) for i, argument in enumerate(made.arguments)]
    parameters = []
    for position in made.launch_order:
        argument = made.arguments[position]
        parameters.append((argument.name, arrays[position], argument.output and position not in given))
    library = build.kernel_library(made.source, made.entry)
    _, findings = launch(library, parameters, made.block_dim, made.dynamic_ub_bytes, policy=policy, checks=checks)
    return [array for array, argument in zip(arrays, made.arguments, strict=True) if argument.output], findings


def launch(
    library: pathlib.Path,
    parameters: Sequence[tuple[str, np.ndarray, bool]],
    blocks: int,
    dynamic_ub_bytes: int = 0,
    *,
    policy: Policy = POLICIES[0],
    checks: int = EVERYTHING,
    threads: int | None = None,
) -> tuple[bool, list[dict]]:
    """Launches a kernel's library on arrays, in place.

    Args:
      library: what ``build.kernel_library`` made.
      parameters: of the generated function, in its order: name, array, and whether no byte of it counts as written.
      blocks: number of blocks.
      dynamic_ub_bytes: unified buffer to reserve.
      policy: the order of the pipes.
      checks: what to look for.
      threads: blocks that run at a time; default: the machine's cores. Nothing depends on it.

    Returns:
      Whether the kernel ran to its end, and the findings.
    """
    buffers = (_Buffer * len(parameters))(
        *(_Buffer(name.encode(), array.ctypes.data, array.nbytes, int(fresh)) for name, array, fresh in parameters)
    )
    findings: list[dict] = []
    request = _Launch(
        abi=_ABI,
        buffers=buffers,
        num_buffers=len(buffers),
        block_dim=blocks,
        dynamic_ub_bytes=dynamic_ub_bytes,
        policy=policy.number,
        seed=policy.seed,
        checks=checks,
        threads=threads or os.cpu_count() or 1,
        report=_Report(lambda _, finding: findings.append(json.loads(finding))),
    )
    status = ctypes.CDLL(str(library)).glass_host_launch(ctypes.byref(request))
    return status == 0, findings


def check_launchable(made: artifact.Artifact) -> None:
    """Raises UnsupportedError for a kernel whose launch needs more than arrays."""
    if made.launch_order is None or made.block_dim is None or made.workspace_bytes:
        raise errors.UnsupportedError(
            f'kernel {made.entry} takes scalars, sizes or a workspace, which implementation="host" does not pass yet: '
            "build it for one shape and pass a scalar as a tensor of one element; implementation='npu_model' runs it"
        )


def _array(argument: artifact.Argument, operand: np.ndarray | None) -> np.ndarray:
    dtype = jnp.dtype(argument.dtype)
    if operand is None:
        return np.frombuffer(bytearray(b"\xff" * (dtype.itemsize * int(np.prod(argument.shape)))), dtype).reshape(
            argument.shape
        )
    array = np.array(operand, order="C")  # a copy: the kernel may write it
    if array.shape != argument.shape or array.dtype != dtype:
        raise errors.HardwareConstraintError(
            f"parameter {argument.name} is {dtype.name}{list(argument.shape)}, the array is "
            f"{array.dtype.name}{list(array.shape)}: pass an array of that shape and dtype"
        )
    return array
