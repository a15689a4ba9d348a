"""Rules about matrix products on the cube."""

from __future__ import annotations

from glass_jax.hw import memory as mem
from glass_jax.hw.chips import C0_BYTES, CUBE_M
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.rules.base import Findings, Rule, Subject

MAX_EXTENT = 4095  # m, n and k of one instruction


L0_BYTES = 65536  # of L0A and of L0B, as TileLang divides them


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


# --- what TileLang makes of products and of copies of their results ------------------------------------------------


def _from_l1(subject: Subject, gemm: ir.Gemm) -> bool:
    return {subject.buffer(gemm.a).space, subject.buffer(gemm.b).space} == {Space.L1}


def _sliced(subject: Subject) -> Findings:
    for gemm in subject.of(ir.Gemm):
        for region in (gemm.a, gemm.b) if _from_l1(subject, gemm) else ():
            buffer = subject.buffer(region)
            rows = mem.static(buffer.shape[-2]) if len(buffer.shape) > 1 else None
            whole_rows = mem.static(region.extents[-2]) == rows if len(region.extents) > 1 else True
            beyond = mem.static(region.starts[-1]) != 0
            if beyond or not whole_rows:
                what = "begins behind its first column" if beyond else f"has not all of its {rows} rows"
                message = (
                    f"the operand {region.buffer} in L1 {what}; the code reads from its beginning, as if it were whole"
                )
                remedy = (
                    "Give each part a tile of its own ([parts, rows, columns], indexed by the part), or copy it to L0"
                )
                yield gemm.loc, message, remedy


def _partial(subject: Subject) -> Findings:
    products: dict[str, list[ir.Gemm]] = {}
    for gemm in subject.of(ir.Gemm):
        products.setdefault(subject.buffer(gemm.c).storage, []).append(gemm)
    for copy in subject.transfers:
        buffer = subject.buffer(copy.src)
        if buffer.space is not Space.L0C or len(buffer.shape) < 2:
            continue
        rows = next((mem.static(gemm.c.extents[-2]) for gemm in products.get(buffer.storage, ())), buffer.shape[-2])
        rows = mem.static(rows) if rows is not None else None
        taken, wide = (mem.static(extent) for extent in copy.src.extents[-2:])
        if rows is None or (wide is not None and wide <= CUBE_M):
            continue  # one column of blocks: no distance to the next
        if taken is None or -(-taken // CUBE_M) != -(-rows // CUBE_M):
            number = "some" if taken is None else taken
            message = f"{number} rows of {buffer.name} leave L0C, of a tile of {rows}; the code takes the next block "
            message += "of columns from as many rows on"
            remedy = "Copy from the whole tile and cut the destination: T.copy(c, y[m : m + rows, n : n + columns])"
            yield copy.loc, message, remedy


def _slots(subject: Subject, gemm: ir.Gemm) -> tuple[int, int, int] | None:
    """How many parts L0 has for a product of operands in L1, and bytes of each in L0A and in L0B; None if unknown."""
    extents = _extents(gemm)
    if None in extents.values() or 0 in extents.values():
        return None
    m, n, k = (extents[name] for name in "mnk")
    bits = mem.bits(subject.buffer(gemm.a).dtype)
    block = C0_BYTES * 8 // bits
    depth = min(L0_BYTES // 2 * 8 // (max(m, n) * bits), k) // block * block
    while depth > block and k % depth:
        depth -= block
    if depth <= 0 or k % depth:
        return None
    return min(k // depth, 2), m * depth * bits // 8, n * depth * bits // 8


def _collide(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    """Whether a part of one product lies where a part of another number does of the other."""
    return any(
        i != j and i * one[side] < (j + 1) * other[side] and j * other[side] < (i + 1) * one[side]
        for side in (1, 2)
        for i in range(one[0])
        for j in range(other[0])
    )


def _product_slots(subject: Subject) -> Findings:
    before, filled = None, set()
    for stmt in subject.statements:
        if isinstance(stmt, ir.Copy) and subject.buffer(stmt.src).space is Space.UB:
            filled.add(stmt.dst.buffer)
        elif isinstance(stmt, ir.Gemm) and _from_l1(subject, stmt):
            ordered = {stmt.a.buffer, stmt.b.buffer} & filled
            slots = _slots(subject, stmt)
            if before is not None and slots is not None and not ordered and _collide(before, slots):
                message = (
                    f"the product before has parts of {before[1]} bytes in L0A and {before[2]} in L0B, this one of "
                    f"{slots[1]} and {slots[2]}: they overlap under different locks"
                )
                yield stmt.loc, message, "Give both the same tiles, or copy the operands to L0 and multiply there"
            before, filled = slots, set()


RULES = (
    Rule("gemm-tile", "The cube computes 16 x 16 x 32 bytes; other extents read what stands beside the tile.", _tile),
    Rule("gemm-extent", "The m, n and k of an instruction are 12-bit numbers.", _largest),
    Rule("gemm-transpose", "A product from L1 contracts the last dimensions of A [M, K] and B [N, K].", _transpose),
    Rule(
        "gemm-dtype",
        "The cube has one data path for each pair of types it takes, and one accumulator type for each.",
        _types,
    ),
    Rule(
        "sliced-product",
        "TileLang drops where an operand in L1 begins within its rows, and takes its rows for all.",
        _sliced,
    ),
    Rule(
        "partial-l0c-copy",
        "Blocks of 16 columns of a tile in L0C stand as many rows apart as the tile has; TileLang takes those copied.",
        _partial,
    ),
    Rule(
        "product-slots",
        "TileLang divides L0A and L0B for each product anew, under the same two locks.",
        _product_slots,
    ),
    Rule("gemm-space", "The cube reads L0A and L0B, through L1, and writes L0C.", _places),
)
