"""``mla_prefill``: flash attention on the cube and the vector units.

Each block takes 128 queries of one head and goes over the keys 128 at a time. The cube multiplies; each of the two
vector units does the softmax of 64 queries. Of the keys gone over so far a query keeps the largest score ``m``, the sum
``total`` of ``exp(s - m)`` and the sum ``o`` of ``exp(s - m) v`` (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; Dao et al., "FlashAttention", 2022). Probabilities are rounded to the operands' type and
left in the blocks of 32 bytes that the cube reads, so that nothing is rearranged on the way back to L1.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math
from typing import Any

from glass_jax.hw.ir.program import Space
from glass_jax.lowering.tilelang.kernels import attention_tiles as tiles
from glass_jax.lowering.tilelang.kernels import vectors
from glass_jax.lowering.tilelang.kernels.attention_tiles import COLUMNS, Room
from glass_jax.lowering.tiling import LANES

QUERIES = 128  # of a block
ROWS = QUERIES // 2  # of a vector unit


@dataclasses.dataclass(frozen=True)
class MlaPrefillKernel:
    """The kernel for one shape. Its parameters in global memory, in order, heads beside each other:

    =======  ======================================  =========
    ``q``    ``[batch, q_length, heads * d]``        ``dtype``
    ``k``    ``[batch, k_length, heads * d]``        ``dtype``
    ``v``    ``[batch, k_length, heads * dv]``       ``dtype``
    ``ids``  ``[batch, q_length]``, with segments    int32
    ``out``  ``[batch, q_length, heads * dv]``       ``dtype``
    ``lse``  ``[batch * heads, q_length]``           float32
    =======  ======================================  =========

    Scores, sums and outputs are float32 until they are stored; float32 operands are multiplied as float32.

    Attributes:
      batch, heads, q_length, k_length, d, dv: extents; ``d`` a multiple of 16, ``dv`` of 64.
      dtype: one of ``tiling.DTYPES``.
      scale: what scores are multiplied by.
      causal: query i sees the keys up to ``i + k_length - q_length`` only.
      segments: queries see the keys of their own id only.

    Raises:
      HardwareConstraintError: an extent or dtype is not one of those above.
    """

    batch: int
    heads: int
    q_length: int
    k_length: int
    d: int
    dv: int
    dtype: str
    scale: float
    causal: bool
    segments: bool

    def __post_init__(self) -> None:
        extents = ("batch", "heads", "q_length", "k_length", "d", "dv")
        tiles.check("mla_prefill", self.dtype, **{name: getattr(self, name) for name in extents})

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        flags = [flag for flag in ("causal", "segments") if getattr(self, flag)]
        shape = f"{self.batch}x{self.heads}x{self.q_length}x{self.k_length}x{self.d}x{self.dv}"
        return "_".join(["mla_prefill", self.dtype, *flags, shape])

    @property
    def outputs(self) -> tuple[int, ...]:
        """The results are the last two parameters."""
        return (4, 5) if self.segments else (3, 4)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    @property
    def blocks(self) -> int:
        """Blocks of queries of all heads."""
        return self.batch * self.heads * math.ceil(self.q_length / QUERIES)

    def versions(self, chip: str) -> dict[str, int]:
        """How many versions of its buffers are kept on ``chip``.

        Raises:
          OutOfOnChipMemoryError: the head dimensions are too large.
        """
        once = [
            Room(Space.L1, (QUERIES, self.d), self.dtype),
            Room(Space.UB, (ROWS, self.dv)),
            Room(Space.UB, (8, COLUMNS)),
        ]
        if self.dtype != "float32":
            once.append(Room(Space.UB, (ROWS, self.dv), self.dtype))
        twice = {
            "k_l1": Room(Space.L1, (COLUMNS, self.d), self.dtype),
            "v_l1": Room(Space.L1, (self.dv, COLUMNS), self.dtype),
            "s_l0c": Room(Space.L0C, (QUERIES, COLUMNS)),
            "o_l0c": Room(Space.L0C, (QUERIES, self.dv)),
            "s": Room(Space.UB, (ROWS, COLUMNS)),
            "p": Room(Space.UB, tiles.packed_shape(ROWS), self.dtype),
            "new": Room(Space.UB, (ROWS, self.dv)),
            "p_l1": Room(Space.L1, (QUERIES, COLUMNS), self.dtype),
        }
        if self.segments:
            twice["key_ids"] = Room(Space.UB, (1, COLUMNS), "int32")
        return tiles.versions(self.name, chip, once, twice)

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        single = [name for name, count in self.versions(chip).items() if count == 1]
        buffers = f"one version of {', '.join(single)}" if single else "double-buffered"
        return f"{self.blocks} blocks of {QUERIES} queries, steps of {COLUMNS} keys, {buffers}"

    def fingerprint(self, chip: str) -> str:
        """The sources and everything that decides what :meth:`build` makes."""
        return tiles.fingerprint(self, chip, __file__)

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T

        dtype, segments = self.dtype, self.segments
        q_type, out_type, lse_type = (
            T.Tensor(shape, type_)
            for shape, type_ in (
                ((self.batch, self.q_length, self.heads * self.d), dtype),
                ((self.batch, self.q_length, self.heads * self.dv), dtype),
                ((self.batch * self.heads, self.q_length), "float32"),
            )
        )
        k_type = T.Tensor((self.batch, self.k_length, self.heads * self.d), dtype)
        v_type = T.Tensor((self.batch, self.k_length, self.heads * self.dv), dtype)
        attention = self._attention(self.versions(chip))
        if segments:

            @T.prim_func
            def mla_prefill(
                q: q_type, k: k_type, v: v_type, ids: T.Tensor((self.batch, self.q_length), "int32"),
                out: out_type, lse: lse_type,
            ):  # fmt: skip
                attention(q, k, v, ids, out, lse)

        else:

            @T.prim_func
            def mla_prefill(q: q_type, k: k_type, v: v_type, out: out_type, lse: lse_type):
                attention(q, k, v, None, out, lse)

        return mla_prefill

    def _attention(self, versions: dict[str, int]) -> Any:
        """The kernel as a macro of its parameters."""
        import tilelang.ascend.language as T
        from tilelang.layout import make_ascend_compact_nz_layout

        dtype, d, dv, heads, causal, segments = self.dtype, self.d, self.dv, self.heads, self.causal, self.segments
        q_tiles, k_tiles = math.ceil(self.q_length / QUERIES), math.ceil(self.k_length / COLUMNS)
        ahead = self.k_length - self.q_length
        ragged = self.k_length % COLUMNS > 0
        softmax = _softmax(dtype, self.scale)
        start, accumulate, finish = _output(dtype, dv)

        def end(query):
            return T.min(query + ahead + 1, self.k_length) if causal else self.k_length

        hide = tiles.hiding(ROWS, end, after=False, edges=causal or ragged, segments=segments)

        @T.macro
        def attention(q, k, v, ids, out, lse):
            with T.MixedKernel(self.blocks) as (block, unit):
                q_l1 = T.alloc_l1((QUERIES, d), dtype)
                k_l1 = T.alloc_l1((COLUMNS, d), dtype)
                v_l1 = T.alloc_l1((dv, COLUMNS), dtype)
                p_l1 = T.alloc_l1((QUERIES, COLUMNS), dtype)
                s_l0c = T.alloc_l0c((QUERIES, COLUMNS), "float32")
                o_l0c = T.alloc_l0c((QUERIES, dv), "float32")
                s = T.alloc_shared((ROWS, COLUMNS), "float32")
                p = T.alloc_shared(tiles.packed_shape(ROWS), dtype)
                new = T.alloc_shared((ROWS, dv), "float32")
                o = T.alloc_shared((ROWS, dv), "float32")
                result = o if dtype == "float32" else T.alloc_shared((ROWS, dv), dtype)
                m = T.alloc_shared((ROWS,), "float32")
                m_old = T.alloc_shared((ROWS,), "float32")
                total = T.alloc_shared((ROWS,), "float32")
                sums = T.alloc_shared((1, ROWS), "float32")
                alpha = T.alloc_shared((ROWS,), "float32")
                query_ids = T.alloc_shared((1, ROWS), "int32") if segments else None
                key_ids = T.alloc_shared((1, COLUMNS), "int32") if segments else None
                T.annotate_layout({p: make_ascend_compact_nz_layout(p)})
                buffers = {
                    "k_l1": k_l1, "v_l1": v_l1, "s_l0c": s_l0c, "o_l0c": o_l0c, "s": s, "p": p, "new": new,
                    "p_l1": p_l1, "key_ids": key_ids,
                }  # fmt: skip
                T.annotate_buffer_versions({buffers[name]: count for name, count in versions.items()})
                head = block // q_tiles  # of all heads of the batch
                b = head // heads
                left, left_v = head % heads * d, head % heads * dv
                query = block % q_tiles * QUERIES
                T.copy(q[b, query : query + QUERIES, left : left + d], q_l1)
                if segments:
                    T.dual_copy(ids[b : b + 1, query : query + QUERIES], query_ids)
                start(o, m, total)
                steps = T.max(T.ceildiv(end(query + QUERIES - 1), COLUMNS), 0) if causal else k_tiles
                for step in T.Pipelined(steps, num_stages=2):
                    key = step * COLUMNS
                    T.copy(k[b, key : key + COLUMNS, left : left + d], k_l1)
                    T.gemm(q_l1, k_l1, s_l0c, transpose_B=True, clear_accum=True)
                    T.dual_copy(s_l0c, s)
                    if segments:
                        T.copy(ids[b : b + 1, key : key + COLUMNS], key_ids)
                    with T.SimdVF():
                        hide(s, query + unit * ROWS, key, query_ids, key_ids)
                        softmax(s, m, m_old, total, sums, alpha, p)
                    T.dual_copy(p[0:ROWS, 0:COLUMNS], p_l1)
                    T.copy(v[b, key : key + COLUMNS, left_v : left_v + dv], v_l1, transpose=True)
                    T.gemm(p_l1, v_l1, o_l0c, transpose_B=True, clear_accum=True)
                    T.dual_copy(o_l0c, new)
                    accumulate(o, new, alpha)
                finish(o, m, total, sums, result)
                with T.Task():  # of the scheduler, whose search is the shorter the fewer there are
                    T.dual_copy(result, out[b, query : query + QUERIES, left_v : left_v + dv])
                    T.dual_copy(sums, lse[head : head + 1, query : query + QUERIES])

        return attention


def _softmax(dtype: str, scale: float) -> Any:
    """What the vector units do between the two products of a step."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    place, pack = tiles.packing(dtype, ROWS)

    @T.macro
    def softmax(s, m, m_old, total, sums, alpha, p):
        """The new maxima and sums, what the old ones count for now, and the probabilities in blocks."""
        full = S.pset(32)
        S.vsts(m_old[0], S.vld(m[0]), full)
        for row in range(ROWS):
            largest = S.vmax(S.vld(s[row, 0]), S.vld(s[row, LANES]), full)
            S.vsts(m[row], S.vcmax(largest, full), full, "ONEPT_B32")
        S.mem_bar("VST_VLD")
        S.vsts(m[0], S.vmax(S.vmuls(S.vld(m[0]), T.float32(scale), full), S.vld(m_old[0]), full), full)
        S.mem_bar("VST_VLD")
        at = place(p, 0)
        beside = place(p, LANES)
        for row in range(ROWS):
            maximum = S.vld(m[row], "BRC_B32")
            left = S.vexpdif(S.vmuls(S.vld(s[row, 0]), T.float32(scale), full), maximum, full)
            right = S.vexpdif(S.vmuls(S.vld(s[row, LANES]), T.float32(scale), full), maximum, full)
            S.vsts(sums[0, row], S.vcadd(S.vadd(left, right, full), full), full, "ONEPT_B32")
            pack(left, right, at, beside)
        S.mem_bar("VST_VLD")
        worth = S.vexpdif(S.vld(m_old[0]), S.vld(m[0]), full)
        S.vsts(alpha[0], worth, full)
        S.vsts(total[0], S.vadd(S.vmul(S.vld(total[0]), worth, full), S.vld(sums[0, 0]), full), full)

    return softmax


