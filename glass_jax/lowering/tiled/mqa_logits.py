"""``mqa_logits`` on its tile kernel: the heads of a query as rows, heads and D padded to what the hardware takes."""

from __future__ import annotations

import jax

from glass_jax import errors
from glass_jax.lowering.tiled import common
from glass_jax.lowering.tilelang.kernels import mqa_logits as kernels
from glass_jax.lowering.xla import mqa_logits as formula


def mqa_logits(*operands: jax.Array, params) -> jax.Array:
    """The logits by the kernel; operands and ``params`` as in the primitive."""
    if 0 in (size for x in operands for size in x.shape):  # no kernel for nothing
        return formula.mqa_logits(*operands)
    batch, length, keys = formula.batch_shape(*operands), operands[0].shape[-3], operands[1].shape[-2]
    q, kv, kv_scale, weights, starts, ends = formula.fold(*operands)
    (count, queries, heads, d), dtype = q.shape, str(q.dtype)
    if heads > kernels.MAX_HEADS:
        raise errors.UnsupportedError(
            f"mqa_logits: {heads} heads; the kernel takes at most {kernels.MAX_HEADS}. Add the logits of two halves of "
            "the heads, or use implementation='xla'"
        )
    sizes = {"heads": heads, "d": d}
    multiples = kernels.alignment(dtype)
    padded = {name: common.next_multiple(size, multiples[name]) for name, size in sizes.items()}
    common.say_padding("mqa_logits", sizes, padded)
    kernel = kernels.MqaLogitsKernel(count, queries, padded["heads"], kv.shape[1], padded["d"], dtype)
    arguments = (
        common.pad(q, (count, queries, padded["heads"], padded["d"])).reshape(count, -1, padded["d"]),
        common.pad(kv, (*kv.shape[:2], padded["d"])),
        kv_scale,
        common.pad(weights, (count, queries, padded["heads"])).reshape(count, -1),
        starts,
        ends,
    )
    (out,) = common.run(kernel, *arguments, implementation=params.implementation, chip=params.chip)
    return out.reshape(*batch, length, keys)


def check_alignment(heads: int, d: int, dtype: str) -> None:
    """Raises HardwareConstraintError unless the hardware takes the heads and D without padding."""
    common.check_aligned("mqa_logits", {"heads": heads, "d": d}, kernels.alignment(dtype), "blocks of 32 bytes")
