"""``moe_dispatch`` and ``moe_combine`` on 8 host devices, against the one-hot einsum and against dense experts.

Each size is measured in a process of its own, which has the devices.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from benchmarks import measure
from benchmarks.measure import Report, Verdict
from glass_jax.sharding.expert_parallel import moe_combine, moe_dispatch

RANKS = 8
TILE = 32  # rows that the layer multiplies at a time
ROOM = {"room for 1.25 of the mean": 1.25, "room for any routing": None}


@dataclasses.dataclass(frozen=True)
class Size:
    """Tokens of a rank, experts of all, choices of a token, features."""

    tokens: int
    experts: int
    k: int
    width: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens a rank, {self.experts} experts, top-{self.k}, width {self.width}, {RANKS} ranks"

    @property
    def rows(self) -> int:
        """Rows of a rank in the mean."""
        return self.tokens * self.k


# With room for any routing, the one-hot masks of the third take seconds and more memory than a test machine has.
SIZES = [Size(256, 32, 4, 256), Size(64, 32, 4, 256), Size(512, 64, 8, 512), Size(32, 64, 8, 1024)]
# Of this little data, the messages are all that counts: three of ours against two, and three that carry nothing take as
# long as the whole one-hot exchange. Measured, not promised.
TINY = Size(32, 8, 2, 64)
LAYER = Size(256, 32, 4, 256)


def exchange() -> list[Report]:
    """Dispatch and combine with nothing between."""
    reports = []
    for size in (*SIZES, TINY):
        promise = None if size == TINY else ("at least", 1)
        seconds, memory, dropped = _in_a_process("measure_exchange", size)
        verdicts = []
        for room in ROOM:
            ours, one_hot = f"glass, {room}", f"one-hot, {room}"
            if one_hot not in seconds:
                continue
            remark = f"of {RANKS * size.rows} choices, one-hot drops {dropped[one_hot]}, glass {dropped[ours]}"
            for what, values in (("time", seconds), ("temporary memory", memory)):
                ratio = values[one_hot] / values[ours]
                verdicts.append(Verdict(f"{what}, one-hot over glass, {room}", ratio, promise=promise, remark=remark))
        reports.append(Report(f"dispatch + combine, {size}", seconds, verdicts))
    return reports


def layer() -> list[Report]:
    """With experts: one matrix each."""
    seconds, memory, _ = _in_a_process("measure_layer", LAYER)
    verdicts = [
        Verdict("time, dense over glass", seconds["dense"] / seconds["glass"]),
        Verdict("temporary memory, dense over glass", memory["dense"] / memory["glass"]),
    ]
    return [Report(f"a layer of experts {LAYER.width}x{LAYER.width}, {LAYER}", seconds, verdicts)]


def measure_exchange(*size: int) -> list[Mapping[str, Any]]:
    """Seconds, bytes and dropped choices of each side; for a process with devices."""
    size = Size(*size)
    x, idx, weights, _ = _problem(size)
    found: list[dict[str, Any]] = [{}, {}, {}]
    # Each room by itself: what runs after a program that takes a hundred times the memory finds its own gone.
    for room, factor in ROOM.items():
        capacity = None if factor is None else math.ceil(factor * size.rows)
        programs: dict[str, Callable] = {f"glass, {room}": _Exchange(size, capacity)}
        slots = size.tokens if factor is None else math.ceil(factor * size.rows / size.experts)
        if size.tokens * size.experts * slots <= 2**23:
            programs[f"one-hot, {room}"] = _OneHot(size, slots)
        for whole, part in zip(found, _measure(programs, x, idx, weights), strict=True):
            whole.update(part)
    return found


def measure_layer(*size: int) -> list[Mapping[str, Any]]:
    """The same for a layer."""
    size = Size(*size)
    return _measure({"glass": _Layer(size), "dense": _Dense(size)}, *_problem(size))


@dataclasses.dataclass(frozen=True)
class _Exchange:
    size: Size
    capacity: int | None

    def __call__(self, x, idx, weights):
        rows, handle = moe_dispatch(
            x, idx, weights, axis_name="x", num_experts=self.size.experts, capacity=self.capacity
        )
        return moe_combine(rows, handle), handle.dropped


@dataclasses.dataclass(frozen=True)
class _OneHot:
    """Masks ``[T, E, slots]`` that a product packs tokens with and another unpacks them (GShard, arXiv:2006.16668)."""

    size: Size
    slots: int

    def __call__(self, x, idx, weights):
        chosen = jax.nn.one_hot(idx, self.size.experts)  # no token chooses an expert twice
        mask = chosen.sum(axis=1)
        gate = jnp.einsum("tke,tk->te", chosen, weights)
        slot = jnp.where(mask > 0, jnp.cumsum(mask, axis=0) - 1, self.slots)
        packing = jax.nn.one_hot(slot, self.slots)
        rows = lax.all_to_all(jnp.einsum("tes,th->esh", packing, x), "x", 0, 1, tiled=True)
        back = lax.all_to_all(rows, "x", 1, 0, tiled=True)
        out = jnp.einsum("tes,esh->th", packing * gate[:, :, None], back)
        return out, (mask.sum() - packing.sum()).astype(jnp.int32)[None]


@dataclasses.dataclass(frozen=True)
class _Layer:
    size: Size

    def __call__(self, x, idx, weights, matrices):
        rows, handle = moe_dispatch(x, idx, weights, axis_name="x", num_experts=self.size.experts, alignment=TILE)

        def multiply(i, y):
            expert = jnp.searchsorted(handle.group_starts, i * TILE, side="right") - 1
            tile = lax.dynamic_slice_in_dim(rows, i * TILE, TILE)
            return lax.dynamic_update_slice_in_dim(y, tile @ matrices[expert], i * TILE, axis=0)

        tiles = handle.padded_group_sizes.sum() // TILE
        return moe_combine(lax.fori_loop(0, tiles, multiply, jnp.zeros_like(rows)), handle), handle.dropped


@dataclasses.dataclass(frozen=True)
class _Dense:
    """Every token to every rank, every expert on every token."""

    size: Size

    def __call__(self, x, idx, weights, matrices):
        everything = [lax.all_gather(each, "x", tiled=True) for each in (x, idx, weights)]
        x, idx, weights = everything
        local = idx - lax.axis_index("x") * len(matrices)
        gate = jnp.einsum("tke,tk->te", jax.nn.one_hot(local, len(matrices)), weights)
        y = jnp.einsum("te,etf->tf", gate, jnp.einsum("th,ehf->etf", x, matrices))
        return lax.psum_scatter(y, "x", tiled=True), jnp.zeros_like(idx, shape=1)


def _problem(size: Size) -> tuple[np.ndarray, ...]:
    """Tokens, different choices of each, weights, and the experts' matrices, of all ranks."""
    rng = np.random.default_rng(0)
    tokens = RANKS * size.tokens
    idx = np.argsort(rng.random((tokens, size.experts)), axis=1)[:, : size.k].astype(np.int32)
    x, matrices = (
        rng.standard_normal(shape, np.float32)
        for shape in ((tokens, size.width), (size.experts, size.width, size.width))
    )
    return x, idx, rng.random(idx.shape, np.float32), matrices


