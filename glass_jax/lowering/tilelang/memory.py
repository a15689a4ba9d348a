"""Where the compiler put each on-chip buffer: read by watching its passes.

TileLang merges the buffers of a memory into one allocation and keeps no record of what went where, but the pass that
merges changes nothing else: the same accesses stand in the same order before and after it, and an access that moved by
so many bytes tells the address of its buffer. The number of versions is what the scheduler wrote down as it chose them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tilelang  # noqa: F401 - brings tvm, which is not importable before it
from tvm import arith, tirx
from tvm.ir.instrument import PassInstrument, pass_instrument

from glass_jax import errors
from glass_jax.hw import memory
from glass_jax.hw.ir import program as ir
from glass_jax.lowering.tilelang.names import op_name, short

_SPACES = {
    "shared.dyn": ir.Space.UB,
    "shared.l1": ir.Space.L1,
    "shared.l0a": ir.Space.L0A,
    "shared.l0b": ir.Space.L0B,
    "shared.l0c": ir.Space.L0C,
}
_SCHEDULE, _MERGE = "tl.AutoSchedule", "tl.MergeUBAllocations"


def watch() -> tuple[PassInstrument, dict[str, Any]]:
    """An instrument for ``PassContext``, and the modules it will keep: ``scheduled``, ``apart`` and ``merged``."""
    kept: dict[str, Any] = {}

    @pass_instrument
    class Watch:
        def run_before_pass(self, module: Any, info: Any) -> None:
            if info.name == _MERGE:
                kept["apart"] = module

        def run_after_pass(self, module: Any, info: Any) -> None:
            if info.name == _SCHEDULE:
                kept["scheduled"] = module
            elif info.name == _MERGE:
                kept["merged"] = module

    return Watch(), kept


def allocations(kept: dict[str, Any], storages: Mapping[str, Sequence[str]]) -> tuple[ir.Allocation, ...]:
    """The on-chip memory map of a kernel.

    Products of L1 operands, which go through L0 in parts that the kernel does not name, count as ``gemm.a`` and
    ``gemm.b``.

    Args:
      kept: what :func:`watch` collected while the kernel was compiled.
      storages: the names that the kernel's Program has for the memory the compiler knows by one name, in the order of
        their allocation.
    """
    versions = _versions(kept["scheduled"]) if "scheduled" in kept else {}
    apart, merged = device_function(kept["apart"]), device_function(kept["merged"])
    offsets = _offsets(apart, merged)
    names = {name: iter(known) for name, known in storages.items()}
    result = []
    for buffer in _allocated(apart):
        name = buffer.data.name
        total, count = int(buffer.shape[0]) * memory.bits(str(buffer.dtype)) // 8, versions.get(name, 1)
        if total % count:
            raise errors.UnsupportedError(f"buffer {name}: {total} bytes in {count} versions is not understood")
        space = _SPACES[buffer.data.type_annotation.storage_scope]
        storage = next(names.get(name, iter(())), name)
        result.append(ir.Allocation(storage, space, offsets.get(buffer.data, 0), total // count, count))
    return (*result, *_implicit(apart))


def device_function(module: Any) -> tirx.PrimFunc:
    """The function of ``module`` that runs on the NPU."""
    functions = [f for f in module.functions.values() if f.attrs.get("tirx.is_global_func")]
    if len(functions) != 1:
        raise errors.UnsupportedError(
            f"a kernel with {len(functions)} launches is not compiled; make each a kernel of its own"
        )
    return functions[0]


def _versions(module: Any) -> dict[str, int]:
    """Versions of each storage, as the scheduler chose them."""
    found: dict[str, int] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.SBlock):
            found.update(
                {var.name: int(count) for var, count in node.annotations.get("tl.buffer_versions_map", {}).items()}
            )

    for function in module.functions.values():
        tirx.stmt_functor.post_order_visit(function.body, visit)
    return found


def _allocated(function: tirx.PrimFunc) -> list[tirx.Buffer]:
    found: list[tirx.Buffer] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.AllocBuffer) and node.buffer.data.type_annotation.storage_scope in _SPACES:
            found.append(node.buffer)

    tirx.stmt_functor.post_order_visit(function.body, visit)
    return found


def _accesses(function: tirx.PrimFunc) -> list[tuple[tirx.Var, Any, int]]:
    """Every access to memory in program order: the memory, the index of its first element, and the element's bytes."""
    found: list[tuple[tirx.Var, Any, int]] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.BufferLoad | tirx.BufferStore) and str(node.buffer.dtype) != "handle":
            found.append((node.buffer.data, node.indices[0], memory.bits(str(node.buffer.dtype)) // 8))
        elif isinstance(node, tirx.Call) and short(op_name(node)) == "tvm_access_ptr":
            found.append((node.args[1], node.args[2], memory.bits(str(node.args[0].dtype)) // 8))

    tirx.stmt_functor.post_order_visit(function.body, visit)
    return found


def _offsets(apart: tirx.PrimFunc, merged: tirx.PrimFunc) -> dict[tirx.Var, int]:
    """Address of each storage that was merged into another, in bytes."""
    analyzer = arith.Analyzer()

    def first(index: Any) -> Any:
        """The first element of a vector access, the element of another."""
        index = analyzer.simplify(index)
        return index.base if isinstance(index, tirx.Ramp) else index

    pairs = _accesses(apart), _accesses(merged)
    if len(pairs[0]) != len(pairs[1]):
        raise errors.GlassError("this version of TileLang merges buffers in a way that cannot be followed; use 0.1.15")
    offsets: dict[tirx.Var, int] = {}
    for (storage, before, size), (home, after, _) in zip(*pairs, strict=True):
        if not storage.same_as(home) and storage not in offsets:
            offsets[storage] = int(analyzer.simplify(first(after) - first(before))) * size
    return offsets


def _implicit(function: tirx.PrimFunc) -> list[ir.Allocation]:
    """The L0 memory that products of L1 operands take: two versions of each operand's part, from address 0."""
    largest: dict[ir.Space, int] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Call) and short(op_name(node)) == "ascend_gemm_l1":
            a, (m, _, n, depth) = node.args[1], (int(arg) for arg in node.args[3:7])
            size = memory.bits(str(a.args[0].dtype)) // 8
            for space, extent in ((ir.Space.L0A, m), (ir.Space.L0B, n)):
                largest[space] = max(largest.get(space, 0), extent * depth * size)

    tirx.stmt_functor.post_order_visit(function.body, visit)
    names = {ir.Space.L0A: "gemm.a", ir.Space.L0B: "gemm.b"}
    return [ir.Allocation(names[space], space, 0, size, 2) for space, size in largest.items()]
