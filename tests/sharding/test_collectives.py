"""Collectives on devices and on simulated ranks: values against NumPy, bits, dtypes, lengths, gradients, messages."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_reference import call, cases, everything, expected, inputs, shift
from jax.sharding import PartitionSpec as P

from glass_jax import errors, sharding
from glass_jax.sharding import algorithms

COLLECTIVES = tuple(algorithms.ALGORITHMS)


def on_devices(shape: dict[str, int]):
    """``shard_map`` over host devices."""
    sizes = tuple(shape.values())
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = jax.sharding.Mesh(devices, tuple(shape))
    return lambda f, **specs: jax.shard_map(f, mesh=mesh, **specs)


def simulated(shape: dict[str, int]):
    return sharding.SimulatedMesh(shape).shard_map


def run_everything(shard_map, ranks: int, chosen: list[tuple[str, str]], **specs) -> dict[str, np.ndarray]:
    """Every case's results, ``[P, ...]``, from one compilation."""
    x = {name: inputs(name, ranks) for name, _ in chosen}
    return jax.jit(shard_map(everything(ranks, "x", chosen), in_specs=P("x"), out_specs=P("x"), **specs))(x)


def check(results: dict[str, np.ndarray], ranks: int) -> None:
    """Against NumPy; and where all ranks have the same result, it must be the same in every bit."""
    for case, result in results.items():
        name, result = case.split()[0], np.asarray(result)
        want = expected(name, inputs(name, ranks))
        if "reduce" in name:
            np.testing.assert_allclose(result, want, rtol=0, atol=ranks * 2e-6 * 4, err_msg=case)
        else:
            np.testing.assert_array_equal(result, want, err_msg=case)
        if name in ("all_reduce", "broadcast", "all_gather") and "xla" not in case:
            np.testing.assert_array_equal(result, np.broadcast_to(result[0], result.shape), err_msg=case)


@pytest.mark.parametrize("ranks", [*range(1, 10), 12, 16])
def test_on_devices(ranks):
    check(run_everything(on_devices({"x": ranks}), ranks, cases(ranks, xla=True)), ranks)


@pytest.mark.parametrize("ranks", [9, 12, 16, 31, 32, 64])
def test_on_simulated_ranks(ranks):
    check(run_everything(simulated({"x": ranks}), ranks, cases(ranks)), ranks)