def _measure(programs: Mapping[str, Callable], *args: np.ndarray) -> list[Mapping[str, Any]]:
    mesh = jax.make_mesh((RANKS,), ("x",), axis_types=(AxisType.Auto,))
    args = jax.device_put(args, jax.NamedSharding(mesh, jax.P("x")))
    compiled = {
        name: jax.jit(jax.shard_map(program, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x")))
        .lower(*args)
        .compile()
        for name, program in programs.items()
    }
    results = {name: program(*args) for name, program in compiled.items()}
    whole = [np.asarray(out) for out, dropped in results.values() if not dropped.sum()]
    for out in whole:
        np.testing.assert_allclose(out, whole[0], rtol=1e-3, atol=1e-3)
    seconds = measure.interleaved({name: lambda f=program: f(*args) for name, program in compiled.items()}, 0.3)
    memory = {name: program.memory_analysis().temp_size_in_bytes for name, program in compiled.items()}
    return [seconds, memory, {name: int(dropped.sum()) for name, (_, dropped) in results.items()}]


def _in_a_process(function: str, size: Size) -> list[Mapping[str, Any]]:
    arguments = ", ".join(map(str, dataclasses.astuple(size)))
    return json.loads(
        measure.python(
            f"import json, jax; jax.config.update('jax_num_cpu_devices', {RANKS}); "
            f"from benchmarks import expert_parallel; print(json.dumps(expert_parallel.{function}({arguments})))"
        )
    )
