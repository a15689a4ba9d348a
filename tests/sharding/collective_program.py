"""A process of a job that runs collectives together; see test_processes.py."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from collective_reference import everything, expected, inputs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glass_jax import errors, sharding

CASES = [
    ("all_reduce", "ring"),
    ("all_reduce", "halving_doubling"),
    ("all_reduce", "mesh"),
    ("reduce_scatter", "ring"),
    ("broadcast", "tree"),
    ("all_to_all", "bruck"),
]


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