@pytest.mark.parametrize("ranks", [3, 8])  # not a power of two, and one
def test_devices_and_simulation_agree_in_every_bit(ranks):
    chosen = [(name, way) for name, way in cases(ranks) if name == "all_reduce"]
    device, simulation = (run_everything(place({"x": ranks}), ranks, chosen) for place in (on_devices, simulated))
    chex.assert_trees_all_equal(device, simulation)


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "bruck", "tree", "hierarchical"])
def test_a_thousand_ranks(algorithm):
    x = np.random.default_rng(0).standard_normal((1024, 1500)).astype(np.float32)
    program = simulated({"x": 1024})(
        lambda x: sharding.all_reduce(x, "x", algorithm=algorithm), in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    total = np.asarray(jax.jit(program)(x))
    np.testing.assert_allclose(total[0], x.sum(axis=0, dtype=np.float64), rtol=0, atol=1e-3)
    np.testing.assert_array_equal(total, np.broadcast_to(total[0], total.shape))


@pytest.mark.parametrize("algorithm", ["pairwise", "bruck", "mesh"])
def test_a_thousand_ranks_exchange_blocks(algorithm):
    x = np.random.default_rng(0).integers(0, 100, (1024, 1024, 2), np.int8)
    program = simulated({"x": 1024})(
        lambda x: sharding.all_to_all(x, "x", algorithm=algorithm), in_specs=P("x"), out_specs=P("x")
    )
    got = jax.jit(program)(x.reshape(-1, 2))
    np.testing.assert_array_equal(np.reshape(got, x.shape), x.swapaxes(0, 1))


def test_the_program_does_not_grow_with_the_ranks():
    def lines(ranks: int, algorithm: str, collective=sharding.all_reduce) -> int:
        program = simulated({"x": ranks})(
            lambda x: collective(x, "x", algorithm=algorithm), in_specs=P("x"), out_specs=P("x"), check_vma=False
        )
        return jax.jit(program).lower(jax.ShapeDtypeStruct((ranks * ranks,), jnp.float32)).as_text().count("\n")

    for algorithm in ("ring", "two_way_ring", "hierarchical", "double_tree"):
        assert lines(1024, algorithm) <= 1.1 * lines(64, algorithm)
    assert lines(1024, "pairwise", sharding.all_to_all) <= 1.1 * lines(64, "pairwise", sharding.all_to_all)
    assert lines(1024, "halving_doubling") <= 10 / 6 * 1.1 * lines(64, "halving_doubling")


DTYPES = ("bool", "int8", "uint8", "int32", "float8_e4m3fn", "float16", "bfloat16", "float32", "complex64")


def test_every_dtype():
    chosen = [("all_reduce", "two_way_ring"), ("all_reduce", "mesh"), ("all_gather", "ring"), ("send_recv", "direct")]
    x = {dtype: {name: inputs(name, 3, dtype) for name, _ in chosen} for dtype in DTYPES}
    program = everything(3, "x", chosen)
    run = simulated({"x": 3})(lambda x: {dtype: program(x[dtype]) for dtype in x}, in_specs=P("x"), out_specs=P("x"))
    for dtype, results in jax.jit(run)(x).items():
        for case, result in results.items():
            name = case.split()[0]
            given = x[dtype][name].astype(np.int32) if dtype == "bool" and "reduce" in name else x[dtype][name]
            assert result.dtype == given.dtype
            want = expected(name, given)
            if "reduce" not in name or given.dtype.kind in "iu":
                np.testing.assert_array_equal(result, want, err_msg=f"{case} {dtype}")
            else:  # summed in float32, then rounded once
                tolerance = float(jnp.finfo(dtype).eps) * np.abs(given.astype(np.complex128)).sum(axis=0).max()
                np.testing.assert_allclose(np.asarray(result).astype(want.dtype), want, rtol=0, atol=tolerance)


def test_narrow_sums_are_formed_in_float32():
    x = np.asarray(jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, (1024, 64)), jnp.bfloat16))
    want = x.astype(np.float64).sum(axis=0)

    def error(**options) -> float:
        program = simulated({"x": 1024})(
            lambda x: sharding.all_reduce(x, "x", algorithm="ring", **options), in_specs=P("x"), out_specs=P()
        )
        return float((np.abs(np.asarray(jax.jit(program)(x)[0]).astype(np.float64) - want) / want).max())

    assert error() <= 2**-8  # one rounding to bfloat16
    assert error(accumulate_dtype=jnp.bfloat16) > 0.1


def test_lengths_zero_and_one_and_scalars():
    ranks, ways = (
        4,
        [
            ("all_gather", "two_way_ring"),
            ("broadcast", "double_tree"),
            ("reduce_scatter", "mesh"),
            ("all_to_all", "bruck"),
        ],
    )
    ways += [("all_reduce", way) for way in ("ring", "bruck", "tree", "mesh", "halving_doubling")]
    x = {"empty": np.zeros((ranks, 0), np.float32), "one": np.arange(4, dtype=np.float32)[:, None]}

    def program(x):
        x = {
            "scalar": x["one"][0, 0],
            "empty": x["empty"][0],
            "one": x["one"][0],
            "empty rows": jnp.zeros((8, 0)),
            "no rows": jnp.zeros((0, 3)),
        }
        results = {}
        for name, way in ways:
            for kind, value in x.items():
                if name not in ("reduce_scatter", "all_to_all") or kind in ("empty rows", "no rows"):
                    results[f"{name} {way} {kind}"] = call(name, value, "x", ranks, way)[None]
        return results

    results = jax.jit(simulated({"x": ranks})(program, in_specs=P("x"), out_specs=P("x"), check_vma=False))(x)
    given = {
        "scalar": np.arange(4.0),
        "one": np.arange(4.0)[:, None],
        "empty": np.zeros((4, 0)),
        "empty rows": np.zeros((4, 8, 0)),
        "no rows": np.zeros((4, 0, 3)),
    }
    for case, result in results.items():
        name, _, kind = case.split(maxsplit=2)
        np.testing.assert_array_equal(result, expected(name, given[kind]), err_msg=case)


