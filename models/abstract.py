"""A model on a mesh of devices that are not there: how much memory it takes, and which kernels it launches.

    python -m models.abstract --config v3 --mesh data=4,expert=16,tensor=4

Nothing is allocated: parameters and cache are shapes with a sharding, the mesh has no devices, and the decode step is
lowered for Ascend as it would be on the real machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.typing import DTypeLike

import glass_jax as glass
from models import parameters
from models.deepseek import CONFIGS, DeepSeek, DeepSeekConfig


@dataclasses.dataclass(frozen=True)
class AbstractModel:
    """A model without values: ``nnx.merge(graphdef, state)`` is one, under ``jax.sharding.use_abstract_mesh(mesh)``.

    Attributes:
      mesh: where it is.
      graphdef: its structure.
      state: its parameters, ``jax.ShapeDtypeStruct`` with shardings.
    """

    mesh: AbstractMesh
    graphdef: nnx.GraphDef
    state: nnx.State

    @classmethod
    def create(cls, config: DeepSeekConfig, mesh: AbstractMesh, dtype: DTypeLike = jnp.bfloat16) -> AbstractModel:
        """The model of ``config`` on ``mesh``, whose axes must be Explicit."""
        with jax.sharding.use_abstract_mesh(mesh):
            graphdef, state = nnx.split(nnx.eval_shape(lambda: DeepSeek(config, dtype=dtype, rngs=nnx.Rngs(0))))
        return cls(mesh, graphdef, jax.tree.map(lambda x: _on(mesh, x), state))

    def decode_step(self, sequences: int, pages: int, page_size: int, pages_of_sequence: int) -> tuple[Any, tuple]:
        """The function that decodes a token of each sequence, and its arguments.

        Args:
          sequences: over all devices.
          pages: of the cache, over all devices.
          page_size: tokens of a page.
          pages_of_sequence: columns of the table.
        """

        def step(values, tokens, lengths, cache, table):
            model = nnx.merge(self.graphdef, parameters.from_named(self.state, values))
            return model.decode(tokens, lengths, cache, table)

        with jax.sharding.use_abstract_mesh(self.mesh):
            model = nnx.merge(self.graphdef, self.state)
            cache = jax.eval_shape(lambda: model.empty_cache(pages, page_size))
        shapes = ((sequences, 1), (sequences,), (sequences, pages_of_sequence))
        tokens, lengths, table = (_on(self.mesh, jax.ShapeDtypeStruct(shape, jnp.int32)) for shape in shapes)
        cache = jax.tree.map(lambda x: _on(self.mesh, x), cache)
        return step, (parameters.named(self.state), tokens, lengths, cache, table)


def bytes_on_device(tree: Any) -> int:
    """Bytes that each device holds of arrays with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def report(model: AbstractModel, path: pathlib.Path, *, sequences: int, length: int, page_size: int, chip: str) -> str:
    """Memory on each device and the kernels of a decode step, which goes as a bundle into the folder ``path``."""
    pages_of_sequence = -(-length // page_size)
    step, arguments = model.decode_step(sequences, sequences * pages_of_sequence, page_size, pages_of_sequence)
    values, _, _, cache, _ = arguments
    size = sum(x.size for x in values.values())
    lines = [
        f"{size / 1e9:.2f} billion parameters on {model.mesh.size} devices",
        f"on each device: {bytes_on_device(values) / 2**30:.2f} GiB of parameters, "
        f"{bytes_on_device(cache) / 2**30:.2f} GiB of cache for {sequences} sequences of {length} tokens",
    ]
    with jax.sharding.use_abstract_mesh(model.mesh), glass.configure(chip=chip):
        bundle = glass.export(step, *arguments, path=path)
        violations = glass.verify(step, *arguments, chip=chip)
    kernels = json.loads((bundle / "manifest.json").read_text())["kernels"]
    lines += [f"{len(kernels)} kernels, {len(violations)} violations of the rules of the {chip}"]
    lines += [f"  {name}" for name in sorted(kernel["entry"] for kernel in kernels.values())]
    return "\n".join([*lines, *map(str, violations)])


def _on(mesh: AbstractMesh, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """``x`` on ``mesh``: as it is split, or whole on each device."""
    spec = getattr(x.sharding, "spec", jax.P())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))


def _mesh(text: str) -> AbstractMesh:
    """``"data=4,expert=16"`` as a mesh with Explicit axes."""
    try:
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh; write for example data=4,expert=16,tensor=4") from None
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m models.abstract",
        description="Memory and kernels of a model's decode step on devices that are not there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", choices=CONFIGS, default="v3", help="the model")
    parser.add_argument("--mesh", type=_mesh, default="data=4,expert=16,tensor=4", help="devices along each axis")
    parser.add_argument("--sequences", type=int, default=1024, help="that are decoded together, on all devices")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence that the cache has room for")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page")
    parser.add_argument("--chip", default="950DT", help="what the kernels are for")
    parser.add_argument("--output", type=pathlib.Path, default="runs/abstract", help="folder for the exported step")
    options = parser.parse_args(argv)
    model = AbstractModel.create(CONFIGS[options.config], options.mesh)
    sizes = {"sequences": options.sequences, "length": options.length, "page_size": options.page_size}
    print(report(model, options.output, chip=options.chip, **sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
