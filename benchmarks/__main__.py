"""Runs benchmarks, prints both sides of each, and says which promises are met on this machine.

A benchmark measures and prints: a promise that is not met is no error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Sequence

import jax
import jaxlib

from benchmarks import (
    attention,
    collectives,
    cpu_gemm,
    expert_parallel,
    fused_linear,
    grouped_gemm,
    mla_decode,
    mla_prefill,
    mqa_logits,
    normalization,
    npu_model,
    paged_attention,
    planner,
    scaled_gemm,
    sparse_mla_prefill,
    startup,
    topk,
)
from benchmarks.measure import Report

BENCHMARKS: dict[str, Callable[[], list[Report]]] = {
    "import": startup.imports,
    "compile": startup.compilation,
    "npu_model_gemm": npu_model.gemm,
    "npu_model_attention": attention.npu_model,
    "verify": attention.verification,
    "cpu_gemm_bfloat16": cpu_gemm.bfloat16,
    "cpu_gemm_float32": cpu_gemm.float32,
    "cpu_grouped_gemm": grouped_gemm.cpu,
    "cpu_grouped_gemm_gradients": grouped_gemm.gradients,
    "cpu_scaled_gemm": scaled_gemm.cpu,
    "cpu_quantize": scaled_gemm.quantize,
    "cpu_mla_decode": mla_decode.cpu,
    "cpu_mla_prefill": mla_prefill.forward,
    "cpu_mla_prefill_gradient": mla_prefill.gradient,
    "cpu_sparse_mla_prefill": sparse_mla_prefill.cpu,
    "cpu_mqa_logits": mqa_logits.cpu,
    "cpu_mqa_logits_gradient": mqa_logits.gradient,
    "cpu_paged_attention": paged_attention.cpu,
    "cpu_ln_gelu_linear": fused_linear.before,
    "cpu_linear_ln_gelu": fused_linear.after,
    "cpu_norms": normalization.norms,
    "cpu_swiglu": normalization.swiglu,
    "cpu_topk": topk.cpu,
    "collectives_devices": collectives.on_devices,
    "collectives_simulated": collectives.simulated,
    "expert_exchange": expert_parallel.exchange,
    "expert_layer": expert_parallel.layer,
    "plan_published": planner.published,
    "plan_large": planner.large,
    "plan_overlap": planner.overlap,
}


def machine() -> dict[str, str | int | float | bool]:
    """What the numbers were measured on."""
    return {
        "cpus": os.cpu_count() or 1,
        "avx512_bf16": cpu_gemm.has_bfloat16(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def show(report: Report) -> None:
    """Prints a report: the sides' times, then what follows from them."""
    print(f"  {report.title}")
    width = max(map(len, report.seconds))
    for side, seconds in report.seconds.items():
        print(f"    {side:{width}}  {seconds * 1e3:10.3f} ms")
    for verdict in report.verdicts:
        print(f"    > {verdict}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")

    results = {"machine": machine(), "benchmarks": {}}
    print("machine: " + ", ".join(f"{name} {value}" for name, value in results["machine"].items()))
    verdicts = []
    for name in options.names or BENCHMARKS:
        print(f"\n{name}", flush=True)
        reports = BENCHMARKS[name]()
        for report in reports:
            show(report)
            verdicts += report.verdicts
        results["benchmarks"][name] = [
            dataclasses.asdict(report)
            | {"verdicts": [dataclasses.asdict(verdict) | {"met": verdict.met} for verdict in report.verdicts]}
            for report in reports
        ]
    promises = [verdict.met for verdict in verdicts if verdict.met is not None]
    print(f"\n{sum(promises)} of {len(promises)} promises met")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
