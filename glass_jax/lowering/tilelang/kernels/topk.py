"""``topk``: the largest elements of rows, by radix selection on the vector units.

A block takes whole rows. The bits of an element become a key that is the smaller the larger the element is; the key of
the last element to be chosen is found a byte at a time, from the highest: the histogram instruction counts, of the
elements that agree with it in the bytes found so far, how many have which next byte at most. Then all elements with a
smaller key are chosen, and of those with this key the first, until there are ``k``. Each goes to its place in the
result, which is the number of chosen ones before it: results are in the order of their indices.

So a row is read once for each byte of a key and once more, a tile at a time, the next one while one is searched; it may
have any length. Nothing of it but what was chosen is kept on the chip.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math
from typing import Any

from glass_jax import errors
from glass_jax.hw import chips
from glass_jax.lowering import artifact, tiling
from glass_jax.lowering.tiling import LANES
from glass_jax.lowering.xla.topk import NO_INDEX

INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}  # bits; those of a NaN are larger
MAX_K = 4096

_BYTES = 256  # of a register, and values of a byte
_TILE_BYTES = 32 * 1024  # twice what a copy needs to run at full rate; less elements than a histogram's 16 bits count


@dataclasses.dataclass(frozen=True)
class TopkKernel:
    """The kernel for one shape. Its parameters in global memory, in order:

    =========== ================== =======================
    ``x``       ``[rows, columns]`` bits, uint16 or uint32
    ``start``   ``[rows]``          int32, 0 to ``columns``
    ``end``     ``[rows]``          int32, 0 to ``columns``
    ``values``  ``[rows, k]``       as ``x``
    ``indices`` ``[rows, k]``       int32
    =========== ================== =======================

    Where a row has less than ``k`` elements from its start to its end, minus infinity and ``NO_INDEX`` follow. In a row
    with a NaN there all values are NaN and all indices ``NO_INDEX``.

    Attributes:
      rows, columns: extents, any positive number.
      k: 1 to :data:`MAX_K`.
      dtype: the type whose bits they are, a key of :data:`INFINITY`.

    Raises:
      HardwareConstraintError: an extent or dtype is not one of those above.
    """

    rows: int
    columns: int
    k: int
    dtype: str

    def __post_init__(self) -> None:
        artifact.check_choice("topk", "dtype", self.dtype, tuple(INFINITY))
        for field in ("rows", "columns", "k"):
            if (size := getattr(self, field)) < 1:
                raise errors.HardwareConstraintError(f"topk kernel: {field}={size} must be positive")
        if self.k > MAX_K:
            raise errors.HardwareConstraintError(f"topk kernel: k={self.k} is more than {MAX_K}")

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        return f"topk_{self.dtype}_{self.rows}x{self.columns}_{self.k}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """The results are the last two parameters."""
        return (3, 4)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return tiling.itemsize(self.dtype)

    @property
    def tile(self) -> int:
        """Elements that are loaded at a time, whole registers of bytes."""
        return min(_TILE_BYTES // self.size, math.ceil(self.columns / _BYTES) * _BYTES)

    @property
    def width(self) -> int:
        """Places for results in the unified buffer, whole registers."""
        return math.ceil(self.k / LANES) * LANES

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        cores = min(self.rows, chips.get(chip).vector_cores)
        return (
            f"{self.rows} rows on {cores} vector units in {math.ceil(self.rows / cores)} waves, each read "
            f"{self.size + 1} times in tiles of {self.tile}, two buffers of {self.tile * self.size} bytes"
        )

    def fingerprint(self, chip: str) -> str:
        """This file and everything that decides what :meth:`build` makes."""
        return artifact.fingerprint(self, chips.get(chip).vector_cores, __file__)

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T

        columns, k, tile_size, width = self.columns, self.k, self.tile, self.width
        cores = min(self.rows, chips.get(chip).vector_cores)
        bits = f"uint{8 * self.size}"
        clear, count, narrow = _search(self)
        begin, select, finish = _selection(self)
        x_type, values_type = T.Tensor((self.rows, columns), bits), T.Tensor((self.rows, k), bits)

        @T.prim_func
        def topk(
            x: x_type,
            start: T.Tensor((self.rows,), "int32"),
            end: T.Tensor((self.rows,), "int32"),
            values: values_type,
            indices: T.Tensor((self.rows, k), "int32"),
        ):
            with T.Kernel(cores) as core:
                tile = T.alloc_shared((tile_size,), bits)
                counts = T.alloc_shared((_BYTES,), "uint32")
                # Each in all lanes: the last key to be chosen; how many that have it are; of the elements before, how
                # many have a smaller key and how many have this one; the largest magnitude, as bits.
                last = T.alloc_shared((LANES,), "uint32")
                quota = T.alloc_shared((LANES,), "uint32")
                smaller = T.alloc_shared((LANES,), "uint32")
                equal = T.alloc_shared((LANES,), "uint32")
                largest = T.alloc_shared((LANES,), "uint32")
                found = T.alloc_shared((width,), "uint32")
                where = T.alloc_shared((width,), "int32")
                result = T.alloc_shared((width,), bits)
                T.annotate_buffer_versions({tile: 2})
                for row in T.Persistent([self.rows], cores, core, group_size=1):
                    first = T.max(T.min(start[row], columns), 0)
                    length = T.max(T.min(end[row], columns) - first, 0)
                    with T.SimdVF():
                        begin(last, quota, smaller, equal, largest, found, where, T.min(length, k))
                    for digit in T.serial(self.size):
                        with T.SimdVF():
                            clear(counts)
                        for step in T.Pipelined(T.ceildiv(length, tile_size), num_stages=2):
                            T.copy(x[row, first + step * tile_size : first + (step + 1) * tile_size], tile)
                            with T.SimdVF():
                                count(tile, counts, last, digit, length - step * tile_size)
                        with T.SimdVF():
                            narrow(counts, last, quota, digit)
                    for step in T.Pipelined(T.ceildiv(length, tile_size), num_stages=2):
                        T.copy(x[row, first + step * tile_size : first + (step + 1) * tile_size], tile)
                        with T.SimdVF():
                            left = length - step * tile_size
                            select(tile, last, quota, smaller, equal, largest, found, where, left, first + length)
                    with T.SimdVF():
                        finish(largest, found, where, result)
                    T.copy(result[0:k], values[row, 0:k])
                    T.copy(where[0:k], indices[row, 0:k])

        return topk


def _key(kernel: TopkKernel, dtype: str, width: int) -> Any:
    """The macro ``key(bits)``: of a register of elements, in lanes of ``width`` bits: the smaller the larger.

    Elements with a sign are in that order; of the others the bits but the sign are inverted.
    """
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    sign = 1 << (8 * kernel.size - 1)
    scalar = {"uint16": T.uint16, "uint32": T.uint32}[dtype]

    @T.macro
    def key(bits):
        full = S.pset(width)
        inverted = S.vxor(bits, S.vdup(scalar(sign - 1), dtype, full), full)
        return S.vsel(inverted, bits, S.vcmps(bits, scalar(sign), full, "lt"))

    return key


def _search(kernel: TopkKernel) -> tuple[Any, Any, Any]:
    """The macros that find one byte of the last key, the highest being number 0.

    ``clear(counts)``, ``count(tile, counts, last, digit, left)`` for each tile, of which ``left`` elements are in the
    row, and ``narrow(counts, last, quota, digit)``.
    """
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    size, bits = kernel.size, f"uint{8 * kernel.size}"
    lanes, scalar = _BYTES // size, {2: T.uint16, 4: T.uint32}[size]
    key = _key(kernel, bits, 8 * size)

    @T.macro
    def rest(tile, start, found, shift):
        """What a key has beyond the bytes ``found``, down to the byte that is looked for; 256 if it has others."""
        full = S.pset(8 * size)
        differs = S.vxor(key(S.vld(tile[start])), found, full)
        return S.vmins(S.vshrs(differs, shift, full), scalar(_BYTES), full)

    @T.macro
    def halves(first, second, dtype):
        """The low and the high halves, of type ``dtype``, of the elements of two registers."""
        return S.vdintlv(T.reinterpret(first, dtype), T.reinterpret(second, dtype))

    @T.macro
    def rests(tile, start, found, shift):
        """The same of 256 keys, the low bytes and the high ones."""
        parts = [rest(tile, start + i * lanes, found, shift) for i in range(size)]
        if size == 2:
            return halves(parts[0], parts[1], "uint8x256")
        first, _ = halves(parts[0], parts[1], "uint16x128")
        second, _ = halves(parts[2], parts[3], "uint16x128")
        return halves(first, second, "uint8x256")

    @T.macro
    def clear(counts):
        full = S.pset(32)
        for i in range(0, _BYTES, LANES):
            S.vsts(counts[i], S.vdup(T.uint32(0), "uint32", full), full)

    @T.macro
    def count(tile, counts, last, digit, left):
        full, full16 = S.pset(32), S.pset(16)
        shift = T.cast(8 * (size - 1 - digit), "int16")
        found = S.vld(last[0])
        if size == 2:
            found = T.reinterpret(S.vor(found, S.vshls(found, T.int16(16), full), full), "uint16x128")
        sums = S.alloc_local(2, "uint16")
        sums[0] = S.vdup(T.uint16(0), "uint16", full16)
        sums[1] = S.vdup(T.uint16(0), "uint16", full16)
        for group in range(T.ceildiv(T.min(left, kernel.tile), _BYTES)):
            low, high = rests(tile, group * _BYTES, found, shift)
            mask = S.vcmps(high, T.uint8(0), S.update_mask(left - group * _BYTES, 8), "eq")
            S.chistv2(sums[0], low, mask, 0)
            S.chistv2(sums[1], low, mask, 1)
        for i in T.unroll(2, explicit=True):
            low, high = 2 * i * LANES, (2 * i + 1) * LANES
            S.vsts(counts[low], S.vadd(S.vld(counts[low]), S.vunpack(sums[i], 0), full), full)
            S.vsts(counts[high], S.vadd(S.vld(counts[high]), S.vunpack(sums[i], 1), full), full)

    @T.macro
    def narrow(counts, last, quota, digit):
        """The byte is the number of values up to which there are less elements than are looked for."""
        full = S.pset(32)
        wanted = S.vld(quota[0])
        zero, one = S.vdup(T.uint32(0), "uint32", full), S.vdup(T.uint32(1), "uint32", full)
        number, below = S.alloc_local(1, "uint32"), S.alloc_local(1, "uint32")
        number[0] = zero
        below[0] = zero
        for i in range(0, _BYTES, LANES):
            seen = S.vld(counts[i])
            less = S.vcmp(seen, wanted, full, "lt")
            number[0] = S.vadd(number[0], S.vsel(one, zero, less), full)
            below[0] = S.vmax(below[0], S.vsel(seen, zero, less), full)
        byte = S.vdupv(S.vcadd(number[0], full), full)
        S.vsts(quota[0], S.vsub(wanted, S.vdupv(S.vcmax(below[0], full), full), full), full)
        shift = T.cast(8 * (size - 1 - digit), "int16")
        S.vsts(last[0], S.vadd(S.vld(last[0]), S.vshls(byte, shift, full), full), full)

    return clear, count, narrow


def _selection(kernel: TopkKernel) -> tuple[Any, Any, Any]:
    """The macros ``begin``, before a row; ``select``, of a tile, once the last key is known; and ``finish``."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    sign, infinity = 1 << (8 * kernel.size - 1), INFINITY[kernel.dtype]
    key = _key(kernel, "uint32", 32)
    is_short = kernel.size == 2

    @T.macro
    def begin(last, quota, smaller, equal, largest, found, where, count):
        full = S.pset(32)
        zero = S.vdup(T.uint32(0), "uint32", full)
        S.vsts(quota[0], S.vdup(T.cast(count, "uint32"), "uint32", full), full)
        S.vsts(last[0], zero, full)
        S.vsts(smaller[0], zero, full)
        S.vsts(equal[0], zero, full)
        S.vsts(largest[0], zero, full)
        for i in range(0, kernel.width, LANES):
            S.vsts(found[i], S.vdup(T.uint32(sign + infinity), "uint32", full), full)
            S.vsts(where[i], S.vdup(T.int32(NO_INDEX), "int32", full), full)

    @T.macro
    def counted(mask, full):
        one, zero = S.vdup(T.uint32(1), "uint32", full), S.vdup(T.uint32(0), "uint32", full)
        return S.vdupv(S.vcadd(S.vsel(one, zero, mask), full), full)

    @T.macro
    def select(tile, last, quota, smaller, equal, largest, found, where, left, end):
        full = S.pset(32)
        bound, most = S.vld(last[0]), S.vld(quota[0])
        magnitude = S.vdup(T.uint32(sign - 1), "uint32", full)
        zero = S.vdup(T.uint32(0), "uint32", full)
        before = S.alloc_local(3, "uint32")
        before[0] = S.vld(smaller[0])
        before[1] = S.vld(equal[0])
        before[2] = S.vld(largest[0])
        for group in range(T.ceildiv(T.min(left, kernel.tile), LANES)):
            start = group * LANES
            mask = S.update_mask(left - start, 32)
            bits = T.reinterpret(S.vld(tile[start], "UNPK_B16"), "uint32x64") if is_short else S.vld(tile[start])
            keys = key(bits)
            less = S.vcmp(keys, bound, mask, "lt")
            same = S.vcmp(keys, bound, mask, "eq")
            alike = S.vadd(before[1], S.vusqz(same, "uint32"), full)
            chosen = S.por(less, S.vcmp(alike, most, same, "lt"), full)
            place = S.vadd(S.vadd(before[0], S.vusqz(less, "uint32"), full), S.vmin(alike, most, full), full)
            S.vscatter(bits, found[0], place, chosen)
            S.vscatter(S.vci(T.int32(end - left + start), "int32"), where[0], place, chosen)
            before[0] = S.vadd(before[0], counted(less, full), full)
            before[1] = S.vadd(before[1], counted(same, full), full)
            before[2] = S.vmax(before[2], S.vsel(S.vand(bits, magnitude, full), zero, mask), full)
        S.vsts(smaller[0], before[0], full)
        S.vsts(equal[0], before[1], full)
        S.vsts(largest[0], before[2], full)

    @T.macro
    def finish(largest, found, where, result):
        full = S.pset(32)
        most = S.vdupv(S.vcmax(S.vld(largest[0]), full), full)
        poisoned = S.vcmps(most, T.uint32(infinity), full, "gt")
        nan = S.vdup(T.uint32(sign - 1), "uint32", full)
        for i in range(0, kernel.width, LANES):
            bits = S.vsel(nan, S.vld(found[i]), poisoned)
            if is_short:
                S.vsts(result[i], T.reinterpret(bits, "uint16x128"), full, "PK_B32")
            else:
                S.vsts(result[i], bits, full)
            nothing = S.vdup(T.int32(NO_INDEX), "int32", full)
            S.vsts(where[i], S.vsel(nothing, S.vld(where[i]), poisoned), full)

    return begin, select, finish
