"""A kernel before and after it is compiled, as plain data. ``cache`` finds the one for the other."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from glass_jax import errors
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir import serialization
from glass_jax.hw.ir.program import Allocation


class Kernel(Protocol):
    """What identifies a kernel before it is compiled. Hashable, so that it can be a static parameter of a primitive.

    A kernel is independent of the chip; what it makes of a chip (tiles, number of blocks) is decided when it is built.
    """

    @property
    def name(self) -> str:
        """The kernel's name, a C identifier."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """Positions of the results among the kernel's parameters."""

    @property
    def pass_configs(self) -> tuple[tuple[str, Any], ...]:
        """Options of TileLang's passes that it is compiled with, by name."""

    def fingerprint(self, chip: str) -> str:
        """Text that changes whenever the generated code might: the kernel's source, its parameters and its tiling."""

    def describe(self, chip: str) -> str:
        """How the work is divided on ``chip``, in one line, for people."""

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``. Imports TileLang."""


def fingerprint(kernel: Kernel, decided: object, *files: str) -> str:
    """A :meth:`Kernel.fingerprint`: the text of ``files``, the kernel, and what was ``decided`` for a chip."""
    return "\n".join([*(pathlib.Path(file).read_text() for file in files), repr(kernel), repr(decided)])


def check_choice(kernel: str, field: str, value: str | None, allowed: Sequence[str | None]) -> None:
    """Raises HardwareConstraintError unless the ``value`` of a ``field`` of the kernel is ``allowed``."""
    if value not in allowed:
        raise errors.HardwareConstraintError(f"{kernel} kernel: {field}={value!r}; use one of {allowed}")


def check_extents(kernel: str, extents: Mapping[str, int], multiples: Mapping[str, int]) -> None:
    """Raises HardwareConstraintError unless the kernel's ``extents`` are positive, and ``multiples`` of these."""
    for field, size in extents.items():
        multiple = multiples.get(field, 1)
        if size < 1 or size % multiple:
            raise errors.HardwareConstraintError(
                f"{kernel} kernel: {field}={size} must be a positive multiple of {multiple}; pad with zeros"
            )


@dataclasses.dataclass(frozen=True)
class Argument:
    """A parameter of a kernel.

    Attributes:
      name: its name in the kernel.
      shape: its shape, None for a dimension that a call decides; empty for a scalar.
      dtype: its element type, a NumPy or ml_dtypes name.
      output: whether the kernel writes it (a result) or reads it (an operand).
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    output: bool


@dataclasses.dataclass(frozen=True)
class Artifact:
    """What TileLang makes of a kernel for one chip.

    Attributes:
      key: cache key, the sha256 of everything the artifact depends on.
      program: the kernel for the NPU model.
      source: the generated Ascend C.
      entry: name of the kernel function in ``source``.
      arguments: the kernel's parameters, in the order of its signature.
      launch_order: positions in ``arguments``, in the order in which the generated function takes them; None if it also
        takes scalars or sizes, by value, which no launch passes.
      block_dim: number of blocks to launch, None where a call decides.
      dynamic_ub_bytes: unified buffer to reserve at launch, in bytes.
      workspace_bytes: GM scratch the kernel needs, in bytes.
      arch: the target architecture, for example ``"dav-3510"``.
      memory: the on-chip memory map.
      versions: versions of the compilers that made it.
      flags: the synchronization in the generated code, as a program without the work; None if it is not known.
    """

    key: str
    program: ir.Program
    source: str
    entry: str
    arguments: tuple[Argument, ...]
    launch_order: tuple[int, ...] | None
    block_dim: int | None
    dynamic_ub_bytes: int
    workspace_bytes: int
    arch: str
    memory: tuple[Allocation, ...]
    versions: dict[str, str]
    flags: ir.Program | None = None

    @functools.cached_property
    def sha(self) -> str:
        """sha256 of the source: the kernel's name in custom calls and bundles."""
        return hashlib.sha256(self.source.encode()).hexdigest()


def to_json(artifact: Artifact) -> str:
    """``artifact`` as JSON text."""
    fields = {field.name: getattr(artifact, field.name) for field in dataclasses.fields(artifact)}
    fields["program"] = json.loads(serialization.to_json(artifact.program))
    fields["flags"] = None if artifact.flags is None else json.loads(serialization.to_json(artifact.flags))
    fields["arguments"] = [dataclasses.asdict(argument) for argument in artifact.arguments]
    fields["memory"] = [dataclasses.asdict(allocation) for allocation in artifact.memory]
    return json.dumps(fields)


def from_json(text: str) -> Artifact:
    """The artifact that :func:`to_json` wrote.

    Raises:
      ValueError, KeyError, TypeError, AttributeError: ``text`` is something else.
    """
    fields = json.loads(text)
    fields["program"] = serialization.from_json(json.dumps(fields["program"]))
    flags = fields["flags"]
    fields["flags"] = None if flags is None else serialization.from_json(json.dumps(flags))
    fields["arguments"] = tuple(Argument(**item | {"shape": tuple(item["shape"])}) for item in fields["arguments"])
    fields["memory"] = tuple(Allocation(**item | {"space": ir.Space(item["space"])}) for item in fields["memory"])
    order = fields["launch_order"]
    fields["launch_order"] = None if order is None else tuple(order)
    return Artifact(**fields)
