"""``mla_decode``: flash decoding over pages on the cube and the vector units.

A block takes up to 64 rows, each one query of one head, of one sequence and goes over its tokens 128 at a time. The
pages of a step are looked up in the block table and copied into L1 once: the cube reads them there as keys, and
transposed as values. Only tokens of the sequence are copied, and where they do not fill a step the rest is zero, so
that nothing else in the pages can reach a sum. Each of the two vector units does the softmax of half of the rows. Of
the tokens gone over so far a row keeps the largest score ``m``, the sum ``total`` of ``exp(s - m)`` and the sum ``o``
of ``exp(s - m) v`` (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).

The steps of a sequence depend on nothing but its length, so its result does not depend on the other sequences.

``sparse_mla_prefill`` is the same kernel: each query is a sequence, the tokens chosen for it are pages of one token.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math
from typing import Any

from glass_jax.hw.ir.program import Space
from glass_jax.lowering import artifact, tiling
from glass_jax.lowering.tilelang.kernels import attention_tiles as tiles
from glass_jax.lowering.tilelang.kernels import vectors
from glass_jax.lowering.tilelang.kernels.attention_tiles import COLUMNS, Room
from glass_jax.lowering.tiling import DTYPES, LANES

ALIGNMENT = 16  # of D and of the value's size: the cube's tiles
MAX_ROWS = 64  # of a block: with more, the sums of the output would leave no room in UB for a second version

_SLICE_BYTES = 128  # of a row of operands that goes to L0 at a time: two slices of 128 tokens take half of L0B


def block_rows(rows: int) -> tuple[int, int]:
    """How ``rows`` rows of a sequence are shared out: the number of blocks, and the rows of each, a multiple of 16."""
    blocks = max(math.ceil(rows / MAX_ROWS), 1)
    return blocks, max(math.ceil(rows / blocks / ALIGNMENT), 1) * ALIGNMENT


@dataclasses.dataclass(frozen=True)
class MlaDecodeKernel:
    """The kernel for one shape. Its parameters in global memory, in order:

    ===========  ===============================  ==========
    ``q``        ``[batch, rows, d]``             ``dtype``
    ``cache``    ``[pages, page, d]``             ``dtype``
    ``table``    ``[batch, table_pages]``         int32
    ``lengths``  ``[batch]``                      int32
    ``sink``     ``[batch, rows]``                float32
    ``out``      ``[batch, rows, dv]``            ``dtype``
    ``largest``  ``[batch, rows]``                float32
    ``lse``      ``[batch, rows]``                float32
    ===========  ===============================  ==========

    Scores, softmax and sums are float32; the probabilities are rounded to ``dtype`` for the second product.

    Attributes:
      batch: sequences.
      rows: queries times heads, a query's heads together; blocks times rows as :func:`block_rows` gives them.
      d: numbers of a token, a multiple of :data:`ALIGNMENT`.
      dv: how many of them are its value, a multiple of :data:`ALIGNMENT`.
      pages: pages of the cache.
      page: tokens of a page.
      table_pages: entries of a sequence in the block table.
      dtype: float32, float16 or bfloat16.
      scale: what scores are multiplied by.
      queries: 1, or the last tokens of a sequence, each of which sees none after itself.
      heads: rows of each of ``queries``; those that are left over at the end count as the last one's.

    Raises:
      HardwareConstraintError: an extent or dtype is not one of those above.
    """

    batch: int
    rows: int
    d: int
    dv: int
    pages: int
    page: int
    table_pages: int
    dtype: str
    scale: float
    queries: int
    heads: int

    def __post_init__(self) -> None:
        artifact.check_choice("mla_decode", "dtype", self.dtype, DTYPES)
        extents = ("batch", "rows", "d", "dv", "pages", "page", "table_pages", "queries", "heads")
        multiples = {"rows": block_rows(self.rows)[1], "d": ALIGNMENT, "dv": ALIGNMENT}
        artifact.check_extents("mla_decode", {name: getattr(self, name) for name in extents}, multiples)

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        causal = f"_causal_{self.queries}x{self.heads}" if self.queries > 1 else ""
        return (
            f"mla_decode_{self.dtype}{causal}_{self.batch}x{self.rows}x{self.d}x{self.dv}_"
            f"pages_{self.table_pages}x{self.page}_of_{self.pages}"
        )

    @property
    def outputs(self) -> tuple[int, ...]:
        """The results are the last three parameters."""
        return (5, 6, 7)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    def versions(self, chip: str) -> dict[str, int]:
        """How many versions of its buffers are kept on ``chip``.

        Raises:
          OutOfOnChipMemoryError: D is too large.
        """
        _, rows = block_rows(self.rows)
        half = rows // 2
        once = [
            Room(Space.L1, (rows, self.d), self.dtype),
            Room(Space.L1, (rows, COLUMNS), self.dtype),
            Room(Space.UB, (half, self.dv)),
            Room(Space.UB, (5, LANES)),
        ]
        if self.dtype != "float32":
            once.append(Room(Space.UB, (half, self.dv), self.dtype))
        columns = _slice(self.dv, self.dtype)
        twice = {
            "kv_l1": Room(Space.L1, (COLUMNS, self.d), self.dtype),
            "o_l0c": Room(Space.L0C, (rows, columns)),
            "s_l0c": Room(Space.L0C, (rows, COLUMNS)),
            "product": Room(Space.UB, (half, columns)),
            "s": Room(Space.UB, (half, COLUMNS)),
            "p": Room(Space.UB, tiles.packed_shape(half), self.dtype),
        }
        return tiles.versions(self.name, chip, once, twice)

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        blocks, rows = block_rows(self.rows)
        single = [name for name, count in self.versions(chip).items() if count == 1]
        buffers = f"one version of {', '.join(single)}" if single else "double-buffered"
        return f"{self.batch * blocks} blocks of {rows} rows, steps of {COLUMNS} tokens, {buffers}"

    def fingerprint(self, chip: str) -> str:
        """The sources and everything that decides what :meth:`build` makes."""
        return tiles.fingerprint(self, chip, __file__)

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T
        from tilelang.layout import make_ascend_compact_nz_layout

        versions = self.versions(chip)
        dtype, d, dv, page = self.dtype, self.d, self.dv, self.page
        blocks, rows = block_rows(self.rows)
        half = rows // 2
        deep, wide = _slice(d, dtype), _slice(dv, dtype)
        # A step is `count` whole pages, or one of the `parts` of a page that is larger than a step.
        count, parts = max(COLUMNS // page, 1), math.ceil(page / COLUMNS)
        group = count * page
        start, accumulate, finish = _output(half, dtype, dv, wide)

        def end(seen, left, row):
            """How many tokens of a step a row sees: of ``seen``, or of ``left`` in all those that its query does."""
            return T.min(seen, left - (self.queries - 1 - row // self.heads)) if self.queries > 1 else seen

        softmax = _softmax(half, dtype, self.scale, end)
        shapes = {"q": (self.batch, self.rows, d), "cache": (self.pages, page, d), "out": (self.batch, self.rows, dv)}
        q_type, cache_type, out_type = (T.Tensor(shape, dtype) for shape in shapes.values())
        sink_type, largest_type, lse_type = (T.Tensor((self.batch, self.rows), "float32") for _ in range(3))

        @T.prim_func
        def mla_decode(
            q: q_type,
            cache: cache_type,
            table: T.Tensor((self.batch, self.table_pages), "int32"),
            lengths: T.Tensor((self.batch,), "int32"),
            sink: sink_type,
            out: out_type,
            largest: largest_type,
            lse: lse_type,
        ):
            with T.MixedKernel(self.batch * blocks) as (block, unit):
                q_l1 = T.alloc_l1((rows, d), dtype)
                kv_l1 = T.alloc_l1((COLUMNS, d), dtype)
                p_l1 = T.alloc_l1((rows, COLUMNS), dtype)
                q_l0 = T.alloc_l0a((rows, deep), dtype)
                k_l0 = T.alloc_l0b((COLUMNS, deep), dtype)
                p_l0 = T.alloc_l0a((rows, COLUMNS), dtype)
                v_l0 = T.alloc_l0b((COLUMNS, wide), dtype)
                s_l0c = T.alloc_l0c((rows, COLUMNS), "float32")
                o_l0c = T.alloc_l0c((rows, wide), "float32")
                s = T.alloc_shared((half, COLUMNS), "float32")
                p = T.alloc_shared(tiles.packed_shape(half), dtype)
                product = T.alloc_shared((half, wide), "float32")
                o = T.alloc_shared((half, dv), "float32")
                result = o if dtype == "float32" else T.alloc_shared((half, dv), dtype)
                m = T.alloc_shared((LANES,), "float32")
                total = T.alloc_shared((LANES,), "float32")
                alpha = T.alloc_shared((LANES,), "float32")
                sums = T.alloc_shared((LANES,), "float32")
                sinks = T.alloc_shared((LANES,), "float32")
                T.annotate_layout({p: make_ascend_compact_nz_layout(p)})
                buffers = {"kv_l1": kv_l1, "s_l0c": s_l0c, "o_l0c": o_l0c, "s": s, "p": p, "product": product}
                T.annotate_buffer_versions(
                    {buffers[name]: number for name, number in versions.items()} | {q_l0: 2, k_l0: 2, v_l0: 2}
                )
                b = block // blocks
                row = block % blocks * rows
                mine = row + unit * half  # the first row of the vector unit
                length = T.max(T.min(lengths[b], self.table_pages * page), 0)
                T.copy(q[b, row : row + rows, 0:d], q_l1)
                T.copy(sink[b, mine : mine + half], sinks[0:half])
                start(o, m, total)
                steps = length // group * parts + T.ceildiv(length % group, COLUMNS)
                for step in T.Pipelined(steps, num_stages=2, annotations={"multi_buffer_eligible": [s_l0c]}):
                    first = step % parts * COLUMNS
                    left = length - step // parts * group - first
                    seen = T.min(T.min(left, group - first), COLUMNS)
                    if seen < COLUMNS:
                        T.fill(kv_l1, 0)
                    for i in T.serial(count):
                        entry = T.max(T.min(table[b, step // parts * count + i], self.pages - 1), 0)
                        tokens = T.max(T.min(seen - i * page, min(page, COLUMNS)), 0)
                        T.copy(cache[entry, first : first + tokens, 0:d], kv_l1[i * page : i * page + tokens, 0:d])
                    for i in T.serial(d // deep):
                        T.copy(q_l1[:, i * deep : (i + 1) * deep], q_l0)
                        T.copy(kv_l1[:, i * deep : (i + 1) * deep], k_l0)
                        T.gemm(q_l0, k_l0, s_l0c, transpose_B=True, clear_accum=i == 0)
                    T.dual_copy(s_l0c, s)
                    softmax(s, m, total, sums, alpha, p, seen, left, mine)
                    T.dual_copy(p[0:half, 0:COLUMNS], p_l1)
                    T.copy(p_l1, p_l0)
                    for i in T.serial(dv // wide):
                        T.copy(kv_l1[:, i * wide : (i + 1) * wide], v_l0)
                        T.gemm(p_l0, v_l0, o_l0c, clear_accum=True)
                        T.dual_copy(o_l0c, product)
                        accumulate(o, product, alpha, i * wide)
                finish(o, m, total, sums, sinks, result)
                T.dual_copy(result, out[b, row : row + rows, 0:dv])
                T.copy(m[0:half], largest[b, mine : mine + half])
                T.copy(sums[0:half], lse[b, mine : mine + half])

        return mla_decode


def _slice(size: int, dtype: str) -> int:
    """The largest part of a row of ``size`` numbers that divides it, is of whole tiles of the cube, and is short."""
    most = _SLICE_BYTES // tiling.itemsize(dtype)
    return max(n for n in range(ALIGNMENT, most + 1, ALIGNMENT) if size % n == 0)


def _softmax(half: int, dtype: str, scale: float, end: Any) -> Any:
    """What the vector units do between the two products of a step, of which a row sees ``end(seen, left, row)``."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    place, pack = tiles.packing(dtype, half)

    @T.macro
    def softmax(s, m, total, sums, alpha, p, seen, left, first):
        """The new maxima and sums, what the old ones count for now, and the probabilities in the cube's blocks."""
        with T.SimdVF():
            full = S.pset(32)
            unseen = S.vdup(-T.infinity("float32"), "float32", full)
            old = S.vld(m[0])
            for row in range(half):
                near = S.update_mask(T.max(end(seen, left, first + row), 0), 32)
                far = S.update_mask(T.max(end(seen, left, first + row) - LANES, 0), 32)
                x = S.vsel(S.vmuls(S.vld(s[row, 0]), T.float32(scale), full), unseen, near)
                y = S.vsel(S.vmuls(S.vld(s[row, LANES]), T.float32(scale), full), unseen, far)
                S.vsts(s[row, 0], x, full)
                S.vsts(s[row, LANES], y, full)
                S.vsts(sums[row], S.vcmax(S.vmax(x, y, full), full), full, "ONEPT_B32")
            S.mem_bar("VST_VLD")
            current = S.vmax(old, S.vld(sums[0]), full)
            worth = S.vexpdif(old, current, full)
            S.vsts(m[0], current, full)
            S.vsts(alpha[0], worth, full)
            S.mem_bar("VST_VLD")
            at = place(p, 0)
            beside = place(p, LANES)
            for row in range(half):
                maximum = S.vld(m[row], "BRC_B32")
                x = S.vexpdif(S.vld(s[row, 0]), maximum, full)
                y = S.vexpdif(S.vld(s[row, LANES]), maximum, full)
                S.vsts(sums[row], S.vcadd(S.vadd(x, y, full), full), full, "ONEPT_B32")
                pack(x, y, at, beside)
            S.mem_bar("VST_VLD")
            S.vsts(total[0], S.vadd(S.vmul(S.vld(total[0]), worth, full), S.vld(sums[0]), full), full)

    return softmax


