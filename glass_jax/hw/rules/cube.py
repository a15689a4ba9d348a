"""Rules about matrix products on the cube."""

from __future__ import annotations

from glass_jax.hw import memory as mem
from glass_jax.hw.chips import C0_BYTES, CUBE_M
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.rules.base import Findings, Rule, Subject

MAX_EXTENT = 4095  # m, n and k of one instruction


def _extents(gemm: ir.Gemm) -> dict[str, int | None]:
    """m, n and k of a product, by the regions of its operands."""
    rows, depth = gemm.a.extents[-2:] if not gemm.transpose_a else gemm.a.extents[:-3:-1]
    return {"m": mem.static(rows), "n": mem.static(gemm.c.extents[-1]), "k": mem.static(depth)}


def _tile(subject: Subject) -> Findings:
    for gemm in subject.of(ir.Gemm):
        k_multiple = C0_BYTES * 8 // mem.bits(subject.buffer(gemm.a).dtype)
        for name, extent in _extents(gemm).items():
            multiple = k_multiple if name == "k" else CUBE_M
            if extent is not None and (extent % multiple or extent == 0):
                valid = max(multiple, -(-extent // multiple) * multiple)
                message = f"the product's {name} is {extent}, cube tiles are a multiple of {multiple}"
                yield gemm.loc, message, f"Make the tile's {name} {valid} and pad the operand with zeros"


def _largest(subject: Subject) -> Findings:
    for gemm in subject.of(ir.Gemm):
        # From L1 the depth is cut to what L0 holds, which is less than the limit.
        names = "mnk" if subject.buffer(gemm.a).space is Space.L0A else "mn"
        for name, extent in _extents(gemm).items():
            if name in names and extent is not None and extent > MAX_EXTENT:
                yield (
                    gemm.loc,
                    f"the product's {name} is {extent}, one instruction takes at most {MAX_EXTENT}",
                    "Split it",
                )


def _transpose(subject: Subject) -> Findings:
    for gemm in subject.of(ir.Gemm):
        if Space.L1 not in (subject.buffer(gemm.a).space, subject.buffer(gemm.b).space):
            continue  # copies from L1 to L0 transpose
        if not gemm.transpose_b:
            message = f"B ({gemm.b.buffer}) is [K, N] in L1 and is read as [N, K]"
            remedy = "Pass transpose_B=True; if B is [K, N] in memory, load it with T.copy(..., transpose=True)"
            yield gemm.loc, message, remedy
        if gemm.transpose_a:
            message = f"A ({gemm.a.buffer}) is [K, M] in L1 and is read as [M, K]"
            yield gemm.loc, message, "Load A with T.copy(..., transpose=True)"


def _types(subject: Subject) -> Findings:
    chip = subject.chip
    for gemm in subject.of(ir.Gemm):
        for label, region in (("A", gemm.a), ("B", gemm.b)):
            dtype = subject.buffer(region).dtype
            if dtype not in chip.cube_k:
                taken = ", ".join(name for name in chip.cube_k if name != "hf32")
                message = f"{label} ({region.buffer}) is {dtype}, which the cube of {chip.name} does not take"
                yield gemm.loc, message, f"Convert it to one of {taken}"
        lhs, rhs, acc = (subject.buffer(region).dtype for region in (gemm.a, gemm.b, gemm.c))
        if lhs != rhs and not (lhs.startswith("float8") and rhs.startswith("float8")):
            yield gemm.loc, f"the cube does not multiply {lhs} by {rhs}", "Convert one operand to the other's type"
        expected = "int32" if lhs in ("int8", "int4") else "float32"
        if acc != expected and chip.family != "910A":
            yield (
                gemm.loc,
                f"C ({gemm.c.buffer}) is {acc}; a product of {lhs} accumulates in {expected}",
                f"Allocate it as {expected}",
            )


def _places(subject: Subject) -> Findings:
    for gemm in subject.of(ir.Gemm):
        a, b, c = (subject.buffer(region) for region in (gemm.a, gemm.b, gemm.c))
        if (a.space, b.space) not in ((Space.L1, Space.L1), (Space.L0A, Space.L0B)):
            message = f"A ({a.name}) is in {a.space.name} and B ({b.name}) in {b.space.name}"
            yield gemm.loc, message, "Put both in L1, or A in L0A and B in L0B"
        if c.space is not Space.L0C:
            yield (
                gemm.loc,
                f"C ({c.name}) is in {c.space.name}; the cube writes L0C only",
                "Allocate it with T.alloc_l0c",
            )


RULES = (
    Rule("gemm-tile", "The cube computes 16 x 16 x 32 bytes; other extents read what stands beside the tile.", _tile),
    Rule("gemm-extent", "The m, n and k of an instruction are 12-bit numbers.", _largest),
    Rule("gemm-transpose", "A product from L1 contracts the last dimensions of A [M, K] and B [N, K].", _transpose),
    Rule(
        "gemm-dtype",
        "The cube has one data path for each pair of types it takes, and one accumulator type for each.",
        _types,
    ),
    Rule("gemm-space", "The cube reads L0A and L0B, through L1, and writes L0C.", _places),
)