@pytest.mark.parametrize("axes", [("y", "x"), ("x", "y"), "x", "y"])
@pytest.mark.parametrize("place", [on_devices, simulated])
def test_several_axes_in_any_order_and_one_of_several(axes, place):
    shape = {"x": 2, "y": 4}
    names = (axes,) if isinstance(axes, str) else axes
    ranks = math.prod(shape[name] for name in names)
    ways = ["hierarchical", "bruck", "mesh", "xla"] if len(names) > 1 else ["ring", "mesh"]
    chosen = [(name, way) for name in ("all_gather", "reduce_scatter", "all_to_all") for way in ways]
    chosen = [(name, way) for name, way in chosen if way == "xla" or way in algorithms.ALGORITHMS[name]]
    chosen += [("all_reduce", "halving_doubling"), ("broadcast", "tree"), ("send_recv", "direct")]
    x = np.random.default_rng(1).integers(-9, 9, (2, 4, 16)).astype(np.float32)

    def program(x):
        return {f"{name} {way}": call(name, x[0, 0], axes, ranks, way)[None, None] for name, way in chosen}

    results = jax.jit(place(shape)(program, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False))(x)
    order = ["xy".index(name) for name in names]
    rest = [dim for dim in (0, 1) if dim not in order]
    grouped = x.transpose(*rest, *order, 2).reshape(-1, ranks, 16)
    for case, result in results.items():
        result = np.asarray(result)
        tail = range(2, result.ndim)
        got = result.transpose(*rest, *order, *tail).reshape(-1, ranks, *result.shape[2:])
        want = np.stack([expected(case.split()[0], group) for group in grouped])
        np.testing.assert_array_equal(got, want, err_msg=f"{case} over {axes}")


def test_three_axes_and_batches():
    x = np.random.default_rng(2).integers(-9, 9, (2, 3, 4, 5)).astype(np.float32)
    program = simulated({"a": 2, "b": 3, "c": 4})(
        lambda x: jax.vmap(lambda x: sharding.all_reduce(x, ("a", "c"), algorithm="halving_doubling"))(x),
        in_specs=P("a", "b", "c"),
        out_specs=P(None, "b"),
    )
    np.testing.assert_array_equal(jax.jit(program)(x), x.sum(axis=(0, 2), keepdims=True))


def _transposed(name: str, w: np.ndarray) -> np.ndarray:
    """The transposed collective, in NumPy: what every rank's input adds to the sum of ``w`` times all outputs."""
    ranks = len(w)
    match name:
        case "all_reduce":
            return np.broadcast_to(w.sum(axis=0), w.shape)
        case "broadcast":
            return np.where(np.arange(ranks)[:, None, None] == 1, w.sum(axis=0), 0)
        case "all_gather":
            return w.sum(axis=0)
        case "reduce_scatter":
            return np.broadcast_to(w.reshape(-1, w.shape[-1]), (ranks, w.shape[0] * w.shape[1], w.shape[2]))
        case "all_to_all":
            return expected("all_to_all", w)
        case "send_recv":
            back = np.zeros_like(w)
            for source, target in shift(ranks):
                back[source] = w[target]
            return back
    raise AssertionError(name)


