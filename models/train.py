"""The main job, ``python -m models.train``: train a DeepSeek model, check it on the NPU model, export it for Ascend.

A character language model of DeepSeek-V3's architecture (latent attention, mixture of experts) is trained on the Python
language reference over a mesh of simulated CPU devices: data, expert and tensor parallel. Then it continues a prompt
from a paged cache, a training step and a decode step are replayed on the model of the NPU, and the decode step is
exported for Ascend, every kernel verified.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import io
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import AxisType, Mesh

import glass_jax as glass
from glass_jax import config as options_in_force
from models import data, report
from models.deepseek import CONFIGS
from models.training import Checkpoints, Recipe, Trainer

AXES = ("data", "expert", "tensor")
PROMPT = "The following example shows how a function"
RUNS = pathlib.Path("runs")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run is made of: the command's options.

    Attributes:
      recipe: what decides the losses.
      mesh: devices along the axes ``data``, ``expert`` and ``tensor``.
      output: folder for what the run writes.
      checkpoint_every: steps from one checkpoint to the next.
      resume: go on from the last checkpoint in ``output``.
      implementation: of the operations while training; None decides by platform.
      coordinator: address of process 0 if several processes share the mesh, else None.
      processes: how many they are.
      process: the number of this one.
    """

    recipe: Recipe
    mesh: tuple[int, int, int]
    output: pathlib.Path
    checkpoint_every: int
    resume: bool
    implementation: str | None
    coordinator: str | None
    processes: int
    process: int


def parse_mesh(text: str) -> tuple[int, int, int]:
    """``"data=2,expert=2,tensor=2"`` as ``(2, 2, 2)``; an axis that is not named has one device."""
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not data=N, expert=N or tensor=N; write for example data=2,expert=2,tensor=2"
            )
        sizes[name] = int(size)
    return tuple(sizes.values())


def make_mesh(shape: tuple[int, int, int]) -> Mesh:
    """A mesh with axes ``data``, ``expert`` and ``tensor`` over the first devices.

    Raises:
      ValueError: there are not enough devices.
    """
    needed, devices = math.prod(shape), jax.devices()
    if needed > len(devices):
        sizes = ",".join(f"{name}={size}" for name, size in zip(AXES, shape, strict=True))
        raise ValueError(
            f"the mesh {sizes} needs {needed} devices and JAX has {len(devices)} ({devices[0].platform}): ask for a "
            "smaller --mesh, or simulate devices with JAX_PLATFORMS=cpu"
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:needed])


def check(options: Options) -> None:
    """Raises ValueError if the run cannot be: what a mesh does not split, a folder that another run has written to."""
    data_size, expert_size, _ = options.mesh
    if options.recipe.batch % (data_size * expert_size):
        raise ValueError(
            f"a batch of {options.recipe.batch} does not split over data={data_size} x expert={expert_size}: use a "
            f"multiple of {data_size * expert_size}"
        )
    if math.prod(options.mesh) % options.processes:
        raise ValueError(f"{math.prod(options.mesh)} devices do not split over {options.processes} processes")
    if (options.processes > 1) != (options.coordinator is not None):
        raise ValueError("several processes need all of --coordinator HOST:PORT, --processes N and --process I")
    if any((options.output / "checkpoints").glob("*")) and not options.resume:
        raise ValueError(f"{options.output} holds checkpoints: go on with --resume, or choose another --output")


