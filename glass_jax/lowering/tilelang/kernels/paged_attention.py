"""``paged_attention``: one query token a sequence, over keys and values that lie in pages.

A block takes the query heads that share one key-value head, of one sequence, and goes over the sequence's tokens a tile
at a time. The pages of a tile are looked up in the page table and copied into L1; only the tokens of the sequence are
copied, and where a tile is not full the rest of its values is zero, so that nothing else in the pages can reach the
sums. The cube multiplies; the two vector units do the softmax of half of the heads each and leave the probabilities in
the blocks of 32 bytes that the cube reads. Of the tokens gone over so far a head keeps the largest score ``m``, the sum
``total`` of ``exp(s - m)`` and the sum ``o`` of ``exp(s - m) v`` (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018).

The tiles of a sequence depend on nothing but its length, so its result does not depend on the other sequences.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math
from typing import Any, NamedTuple

from glass_jax import errors
from glass_jax.hw import chips
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import artifact, tiling
from glass_jax.lowering.tilelang.kernels import vectors
from glass_jax.lowering.tiling import DTYPES, LANES

ALIGNMENT = 16  # page sizes and head dimensions are multiples of it: the cube's blocks

_TILE = 256  # most tokens of a step
_ROWS = 64  # most heads of a block; half of them where a head is wider than 256 numbers


class Rows(NamedTuple):
    """How the query heads of one key-value head become rows of the cube.

    Each of the two vector units gets the same number of heads, whatever their number is; the rows that are left to the
    next multiple of 8 in each half hold nothing.

    Attributes:
      tiles: blocks that share the heads.
      live: heads of a vector unit.
      half: rows of a vector unit, a multiple of 8.
    """

    tiles: int
    live: int
    half: int

    @classmethod
    def of(cls, groups: int, head_dim: int) -> "Rows":
        """The rows for ``groups`` query heads of ``head_dim`` numbers."""
        tiles = math.ceil(groups / (_ROWS if head_dim <= 256 else _ROWS // 2))
        live = math.ceil(groups / (2 * tiles))
        return cls(tiles, live, math.ceil(live / 8) * 8)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of the tiles on a chip.

    Attributes:
      parts: equal parts that a page is copied in, 1 unless a page is larger than a tile.
      count: parts of a tile.
      part: tokens of a part.
      tokens: tokens of a tile, ``count * part`` and then up to a multiple of what a register of probabilities holds.
      versions: versions of the tiles of keys and values in L1; with 2 they are copied while the cube multiplies.
    """

    parts: int
    count: int
    part: int
    tokens: int
    versions: int


