"""Flash attention, forward: a kernel in TileLang's Ascend language, as a user of the library would write it.

Each block takes 128 queries of one head and goes over the keys 128 at a time. The cube multiplies; each of the two
vector units does the softmax of 64 queries, a register for 64 keys, and leaves the probabilities in the blocks of 32
bytes that the cube reads, so that nothing is rearranged on the way back to L1. Of the keys gone over so far a query
keeps the largest score ``m``, the sum ``total`` of ``exp(s - m)`` and the sum ``o`` of ``exp(s - m) v`` (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022).
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import functools
import math
from typing import Any

import jax

import glass_jax as glass

HEAD_DIM = 128
SCALE = 1 / math.sqrt(HEAD_DIM)
TILE = 128  # queries of a block, and keys of a step
ROWS = TILE // 2  # queries of a vector unit
LANES = 64  # float32 elements of a register
# From one block of 32 bytes to the next of the same row there is a row more than the tile has, as TileLang's copy of
# packed tiles wants it: the eight blocks of a row lie in eight banks of the memory.
APART = ROWS + 1


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False) -> jax.Array:
    """``softmax(q k' / sqrt(128)) v`` of every head.

    Args:
      q: ``[H, S, 128]``, float16 or bfloat16.
      k: the same.
      v: the same.
      causal: query i sees the keys 0 to i only.

    Returns:
      ``[H, S, 128]``, the type of ``q``.
    """
    heads, length, _ = q.shape
    kernel = flash_attention(heads, length, str(q.dtype), causal)
    return glass.tilelang_call(kernel, out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype))(q, k, v)


@functools.cache
def flash_attention(heads: int, length: int, dtype: str, causal: bool = False) -> Any:
    """The kernel as a ``T.prim_func`` of q, k, v and out, each ``[heads, length, 128]`` of ``dtype``."""
    import tilelang.ascend.language as T
    from tilelang.layout import make_ascend_compact_nz_layout

    tiles = math.ceil(length / TILE)
    hide, softmax = _softmax(length, dtype, causal)
    start, accumulate, finish = _output(dtype)
    # One type for each parameter: those of one type object would be one array.
    q_type, k_type, v_type, out_type = (T.Tensor((heads, length, HEAD_DIM), dtype) for _ in range(4))

    @T.prim_func
    def attention_forward(q: q_type, k: k_type, v: v_type, out: out_type):
        with T.MixedKernel(heads * tiles) as (block, unit):
            q_l1 = T.alloc_l1((TILE, HEAD_DIM), dtype)
            k_l1 = T.alloc_l1((TILE, HEAD_DIM), dtype)
            v_l1 = T.alloc_l1((HEAD_DIM, TILE), dtype)
            p_l1 = T.alloc_l1((TILE, TILE), dtype)
            s_l0c = T.alloc_l0c((TILE, TILE), "float32")
            o_l0c = T.alloc_l0c((TILE, HEAD_DIM), "float32")
            s = T.alloc_shared((ROWS, TILE), "float32")
            p = T.alloc_shared((APART, TILE), dtype)
            new = T.alloc_shared((ROWS, HEAD_DIM), "float32")
            o = T.alloc_shared((ROWS, HEAD_DIM), "float32")
            result = T.alloc_shared((ROWS, HEAD_DIM), dtype)
            m = T.alloc_shared((ROWS,), "float32")
            m_old = T.alloc_shared((ROWS,), "float32")
            total = T.alloc_shared((ROWS,), "float32")
            sums = T.alloc_shared((ROWS,), "float32")
            alpha = T.alloc_shared((ROWS,), "float32")
            T.annotate_layout({p: make_ascend_compact_nz_layout(p)})
            T.annotate_buffer_versions({k_l1: 2, v_l1: 2, s_l0c: 2, o_l0c: 2, s: 2, p: 2, new: 2})
            head = block // tiles
            query = block % tiles * TILE
            T.copy(q[head, query : query + TILE, 0:HEAD_DIM], q_l1)
            start(o, m, total)
            for step in T.Pipelined(block % tiles + 1 if causal else tiles, num_stages=2):
                key = step * TILE
                T.copy(k[head, key : key + TILE, 0:HEAD_DIM], k_l1)
                T.gemm(q_l1, k_l1, s_l0c, transpose_B=True, clear_accum=True)
                T.dual_copy(s_l0c, s)
                if causal or length % TILE:
                    hide(s, query, unit, key)
                softmax(s, m, m_old, total, sums, alpha, p)
                T.dual_copy(p[0:ROWS, 0:TILE], p_l1)
                T.copy(v[head, key : key + TILE, 0:HEAD_DIM], v_l1, transpose=True)
                T.gemm(p_l1, v_l1, o_l0c, transpose_B=True, clear_accum=True)
                T.dual_copy(o_l0c, new)
                accumulate(o, new, alpha)
            finish(o, total, result)
            T.dual_copy(result, out[head, query : query + TILE, 0:HEAD_DIM])

    return attention_forward


def _softmax(length: int, dtype: str, causal: bool) -> tuple[Any, Any]:
    """What the vector units do between the two products of a step."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    @T.macro
    def hide(s, query, unit, key):
        """In a tile at the edge, the scores of keys that a query does not see become -inf."""
        with T.SimdVF():
            if key + TILE > (query if causal else length):
                full = S.pset(32)
                unseen = S.vdup(-T.infinity("float32"), "float32", full)
                for row in range(ROWS):
                    end = T.min(query + unit * ROWS + row + 1, length) if causal else length
                    left_seen = S.update_mask(T.max(end - key, 0), 32)
                    right_seen = S.update_mask(T.max(end - key - LANES, 0), 32)
                    S.vsts(s[row, 0], S.vsel(S.vld(s[row, 0]), unseen, left_seen), full)
                    S.vsts(s[row, LANES], S.vsel(S.vld(s[row, LANES]), unseen, right_seen), full)

    @T.macro
    def softmax(s, m, m_old, total, sums, alpha, p):
        """The new maxima and sums, what the old ones count for now, and the probabilities in 16 bits, packed."""
        with T.SimdVF():
            full = S.pset(32)
            full16 = S.pset(16)
            S.vsts(m_old[0], S.vld(m[0]), full)
            for row in range(ROWS):
                largest = S.vmax(S.vld(s[row, 0]), S.vld(s[row, LANES]), full)
                S.vsts(m[row], S.vcmax(largest, full), full, "ONEPT_B32")
            S.mem_bar("VST_VLD")
            S.vsts(m[0], S.vmax(S.vmuls(S.vld(m[0]), T.float32(SCALE), full), S.vld(m_old[0]), full), full)
            S.mem_bar("VST_VLD")
            target = S.make_ubuf_ptr(T.access_ptr(p[0, 0], "w", APART, TILE), dtype)
            for row in range(ROWS):
                maximum = S.vld(m[row], "BRC_B32")
                left = S.vexpdif(S.vmuls(S.vld(s[row, 0]), T.float32(SCALE), full), maximum, full)
                right = S.vexpdif(S.vmuls(S.vld(s[row, LANES]), T.float32(SCALE), full), maximum, full)
                S.vsts(sums[row], S.vcadd(S.vadd(left, right, full), full), full, "ONEPT_B32")
                narrow, _ = S.vdintlv(S.vcvt(left, dtype, full, sat=False), S.vcvt(right, dtype, full, sat=False))
                target = S.vsstb(narrow, target, T.int32(APART << 16 | 1), full16, update=True)
            S.mem_bar("VST_VLD")
            worth = S.vexpdif(S.vld(m_old[0]), S.vld(m[0]), full)
            S.vsts(alpha[0], worth, full)
            S.vsts(total[0], S.vadd(S.vmul(S.vld(total[0]), worth, full), S.vld(sums[0]), full), full)

    return hide, softmax


def _output(dtype: str) -> tuple[Any, Any, Any]:
    """How the output is cleared, added to and divided."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    @T.macro
    def start(o, m, total):
        """Nothing seen yet."""
        with T.SimdVF():
            full = S.pset(32)
            zero = S.vdup(0.0, "float32", full)
            S.vsts(m[0], S.vdup(-T.infinity("float32"), "float32", full), full)
            S.vsts(total[0], zero, full)
            for row in range(ROWS):
                for column in range(0, HEAD_DIM, LANES):
                    S.vsts(o[row, column], zero, full)

    @T.macro
    def accumulate(o, new, alpha):
        """The output so far, less for what the maxima have grown, and that of the tile."""
        with T.SimdVF():
            full = S.pset(32)
            for row in range(ROWS):
                worth = S.vld(alpha[row], "BRC_B32")
                for column in range(0, HEAD_DIM, LANES):
                    kept = S.vmul(S.vld(o[row, column]), worth, full)
                    S.vsts(o[row, column], S.vadd(kept, S.vld(new[row, column]), full), full)

    @T.macro
    def finish(o, total, result):
        """The output in 16 bits."""
        with T.SimdVF():
            full = S.pset(32)
            for row in range(ROWS):
                divisor = S.vld(total[row], "BRC_B32")
                for column in range(0, HEAD_DIM, LANES):
                    mean = S.vdiv(S.vld(o[row, column]), divisor, full)
                    S.vsts(result[row, column], S.vcvt(mean, dtype, full, sat=False), full, "PK_B32")

    return start, accumulate, finish