def _output(half: int, dtype: str, dv: int, wide: int) -> tuple[Any, Any, Any]:
    """How the output, ``wide`` columns at a time, is cleared, added to and divided."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    store = vectors.store(dtype)

    @T.macro
    def start(o, m, total):
        """Nothing seen yet. The lowest number, not -inf: of a row that sees nothing the differences are defined."""
        with T.SimdVF():
            full = S.pset(32)
            lanes = S.update_mask(wide, 32)
            zero = S.vdup(0.0, "float32", full)
            S.vsts(m[0], S.vdup(tiles.LOWEST, "float32", full), full)
            S.vsts(total[0], zero, full)
            for row in range(half):
                for column in range(0, dv, wide):
                    S.vsts(o[row, column], zero, lanes)

    @T.macro
    def accumulate(o, product, alpha, column):
        """The output so far, less for what the maxima have grown, and that of the step."""
        with T.SimdVF():
            full = S.pset(32)
            lanes = S.update_mask(wide, 32)
            for row in range(half):
                kept = S.vmul(S.vld(o[row, column]), S.vld(alpha[row], "BRC_B32"), full)
                S.vsts(o[row, column], S.vadd(kept, S.vld(product[row, 0]), full), lanes)

    @T.macro
    def finish(o, m, total, lse, sinks, result):
        """The results. The sum of a row that sees any token is at least that of its largest, 1."""
        with T.SimdVF():
            full = S.pset(32)
            lanes = S.update_mask(wide, 32)
            sums = S.vld(total[0])
            blind = S.vcmps(sums, T.float32(0), full, "eq")
            logarithm = S.vadd(S.vld(m[0]), S.vln(sums, full), full)
            S.vsts(lse[0], S.vsel(S.vdup(T.infinity("float32"), "float32", full), logarithm, blind), full)
            sunk = S.vexpdif(S.vld(sinks[0]), S.vld(m[0]), full)
            S.vsts(total[0], S.vadd(S.vmaxs(sums, T.float32(1), full), sunk, full), full)
            S.vsts(m[0], S.vsel(S.vdup(-T.infinity("float32"), "float32", full), S.vld(m[0]), blind), full)
            S.mem_bar("VST_VLD")
            for row in range(half):
                divisor = S.vld(total[row], "BRC_B32")
                for column in range(0, dv, wide):
                    store(result, row, column, S.vdiv(S.vld(o[row, column]), divisor, full), lanes)

    return start, accumulate, finish
