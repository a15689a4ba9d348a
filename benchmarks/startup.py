"""What a process pays before its first kernel: imports, and the compilation of a kernel, cold and from the cache."""

from __future__ import annotations

import json
import statistics
import tempfile

from benchmarks import measure
from benchmarks.measure import Report, Verdict

_IMPORT = "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"

_COMPILE = """
import json, sys, time
from benchmarks import npu_model
from glass_jax.lowering import cache
kernel = npu_model.kernel()
start = time.perf_counter()
cache.compile(kernel, "950DT")
print(json.dumps({"seconds": time.perf_counter() - start, "tilelang": "tilelang" in sys.modules}))
"""


def imports() -> list[Report]:
    """``import glass_jax`` over ``import jax``, each in processes of its own, in turn."""
    seconds: dict[str, list[float]] = {"import jax": [], "import glass_jax": []}
    for _ in range(1 + 7):
        for name, times in seconds.items():
            times.append(float(measure.python(_IMPORT.format(module=name.removeprefix("import ")))))
    # The first process of each fills the disk's cache.
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    extra = medians["import glass_jax"] - medians["import jax"]
    return [Report("importing", medians, [Verdict("glass_jax over jax", extra, "s", ("at most", 0.3))])]


def compilation() -> list[Report]:
    """A kernel's artifact, made by TileLang in an empty cache and then read by other processes."""
    with tempfile.TemporaryDirectory() as cache:
        cold, *cached = (json.loads(measure.python(_COMPILE, {"GLASS_CACHE_DIR": cache})) for _ in range(1 + 5))
    seconds = {"cold: TileLang imported and run": cold["seconds"]}
    seconds["second process: from the cache"] = warm = statistics.median(each["seconds"] for each in cached)
    remark = "imports TileLang" if any(each["tilelang"] for each in cached) else "TileLang not imported"
    verdict = Verdict("from the cache", warm, "s", ("at most", 0.1), remark)
    return [Report("compiling a GEMM kernel", seconds, [verdict])]
