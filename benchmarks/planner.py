"""The planner against published measurements, how fast it plans, and how much overlap it finds; ``python -m
benchmarks.planner`` prints the comparison row by row.

``data/published_comm.csv`` holds the published numbers, each with its source. A prediction uses the described machine
(``glass_jax/sharding/topologies.json``) and the sizes that the source gives, nothing fitted to any row.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import pathlib
import re
import statistics
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.measure import Report, Verdict
from glass_jax import text
from glass_jax.sharding import overlap_plan, planner, report, simulate
from glass_jax.sharding import topology as topologies
from glass_jax.sharding.network import Network

DATA = pathlib.Path(__file__).parent / "data" / "published_comm.csv"

# Which described machine each is, by how the source names it.
MACHINES = {"H800": "h800", "SM90": "h800", "SM100": "b200", "Ascend A3": "a3", "CM384": "a3", "8 NPU": "910b"}

# Bytes of a token of width 7168 on the wire: float8 with a scale for each 128 values and 16 bytes of header, as
# DeepEP's sizes give them; int8 as the authors of CloudMatrix384 give it, about 7.5 KB; bfloat16.
FLOAT8_TOKEN, INT8_TOKEN, BFLOAT16_TOKEN = 7585792 // 1024, 7500, 2 * 7168
TOP_K = 8
REMOTE_ACCESS = {
    "intra-NPU": 2,
    "one switch hop": 16,
    "two switch hops": 768,
}  # ranks of the smallest group with both ends


@dataclasses.dataclass(frozen=True)
class Row:
    """A published number, and what the planner says.

    Attributes:
      group: rows that say the same about the planner.
      what: devices and operation.
      predicted, published: in ``unit``.
      unit: of both.
    """

    group: str
    what: str
    predicted: float
    published: float
    unit: str

    @property
    def ratio(self) -> float:
        """Predicted over published time; of bandwidths the inverse, so that below 1 is faster than was measured."""
        return self.predicted / self.published if self.unit in ("us", "ns") else self.published / self.predicted


def compare() -> tuple[list[Row], list[str]]:
    """Every published number that the planner can express, with its prediction; and names of those it cannot."""
    rows, rest = [], []
    with DATA.open(newline="") as file:
        for line in csv.DictReader(file):
            row = _predict(line)
            rows += [row] if row else []
            rest += [] if row else [f"{line['devices']}: {line['op']}, {line['metric']}"]
    return rows, rest


def _predict(line: dict[str, str]) -> Row | None:
    """A row for a line of the file; None if the planner has no word for it."""
    machine = next((name for prefix, name in MACHINES.items() if line["devices"].startswith(prefix)), None)
    what, published, metric = f"{line['devices']} {line['op']}", float(line["value"]), line["metric"]
    if machine is None or metric not in ("latency", "algbw", "bottleneck_bw", "bw", "rdma_bw", "bw_per_rank"):
        return None
    if line["op"] == "AllReduce":
        nbytes = int(line["size_bytes"])
        what = f"{what} {report.size(nbytes)}"
        seconds = planner.plan("all_reduce", nbytes, machine, ranks=8).seconds
        group = "all-reduce of 8 NPUs, demonstration of hccl_test"
        return _row(group, what, metric, published, seconds, nbytes, line["unit"])
    if (match := re.fullmatch(r"remote access (.*?)( \(.*\))?", line["op"])) and match[1] in REMOTE_ACCESS:
        return _row(
            "remote access, CloudMatrix384", what, metric, published, _access(machine, match[1]), 0, line["unit"]
        )
    ranks = _ranks(line["devices"])
    if ranks is None or not re.search("dispatch|combine", line["op"], re.IGNORECASE):
        return None
    nbytes = _tokens(line) * TOP_K * _token_bytes(line)
    seconds = planner.plan("all_to_all", nbytes, machine, ranks=ranks, algorithm="mesh").seconds
    latency_bound = "bottleneck" not in metric
    mode = "low latency, 128 tokens" if latency_bound else "many tokens"
    where = {"h800": "H800", "b200": "B200", "a3": "A3"}[machine]
    payload = "combine" if "combine" in line["op"] else "dispatch"
    return _row(f"{payload}, {mode}, {where}", what, metric, published, seconds, nbytes, line["unit"])


def _row(group: str, what: str, metric: str, published: float, seconds: float, nbytes: int, unit: str) -> Row:
    """A row in the unit of the source, which prints GiB/s as GB/s in one place."""
    if metric == "latency":
        return Row(group, what, seconds * (1e9 if unit == "ns" else 1e6), published, unit)
    scale, unit = (2**30, "GiB/s") if unit.startswith("GiB") else (1e9, "GB/s")
    return Row(group, f"{what}, {metric}", nbytes / seconds / scale, published, unit)


def _ranks(devices: str) -> int | None:
    """Ranks of ``"EP64"`` or ``"EP8x4"``."""
    match = re.search(r"EP(\d+)(?:x(\d+))?", devices)
    return int(match[1]) * int(match[2] or 1) if match else None


def _tokens(line: dict[str, str]) -> int:
    """Tokens a rank: what the source says of it."""
    if line["metric"] != "bottleneck_bw":
        return 128
    return 8192 if "8K tok/rank" in line["source"] else 4096


def _token_bytes(line: dict[str, str]) -> int:
    if "combine" in line["op"]:
        return BFLOAT16_TOKEN
    return FLOAT8_TOKEN if re.match("H800|SM", line["devices"]) else INT8_TOKEN


@functools.cache
def _access(machine: str, distance: str) -> float:
    """Seconds of one small message between the two ends of the smallest group that spans ``distance``."""
    ranks = REMOTE_ACCESS[distance]
    dst = np.full(ranks, -1)
    dst[0] = ranks - 1
    return simulate.simulate(simulate.one_step(dst), 64, Network(topologies.get(machine), ranks)).seconds


def grouped(rows: Sequence[Row]) -> dict[str, list[float]]:
    """The ratios of each group."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row.ratio)
    return groups


