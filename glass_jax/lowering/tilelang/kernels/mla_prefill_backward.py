"""The gradients of ``mla_prefill``: one kernel for those of the queries, one for those of the keys and values.

Both are the same walk. A block takes 64 rows of its own, queries or keys of one head, and goes over 128 of the others
at a time. With the probabilities p = exp(s - lse) computed again, and dp = d_out v', the gradients of the scores are ds
= p (dp - delta) scale, delta being the sum of d_out * out less the gradient of lse; those of the rows are sums over the
steps of ds times the others, and of the values p times d_out (Dao et al., "FlashAttention", 2022). For keys the tiles
of scores are transposed, so that the product with their rows needs no rearranging. No block writes what another does,
so that the result does not depend on their order.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math
from typing import Any

from glass_jax import errors
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import tiling
from glass_jax.lowering.tilelang.kernels import attention_tiles as tiles
from glass_jax.lowering.tilelang.kernels.attention_tiles import COLUMNS, Room
from glass_jax.lowering.tiling import LANES

OWN = 64  # rows of a block
L0B_HALF = 32768  # bytes of one of two versions in L0B
ROWS = OWN // 2  # of a vector unit
OF = ("queries", "keys")


@dataclasses.dataclass(frozen=True)
class MlaPrefillBackwardKernel:
    """The kernel for one shape. Its parameters in global memory, in order, heads beside each other:

    ============  ========================================  ===================
    ``of``        ``"queries"``                             ``"keys"``
    ============  ========================================  ===================
    ``rows``      q                                         k
    ``rows_v``    d_out                                     v
    ``others``    k                                         q
    ``others_v``  v                                         d_out
    ``sums``      ``[batch * heads, 2, ceil128(q_length)]``, float32: lse, +inf beyond ``q_length``, and delta, 0 there
    ``ids``       ``[batch, q_length]``, int32, with segments
    ``d_rows``    gradient of q                             gradient of k
    ``d_rows_v``  absent                                    gradient of v
    ============  ========================================  ===================

    q and k are ``[batch, length, heads * d]`` of ``dtype``, v and d_out ``[batch, length, heads * dv]``, and so are
    their gradients. Sums are float32.

    Attributes:
      of: whose gradients: ``"queries"`` or ``"keys"``.
      batch, heads, q_length, k_length, d, dv, dtype, scale, causal, segments: as in the forward kernel.

    Raises:
      HardwareConstraintError: an extent or dtype is not one of those.
    """

    of: str
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
        if self.of not in OF:
            raise errors.HardwareConstraintError(f"mla_prefill_backward kernel: of={self.of!r}; use one of {OF}")
        extents = ("batch", "heads", "q_length", "k_length", "d", "dv")
        tiles.check("mla_prefill_backward", self.dtype, **{name: getattr(self, name) for name in extents})

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        flags = [flag for flag in ("causal", "segments") if getattr(self, flag)]
        shape = f"{self.batch}x{self.heads}x{self.q_length}x{self.k_length}x{self.d}x{self.dv}"
        return "_".join(["mla_prefill_backward", self.of, self.dtype, *flags, shape])

    @property
    def of_keys(self) -> bool:
        """Whether the rows are keys."""
        return self.of == "keys"

    @property
    def outputs(self) -> tuple[int, ...]:
        """The results are the last parameters."""
        first = 6 if self.segments else 5
        return (first, first + 1) if self.of_keys else (first,)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of rows, and of the others."""
        return (self.k_length, self.q_length) if self.of_keys else (self.q_length, self.k_length)

    @property
    def own_tiles(self) -> int:
        """Blocks of rows of a head."""
        return math.ceil(self.lengths[0] / OWN)

    @property
    def blocks(self) -> int:
        """Blocks of rows of all heads."""
        return self.batch * self.heads * self.own_tiles

    def versions(self, chip: str) -> dict[str, int]:
        """How many versions of its buffers are kept on ``chip``.

        Raises:
          OutOfOnChipMemoryError: the head dimensions are too large.
        """
        gradients = [self.d, self.dv] if self.of_keys else [self.d]
        packed = ["p", "ds"] if self.of_keys else ["ds"]
        once = [
            *(Room(Space.L1, (OWN, width), self.dtype) for width in (self.d, self.dv)),
            *(Room(Space.L0C, (OWN, width)) for width in gradients),
            Room(Space.UB, (8, COLUMNS)),
        ]
        tile = Room(Space.L0C, (OWN, COLUMNS))
        twice = {
            "s_l0c": tile,
            "dp_l0c": tile,
            "others_l1": Room(Space.L1, (COLUMNS, self.d), self.dtype),
            "others_v_l1": Room(Space.L1, (COLUMNS, self.dv), self.dtype),
            "turned_l1": Room(Space.L1, (self.d, COLUMNS), self.dtype),
            "s": Room(Space.UB, (ROWS, COLUMNS)),
            "dp": Room(Space.UB, (ROWS, COLUMNS)),
            **{name: Room(Space.UB, tiles.packed_shape(ROWS), self.dtype) for name in packed},
            **{f"{name}_l1": Room(Space.L1, (OWN, COLUMNS), self.dtype) for name in packed},
        }
        if self.of_keys:
            twice["turned_v_l1"] = Room(Space.L1, (self.dv, COLUMNS), self.dtype)
            twice["sums_ub"] = Room(Space.UB, (2, COLUMNS))
        if self.segments:
            twice["other_ids"] = Room(Space.UB, (1, COLUMNS), "int32")
        return tiles.versions(self.name, chip, once, twice)

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        single = [name for name, count in self.versions(chip).items() if count == 1]
        buffers = f"one version of {', '.join(single)}" if single else "double-buffered"
        return f"{self.blocks} blocks of {OWN} {self.of}, steps of {COLUMNS}, {buffers}"

    def fingerprint(self, chip: str) -> str:
        """The sources and everything that decides what :meth:`build` makes."""
        return tiles.fingerprint(self, chip, __file__)

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T

        def array(length, width):
            return T.Tensor((self.batch, length, self.heads * width), self.dtype)

        own, other = self.lengths
        # One type for each parameter: those of one type object would be one array.
        rows_type, others_type, d_rows_type = array(own, self.d), array(other, self.d), array(own, self.d)
        rows_v_type, others_v_type, d_rows_v_type = array(own, self.dv), array(other, self.dv), array(own, self.dv)
        sums_type = T.Tensor((self.batch * self.heads, 2, math.ceil(self.q_length / COLUMNS) * COLUMNS), "float32")
        ids_type = T.Tensor((self.batch, self.q_length), "int32")
        walk = self._walk(self.versions(chip))
        if self.of_keys and self.segments:

            @T.prim_func
            def backward(
                rows: rows_type, rows_v: rows_v_type, others: others_type, others_v: others_v_type, sums: sums_type,
                ids: ids_type, d_rows: d_rows_type, d_rows_v: d_rows_v_type,
            ):  # fmt: skip
                walk(rows, rows_v, others, others_v, sums, ids, d_rows, d_rows_v)

        elif self.of_keys:

            @T.prim_func
            def backward(
                rows: rows_type, rows_v: rows_v_type, others: others_type, others_v: others_v_type, sums: sums_type,
                d_rows: d_rows_type, d_rows_v: d_rows_v_type,
            ):  # fmt: skip
                walk(rows, rows_v, others, others_v, sums, None, d_rows, d_rows_v)

        elif self.segments:

            @T.prim_func
            def backward(
                rows: rows_type, rows_v: rows_v_type, others: others_type, others_v: others_v_type, sums: sums_type,
                ids: ids_type, d_rows: d_rows_type,
            ):  # fmt: skip
                walk(rows, rows_v, others, others_v, sums, ids, d_rows, None)

        else:

            @T.prim_func
            def backward(
                rows: rows_type, rows_v: rows_v_type, others: others_type, others_v: others_v_type, sums: sums_type,
                d_rows: d_rows_type,
            ):  # fmt: skip
                walk(rows, rows_v, others, others_v, sums, None, d_rows, None)

        return backward

    @property
    def _depth(self) -> int:
        """How deep the parts of a product are, a divisor of all depths: two versions of the widest operand fit L0B."""
        most = L0B_HALF // (max(COLUMNS, self.d, self.dv) * tiling.itemsize(self.dtype))
        return math.gcd(self.d, min(64, 1 << most.bit_length() - 1))

    def _walk(self, versions: dict[str, int]) -> Any:
        """The kernel as a macro of its parameters, None where there is no such one."""
        import tilelang.ascend.language as T
        from tilelang.layout import make_ascend_compact_nz_layout

        dtype, d, dv, heads, of_keys, segments = self.dtype, self.d, self.dv, self.heads, self.of_keys, self.segments
        reach, hide = self._reach()
        gradients = _gradients(dtype, self.scale, of_keys)
        multiply = _product(self._depth)

        @T.macro
        def walk(rows, rows_v, others, others_v, sums, ids, d_rows, d_rows_v):
            with T.MixedKernel(self.blocks) as (block, unit):
                rows_l1, rows_v_l1 = T.alloc_l1((OWN, d), dtype), T.alloc_l1((OWN, dv), dtype)
                others_l1 = T.alloc_l1((COLUMNS, d), dtype)
                others_v_l1 = T.alloc_l1((COLUMNS, dv), dtype)
                turned_l1 = T.alloc_l1((d, COLUMNS), dtype)
                ds_l1 = T.alloc_l1((OWN, COLUMNS), dtype)
                l0a = T.alloc_l0a((OWN, self._depth), dtype)
                l0b = T.alloc_l0b((max(COLUMNS, d, dv), self._depth), dtype)
                s_l0c = T.alloc_l0c((OWN, COLUMNS), "float32")
                dp_l0c = T.alloc_l0c((OWN, COLUMNS), "float32")
                d_rows_l0c = T.alloc_l0c((OWN, d), "float32")
                s = T.alloc_shared((ROWS, COLUMNS), "float32")
                dp = T.alloc_shared((ROWS, COLUMNS), "float32")
                ds = T.alloc_shared(tiles.packed_shape(ROWS), dtype)
                sums_ub = T.alloc_shared((2, COLUMNS if of_keys else ROWS), "float32")
                p = T.alloc_shared(tiles.packed_shape(ROWS), dtype) if of_keys else None
                p_l1 = T.alloc_l1((OWN, COLUMNS), dtype) if of_keys else None
                turned_v_l1 = T.alloc_l1((dv, COLUMNS), dtype) if of_keys else None
                d_rows_v_l0c = T.alloc_l0c((OWN, dv), "float32") if of_keys else None
                own_ids = T.alloc_shared((1, ROWS), "int32") if segments else None
                other_ids = T.alloc_shared((1, COLUMNS), "int32") if segments else None
                T.annotate_layout({x: make_ascend_compact_nz_layout(x) for x in ((ds, p) if of_keys else (ds,))})
                buffers = {
                    "others_l1": others_l1, "others_v_l1": others_v_l1, "turned_l1": turned_l1, "s_l0c": s_l0c,
                    "dp_l0c": dp_l0c, "s": s, "dp": dp, "ds": ds, "p": p, "turned_v_l1": turned_v_l1,
                    "ds_l1": ds_l1, "p_l1": p_l1, "sums_ub": sums_ub, "other_ids": other_ids,
                }  # fmt: skip
                counts = {buffers[name]: count for name, count in versions.items()}
                T.annotate_buffer_versions(counts | {l0a: 2, l0b: 2})
                head = block // self.own_tiles  # of all heads of the batch
                b, left, left_v = head // heads, head % heads * d, head % heads * dv
                own = block % self.own_tiles * OWN
                with T.Task():  # of the scheduler, whose search is the shorter the fewer there are
                    T.copy(rows[b, own : own + OWN, left : left + d], rows_l1)
                    T.copy(rows_v[b, own : own + OWN, left_v : left_v + dv], rows_v_l1)
                if segments or not of_keys:
                    with T.Task():
                        if not of_keys:
                            T.dual_copy(sums[head, 0:2, own : own + OWN], sums_ub)
                        if segments:
                            T.dual_copy(ids[b : b + 1, own : own + OWN], own_ids)
                first, steps = reach(own)
                # The scheduler does not see by itself that the first part of a product clears its sums.
                eligible = [tile for tile in (s_l0c, dp_l0c) if counts[tile] == 2]
                for step in T.Pipelined(steps, num_stages=2, annotations={"multi_buffer_eligible": eligible}):
                    other = (first + step) * COLUMNS
                    end = other + COLUMNS
                    with T.Task():
                        T.copy(others[b, other:end, left : left + d], others_l1)
                        T.copy(others[b, other:end, left : left + d], turned_l1, transpose=True)
                    with T.Task():
                        T.copy(others_v[b, other:end, left_v : left_v + dv], others_v_l1)
                        if of_keys:
                            T.copy(others_v[b, other:end, left_v : left_v + dv], turned_v_l1, transpose=True)
                    multiply(rows_l1, others_l1, s_l0c, l0a, l0b, 0)
                    multiply(rows_v_l1, others_v_l1, dp_l0c, l0a, l0b, 0)
                    with T.Task():
                        T.dual_copy(s_l0c, s)
                        T.dual_copy(dp_l0c, dp)
                    if of_keys or segments:
                        with T.Task():
                            if of_keys:
                                T.copy(sums[head, 0:2, other:end], sums_ub)
                            if segments:
                                T.copy(ids[b : b + 1, other:end], other_ids)
                    with T.SimdVF():
                        hide(s, own + unit * ROWS, other, own_ids, other_ids)
                        gradients(s, dp, sums_ub, ds, p)
                    with T.Task():
                        T.dual_copy(ds[0:ROWS, 0:COLUMNS], ds_l1)
                        if of_keys:
                            T.dual_copy(p[0:ROWS, 0:COLUMNS], p_l1)
                    multiply(ds_l1, turned_l1, d_rows_l0c, l0a, l0b, step)
                    if of_keys:
                        multiply(p_l1, turned_v_l1, d_rows_v_l0c, l0a, l0b, step)
                with T.Task():
                    T.copy(d_rows_l0c, d_rows[b, own : own + OWN, left : left + d])
                    if of_keys:
                        T.copy(d_rows_v_l0c, d_rows_v[b, own : own + OWN, left_v : left_v + dv])

        return walk

    def _reach(self) -> tuple[Any, Any]:
        """Of a block's first row, the first tile of the others and how many; and the macro that hides scores."""
        import tilelang.ascend.language as T

        ahead, causal = self.k_length - self.q_length, self.causal
        count = math.ceil(self.lengths[1] / COLUMNS)

        def seen_from(key):
            return key - ahead

        def end(query):
            return T.min(query + ahead + 1, self.k_length) if causal else self.k_length

        def reach(own):
            if not causal:
                return 0, count
            if self.of_keys:
                first = T.max(seen_from(own), 0) // COLUMNS
                return first, count - first
            # One step at least, which clears the sums of queries that see nothing.
            return 0, T.max(T.ceildiv(end(own + OWN - 1), COLUMNS), 1)

        edges = causal or (not self.of_keys and self.k_length % COLUMNS > 0)
        limit = seen_from if self.of_keys else end
        return reach, tiles.hiding(ROWS, limit, after=self.of_keys, edges=edges, segments=self.segments)


