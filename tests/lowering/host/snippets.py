"""Small pieces of Ascend C, written by hand and run by the host runtime: many in one kernel, one in each block."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from glass_jax.lowering.host import build
from glass_jax.lowering.host import launch as launching

POLICIES = [policy for policy in launching.POLICIES if policy.seed == 0]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a launch returned and found."""

    ended: bool
    findings: list[dict]

    def rules(self, block: int | None = None) -> set[str]:
        return {f["rule"] for f in self.findings if block is None or f.get("block") == block}


def compiled(source: str) -> pathlib.Path:
    """A kernel's library, compiled once for each source and runtime."""
    return build.kernel_library(source, "snippets")


def launch(
    library: pathlib.Path, arguments: Mapping[str, np.ndarray], results: Sequence[str], blocks: int, **options: Any
) -> Outcome:
    """Runs a kernel on arrays, in place; scalars are arrays of one element."""
    parameters = [(name, array, name in results) for name, array in arguments.items()]
    return Outcome(*launching.launch(library, parameters, blocks, **options))


IN_BYTES, OUT_BYTES, OUT_OFFSET = 32768, 65536, 65536

_VECTOR = """#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/simd_inst.h>
using namespace simd_inst;
#define IN(T, i) ((__ubuf__ T*)(buf) + (i))
#define OUT(T, i) ((__ubuf__ T*)(buf + {out}) + (i))
#define LOAD(T, i) vlds_norm<T>(IN(T, i), 0)
#define STORE(T, i, value, mask) vsts_norm(value, OUT(T, i), 0, mask)
#define ALL8 asc_create_mask_b8(PAT_ALL)
#define ALL16 asc_create_mask_b16(PAT_ALL)
#define ALL32 asc_create_mask_b32(PAT_ALL)
#define L2 asc_load_l2_cache_mode(0)
#define OUT_L2 asc_store_l2_cache_mode(0)
{regions}
extern "C" __global__ __vector__ void snippets(__gm__ uint8_t* x, __gm__ uint8_t* y) {{
  asc_init();
  __ubuf__ uint8_t *buf = (__ubuf__ uint8_t *)0;
  asc_copy_gm2ub_align(buf, x + block_idx * {inputs}, 1, {inputs}, 0, 0, 0, L2, {inputs}, {inputs});
  asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
  asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
{calls}
  asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
  asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
  asc_copy_ub2gm_align(y + block_idx * {outputs}, buf + {out}, 1, {outputs}, OUT_L2, {outputs}, {outputs});
}}
"""


def run_regions(regions: Mapping[str, tuple[np.ndarray, str]]) -> dict[str, np.ndarray]:
    """Runs regions of vector code, each on its own input, in one kernel.

    Args:
      regions: for each name an array of at most ``IN_BYTES`` bytes, which the region finds at ``IN(type, index)``, and
        its statements, which store at ``OUT(type, index)``.

    Returns:
      For each name the ``OUT_BYTES`` bytes of its results; what it does not store is 0xff.
    """
    texts, calls = [], []
    x = np.zeros((len(regions), IN_BYTES), np.uint8)
    for number, (name, (array, body)) in enumerate(regions.items()):
        texts.append(f"// {name}\n__simd_vf__ inline void region_{number}(__ubuf__ uint8_t* buf) {{\n  {body}\n}}\n")
        calls.append(f"  if (block_idx == {number}) {{\n    region_{number}(buf);\n  }}")
        x[number, : array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    text = _VECTOR.format(
        regions="\n".join(texts), calls="\n".join(calls), out=OUT_OFFSET, inputs=IN_BYTES, outputs=OUT_BYTES
    )
    y = np.zeros((len(regions), OUT_BYTES), np.uint8)
    outcome = launch(compiled(text), {"x": x, "y": y}, ["y"], len(regions), checks=launching.RACES | launching.BOUNDS)
    assert outcome.ended and not outcome.findings, outcome
    return dict(zip(regions, y, strict=True))
