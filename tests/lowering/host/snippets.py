"""Small pieces of Ascend C, written by hand and run by the host runtime: many in one kernel, one in each block."""

import ctypes
import dataclasses
import hashlib
import importlib.util
import json
import pathlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

from glass_jax.lowering import cache
from glass_jax.lowering.host import adapt

RUNTIME = pathlib.Path(adapt.__file__).parent / "runtime"
TEMPLATES = pathlib.Path(importlib.util.find_spec("tilelang").submodule_search_locations[0]) / "src"
FLAGS = (
    "-std=c++20",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-O1",
)

RACES, BOUNDS, UNWRITTEN = 1, 2, 4
POLICIES = range(4)


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("result", ctypes.c_uint32),
    )


_Report = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)


class _Launch(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("num_buffers", ctypes.c_uint32),
        ("block_dim", ctypes.c_uint32),
        ("dynamic_ub_bytes", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("checks", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("report", _Report),
        ("context", ctypes.c_void_p),
    )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a launch returned and found."""

    status: int
    findings: list[dict]

    def rules(self, block: int | None = None) -> set[str]:
        return {f["rule"] for f in self.findings if block is None or f.get("block") == block}


def _run(command: Sequence[object]) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


def _runtime() -> pathlib.Path:
    """The folder with the runtime's library and precompiled header."""
    files = sorted(p for p in RUNTIME.rglob("*") if p.is_file())
    key = hashlib.sha256(b"".join(p.read_bytes() for p in files) + repr(FLAGS).encode()).hexdigest()[:16]
    folder = cache.cache_dir() / f"host-snippets-{key}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            work = pathlib.Path(made) / "runtime"
            work.mkdir()
            for source in RUNTIME.glob("*.cc"):
                _run(["g++", *FLAGS, "-fvisibility=default", "-O3", "-c", source, "-o", work / f"{source.stem}.o"])
            library = work / f"libglass_host_{key}.so"
            _run(
                [
                    "g++",
                    "-shared",
                    *work.glob("*.o"),
                    "-o",
                    library,
                    "-pthread",
                    "-Wl,-z,defs",
                    f"-Wl,-soname,{library.name}",
                ]
            )
            header = work / "kernel.h.gch"
            _run(
                ["g++", *FLAGS, "-x", "c++-header", "-I", RUNTIME, "-I", TEMPLATES, RUNTIME / "kernel.h", "-o", header]
            )
            try:
                work.rename(folder)
            except OSError:
                assert folder.exists()  # another process was faster
    return folder


def compiled(source: str) -> ctypes.CDLL:
    """A kernel's shared object, compiled once for each source and runtime."""
    folder = _runtime()
    text = adapt.translation_unit(source)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    library = folder / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as made:
            unit, result = pathlib.Path(made) / "kernel.cc", pathlib.Path(made) / "kernel.so"
            unit.write_text(text)
            runtime = next(folder.glob("libglass_host_*.so"))
            link = ["-L", folder, f"-l:{runtime.name}", f"-Wl,-rpath,{folder}", "-Wl,-z,defs"]
            _run(["g++", *FLAGS, "-shared", "-I", folder, "-I", RUNTIME, "-I", TEMPLATES, unit, "-o", result, *link])
            result.rename(library)
    return ctypes.CDLL(str(library))


def launch(
    library: ctypes.CDLL,
    arguments: Mapping[str, np.ndarray],
    results: Sequence[str],
    blocks: int,
    *,
    policy: int = 0,
    seed: int = 0,
    checks: int = RACES | BOUNDS | UNWRITTEN,
    threads: int = 1,
) -> Outcome:
    """Runs a kernel on arrays, in place; scalars are arrays of one element."""
    buffers = (_Buffer * len(arguments))(
        *(_Buffer(name.encode(), a.ctypes.data, a.nbytes, name in results) for name, a in arguments.items())
    )
    findings: list[dict] = []
    report = _Report(lambda _, text: findings.append(json.loads(text)))
    request = _Launch(1, buffers, len(arguments), blocks, 0, policy, seed, checks, threads, report, None)
    return Outcome(library.glass_host_launch(ctypes.byref(request)), findings)


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
    outcome = launch(compiled(text), {"x": x, "y": y}, ["y"], len(regions), checks=RACES | BOUNDS)
    assert outcome.status == 0 and not outcome.findings, outcome
    return dict(zip(regions, y, strict=True))
