"""Faults of order, bounds and unwritten bytes are found by the host runtime and named; sound code has no findings."""

import dataclasses
import re
import shutil

import numpy as np
import pytest
import snippets

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")

AREA = 4096  # bytes of global memory that each case reads, and that it writes

_KERNEL = """#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
#include <tl_templates/ascend/gemm.h>
#include <tl_templates/ascend/dcache_bypass.h>
#define FLAG(from, to) asc_sync_notify(from, to, event_t(0)); asc_sync_wait(from, to, event_t(0));
#define L2 asc_load_l2_cache_mode(0)
#define OUT_L2 asc_store_l2_cache_mode(0)
#define IN(to, at, bytes) asc_copy_gm2ub_align(ub + (to), in + (at), 1, bytes, 0, 0, 0, L2, bytes, bytes);
#define OUT(to, at, bytes) asc_copy_ub2gm_align(out + (to), ub + (at), 1, bytes, OUT_L2, bytes, bytes);
#define BROADCAST(at) simd_inst::vlds_brc_elem<float>((__ubuf__ float*)(ub + (at)), 0)
#define FIRST(at, value) simd_inst::vsts_1st(value, (__ubuf__ float*)(ub + (at)), 0, ALL);
#define LOAD(at) simd_inst::vlds_norm<float>((__ubuf__ float*)(ub + (at)), 0)
#define STORE(at, value, mask) simd_inst::vsts_norm(value, (__ubuf__ float*)(ub + (at)), 0, mask);
#define ALL asc_create_mask_b32(PAT_ALL)
__simd_vf__ inline void doubled(__ubuf__ uint8_t* ub, int32_t from, int32_t to) {{
  STORE(to, simd_inst::vmuls(LOAD(from), 2.0f, ALL, MODE_ZEROING), ALL)
}}

__simd_vf__ inline void partly(__ubuf__ uint8_t* ub, int32_t lanes) {{
  auto sum = simd_inst::vadds(LOAD(0), 1.0f, ALL, MODE_ZEROING);
  auto seven = simd_inst::vdup<float>(7.0f, ALL, MODE_ZEROING);
  auto chosen = simd_inst::vsel(sum, seven, simd_inst::update_mask_b32(lanes));
  STORE(1024, chosen, ALL)
}}

__simd_vf__ inline void stored_and_loaded(__ubuf__ uint8_t* ub, int32_t barrier) {{
  STORE(1024, LOAD(0), ALL)
  if (barrier > 0) {{
    simd_inst::mem_bar(VST_VLD);
  }}
  STORE(2048, LOAD(1024), ALL)
}}

__simd_vf__ inline void beside_each_other(__ubuf__ uint8_t* ub) {{
  for (int32_t i = 0; i < 4; ++i) {{
    FIRST(1024 + i * 4, BROADCAST(i * 4))
    FIRST(2048 + i * 4, BROADCAST(1024 + 16 + i * 4))
  }}
}}

extern "C" __global__ __mix__(1, 2) void cases(__gm__ uint8_t* x, __gm__ uint8_t* y) {{
  asc_init();
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  __cbuf__ uint8_t *l1 = (__cbuf__ uint8_t *)0;
  __gm__ uint8_t* in = x + block_idx * {area};
  __gm__ uint8_t* out = y + block_idx * {area};
  int32_t sid = ASC_IS_AIC ? -1 : asc_get_sub_block_id();
{cases}
}}
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """Code of one block.

    Attributes:
      vector: of the first vector core.
      cube: of the cube core.
      rule: what is to be found; None for sound code.
      finding: fields of the finding.
      words: parts of its sentence.
      status: what the launch would return.
    """

    vector: str = ""
    cube: str = ""
    rule: str | None = None
    finding: dict = dataclasses.field(default_factory=dict)
    words: tuple[str, ...] = ()


_DOUBLED = "IN(0, 0, 256) FLAG(PIPE_MTE2, PIPE_V) doubled(ub, 0, 256); FLAG(PIPE_V, PIPE_MTE3) OUT(0, 256, 256)"

CASES = {
    "sound": Case(_DOUBLED),
    "regions go in order": Case(
        "IN(0, 0, 256) FLAG(PIPE_MTE2, PIPE_V) doubled(ub, 0, 256); doubled(ub, 256, 512);"
        "FLAG(PIPE_V, PIPE_MTE3) OUT(0, 512, 256)"
    ),
    # --- orders that stop
    "wait without set": Case(
        "IN(0, 0, 256) FLAG(PIPE_MTE2, PIPE_V)\n    asc_sync_wait(PIPE_V, PIPE_MTE3,"
        " event_t(5));\n    doubled(ub, 0, 256);",
        rule="deadlock",
        finding={"pipe": "MTE3", "other_pipe": "V", "core": "first vector"},
        words=("flag 5 from V",),
    ),
    "counter that nobody raises": Case(
        cube="asc_sync_intra_wait(PIPE_MTE1, 17);", rule="deadlock", finding={"core": "cube"}, words=("counter 17",)
    ),
    "mutex held by a pipe that waits": Case(
        cube="asc_sync_wait(PIPE_M, PIPE_MTE1, event_t(1)); asc_lock(PIPE_MTE1, 4);"
        " asc_unlock(PIPE_MTE1, 4); asc_lock(PIPE_M, 4);",
        rule="deadlock",
        words=("mutex 4", "flag 1 from M"),
    ),
    "program that waits for ever": Case(
        "asc_sync_wait(PIPE_MTE2, PIPE_S, event_t(2));",
        rule="deadlock",
        finding={"pipe": "S"},
        words=("flag 2 from MTE2",),
    ),
    "program without end": Case("while (1) {\n      asc_sync_pipe(PIPE_MTE2);\n    }", rule="step_limit"),
    # --- flags
    "flag that may be set twice": Case(
        "for (int32_t i = 0; i < 2; ++i) {\n      asc_sync_notify(PIPE_V, PIPE_MTE3, event_t(1));\n"
        "      asc_sync_wait(PIPE_V, PIPE_MTE3, event_t(1));\n    }",
        rule="flag",
        words=("flag 1 from V to MTE3",),
    ),
    "flag set twice": Case(
        "asc_sync_notify(PIPE_V, PIPE_MTE2, event_t(3)); asc_sync_notify(PIPE_V, PIPE_MTE2, event_t(3));"
        "FLAG(PIPE_S, PIPE_V) asc_sync_wait(PIPE_V, PIPE_MTE2, event_t(3));"
        " asc_sync_wait(PIPE_V, PIPE_MTE2, event_t(3));",
        rule="flag",
        words=("flag 3 from V to MTE2", "set again before it was waited for"),
    ),
    "flag left set": Case(
        "asc_sync_notify(PIPE_MTE3, PIPE_MTE2, event_t(1));", rule="flag", words=("flag 1", "still set")
    ),
    "flag that does not exist": Case(
        "asc_sync_notify(PIPE_V, PIPE_MTE2, event_t(8));", rule="flag", words=("id 8", "0 to 7")
    ),
    "counter raised too often": Case(
        "for (int32_t i = 0; i < 16; ++i)"
        " {\n      asc_sync_intra_arrive(PIPE_V, 2);\n    }\n    asc_sync_intra_arrive(PIPE_MTE3, 3);",
        "asc_sync_intra_wait(PIPE_MTE1, 3); FLAG(PIPE_MTE1, PIPE_M)"
        "for (int32_t i = 0; i < 16; ++i) {\n      asc_sync_intra_wait(PIPE_M, 2);\n    }",
        rule=None,  # whether it overflows depends on the order: see the test of it
    ),
    # --- races
    "load not waited for": Case(
        "IN(0, 0, 256)\n    doubled(ub, 0, 256);\n    FLAG(PIPE_V, PIPE_MTE3) OUT(0, 256, 256)",
        rule="race",
        finding={"memory": "UB", "begin": 0, "end": 256},
        words=("asc_copy_gm2ub_align on MTE2", "doubled on V"),
    ),
    "two loads to one address": Case(
        "IN(0, 0, 256)\n    IN(128, 512, 256) FLAG(PIPE_MTE2, PIPE_MTE3) OUT(0, 0, 384)",
        rule="race",
        finding={"pipe": "MTE2", "other_pipe": "MTE2", "begin": 128, "end": 256},
    ),
    "two loads to one address, the second after a barrier": Case(
        "IN(0, 0, 256) asc_sync_pipe(PIPE_MTE2); IN(128, 512, 256) FLAG(PIPE_MTE2, PIPE_MTE3) OUT(0, 0, 384)"
    ),
    "result overwritten while it is stored": Case(
        _DOUBLED + "\n    doubled(ub, 0, 256);",
        rule="race",
        finding={"pipe": "V", "other_pipe": "MTE3", "begin": 256, "end": 512},
    ),
    "cores without a counter": Case(
        "FLAG(PIPE_S, PIPE_V) doubled(ub, 0, 1024); FLAG(PIPE_V, PIPE_MTE3)"
        "asc_copy_ub2l1((__cbuf__ void*)l1, (__ubuf__ void*)(ub + 1024), 1, 8, 0, 0);",
        "FLAG(PIPE_S, PIPE_MTE1) asc_copy_l12l0a((__ca__ half*)0, (__cbuf__ half*)l1, 0, 0, 1, 1, 1, 1);",
        rule="race",
        finding={"memory": "L1"},
        words=("cube core",),
    ),
    "workspace in global memory": Case(
        "IN(0, 0, 256) FLAG(PIPE_MTE2, PIPE_MTE3) OUT(0, 0, 256)\n"
        "    asc_copy_gm2ub_align(ub + 512, out, 1, 256, 0, 0, 0, L2, 256, 256);",
        rule="race",
        finding={"memory": "y", "pipe": "MTE2", "other_pipe": "MTE3"},
    ),
    "workspace in global memory, waited for": Case(
        "IN(0, 0, 256) FLAG(PIPE_MTE2, PIPE_MTE3) OUT(0, 0, 256) FLAG(PIPE_MTE3, PIPE_MTE2)"
        "asc_copy_gm2ub_align(ub + 512, out, 1, 256, 0, 0, 0, L2, 256, 256);"
        "FLAG(PIPE_MTE2, PIPE_MTE3) OUT(512, 512, 256)"
    ),
    "all pipes waited for": Case("IN(0, 0, 256) asc_sync(); doubled(ub, 0, 256); asc_sync(); OUT(0, 256, 256)"),
    "mutexes order": Case(
        "asc_lock(PIPE_MTE2, 1); IN(0, 0, 256) asc_unlock(PIPE_MTE2, 1); asc_lock(PIPE_V, 1);"
        " doubled(ub, 0, 256); asc_unlock(PIPE_V, 1);"
        "asc_lock(PIPE_MTE3, 1); OUT(0, 256, 256) asc_unlock(PIPE_MTE3, 1);"
    ),
    "the program reads what it waited for": Case(
        "IN(0, 0, 256) FLAG(PIPE_MTE2,"
        " PIPE_S)\n    int32_t lanes = ((__ubuf__ int32_t*)ub)[63];\n"
        "    FLAG(PIPE_S, PIPE_MTE2) IN(0, 512, 256)\n"
        "    FLAG(PIPE_MTE2, PIPE_V) partly(ub, lanes); FLAG(PIPE_V, PIPE_MTE3) OUT(0, 1024, 256)"
    ),
    "the program reads what it did not wait for": Case(
        "IN(0, 0, 256)\n    int32_t lanes = ((__ubuf__ int32_t*)ub)[63];\n"
        "    tl::write_gm_bypass_dcache((__gm__ int32_t*)out, lanes);",
        rule="race",
        finding={"memory": "UB", "begin": 252, "end": 256},
    ),
    "load over a store of the region": Case(
        "IN(0, 0, 256) FLAG(PIPE_MTE2, PIPE_V) stored_and_loaded(ub, 0);",
        rule="missing_barrier",
        finding={"begin": 1024, "end": 1280, "pipe": "V"},
    ),
    "load after a barrier of the region": Case("IN(0, 0, 256) FLAG(PIPE_MTE2, PIPE_V) stored_and_loaded(ub, 1);"),
    "elements side by side": Case("IN(0, 0, 256) FLAG(PIPE_MTE2, PIPE_V) beside_each_other(ub);"),
    # --- bounds
    "beyond UB": Case(
        "IN(253952 - 128, 0, 256)", rule="out_of_bounds", finding={"memory": "UB", "begin": 253824, "end": 254080}
    ),
    "register beyond UB": Case(
        "doubled(ub, 0, 253952 - 128);", rule="out_of_bounds", finding={"memory": "UB", "pipe": "V"}
    ),
    "beyond L0A": Case(
        cube="asc_copy_l12l0a((__ca__ half*)(65536 - 512), (__cbuf__ half*)l1, 0, 0, 2, 1, 2, 2);",
        rule="out_of_bounds",
        finding={"memory": "L0A", "begin": 65024, "end": 66048},
    ),
    "before an array": Case("asc_copy_gm2ub_align(ub, x - 32, 1, 64, 0, 0, 0, L2, 64, 64);", rule="out_of_bounds"),
    "beyond an array": Case(
        "asc_copy_gm2ub_align(ub, x + {bytes} - 32, 1, 64, 0, 0, 0, L2, 64, 64);",
        rule="out_of_bounds",
        finding={"memory": "x"},
    ),
    "scalar beyond an array": Case(
        "int32_t far = tl::read_gm_bypass_dcache(((__gm__ int32_t*)x + {bytes} / 4 + 1));\n"
        "    tl::write_gm_bypass_dcache((__gm__ int32_t*)out, far);",
        rule="out_of_bounds",
        finding={"memory": "x", "pipe": "S"},
    ),
    # --- unwritten bytes
    "never written": Case(
        "OUT(0, 512, 256)", rule="unwritten_read", finding={"memory": "UB", "begin": 512, "end": 768}
    ),
    "partly written": Case(
        "IN(0, 0, 192) FLAG(PIPE_MTE2, PIPE_MTE3) OUT(0, 0, 256)",
        rule="unwritten_read",
        finding={"begin": 192, "end": 256},
    ),
    "computed from unwritten bytes": Case(
        "IN(0, 0, 192) FLAG(PIPE_MTE2, PIPE_V) partly(ub, 50); FLAG(PIPE_V, PIPE_MTE3) OUT(0, 1024, 256)",
        rule="unwritten_read",
        finding={"begin": 1024 + 192, "end": 1024 + 200},
    ),
    "unwritten lanes that nothing depends on": Case(
        "IN(0, 0, 192) FLAG(PIPE_MTE2, PIPE_V) partly(ub, 48); FLAG(PIPE_V, PIPE_MTE3) OUT(0, 1024, 256)"
    ),
    "product of unwritten columns": Case(
        cube="asc_set_gm2l1_nz_para(1, 1, 16, 0);"
        "asc_copy_gm2l1_nd2nz((__cbuf__ half*)l1, (__gm__ half*)in, 64, L2, 16, 32, 0, 0);"
        "FLAG(PIPE_MTE2, PIPE_MTE1) asc_copy_l12l0a((__ca__ half*)0, (__cbuf__ half*)l1, 0, 0, 1, 2, 1, 1);"
        "asc_copy_l12l0b((__cb__ half*)0, (__cbuf__ half*)l1, 0, 0, 1, 1, 1, 1); FLAG(PIPE_MTE1, PIPE_M)"
        "asc_mmad((__cc__ float*)0, (__ca__ half*)0, (__cb__ half*)0, 16, 32, 16, 0, true, false,"
        " true); FLAG(PIPE_M, PIPE_FIX)"
        "asc_copy_l0c2gm((__gm__ float*)out, (__cc__ float*)0, 16, 16, 16, 16,"
        " OUT_L2, asc_unit_flag_mode(0),"
        " asc_quant_mode(0), asc_relu_pre_mode(0), 0, 1, 0, 0);",
        rule="unwritten_read",
        finding={"memory": "L0C", "pipe": "FIX"},
    ),
    "result of the array that was not written": Case(
        "asc_copy_gm2ub_align(ub, out + 64, 1, 64, 0, 0, 0, L2, 64, 64); FLAG(PIPE_MTE2, PIPE_MTE3) OUT(0, 0, 64)",
        rule="unwritten_read",
    ),
    # --- calls that cannot be done
    "quantization": Case(
        cube="asc_copy_l0c2gm((__gm__ int8_t*)out, (__cc__ float*)0, 16, 16, 16, 16,"
        " OUT_L2, asc_unit_flag_mode(0),"
        " asc_quant_mode(9), asc_relu_pre_mode(0), 0, 1, 0, 0);",
        rule="call",
        words=("quantization 9",),
    ),
}
BLOCKS = {name: number for number, name in enumerate(CASES)}
BYTES = AREA * len(CASES)


def _source() -> str:
    codes = []
    for name, case in CASES.items():
        for core, code in ((0, case.vector), (-1, case.cube)):
            if code:
                text = re.sub(r"\)$", ");", code.replace("{bytes}", str(BYTES)), flags=re.MULTILINE)
                codes.append(f"  if (block_idx == {BLOCKS[name]} && sid == {core}) {{\n    {text}\n  }}")
    return _KERNEL.format(area=AREA, cases="\n".join(codes))


@pytest.fixture(scope="module")
def library():
    return snippets.compiled(_source())


def _launch(library, **options):
    x = np.zeros((len(CASES), AREA // 4), np.float32)
    x[:] = np.arange(AREA // 4)
    x.view(np.int32)[BLOCKS["the program reads what it waited for"], 63] = 48
    y = np.zeros((len(CASES), AREA), np.uint8)
    return snippets.launch(library, {"x": x, "y": y}, ["y"], len(CASES), **options), x, y.view(np.float32)


@pytest.fixture(scope="module")
def outcomes(library):
    return [_launch(library, policy=policy) for policy in snippets.POLICIES]


def _line(name: str) -> range:
    """Lines of the source that hold a case."""
    lines = _source().splitlines()
    first = next(i for i, line in enumerate(lines, 1) if f"block_idx == {BLOCKS[name]} &&" in line)
    return range(first, first + 12)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rule])
def test_each_fault_is_found_by_name_under_every_policy(outcomes, name):
    case = CASES[name]
    for outcome, _, _ in outcomes:
        found = [f for f in outcome.findings if f.get("block") == BLOCKS[name]]
        rules = {f["rule"] for f in found}
        assert case.rule in rules, found
        assert rules - {case.rule} <= {"flag", "unwritten_read", "deadlock"}, found  # what follows from the fault
        match = [f for f in found if f["rule"] == case.rule and _fits(f, case)]
        assert match, found
        assert all(word in match[0]["what"] for word in case.words), match
        assert match[0]["line"] in _line(name) or "_vf" in match[0]["what"] or match[0]["line"] < _line(name)[0], match


def _fits(found: dict, case: Case) -> bool:
    """A race is told by whoever comes second, and which that is the policy decides."""
    swapped = dict(found, pipe=found.get("other_pipe"), other_pipe=found.get("pipe"))
    return case.finding.items() <= found.items() or (case.rule == "race" and case.finding.items() <= swapped.items())


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if not case.rule and name != "counter raised too often"]
)
def test_sound_code_has_no_findings(outcomes, name):
    for outcome, _, _ in outcomes:
        assert not [f for f in outcome.findings if f.get("block") == BLOCKS[name]]


def test_values_of_sound_code(outcomes):
    for _, x, y in outcomes:
        for name in ("sound", "all pipes waited for", "mutexes order"):
            np.testing.assert_array_equal(y[BLOCKS[name], :64], 2 * x[0, :64])
        lanes = np.where(np.arange(64) < 48, x[0, 128:192] + 1, 7)
        np.testing.assert_array_equal(y[BLOCKS["the program reads what it waited for"], :64], lanes)


def test_a_counter_that_overflows_is_told_where_the_order_makes_it(outcomes):
    block = BLOCKS["counter raised too often"]
    rules = [outcome.rules(block) for outcome, _, _ in outcomes]
    assert {"flag"} in rules, rules


def test_status_says_whether_all_blocks_ended(outcomes):
    assert not any(outcome.ended for outcome, _, _ in outcomes)


def test_without_checks_only_what_stops_the_kernel_or_leaves_memory_is_told(library):
    outcome, _, _ = _launch(library, checks=0)
    assert outcome.rules() == {"deadlock", "step_limit", "flag", "out_of_bounds", "call"}


def test_threads_do_not_matter(library):
    one, _, y = _launch(library, checks=snippets.launching.BOUNDS, threads=1)
    two, _, z = _launch(library, checks=snippets.launching.BOUNDS, threads=3)
    np.testing.assert_array_equal(y.view(np.uint8), z.view(np.uint8))
    # Which array the bytes before another belong to is the allocator's choice.
    elsewhere = BLOCKS["before an array"]
    assert [f for f in one.findings if f["block"] != elsewhere] == [f for f in two.findings if f["block"] != elsewhere]
