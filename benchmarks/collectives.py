"""``glass.sharding``'s collectives against JAX's own, on 8 host devices and on 8 simulated ranks."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import measure
from benchmarks.measure import Report, Verdict
from glass_jax import sharding

RANKS = 8
SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
ALGORITHMS = {
    "all_reduce": ("mesh", "halving_doubling", "ring"),
    "all_gather": ("mesh", "halving_doubling", "ring"),
    "reduce_scatter": ("mesh", "halving_doubling", "ring"),
    "all_to_all": ("mesh", "bruck", "pairwise"),
}
NAMES = {"all_reduce": "psum", "all_gather": "all_gather", "reduce_scatter": "psum_scatter", "all_to_all": "all_to_all"}


def on_devices() -> list[Report]:
    """Every collective and size, in a process with 8 host devices: all-reduce is promised, the others are shown."""
    code = "from benchmarks import collectives; collectives.measured()"
    times = json.loads(measure.python(code, {"JAX_NUM_CPU_DEVICES": str(RANKS)}))
    reports = []
    for (collective, size), seconds in (((*title.split(", "),), sides) for title, sides in times.items()):
        promise = ("at most", 2.0) if collective == "all_reduce" else None
        reports.append(
            Report(f"{collective} of {size}, {RANKS} host devices", seconds, [_verdict(collective, seconds, promise)])
        )
    return reports


def simulated() -> list[Report]:
    """All-reduce of 1 MiB among 8 simulated ranks: faster than psum under vmap."""
    mesh = sharding.SimulatedMesh({"x": RANKS})
    sides = {
        _name("all_reduce", way): _program(mesh.shard_map, "all_reduce", SIZES["1 MiB"], way)
        for way in ("xla", *ALGORITHMS["all_reduce"])
    }
    seconds = measure.interleaved(sides, seconds=0.5)
    verdict = _verdict("all_reduce", seconds, ("at most", 1.0))
    return [Report(f"all_reduce of 1 MiB, {RANKS} simulated ranks", seconds, [verdict])]


def measured() -> None:
    """Prints the times of every collective and size on this process's devices, as JSON."""
    mesh = jax.make_mesh((RANKS,), ("x",), axis_types=(AxisType.Auto,))

    def shard_map(f, **specs):
        return jax.shard_map(f, mesh=mesh, **specs)

    times = {}
    for collective, ways in ALGORITHMS.items():
        for title, nbytes in SIZES.items():
            place = NamedSharding(mesh, P("x"))
            sides = {
                _name(collective, way): _program(shard_map, collective, nbytes, way, place) for way in ("xla", *ways)
            }
            times[f"{collective}, {title}"] = measure.interleaved(sides, seconds=0.4)
    print(json.dumps(times))


def _name(collective: str, way: str) -> str:
    return f"jax {NAMES[collective]}" if way == "xla" else way


def _program(shard_map, collective: str, nbytes: int, way: str, place: NamedSharding | None = None):
    """A call of the collective; ``nbytes`` is the size of a rank's input, or, of all_gather, of its output."""
    share = nbytes // (RANKS if collective == "all_gather" else 1)
    x = jax.random.normal(jax.random.key(0), (RANKS * share // 4,), jnp.float32)
    x = x if place is None else jax.device_put(x, place)

    def run(x):
        return getattr(sharding, collective)(x, "x", algorithm=way).ravel()

    program = jax.jit(shard_map(run, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    return lambda: program(x)


def _verdict(collective: str, seconds: dict[str, float], promise: tuple | None) -> Verdict:
    ours = {name: time for name, time in seconds.items() if not name.startswith("jax ")}
    best = min(ours, key=ours.__getitem__)
    return Verdict(
        f"best of ours ({best}) over jax {NAMES[collective]}",
        ours[best] / seconds[f"jax {NAMES[collective]}"],
        promise=promise,
    )
