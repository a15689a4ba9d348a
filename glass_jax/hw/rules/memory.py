"""Rules about on-chip memory: what fits, where it may stand, how many buffers there may be."""

from __future__ import annotations

from glass_jax.hw import memory as mem
from glass_jax.hw.chips import C0_BYTES
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.rules.base import Findings, Rule, Subject

MAX_BUFFERS = 64

_SHRINK = {
    Space.L1: "Use a smaller block_k or fewer stages",
    Space.UB: "Use smaller tiles, or split the tile between the two vector units with T.dual_copy",
    Space.L0A: "Use fewer rows of A or a smaller K a product",
    Space.L0B: "Use fewer columns of B or a smaller K a product",
    Space.L0C: "Use a smaller block_m x block_n (4 bytes an element)",
}


def _overflow(subject: Subject) -> Findings:
    for space in mem.ON_CHIP:
        total = subject.chip.capacity(space)
        here = [a for a in subject.memory if a.space is space]
        end = mem.used(here, space)
        if total is None or end <= total:
            continue
        buffers = ", ".join(f"{a.buffer} {a.versions} x {mem.kib(a.nbytes)}" for a in here)
        loc = next((subject.program.buffers[a.buffer].loc for a in here if a.buffer in subject.program.buffers), None)
        message = (
            f"{space.name} needs {end} bytes and {subject.chip.name} has {total}: over by {end - total} ({buffers})"
        )
        yield loc, message, _SHRINK[space]


def _l0_of_gemm(subject: Subject) -> Findings:
    for gemm in subject.of(ir.Gemm):
        operands = (("A", gemm.a, Space.L0A, "rows"), ("B", gemm.b, Space.L0B, "columns"))
        for label, region, space, what in operands:
            extent = mem.static(region.extents[-2])
            total = subject.chip.capacity(space)
            if subject.buffer(region).space is not Space.L1 or extent is None:
                continue
            need = 2 * extent * C0_BYTES
            if need > total:
                message = (
                    f"a product from L1 keeps two slices of {label} in {space.name}: {extent} {what} of {C0_BYTES} "
                    f"bytes or more need 2 x {need // 2} bytes, {subject.chip.name} has {total}"
                )
                yield gemm.loc, message, f"Use at most {total // (2 * C0_BYTES)} {what}"


def _alignment(subject: Subject) -> Findings:
    products = {subject.buffer(gemm.c).storage for gemm in subject.of(ir.Gemm)}
    for a in subject.memory:
        align = mem.MAD_ALIGNMENT if a.space is Space.L0C and a.buffer in products else mem.ALIGNMENT.get(a.space, 1)
        buffer = subject.program.buffers.get(a.buffer)
        for version in range(a.versions):
            address = a.offset + version * a.nbytes
            if address % align:
                message = (
                    f"{a.buffer} version {version} is at {a.space.name} address {address}, not a multiple of {align}"
                )
                remedy = f"Make its size ({a.nbytes} bytes) and those before it a multiple of {align}"
                yield buffer.loc if buffer else None, message, remedy
                break


def _buffer_count(subject: Subject) -> Findings:
    count = sum(a.versions for a in subject.memory if a.buffer != mem.SIMT_CONTEXTS)
    if count > MAX_BUFFERS:
        message = f"{count} on-chip buffers, multi-buffering counted; a kernel may have {MAX_BUFFERS}"
        yield None, message, "Reuse buffers or lower num_stages"


RULES = (
    Rule(
        "memory-overflow",
        "Buffers beyond the end of a memory overwrite others or fault when the kernel runs.",
        _overflow,
    ),
    Rule("l0-overflow", "A product from L1 streams through L0A and L0B, two slices of K at a time.", _l0_of_gemm),
    Rule(
        "address-alignment",
        "L1 and UB are addressed in 32 bytes, L0A and L0B in 512, a product in L0C in 1024.",
        _alignment,
    ),
    Rule("buffer-count", "A kernel has at most 64 buffers.", _buffer_count),
)