def published() -> list[Report]:
    """Predicted over published, by group."""
    start = time.perf_counter()
    rows, rest = compare()
    seconds = {f"predicting {len(rows)} rows": time.perf_counter() - start}
    verdicts = [
        Verdict(
            f"predicted over published time, {group}",
            statistics.median(ratios),
            remark=f"{min(ratios):.2g} to {max(ratios):.2g}, {len(ratios)} rows",
        )
        for group, ratios in grouped(rows).items()
    ]
    title = f"{len(rows)} published numbers; {len(rest)} more are no measurement of a collective of known size"
    return [Report(title, seconds, verdicts)]


def large() -> list[Report]:
    """How long plans of 16,384 ranks take."""
    seconds = {}
    for collective in ("all_reduce", "all_to_all"):
        start = time.perf_counter()
        planner.plan(collective, 64 << 20, "roce_fat_tree", ranks=16384)
        seconds[f"{collective}, every algorithm"] = time.perf_counter() - start
    return [Report("planning for 16384 ranks on a fat tree", seconds, [])]


def overlap() -> list[Report]:
    """The gradients of a 7B model on a server of 8 910B1, as one would begin and as the planner ends."""
    layers, width, inner, tokens = 32, 4096, 11008, 4096
    weights = 4 * width * width + 3 * width * inner
    backward = 4 * weights * tokens / (0.6 * 363.7e12)  # two products a weight, at 60% of a 910B1's peak
    ways = {
        "ring, a bucket a layer": (1, "ring"),
        "direct on the full mesh, two buckets": (16, "mesh"),
        "direct on the full mesh, a bucket a layer": (1, "mesh"),
    }
    seconds, verdicts = {}, []
    for name, (per_bucket, algorithm) in ways.items():
        work = overlap_plan.GradientBuckets(
            [backward] * layers, [2 * weights] * layers, per_bucket * 2 * weights, algorithm
        )
        found = overlap_plan.plan_overlap(work, "910b", ranks=8)
        seconds[name] = found.seconds
        verdicts.append(Verdict(f"of the communication hidden, {name}", found.overlapped))
    return [
        Report(
            "predicted: backward pass and gradient all-reduce, 7B parameters in bfloat16, 8 x 910B1", seconds, verdicts
        )
    ]


def main() -> None:
    """Prints the comparison."""
    rows, rest = compare()
    cells = [("", "predicted", "published", "unit", "time ratio")]
    for group in grouped(rows):
        cells.append((group, "", "", "", ""))
        for row in (row for row in rows if row.group == group):
            cells.append(
                (f"  {row.what}", f"{row.predicted:.4g}", f"{row.published:.4g}", row.unit, f"{row.ratio:.2f}")
            )
    print(text.table(cells, left=(0, 3)))
    print(f"\nnot compared ({len(rest)}):", *rest, sep="\n  ")


if __name__ == "__main__":
    main()
