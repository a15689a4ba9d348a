"""What the kernels of attention share: tiles of scores in registers, what is hidden of them, and room in the memories.

A tile has 128 columns, so that its rows are two registers of float32. A row of 16-bit numbers is one register then,
which holds eight of the blocks of 32 bytes that the cube reads; a row of float32 is two.
"""

# Annotations are evaluated here: TileLang reads those of a macro.
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from glass_jax import errors
from glass_jax.hw import chips
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import artifact, tiling
from glass_jax.lowering.tilelang.kernels import vectors
from glass_jax.lowering.tiling import DTYPES, LANES

COLUMNS = 2 * LANES  # of a tile
LOWEST = -3.4028234663852886e38  # float32: the largest score so far of a row that has seen nothing
HEAD_MULTIPLES = {"d": 16, "dv": 64}  # of head dimensions: the cube's tiles, and registers of a row of the output


def check(name: str, dtype: str, **extents: int) -> None:
    """Raises HardwareConstraintError unless the kernel ``name`` takes operands of ``dtype`` and these extents."""
    artifact.check_choice(name, "dtype", dtype, DTYPES)
    artifact.check_extents(name, extents, HEAD_MULTIPLES)


def fingerprint(kernel: artifact.Kernel, chip: str, *files: str) -> str:
    """The sources of a kernel, this one among them, and everything that decides what it makes of ``chip``."""
    return artifact.fingerprint(kernel, kernel.versions(chip), *files, __file__, vectors.__file__)


# --- room in the memories ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Room:
    """What one version of a buffer takes: its memory, its shape, and the type of its elements."""

    space: Space
    shape: tuple[int, int]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.shape[0] * self.shape[1] * tiling.itemsize(self.dtype)


def versions(name: str, chip: str, once: Sequence[Room], twice: Mapping[str, Room]) -> dict[str, int]:
    """How many versions of the buffers that pass from one pipe to another fit ``chip``: two while there is room.

    Args:
      name: the kernel's, for the message.
      chip: name of the chip.
      once: buffers of which there is one version.
      twice: the others by name, those that two versions do most for first.

    Returns:
      1 or 2 for each of ``twice``.

    Raises:
      OutOfOnChipMemoryError: one version of each does not fit.
    """
    have = {space: chips.get(chip).capacity(space) for space in (Space.L1, Space.L0C, Space.UB)}
    used = dict.fromkeys(have, 0)
    for room in (*once, *twice.values()):
        used[room.space] += room.nbytes
    if over := [f"{s.value} {used[s]} of {have[s]} bytes" for s in have if used[s] > have[s]]:
        raise errors.OutOfOnChipMemoryError(
            f"{name} does not fit {chip}: {'; '.join(over)}. Take smaller head dimensions, or 16-bit operands"
        )
    count = {}
    for buffer, room in twice.items():
        count[buffer] = 1 + (used[room.space] + room.nbytes <= have[room.space])
        used[room.space] += room.nbytes * (count[buffer] - 1)
    return count


def packed_shape(rows: int) -> tuple[int, int]:
    """Shape of a buffer for ``rows`` rows of a tile in blocks of 32 bytes, as the cube reads them.

    From one block to the next of the same row there is a row more than the tile has, as the copy to L1 wants it: the
    blocks of a row lie in different banks of the memory.
    """
    return rows + 1, COLUMNS


# --- macros --------------------------------------------------------------------------------------------------------


def packing(dtype: str, rows: int) -> tuple[Any, Any]:
    """Two macros: the places where a tile of ``rows`` rows begins to be stored in blocks, and the store of a row there.

    ``place(packed, part)`` is where the columns from ``part`` on begin in a buffer of :func:`packed_shape`;
    ``pack(left, right, place, beside)`` stores a row's two registers of float32 at the places of 0 and of 64, which
    move on to the next row. 16-bit numbers need the first place only.
    """
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    stride = (rows + 1) << 16 | 1  # in blocks: from one block of a row to the next, and from row to row

    def place(packed, part):
        return S.make_ubuf_ptr(T.access_ptr(packed[0, part], "w", rows + 1, COLUMNS - part), dtype)

    @T.macro
    def pack(left, right, place: T.Ref, beside: T.Ref):
        if dtype == "float32":
            full = S.pset(32)
            place = S.vsstb(left, place, T.int32(stride), full, update=True)
            beside = S.vsstb(right, beside, T.int32(stride), full, update=True)
        else:
            full, full16 = S.pset(32), S.pset(16)
            narrow, _ = S.vdintlv(S.vcvt(left, dtype, full, sat=False), S.vcvt(right, dtype, full, sat=False))
            place = S.vsstb(narrow, place, T.int32(stride), full16, update=True)

    return place, pack


def hiding(rows: int, limit: Any, *, after: bool, edges: bool, segments: bool) -> Any:
    """The macro ``hide(s, first, column, row_ids, column_ids)``: scores that do not count become -inf.

    It is used inside a SIMD region. ``first`` is the number of the first row of the tile ``s``, ``column`` that of its
    first column. Tiles that lie within the limits of all rows are left as they are, unless there are segments.

    Args:
      rows: rows of a vector unit's part of the tile.
      limit: of the number of a row, its first column that does not count, or does with ``after``; grows with the row.
      after: the columns from ``limit`` on count, and not those before it.
      edges: whether there is a limit.
      segments: whether only columns with the row's id count.
    """
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    @T.macro
    def cut(s, first, column, row_ids, column_ids):
        full = S.pset(32)
        unseen = S.vdup(-T.infinity("float32"), "float32", full)
        for row in range(rows):
            for part in range(0, COLUMNS, LANES):
                seen = S.pset(32)
                if edges:
                    seen = S.update_mask(T.max(limit(first + row) - column - part, 0), 32)
                    if after:
                        seen = S.pnot(seen, full)
                if segments:
                    seen = S.vcmp(S.vld(column_ids[0, part]), S.vld(row_ids[0, row], "BRC_B32"), seen, "eq")
                S.vsts(s[row, part], S.vsel(S.vld(s[row, part]), unseen, seen), full)
        S.mem_bar("VST_VLD")

    @T.macro
    def hide(s, first, column, row_ids, column_ids):
        if segments:
            cut(s, first, column, row_ids, column_ids)
        elif edges and after:
            if column < limit(first + rows - 1):
                cut(s, first, column, row_ids, column_ids)
        elif edges:  # noqa: SIM102, decided when the kernel is built, and the condition inside when it runs
            if column + COLUMNS > limit(first):
                cut(s, first, column, row_ids, column_ids)

    return hide
