"""The main job, ``python -m models.train``: train a small model, check it against the NPU model, export it for Ascend.

A character language model is trained on the Python language reference, data- and tensor-parallel over a mesh of
simulated CPU devices. Then one step is replayed on the NPU model, and the inference function is exported for Ascend.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
import optax
import tqdm
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import glass_jax as glass
from glass_jax import config
from models import data, report
from models.char_lm import CharLM, Params

AXES = ("data", "tensor")
PROMPT = "The following example shows how a function"
_HELD_OUT_BATCHES = 4  # as many windows as in these judge the model
_EVALUATIONS = 20  # of the held-out loss in the course of training
_LEARNING_RATE = 4e-3


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run is made of: the command's options.

    Attributes:
      steps: optimizer steps.
      batch: windows in a step, over all devices.
      mesh: devices along the axes ``data`` and ``tensor``.
      seed: of the parameters, the batches and the sample.
      output: folder for what the run writes.
      implementation: of the matrix products while training; None decides by platform.
      dtype: of the matrix products' operands.
    """

    steps: int = 1000
    batch: int = 1024
    mesh: tuple[int, int] = (4, 2)
    seed: int = 0
    output: pathlib.Path = pathlib.Path("runs/char_lm")
    implementation: str | None = None
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model.

    Attributes:
      params: its parameters, on the mesh.
      losses: the loss of each step, in nats a character.
      held_out: the held-out loss, in nats a character, by the number of steps taken before it was measured.
      tokens_per_second: characters predicted and learned from in a second of training, compilation not counted.
    """

    params: Params
    losses: list[float]
    held_out: dict[int, float]
    tokens_per_second: float


def parse_mesh(text: str) -> tuple[int, int]:
    """``"data=4,tensor=2"`` as ``(4, 2)``; an axis that is not named has one device."""
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is not data=N or tensor=N; write for example data=4,tensor=2")
        sizes[name] = int(size)
    return tuple(sizes.values())


def make_mesh(shape: tuple[int, int]) -> Mesh:
    """A mesh with axes ``data`` and ``tensor`` over the first devices.

    Raises:
      ValueError: there are not enough devices.
    """
    needed, devices = math.prod(shape), jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"the mesh data={shape[0]},tensor={shape[1]} needs {needed} devices and JAX has {len(devices)} "
            f"({devices[0].platform}): ask for a smaller --mesh, or simulate devices with JAX_PLATFORMS=cpu"
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2, devices=devices[:needed])


def check(options: Options, model: CharLM) -> None:
    """Raises ValueError if ``model`` or a batch cannot be split over the mesh."""
    data_size, tensor_size = options.mesh
    if options.batch % data_size:
        raise ValueError(
            f"a batch of {options.batch} does not split over data={data_size}: use a multiple of {data_size}"
        )
    for what, width in (("hidden width", model.hidden), ("vocabulary", len(data.VOCABULARY))):
        if width % tensor_size:
            raise ValueError(f"the {what} {width} does not split over tensor={tensor_size}: use a divisor of {width}")


def train(model: CharLM, corpus: data.Corpus, options: Options, mesh: Mesh) -> Run:
    """Trains ``model`` on ``corpus.train``, with a progress bar on standard error."""
    by_rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, _LEARNING_RATE, options.steps // 20, options.steps))
    params = jax.device_put(model.init(jax.random.key(options.seed)), model.shardings(mesh))
    # Moments lie where their parameters lie; counters are scalars, the same on all devices.
    state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, whole), optimizer.init(params))
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    stream = data.batches(corpus.train, options.batch, model.context, options.seed)
    batches = (jax.device_put(batch, by_rows) for batch in stream)
    starts = np.linspace(0, len(corpus.held_out) - model.context - 1, _HELD_OUT_BATCHES * options.batch).astype(int)
    held_out_batch = jax.device_put(data.windows(corpus.held_out, starts, model.context), by_rows)

    @jax.jit
    def evaluate(params):
        return model.loss(params, *held_out_batch)

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*shardings, whole))
    def step(params, state, contexts, targets):
        loss, grads = jax.value_and_grad(model.loss)(params, contexts, targets)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = step.lower(
        params, state, *next(batches)
    ).compile()  # ahead of the first step, which so takes as long as others
    losses, held_out, seconds = [], {0: float(evaluate(params))}, 0.0
    print(f"held-out loss before the first step: {held_out[0]:.3f} nats a character", flush=True)
    interval = 0.1 if sys.stderr.isatty() else 5.0  # seconds between updates of the bar: a log needs few
    bar = tqdm.trange(1, options.steps + 1, desc="training", unit="step", dynamic_ncols=True, mininterval=interval)
    for i in bar:
        start = time.perf_counter()
        params, state, loss = step(params, state, *next(batches))
        losses.append(float(loss))  # waits for the step
        seconds += time.perf_counter() - start
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {i * options.batch / seconds:,.0f} tokens/s", refresh=False)
        if i % math.ceil(options.steps / _EVALUATIONS) == 0 or i == options.steps:
            held_out[i] = float(evaluate(params))
    print(f"held-out loss after {options.steps} steps: {held_out[options.steps]:.3f} nats a character", flush=True)
    return Run(params, losses, held_out, options.steps * options.batch / seconds)


def run(options: Options, model: CharLM, mesh: Mesh) -> None:
    """Trains, draws the loss curve and a sample, replays a step on the NPU model, exports the inference function."""
    corpus = data.load()
    options.output.mkdir(parents=True, exist_ok=True)
    print(report.heading("Training"))
    print(report.setup(model, corpus, mesh, options.batch), flush=True)
    with glass.configure(implementation=options.implementation):
        result = train(model, corpus, options, mesh)
    curve = options.output / "loss.png"
    report.plot(result.losses, result.held_out, data.unigram_entropy(corpus.train), curve)
    print(f"{result.tokens_per_second:,.0f} tokens/s; loss curve in {curve}")

    print(report.heading(f"A sample, after {PROMPT!r}"))
    print(report.sample(model, result.params, PROMPT, options.seed))

    chip = config.current().chip
    print(report.heading(f"One more step, by XLA and by the model of the Ascend {chip}"), flush=True)
    contexts, targets = jax.device_put(
        next(data.batches(corpus.train, options.batch, model.context, options.seed + 1)),
        NamedSharding(mesh, PartitionSpec("data")),
    )
    print(report.replay(model, result.params, contexts, targets))

    print(report.heading(f"Export for the Ascend {chip}"), flush=True)
    print(report.export(model, jax.device_get(result.params), options.output / "ascend"))


def parse(argv: Sequence[str] | None) -> Options:
    """The command line as :class:`Options`."""
    parser = argparse.ArgumentParser(
        prog="python -m models.train", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=_positive, default=Options.steps, help="optimizer steps")
    parser.add_argument("--batch", type=_positive, default=Options.batch, help="windows in a step, over all devices")
    parser.add_argument(
        "--mesh", type=parse_mesh, default="data=4,tensor=2", metavar="data=N,tensor=N", help="devices along each axis"
    )
    parser.add_argument("--seed", type=int, default=Options.seed, help="of parameters, batches and sample")
    parser.add_argument("--output", type=pathlib.Path, default=Options.output, help="folder to write to")
    parser.add_argument(
        "--implementation", choices=("xla", "npu_model"), help="of the matrix products in training; None: by platform"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default=Options.dtype, help="operands of the products"
    )
    return Options(**vars(parser.parse_args(argv)))


def _positive(text: str) -> int:
    """``text`` as an int of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = parse(argv)
    jax.config.update("jax_num_cpu_devices", math.prod(options.mesh))  # before JAX starts its backends
    model = CharLM(dtype=options.dtype)
    try:
        check(options, model)
        mesh = make_mesh(options.mesh)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    run(options, model, mesh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