def _product(depth: int) -> Any:
    """The macro ``multiply(a, b, c, l0a, l0b, before)``: c, cleared if ``before`` is 0, and a times b, transposed.

    a and b lie in L1. All products of the kernel pass the same two buffers in L0, in parts of ``depth``: those of
    T.gemm on operands in L1 each divide L0 by their own sizes, and one would overwrite what another still reads.
    """
    import tilelang.ascend.language as T

    @T.macro
    def multiply(a, b, c, l0a, l0b, before):
        columns, k = int(b.shape[0]), int(b.shape[1])
        for part in T.serial(k // depth):
            with T.Task():
                T.copy(a[0:OWN, part * depth : part * depth + depth], l0a)
                T.copy(b[0:columns, part * depth : part * depth + depth], l0b[0:columns, 0:depth])
            T.gemm(l0a, l0b[0:columns, 0:depth], c, transpose_B=True, clear_accum=before + part == 0)

    return multiply


def _gradients(dtype: str, scale: float, of_keys: bool) -> Any:
    """What the vector units do between the products of a step."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    place, pack = tiles.packing(dtype, ROWS)

    @T.macro
    def gradients(s, dp, sums, ds, p):
        """The gradients of the scores and, of keys, the probabilities, in the blocks that the cube reads.

        Keys have the sums of the queries beside each other, one for each column; queries have one for the row.
        """
        full = S.pset(32)
        at = place(ds, 0)
        beside = place(ds, LANES)
        if of_keys:
            at_p = place(p, 0)
            beside_p = place(p, LANES)
            lse_left = S.vld(sums[0, 0])
            lse_right = S.vld(sums[0, LANES])
            delta_left = S.vld(sums[1, 0])
            delta_right = S.vld(sums[1, LANES])
        for row in range(ROWS):
            if not of_keys:
                lse_left = lse_right = S.vld(sums[0, row], "BRC_B32")
                delta_left = delta_right = S.vld(sums[1, row], "BRC_B32")
            left = S.vexpdif(S.vmuls(S.vld(s[row, 0]), T.float32(scale), full), lse_left, full)
            right = S.vexpdif(S.vmuls(S.vld(s[row, LANES]), T.float32(scale), full), lse_right, full)
            if of_keys:
                pack(left, right, at_p, beside_p)
            ds_left = S.vmul(left, S.vsub(S.vld(dp[row, 0]), delta_left, full), full)
            ds_right = S.vmul(right, S.vsub(S.vld(dp[row, LANES]), delta_right, full), full)
            ds_left = S.vmuls(ds_left, T.float32(scale), full)
            ds_right = S.vmuls(ds_right, T.float32(scale), full)
            pack(ds_left, ds_right, at, beside)

    return gradients
