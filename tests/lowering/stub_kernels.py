"""Kernels that need no compiler: artifacts written by hand, whose source is C for the stub of the NPU's runtime."""

import contextlib
import dataclasses
import pathlib

import jax.numpy as jnp
import pytest

from glass_jax.hw.ir import program as ir
from glass_jax.lowering import artifact, ascend, cache

STUB = pathlib.Path(__file__).parent / "runtime_stub"
CHIP = "950DT"


@dataclasses.dataclass(frozen=True)
class StubKernel:
    """``axpy`` or ``split`` of ``runtime_stub``, for ``blocks`` blocks of 8 elements."""

    name: str
    blocks: int
    workspace_bytes: int = 0

    @property
    def outputs(self) -> tuple[int, ...]:
        return {"axpy": (1,), "split": (0, 2)}[self.name]


def compile_stub(kernel: StubKernel, chip: str = CHIP) -> artifact.Artifact:
    """In place of ``cache.compile``. Results stand among the operands; the entry orders its parameters by name."""
    n = 8 * kernel.blocks
    arguments = {
        "axpy": (("x", n, False), ("out", n, True), ("alpha", 1, False), ("y", n, False)),
        "split": (("low", n, True), ("pairs", 2 * n, False), ("high", n, True)),
    }[kernel.name]
    names = [name for name, _, _ in arguments] + ["workspace"] * bool(kernel.workspace_bytes)
    return artifact.Artifact(
        key=f"{kernel} {chip}",
        program=ir.Program(kernel.name, tuple(names), {}, ir.Var("block"), kernel.blocks, ()),
        source=(STUB / f"{kernel.name}.c").read_text(),
        entry=f"{kernel.name}_kernel",
        arguments=tuple(artifact.Argument(name, (size,), "float32", output) for name, size, output in arguments),
        launch_order=tuple(sorted(range(len(names)), key=names.__getitem__)),
        block_dim=kernel.blocks,
        dynamic_ub_bytes=4096 * (kernel.name == "axpy"),
        workspace_bytes=kernel.workspace_bytes,
        arch="dav-3510",
        memory=(),
        versions={"tilelang": "0"},
    )


@contextlib.contextmanager
def installed():
    """The stub kernels take the place of the compiler."""
    made = {compile_stub(StubKernel(name, 1)).sha: compile_stub(StubKernel(name, 1)) for name in ("axpy", "split")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "compile", compile_stub)
        patch.setattr(cache, "find", made.__getitem__)
        yield


def axpy(alpha, x, y, *, workspace_bytes=0):
    """``alpha * x + y`` as the custom call."""
    kernel = StubKernel("axpy", len(x) // 8, workspace_bytes)
    (out,) = ascend.call(kernel, x, jnp.reshape(alpha, 1), y, chip=CHIP)
    return out


def split(pairs):
    """Even and odd elements of ``pairs`` as the custom call."""
    return ascend.call(StubKernel("split", len(pairs) // 16), pairs, chip=CHIP)