@pytest.mark.parametrize(("place", "check_vma"), [(on_devices, True), (on_devices, False), (simulated, True)])
def test_gradients(place, check_vma):
    ranks = 4
    chosen = [(name, way) for name in COLLECTIVES for way in ("ring", "bruck", "mesh", "direct", "xla")]
    chosen = [case for case in chosen if case in cases(ranks, xla=True)]
    f = place({"x": ranks})(everything(ranks, "x", chosen), in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    x = {name: inputs(name, ranks) for name in COLLECTIVES}
    rng = np.random.default_rng(3)
    w = jax.tree.map(lambda y: rng.standard_normal(y.shape).astype(np.float32), jax.eval_shape(f, x))

    def gradient(x):  # of the inputs of each case on its own
        many = {f"{name} {way}": x[name] for name, way in chosen}

        def loss(many):
            ys = {}
            for case, value in many.items():
                ys[case] = one(case)(value)
            return sum(jnp.sum(w[case] * y + 0.5 * y**2) for case, y in ys.items())

        return jax.grad(loss)(many)

    def one(case):
        name, way = case.split()
        return place({"x": ranks})(
            lambda x: call(name, x[0], "x", ranks, way)[None], in_specs=P("x"), out_specs=P("x"), check_vma=check_vma
        )

    tangents = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(np.float32), x)
    gradients, second = jax.jit(lambda x, t: jax.jvp(gradient, (x,), (t,)))(x, tangents)
    for case in gradients:
        name = case.split()[0]
        want = _transposed(name, w[case] + expected(name, x[name]))
        np.testing.assert_allclose(gradients[case], want, rtol=0, atol=2e-4, err_msg=case)
        want = _transposed(name, expected(name, tangents[name]))
        np.testing.assert_allclose(second[case], want, rtol=0, atol=2e-4, err_msg=case)


def test_gradient_of_a_replicated_result_sends_nothing():
    def loss(x):
        return jnp.sum(sharding.all_reduce(x, "x", algorithm="ring") ** 2)

    f = on_devices({"x": 4})(jax.grad(loss), in_specs=P("x"), out_specs=P("x"))
    text = jax.jit(f).lower(jnp.ones(8)).as_text()
    assert text.count("stablehlo.collective_permute") == 2  # the forward pass's loops; none backward
    np.testing.assert_array_equal(f(jnp.ones(8)), np.full(8, 8.0))


def test_narrow_gradients_are_summed_in_float32():
    x = np.asarray(jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, (256, 256)), jnp.bfloat16))

    def loss(x, w):
        return jnp.sum(sharding.all_gather(x[0], "x", algorithm="ring").ravel() * w[0])

    f = simulated({"x": 256})(jax.grad(loss), in_specs=P("x"), out_specs=P("x"))
    gradient = np.asarray(jax.jit(f)(np.zeros((256, 1), x.dtype), x)).astype(np.float64).ravel()
    np.testing.assert_allclose(gradient, x.astype(np.float64).sum(axis=0), rtol=2**-8)


def _permutes(text: str) -> list[tuple[int, int]]:
    """(times, bytes) of every collective-permute of a compiled program, by the trip counts of the loops they are in."""
    bodies = dict(re.findall(r"body=%?([\w.\-]+).*?\"known_trip_count\":\{\"n\":\"(\d+)\"\}", text))
    found, times = [], 1
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            times = int(bodies.get(header[1], 1))
        if permute := re.search(r"= (f32|bf16)\[([\d,]*)\]\S* collective-permute(?:-start)?\(", line):
            size = math.prod(int(n) for n in permute[2].split(",") if n)
            found.append((times, size * {"f32": 4, "bf16": 2}[permute[1]]))
    return found


