"""A process of a job that runs collectives together; see test_processes.py."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from collective_reference import everything, expected, inputs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from moe_reference import routing

from glass_jax import errors, sharding

CASES = [
    ("all_reduce", "ring"),
    ("all_reduce", "halving_doubling"),
    ("all_reduce", "mesh"),
    ("reduce_scatter", "ring"),
    ("broadcast", "tree"),
    ("all_to_all", "bruck"),
]


EXPERTS, TOKENS, WIDTH = 8, 5, 16


def expert_layer(x, idx, weights):
    """One rank's tokens through experts that multiply by their number, and the gradient of the tokens."""

    def layer(x):
        rows, handle = sharding.moe_dispatch(x, idx, weights, axis_name="x", num_experts=EXPERTS)
        here = len(handle.group_sizes)
        factors = jax.lax.axis_index("x") * here + jnp.arange(here) + 1.0
        ends = handle.group_starts + handle.group_sizes
        expert = jnp.searchsorted(ends, jnp.arange(len(rows)), side="right").clip(max=here - 1)
        return sharding.moe_combine(rows * factors[expert][:, None], handle)

    return layer(x), jax.grad(lambda x: (layer(x) ** 2).sum())(x)


def expert_layer_expected(x, idx, weights):
    chosen = np.where(idx >= 0, weights * (idx + 1), 0).sum(-1, keepdims=True)
    return chosen * x, 2 * chosen**2 * x


def check_experts(mesh: jax.sharding.Mesh, ranks: int) -> None:
    """Values against NumPy, and bits against a simulation."""
    idx, weights = routing(0, ranks, TOKENS, 2, EXPERTS)
    x = np.random.default_rng(1).normal(size=(ranks, TOKENS, WIDTH)).astype(np.float32)
    arguments = [a.reshape(ranks * TOKENS, -1) for a in (x, idx, weights)]
    together = jax.jit(jax.shard_map(expert_layer, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    results = together(*(whole(mesh, a) for a in arguments))
    simulated = sharding.SimulatedMesh({"x": ranks}).shard_map(expert_layer, in_specs=P("x"), out_specs=P("x"))
    for result, alone, want in zip(
        results, jax.jit(simulated)(*arguments), expert_layer_expected(*arguments), strict=True
    ):
        for shard in result.addressable_shards:
            np.testing.assert_allclose(shard.data, want[shard.index], rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(shard.data, np.asarray(alone)[shard.index])
    print("expert parallelism agrees")


def whole(mesh: jax.sharding.Mesh, x: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("x")), lambda index: x[index])


def main(process: int, processes: int, port: int, devices: int) -> None:
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    ranks = processes * devices
    mesh = jax.make_mesh((ranks,), ("x",), axis_types=(AxisType.Auto,))
    program = everything(ranks, "x", CASES)
    x = {name: inputs(name, ranks) for name, _ in CASES}
    together = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    arrays = jax.tree.map(lambda x: whole(mesh, x), x)
    sharding.check_processes(together, arrays)
    results = together(arrays)
    alone = jax.jit(sharding.SimulatedMesh({"x": ranks}).shard_map(program, in_specs=P("x"), out_specs=P("x")))
    alone = alone(x) if process == 0 else None
    for case, result in results.items():
        want = expected(case.split()[0], x[case.split()[0]])
        for shard in result.addressable_shards:
            np.testing.assert_allclose(shard.data, want[shard.index], rtol=0, atol=1e-4, err_msg=case)
            if alone is not None:
                np.testing.assert_array_equal(shard.data, np.asarray(alone[case])[shard.index], err_msg=case)
    print(f"{len(results)} collectives agree")
    check_experts(mesh, ranks)

    try:
        sharding.check_processes(jnp.sin, jax.ShapeDtypeStruct((4 + (process == 1),), jnp.float32))
    except errors.CollectiveError as error:
        print(f"shapes: {error}")
    try:
        sharding.check_processes(jnp.sin if process != 1 else jnp.cos, jax.ShapeDtypeStruct((4,), jnp.float32))
    except errors.CollectiveError as error:
        print(f"programs: {error}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