@dataclasses.dataclass(frozen=True)
class PagedAttentionKernel:
    """The kernel for one shape. Its parameters in global memory, in order:

    ===============  ======================================  =========
    ``q``            ``[batch * kv_heads, rows, head_dim]``  ``dtype``
    ``k``, ``v``     ``[pages, page, kv_heads, head_dim]``   ``dtype``
    ``table``        ``[batch, table_pages]``                int32
    ``lengths``      ``[batch]``, in the table's pages       int32
    ``out``          as ``q``                                ``dtype``
    ===============  ======================================  =========

    ``rows`` is ``tiles * 2 * half`` of :class:`Rows`, of each half the first ``live`` are heads. Scores, softmax and
    sums are float32; the probabilities are rounded to ``dtype`` for the second product.

    Attributes:
      batch: sequences.
      groups: query heads of a key-value head.
      kv_heads: key-value heads.
      head_dim: a multiple of 16.
      pages: pages of the cache.
      page: tokens of a page, a multiple of 16.
      table_pages: entries of a sequence in the page table.
      dtype: one of ``tiling.DTYPES``.
      scale: what scores are multiplied by.

    Raises:
      HardwareConstraintError: an extent or dtype is not one of those above.
    """

    batch: int
    groups: int
    kv_heads: int
    head_dim: int
    pages: int
    page: int
    table_pages: int
    dtype: str
    scale: float

    def __post_init__(self) -> None:
        artifact.check_choice("paged_attention", "dtype", self.dtype, DTYPES)
        extents = ("batch", "groups", "kv_heads", "pages", "table_pages", "head_dim", "page")
        multiples = {"head_dim": ALIGNMENT, "page": ALIGNMENT}
        artifact.check_extents("paged_attention", {name: getattr(self, name) for name in extents}, multiples)

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        shape = f"{self.batch}x{self.kv_heads}x{self.groups}x{self.head_dim}"
        return f"paged_attention_{self.dtype}_{shape}_pages_{self.table_pages}x{self.page}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """The result is the last parameter."""
        return (5,)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    @property
    def rows(self) -> Rows:
        """The rows of the cube that the heads become."""
        return Rows.of(self.groups, self.head_dim)

    def plan(self, chip: str) -> Plan:
        """The tiles on ``chip``: as many tokens as L1 has room for twice, keys and values.

        Raises:
          OutOfOnChipMemoryError: not even the smallest tile fits.
        """
        have = chips.get(chip)
        register = LANES * 4 // tiling.itemsize(self.dtype)  # scores whose probabilities fill a register
        for tokens, versions in ((_TILE, 2), (128, 2), (64, 2), (128, 1), (64, 1)):
            room = self._room(tokens, versions)
            if tokens % register == 0 and all(need <= have.capacity(space) for space, need in room.items()):
                break
        else:
            over = [f"{space.value} {need} of {have.capacity(space)} bytes" for space, need in room.items()]
            raise errors.OutOfOnChipMemoryError(
                f"paged_attention: {tokens} tokens with D {self.head_dim} in {self.dtype} take {', '.join(over)} of "
                f"{chip}. Use a head dimension of 512 or less"
            )
        part = max(n for n in range(ALIGNMENT, min(self.page, tokens) + 1, ALIGNMENT) if self.page % n == 0)
        count = tokens // part
        return Plan(self.page // part, count, part, math.ceil(count * part / register) * register, versions)

    def _room(self, tokens: int, versions: int) -> dict[Space, int]:
        """Bytes of each memory that tiles of ``tokens`` take, keys and values in ``versions``, the others in two."""
        size, half, dim = tiling.itemsize(self.dtype), self.rows.half, self.head_dim
        return {
            Space.L1: (2 * versions * tokens * dim + 2 * half * (dim + tokens)) * size,
            Space.L0C: 2 * 2 * half * (tokens + dim) * 4,
            Space.UB: 2 * half * tokens * 4
            + 2 * (half + 1) * tokens * size
            + half * dim * (3 * 4 + size)
            + (3 * LANES + tokens) * 4,
        }

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        plan, rows = self.plan(chip), self.rows
        return (
            f"{self.batch * self.kv_heads * rows.tiles} blocks of {2 * rows.live} heads in {2 * rows.half} rows, tiles "
            f"of {plan.count} x {plan.part} tokens in {plan.tokens} columns (a page in {plan.parts} parts), "
            f"{'double' if plan.versions == 2 else 'single'}-buffered"
        )

    def fingerprint(self, chip: str) -> str:
        """This file and everything that decides what :meth:`build` makes."""
        return artifact.fingerprint(self, self.plan(chip), __file__, vectors.__file__)

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T
        from tilelang.layout import make_ascend_compact_nz_layout

        plan, dtype, dim = self.plan(chip), self.dtype, self.head_dim
        tokens, part, parts = plan.tokens, plan.part, plan.parts
        step_tokens = plan.count * part
        tiles, _, half = self.rows
        rows = 2 * half
        heads = self.batch * self.kv_heads
        softmax = _softmax(plan, self.rows, dtype, self.scale)
        start, accumulate, finish = _output(self.rows, dim, dtype)
        cache = (self.pages, self.page, self.kv_heads, dim)
        # One type for each parameter: those of one type object would be one array.
        q_type, out_type = (T.Tensor((heads, tiles * rows, dim), dtype) for _ in range(2))
        k_type, v_type = (T.Tensor(cache, dtype) for _ in range(2))

        @T.prim_func
        def paged_attention(
            q: q_type,
            k: k_type,
            v: v_type,
            table: T.Tensor((self.batch, self.table_pages), "int32"),
            lengths: T.Tensor((self.batch,), "int32"),
            out: out_type,
        ):
            with T.MixedKernel(heads * tiles) as (block, _):
                q_l1 = T.alloc_l1((rows, dim), dtype)
                k_l1 = T.alloc_l1((tokens, dim), dtype)
                v_l1 = T.alloc_l1((dim, tokens), dtype)
                p_l1 = T.alloc_l1((rows, tokens), dtype)
                s_l0c = T.alloc_l0c((rows, tokens), "float32")
                o_l0c = T.alloc_l0c((rows, dim), "float32")
                s = T.alloc_shared((half, tokens), "float32")
                p = T.alloc_shared((half + 1, tokens), dtype)
                product = T.alloc_shared((half, dim), "float32")
                o = T.alloc_shared((half, dim), "float32")
                result = T.alloc_shared((half, dim), dtype)
                m = T.alloc_shared((LANES,), "float32")
                total = T.alloc_shared((LANES,), "float32")
                alpha = T.alloc_shared((LANES,), "float32")
                sums = T.alloc_shared((tokens // LANES, LANES), "float32")
                T.annotate_layout({p: make_ascend_compact_nz_layout(p)})
                T.annotate_buffer_versions(
                    {k_l1: plan.versions, v_l1: plan.versions, s_l0c: 2, o_l0c: 2, s: 2, p: 2, product: 2}
                )
                head, row = block // tiles, block % tiles * rows
                sequence, kv_head = head // self.kv_heads, head % self.kv_heads
                length = lengths[sequence]
                T.copy(q[head, row : row + rows, 0:dim], q_l1)
                start(o, m, total)
                for step in T.Pipelined(T.ceildiv(length, step_tokens), num_stages=2):
                    seen = T.min(length - step * step_tokens, step_tokens)
                    if seen < tokens:
                        T.fill(v_l1, 0)
                    for i in T.serial(plan.count):
                        page = table[sequence, (step * plan.count + i) // parts]
                        first = (step * plan.count + i) % parts * part
                        count = T.max(T.min(seen - i * part, part), 0)
                        T.copy(k[page, first : first + count, kv_head, 0:dim], k_l1[i * part : i * part + count, 0:dim])
                        T.copy(
                            v[page, first : first + count, kv_head, 0:dim],
                            v_l1[0:dim, i * part : i * part + count],
                            transpose=True,
                        )
                    T.gemm(q_l1, k_l1, s_l0c, transpose_B=True, clear_accum=True)
                    T.dual_copy(s_l0c, s)
                    softmax(s, m, total, sums, alpha, p, seen)
                    T.dual_copy(p[0:half, 0:tokens], p_l1)
                    T.gemm(p_l1, v_l1, o_l0c, transpose_B=True, clear_accum=True)
                    T.dual_copy(o_l0c, product)
                    accumulate(o, product, alpha)
                finish(o, total, result)
                T.dual_copy(result, out[head, row : row + rows, 0:dim])

        return paged_attention


def _softmax(plan: Plan, rows: Rows, dtype: str, scale: float) -> Any:
    """What the vector units do between the two products of a step."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    wide = dtype == "float32"
    columns = LANES if wide else 2 * LANES  # probabilities of a register
    apart = rows.half + 1  # blocks from one block of a row to the next, as TileLang's copy of packed tiles wants it

    @T.macro
    def softmax(s, m, total, sums, alpha, p, seen):
        """The new maxima and sums, what the old ones count for now, and the probabilities, packed."""
        with T.SimdVF():
            full = S.pset(32)
            full16 = S.pset(16)
            unseen = S.vdup(-T.infinity("float32"), "float32", full)
            old = S.vld(m[0])
            for row in range(rows.live):
                largest = S.alloc_var("float32")
                largest = S.vld(m[row], "BRC_B32")
                for i in T.unroll(plan.tokens // LANES):
                    scores = S.vmuls(S.vld(s[row, i * LANES]), T.float32(scale), full)
                    scores = S.vsel(scores, unseen, S.update_mask(T.max(seen - i * LANES, 0), 32))
                    S.vsts(s[row, i * LANES], scores, full)
                    largest = S.vmax(largest, scores, full)
                S.vsts(m[row], S.vcmax(largest, full), full, "ONEPT_B32")
            S.mem_bar("VST_VLD")
            for i in T.unroll(plan.tokens // columns):
                target = S.make_ubuf_ptr(T.access_ptr(p[0, i * columns], "w", apart, columns), dtype)
                for row in range(rows.live):
                    maximum = S.vld(m[row], "BRC_B32")
                    left = S.vexpdif(S.vld(s[row, i * columns]), maximum, full)
                    if wide:
                        S.vsts(sums[i, row], S.vcadd(left, full), full, "ONEPT_B32")
                        target = S.vsstb(left, target, T.int32(apart << 16 | 1), full, update=True)
                    else:
                        right = S.vexpdif(S.vld(s[row, i * columns + LANES]), maximum, full)
                        S.vsts(sums[i, row], S.vcadd(S.vadd(left, right, full), full), full, "ONEPT_B32")
                        narrow, _ = S.vdintlv(
                            S.vcvt(left, dtype, full, sat=False), S.vcvt(right, dtype, full, sat=False)
                        )
                        target = S.vsstb(narrow, target, T.int32(apart << 16 | 1), full16, update=True)
            S.mem_bar("VST_VLD")
            worth = S.vexpdif(old, S.vld(m[0]), full)
            S.vsts(alpha[0], worth, full)
            added = S.alloc_var("float32")
            added = S.vmul(S.vld(total[0]), worth, full)
            for i in T.unroll(plan.tokens // columns):
                added = S.vadd(added, S.vld(sums[i, 0]), full)
            S.vsts(total[0], added, full)

    return softmax


def _output(rows: Rows, dim: int, dtype: str) -> tuple[Any, Any, Any]:
    """How the output is cleared, added to and divided."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    store = vectors.store(dtype)

    def inside(full, column):
        """The lanes of a register that belong to the row."""
        return full if dim % LANES == 0 else S.update_mask(T.min(dim - column, LANES), 32)

    @T.macro
    def start(o, m, total):
        """Nothing seen yet."""
        with T.SimdVF():
            full = S.pset(32)
            zero = S.vdup(0.0, "float32", full)
            S.vsts(m[0], S.vdup(-T.infinity("float32"), "float32", full), full)
            S.vsts(total[0], zero, full)
            for row in range(rows.live):
                for column in range(0, dim, LANES):
                    S.vsts(o[row, column], zero, inside(full, column))

    @T.macro
    def accumulate(o, product, alpha):
        """The output so far, less for what the maxima have grown, and that of the tile."""
        with T.SimdVF():
            full = S.pset(32)
            for row in range(rows.live):
                worth = S.vld(alpha[row], "BRC_B32")
                for column in range(0, dim, LANES):
                    kept = S.vmul(S.vld(o[row, column]), worth, full)
                    S.vsts(o[row, column], S.vadd(kept, S.vld(product[row, column]), full), inside(full, column))

    @T.macro
    def finish(o, total, result):
        """The output in its type. The largest score of a sequence adds 1 to its sum; only an empty one has less."""
        with T.SimdVF():
            full = S.pset(32)
            for row in range(rows.live):
                divisor = S.vmaxs(S.vld(total[row], "BRC_B32"), T.float32(1), full)
                for column in range(0, dim, LANES):
                    store(result, row, column, S.vdiv(S.vld(o[row, column]), divisor, full), inside(full, column))

    return start, accumulate, finish
