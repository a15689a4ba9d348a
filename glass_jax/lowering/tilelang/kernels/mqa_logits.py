"""``mqa_logits``: products of queries and keys on the cube, their sums over the heads on the vector units.

A block takes up to 128 rows, the heads of a few queries of one sequence, and goes over keys 256 at a time, or over a
part of the keys where queries alone would leave cores idle. Each of the two vector units takes all rows and half of the
keys: it sums up a query's heads, times their weights, in registers. Steps whose keys no query of the block sees are
filled with minus infinity and cost a store only.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math
from typing import Any

from glass_jax import errors
from glass_jax.hw import chips
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import artifact, tiling
from glass_jax.lowering.tilelang.kernels import attention_tiles as tiles
from glass_jax.lowering.tilelang.kernels.attention_tiles import Room
from glass_jax.lowering.tiling import LANES

DTYPES = (*tiling.DTYPES, "float8_e4m3fn")
MAX_HEADS = 128  # rows of a block

_KEYS = 256  # of a step
_HALF = _KEYS // 2  # of a vector unit
_ROWS = 16  # of a tile of the cube


def alignment(dtype: str) -> dict[str, int]:
    """Multiples that the number of heads and D must be: 32 bytes of weights, and of a row."""
    return {"heads": chips.C0_BYTES // 4, "d": chips.C0_BYTES // tiling.itemsize(dtype)}


@dataclasses.dataclass(frozen=True)
class MqaLogitsKernel:
    """The kernel for one shape. Its parameters in global memory, in order:

    ===========  =================================  =========
    ``q``        ``[batch, queries * heads, d]``    ``dtype``
    ``k``        ``[batch, keys, d]``               ``dtype``
    ``scale``    ``[batch, keys]``                  float32
    ``weights``  ``[batch, queries * heads]``       float32
    ``starts``   ``[batch, queries]``               int32
    ``ends``     ``[batch, queries]``               int32
    ``out``      ``[batch, queries, keys]``         float32
    ===========  =================================  =========

    Products and sums are float32. Starts and ends may be any numbers.

    Attributes:
      batch, queries, keys: extents, any positive number.
      heads, d: multiples of what :func:`alignment` says, ``heads`` at most :data:`MAX_HEADS`.
      dtype: one of :data:`DTYPES`.

    Raises:
      HardwareConstraintError: an extent or dtype is not one of those above.
    """

    batch: int
    queries: int
    heads: int
    keys: int
    d: int
    dtype: str

    def __post_init__(self) -> None:
        artifact.check_choice("mqa_logits", "dtype", self.dtype, DTYPES)
        extents = {name: getattr(self, name) for name in ("batch", "queries", "heads", "keys", "d")}
        artifact.check_extents("mqa_logits", extents, alignment(self.dtype))
        if self.heads > MAX_HEADS:
            raise errors.HardwareConstraintError(f"mqa_logits kernel: heads={self.heads} is more than {MAX_HEADS}")

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        return f"mqa_logits_{self.dtype}_{self.batch}x{self.queries}x{self.heads}x{self.keys}x{self.d}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """The result is the last parameter."""
        return (6,)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    @property
    def block(self) -> int:
        """Queries of a block."""
        return min(MAX_HEADS // self.heads, self.queries)

    @property
    def rows(self) -> int:
        """Rows of a block, whole tiles of the cube; what is left over is not looked at."""
        return math.ceil(self.block * self.heads / _ROWS) * _ROWS

    def parts(self, chip: str) -> int:
        """How many parts the keys are in, each for a block of its own, so that there are blocks for all cores."""
        blocks = self.batch * math.ceil(self.queries / self.block)
        return min(math.ceil(chips.get(chip).cube_cores / blocks), math.ceil(self.keys / _KEYS))

    def versions(self, chip: str) -> dict[str, int]:
        """How many versions of its buffers are kept on ``chip``.

        Raises:
          OutOfOnChipMemoryError: D is too large.
        """
        once = [
            Room(Space.L1, (self.rows, self.d), self.dtype),
            Room(Space.UB, (self.block, _HALF)),
            Room(Space.UB, (1, self.rows)),
            Room(Space.UB, (2, _padded(self.block))),
        ]
        twice = {
            "k_l1": Room(Space.L1, (_KEYS, self.d), self.dtype),
            "s_l0c": Room(Space.L0C, (self.rows, _KEYS)),
            "s": Room(Space.UB, (self.rows, _HALF)),
            "total": Room(Space.UB, (self.block, _HALF)),
            "scales": Room(Space.UB, (1, _HALF)),
        }
        return tiles.versions(self.name, chip, once, twice)

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        single = [name for name, count in self.versions(chip).items() if count == 1]
        buffers = f"one version of {', '.join(single)}" if single else "double-buffered"
        blocks, parts = self.batch * math.ceil(self.queries / self.block), self.parts(chip)
        return f"{blocks} blocks of {self.block} queries, keys in {parts} parts, steps of {_KEYS} keys, {buffers}"

    def fingerprint(self, chip: str) -> str:
        """The sources and everything that decides what :meth:`build` makes."""
        return artifact.fingerprint(self, (self.versions(chip), self.parts(chip)), __file__, tiles.__file__)

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T

        dtype, heads, d, queries, keys, block, rows = (
            self.dtype, self.heads, self.d, self.queries, self.keys, self.block, self.rows
        )  # fmt: skip
        versions, parts = self.versions(chip), self.parts(chip)
        blocks, steps = math.ceil(queries / block), math.ceil(keys / _KEYS)
        per_part = math.ceil(steps / parts)
        blank, add_up = _vectors(block, heads)
        q_type, k_type = T.Tensor((self.batch, queries * heads, d), dtype), T.Tensor((self.batch, keys, d), dtype)
        scale_type = T.Tensor((self.batch, keys), "float32")
        weights_type = T.Tensor((self.batch, queries * heads), "float32")
        starts_type, ends_type = (T.Tensor((self.batch, queries), "int32") for _ in range(2))

        @T.prim_func
        def mqa_logits(
            q: q_type,
            k: k_type,
            scale: scale_type,
            weights: weights_type,
            starts: starts_type,
            ends: ends_type,
            out: T.Tensor((self.batch, queries, keys), "float32"),
        ):
            with T.MixedKernel(self.batch * blocks * parts) as (core, unit):
                q_l1 = T.alloc_l1((rows, d), dtype)
                k_l1 = T.alloc_l1((_KEYS, d), dtype)
                s_l0c = T.alloc_l0c((rows, _KEYS), "float32")
                s = T.alloc_shared((rows, _HALF), "float32")
                total = T.alloc_shared((block, _HALF), "float32")
                unseen = T.alloc_shared((block, _HALF), "float32")
                scales = T.alloc_shared((_HALF,), "float32")
                w = T.alloc_shared((rows,), "float32")
                first = T.alloc_shared((_padded(block),), "int32")
                end = T.alloc_shared((_padded(block),), "int32")
                buffers = {"k_l1": k_l1, "s_l0c": s_l0c, "s": s, "total": total, "scales": scales}
                T.annotate_buffer_versions({buffers[name]: count for name, count in versions.items()})
                b = core // (blocks * parts)
                query = core // parts % blocks * block
                row = query * heads
                begin = core % parts * per_part
                stop = T.min(begin + per_part, steps)
                lowest = T.alloc_var("int32", init=keys)
                highest = T.alloc_var("int32", init=0)
                for i in T.serial(block):
                    lowest = T.min(lowest, starts[b, T.min(query + i, queries - 1)])
                    highest = T.max(highest, ends[b, T.min(query + i, queries - 1)])
                left = T.min(T.max(lowest // _KEYS, begin), stop)
                right = T.max(T.min(T.ceildiv(highest, _KEYS), stop), left)
                T.copy(q[b, row : row + rows, 0:d], q_l1)
                T.copy(weights[b, row : row + rows], w)
                T.copy(starts[b, query : query + _padded(block)], first)
                T.copy(ends[b, query : query + _padded(block)], end)
                blank(unseen)
                for i in T.serial(stop - begin - (right - left)):
                    step = begin + i + T.if_then_else(begin + i >= left, right - left, 0)
                    key = step * _KEYS + unit * _HALF
                    T.copy(unseen, out[b, query : query + block, key : key + _HALF])
                for step in T.Pipelined(right - left, num_stages=2):
                    key = (left + step) * _KEYS
                    mine = key + unit * _HALF
                    T.copy(k[b, key : key + _KEYS, 0:d], k_l1)
                    T.gemm(q_l1, k_l1, s_l0c, transpose_B=True, clear_accum=True)
                    T.dual_copy(s_l0c, s)
                    T.copy(scale[b, mine : mine + _HALF], scales)
                    add_up(s, w, scales, first, end, total, mine)
                    T.copy(total, out[b, query : query + block, mine : mine + _HALF])

        return mqa_logits


def _padded(queries: int) -> int:
    """Room for a number of each of ``queries``, in whole blocks of 32 bytes."""
    return math.ceil(queries / 8) * 8


def _vectors(block: int, heads: int) -> tuple[Any, Any]:
    """The macros of the vector units.

    ``blank(total)`` makes all of it minus infinity; ``add_up(s, w, scales, first, end, total, key)`` the logits of the
    products ``s`` of ``block`` queries' heads and the keys from number ``key`` on.
    """
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    count = _HALF // LANES

    @T.macro
    def blank(total):
        with T.SimdVF():
            full = S.pset(32)
            for query in range(block):
                for column in range(0, _HALF, LANES):
                    S.vsts(total[query, column], S.vdup(-T.infinity("float32"), "float32", full), full)

    @T.macro
    def add_up(s, w, scales, first, end, total, key):
        with T.SimdVF():
            full = S.pset(32)
            unseen = S.vdup(-T.infinity("float32"), "float32", full)
            for query in range(block):
                sums = S.alloc_local(count, "float32")
                for i in T.unroll(count, explicit=True):
                    sums[i] = S.vdup(0.0, "float32", full)
                for head in range(heads):
                    weight = S.vld(w[query * heads + head], "BRC_B32")
                    for i in T.unroll(count, explicit=True):
                        S.vmula(sums[i], S.vrelu(S.vld(s[query * heads + head, i * LANES]), full), weight, full)
                low, high = S.vld(first[query], "BRC_B32"), S.vld(end[query], "BRC_B32")
                for i in T.unroll(count, explicit=True):
                    column = S.vci(T.int32(key + i * LANES), "int32")
                    seen = S.vcmp(column, high, S.vcmp(column, low, full, "ge"), "lt")
                    logits = S.vmul(sums[i], S.vld(scales[i * LANES]), full)
                    S.vsts(total[query, i * LANES], S.vsel(logits, unseen, seen), full)

    return blank, add_up