def run(options: Options, mesh: Mesh) -> None:
    """Trains; then, in one process: curve, sample, replay on the NPU model, export."""
    recipe, corpus = options.recipe, data.load()
    first = options.process == 0
    options.output.mkdir(parents=True, exist_ok=True)
    # Every process trains; one of them tells.
    with contextlib.nullcontext() if first else contextlib.redirect_stdout(io.StringIO()):
        print(report.heading("Training"))
        with (
            jax.set_mesh(mesh),
            glass.configure(implementation=options.implementation),
            Checkpoints(options.output / "checkpoints", options.checkpoint_every) as checkpoints,
        ):
            trainer = Trainer(CONFIGS[recipe.config], recipe, corpus)
            if options.resume:
                checkpoints.restore(trainer)
                print(f"resumed after step {len(trainer.history.losses)}")
            print(report.setup(trainer, corpus, mesh), flush=True)
            rate = trainer.train(checkpoints, report=first)
        model, history = trainer.model(), trainer.history
        print(f"held-out loss {history.held_out[0]:.3f} before the first step, ", end="")
        print(f"{history.held_out[recipe.steps]:.3f} nats a character after {recipe.steps} steps")
        for step, loss in enumerate(history.losses[-3:], recipe.steps - 2):
            print(f"step {step}: loss {loss:.6f}")
        curve = options.output / "loss.png"
        if first:
            report.plot(history, data.unigram_entropy(corpus.train), curve)
        print(f"{rate:,.0f} tokens/s; loss curve in {curve}; checkpoints in {options.output / 'checkpoints'}")
        print(report.expert_load(history.load, options.mesh[1]), flush=True)
        if options.processes > 1:
            return  # what follows is of one process, and needs no mesh

        print(report.heading(f"A sample from the paged cache, after {PROMPT!r}"), flush=True)
        print(report.sample(model, PROMPT, recipe.seed), flush=True)

        chip = options_in_force.current().chip
        print(
            report.heading(f"A training step and a decode step, by XLA and by the model of the Ascend {chip}"),
            flush=True,
        )
        ids = data.batch(corpus.train, report.REPLAYED_BATCH, recipe.length, recipe.seed + 1, 0)
        print(report.replay_training(model, ids), flush=True)
        print(report.replay_decoding(model, ids), flush=True)

        print(report.heading(f"Export of the decode step for the Ascend {chip}"), flush=True)
        print(report.export(model, options.output / "ascend"))


def parse(argv: Sequence[str] | None) -> Options:
    """The command line as :class:`Options`."""
    parser = argparse.ArgumentParser(
        prog="python -m models.train", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    recipe = parser.add_argument_group("what decides the losses")
    recipe.add_argument("--config", choices=CONFIGS, default=Recipe.config, help="sizes of the model")
    recipe.add_argument("--steps", type=_positive, default=Recipe.steps, help="optimizer steps")
    recipe.add_argument("--batch", type=_positive, default=Recipe.batch, help="sequences in a step, over all devices")
    recipe.add_argument("--length", type=_positive, default=Recipe.length, help="characters of a sequence")
    recipe.add_argument("--seed", type=int, default=Recipe.seed, help="of parameters, batches and sample")
    recipe.add_argument("--dtype", choices=("float32", "bfloat16"), default=Recipe.dtype, help="of activations")
    parser.add_argument(
        "--mesh",
        type=parse_mesh,
        default="data=2,expert=2,tensor=2",
        metavar="data=N,expert=N,tensor=N",
        help="devices along each axis",
    )
    parser.add_argument(
        "--implementation", choices=("xla", "npu_model"), help="of the operations in training; None: by platform"
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        help=f"folder to write to; None: a new one in {RUNS}, or with --resume the latest",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--checkpoint-every", type=_positive, default=50, metavar="N", help="steps between checkpoints")
    several = parser.add_argument_group("several processes, each with its part of the mesh and the same other options")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    several.add_argument("--processes", type=_positive, default=1, help="how many there are")
    several.add_argument("--process", type=int, default=0, help="the number of this one")
    given = vars(parser.parse_args(argv))
    if given["output"] is None:
        if given["processes"] > 1:
            parser.error("several processes write to one folder: name it with --output")
        given["output"] = _latest_run() if given["resume"] else _new_run(given["config"])
        if given["output"] is None:
            parser.error(f"--resume: there is no run in {RUNS}; name a folder with --output")
    names = [field.name for field in dataclasses.fields(Recipe)]
    return Options(recipe=Recipe(**{name: given.pop(name) for name in names}), **given)


def _new_run(config: str) -> pathlib.Path:
    return RUNS / f"{config}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def _latest_run() -> pathlib.Path | None:
    runs = [path.parent for path in RUNS.glob("*/checkpoints")]
    return max(runs, key=lambda path: path.stat().st_mtime, default=None)


def _positive(text: str) -> int:
    """``text`` as an int of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


@contextlib.contextmanager
def _processes(options: Options) -> Iterator[None]:
    """Starts JAX with this process's devices, together with the other processes if there are several."""
    jax.config.update("jax_num_cpu_devices", math.prod(options.mesh) // options.processes)
    if options.coordinator is None:
        yield
        return
    jax.distributed.initialize(options.coordinator, options.processes, options.process)
    try:
        yield
    finally:
        jax.distributed.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = parse(argv)
    try:
        check(options)
        with _processes(options):
            run(options, make_mesh(options.mesh))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