@pytest.mark.parametrize(
    ("collective", "algorithm", "operations"),
    [
        ("all_reduce", "ring", 2),
        ("all_reduce", "two_way_ring", 4),
        ("all_reduce", "hierarchical", 4),
        ("all_reduce", "halving_doubling", 6),
        ("all_reduce", "bruck", 6),
        ("all_reduce", "tree", 6),
        ("reduce_scatter", "ring", 1),
        ("all_gather", "halving_doubling", 3),
        ("broadcast", "tree", 3),
        ("all_to_all", "bruck", 3),
        ("all_to_all", "pairwise", 7),
        ("send_recv", "direct", 1),
    ],
)
def test_compiled_messages_are_the_schedules(collective, algorithm, operations):
    ranks, elements = 8, 8 * 48
    f = on_devices({"x": ranks})(
        lambda x: call(collective, x, "x", ranks, algorithm), in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    text = jax.jit(f).lower(jax.ShapeDtypeStruct((ranks * elements,), jnp.float32)).compile().as_text()
    found = _permutes(text)
    assert len(found) == operations
    if collective != "send_recv":
        schedule = algorithms.build(collective, algorithm, ranks, root=1 if collective == "broadcast" else 0)
        counts = [(phase.repeat, transfer.count) for phase in schedule.phases for transfer in phase.transfers]
        want = sum(repeat * count for repeat, count in counts) * schedule.chunk_size(elements * 4)
        assert sum(times * size for times, size in found) == want
        if (collective, algorithm) in (("all_reduce", "ring"), ("all_reduce", "halving_doubling")):
            assert want == 2 * elements * 4 * (ranks - 1) // ranks


def test_auto_is_one_of_the_algorithms_everywhere():
    f = on_devices({"x": 8})(lambda x: sharding.all_reduce(x, "x"), in_specs=P("x"), out_specs=P())
    device = f(np.arange(80, dtype=np.float32))
    simulation = simulated({"x": 8})(lambda x: sharding.all_reduce(x, "x"), in_specs=P("x"), out_specs=P())(
        np.arange(80, dtype=np.float32)
    )
    np.testing.assert_array_equal(device, simulation)
    np.testing.assert_array_equal(device, np.arange(80).reshape(8, 10).sum(axis=0))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda x: sharding.all_reduce(x, "z"), "no mesh axis 'z'; the axes here are 'x'"),
        (lambda x: sharding.all_reduce(x, ("x", "x")), "each axis once"),
        (lambda x: sharding.all_reduce(x, "x", algorithm="rign"), "no algorithm 'rign'; it has auto, xla, ring"),
        (lambda x: sharding.all_reduce(x.astype(jnp.float16), "x", accumulate_dtype=jnp.bfloat16), "use float32"),
        (lambda x: sharding.reduce_scatter(x, "x"), r"first dimension, 7, is not a multiple of 6; pad it to 12"),
        (lambda x: sharding.all_to_all(x[0], "x"), "a scalar has none"),
        (lambda x: sharding.all_gather(x, "x", algorithm="halving_doubling"), "powers of two"),
        (lambda x: sharding.broadcast(x, "x", root=6), "root 6 is not a rank; the ranks are 0 to 5"),
        (lambda x: sharding.send_recv(x, "x", [(0, 1), (2, 1)]), "rank 1 is sent to twice, by 0 and 2"),
        (lambda x: sharding.send_recv(x, "x", [(0, 1), (0, 2)]), "rank 0 sends twice"),
        (lambda x: sharding.send_recv(x, "x", [(0, 6)]), "0 -> 6 is not between ranks"),
    ],
)
@pytest.mark.parametrize("place", [on_devices, simulated])
def test_errors_before_anything_runs(program, message, place):
    f = place({"x": 6})(program, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with pytest.raises(errors.CollectiveError, match=message):
        jax.eval_shape(f, jax.ShapeDtypeStruct((42,), jnp.float32))


def test_axes_outside_of_any_mesh():
    with pytest.raises(errors.CollectiveError, match="there are none here"):
        sharding.all_reduce(jnp.ones(3), "x")