def _output(dtype: str, dv: int) -> tuple[Any, Any, Any]:
    """How the output is cleared, added to and divided."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    store = vectors.store(dtype)

    @T.macro
    def start(o, m, total):
        """Nothing seen yet. The lowest number, not -inf: of a query that sees nothing the differences are defined."""
        with T.SimdVF():
            full = S.pset(32)
            zero = S.vdup(0.0, "float32", full)
            S.vsts(m[0], S.vdup(tiles.LOWEST, "float32", full), full)
            S.vsts(total[0], zero, full)
            for row in range(ROWS):
                for column in range(0, dv, LANES):
                    S.vsts(o[row, column], zero, full)

    @T.macro
    def accumulate(o, new, alpha):
        """The output so far, less for what the maxima have grown, and that of the tile."""
        with T.SimdVF():
            full = S.pset(32)
            for row in range(ROWS):
                worth = S.vld(alpha[row], "BRC_B32")
                for column in range(0, dv, LANES):
                    kept = S.vmul(S.vld(o[row, column]), worth, full)
                    S.vsts(o[row, column], S.vadd(kept, S.vld(new[row, column]), full), full)

    @T.macro
    def finish(o, m, total, lse, result):
        """The output in the operands' type. The sum of a query that sees any key is at least that of its largest, 1."""
        with T.SimdVF():
            full = S.pset(32)
            sums = S.vld(total[0])
            blind = S.vcmps(sums, T.float32(0), full, "eq")
            logarithm = S.vadd(S.vld(m[0]), S.vln(sums, full), full)
            S.vsts(lse[0, 0], S.vsel(S.vdup(T.infinity("float32"), "float32", full), logarithm, blind), full)
            S.vsts(total[0], S.vmaxs(sums, T.float32(1), full), full)
            S.mem_bar("VST_VLD")
            for row in range(ROWS):
                divisor = S.vld(total[row], "BRC_B32")
                for column in range(0, dv, LANES):
                    store(result, row, column, S.vdiv(S.vld(o[row, column]), divisor, full), full)

    return start, accumulate, finish
