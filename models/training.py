"""Training of a DeepSeek language model over a mesh, with checkpoints that a killed run goes on from.

A step's batch depends on the seed and the step's number alone, so that a run that was interrupted sees the same batches
as one that was not, and has the same losses.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm
from flax import nnx
from jax.sharding import NamedSharding

from models import data
from models.deepseek import DeepSeek, DeepSeekConfig, next_token_loss

HELD_OUT_BATCHES = 4  # batches of held-out text that judge the model
EVALUATIONS = 10  # in the course of training
_LEARNING_RATE = 6e-3
_BIAS_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What decides the losses of a run: two runs with the same recipe have the same.

    Attributes:
      config: name of the model's sizes, for example ``"tiny"``.
      steps: optimizer steps.
      batch: sequences of a step.
      length: tokens of a sequence.
      seed: of parameters and batches.
      dtype: of activations; parameters and optimizer are float32.
    """

    config: str = "tiny"
    steps: int = 300
    batch: int = 32
    length: int = 128
    seed: int = 0
    dtype: str = "float32"


class State(NamedTuple):
    """What a step changes.

    Attributes:
      params: what gradients train.
      rest: what they do not: the gates' biases.
      optimizer: moments and counters.
    """

    params: nnx.State
    rest: nnx.State
    optimizer: Any


@dataclasses.dataclass
class History:
    """What is known of the steps so far.

    Attributes:
      losses: of each step, in nats a token.
      held_out: the loss on held-out text, by the number of steps before it was measured.
      load: of the last step, tokens of each expert, ``[layers with experts][E]``.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    held_out: dict[int, float] = dataclasses.field(default_factory=dict)
    load: list[list[int]] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As JSON, whose keys are strings."""
        return dataclasses.asdict(self) | {"held_out": [list(item) for item in self.held_out.items()]}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> History:
        """What :meth:`to_json` made."""
        return cls(fields["losses"], {int(step): loss for step, loss in fields["held_out"]}, fields["load"])


class Trainer:
    """Trains a model by a recipe; make and use it under ``jax.set_mesh``.

    Args:
      config: the model's sizes.
      recipe: what to do.
      corpus: the text.

    Attributes:
      config: the model's sizes.
      recipe: what to do.
      graphdef: the model's structure, see ``nnx.split``.
      state: parameters and moments, on the mesh.
      history: of the steps taken.
    """

    def __init__(self, config: DeepSeekConfig, recipe: Recipe, corpus: data.Corpus):
        self.config, self.recipe, self._corpus = config, recipe, corpus
        schedule = optax.warmup_cosine_decay_schedule(0.0, _LEARNING_RATE, recipe.steps // 15, recipe.steps)
        self._optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))

        @nnx.jit
        def build():
            return DeepSeek(config, dtype=recipe.dtype, param_dtype=jnp.float32, rngs=nnx.Rngs(recipe.seed))

        self.graphdef, params, rest = nnx.split(build(), nnx.Param, ...)
        whole = NamedSharding(jax.sharding.get_mesh(), jax.P())
        params, rest = (jax.tree.map(functools.partial(_placed, whole), tree) for tree in (params, rest))
        # Moments lie where their parameters lie; counters are scalars, the same on all devices.
        self.state = State(params, rest, jax.tree.map(functools.partial(_placed, whole), self._optimizer.init(params)))
        self.history = History()
        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        batch = jax.P(tuple(name for name in ("data", "expert") if name in whole.mesh.axis_names) or None)
        self._rows = NamedSharding(whole.mesh, batch)
        self._step = jax.jit(self._one_step, donate_argnums=0, out_shardings=(shardings, whole, whole))
        self._evaluate = jax.jit(lambda state, ids: self.loss(state.params, state.rest, ids)[0], out_shardings=whole)

    def loss(self, params: nnx.State, rest: nnx.State, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean loss, in nats a token, of ``ids`` ``[B, length + 1]``, and the load of each layer's experts."""
        logits, load = nnx.merge(self.graphdef, params, rest).with_load(ids[:, :-1])
        return next_token_loss(logits, ids[:, 1:]), load

    def _one_step(self, state: State, ids: jax.Array) -> tuple[State, jax.Array, jax.Array]:
        (loss, load), grads = jax.value_and_grad(self.loss, has_aux=True)(state.params, state.rest, ids)
        updates, moments = self._optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        model = nnx.merge(self.graphdef, params, state.rest)
        model.update_biases(load, _BIAS_RATE)
        _, params, rest = nnx.split(model, nnx.Param, ...)
        return State(params, rest, moments), loss, load

    def batch(self, step: int) -> jax.Array:
        """The sequences of a step, ``[batch, length + 1]``, split over the mesh."""
        return self._on_mesh(
            data.batch(self._corpus.train, self.recipe.batch, self.recipe.length, self.recipe.seed, step)
        )

    def held_out_loss(self) -> float:
        """Mean loss of text that is not trained on, in nats a token."""
        ids, size, length = self._corpus.held_out, self.recipe.batch, self.recipe.length
        starts = np.linspace(0, len(ids) - length - 1, HELD_OUT_BATCHES * size).astype(int)
        rows = data.windows(ids, starts, length)
        batches = [self._on_mesh(rows[i::HELD_OUT_BATCHES]) for i in range(HELD_OUT_BATCHES)]
        return float(np.mean([float(self._evaluate(self.state, each)) for each in batches]))

    def _on_mesh(self, rows: np.ndarray) -> jax.Array:
        # Every process has all rows and gives its devices theirs.
        return jax.make_array_from_callback(rows.shape, self._rows, lambda index: rows[index])

    def train(self, checkpoints: Checkpoints | None = None, *, report: bool = True) -> float:
        """Takes the steps that are left, with a progress bar on standard error.

        Args:
          checkpoints: where to save the state now and then and at the end; None: nowhere.
          report: show progress.

        Returns:
          Tokens learned from in a second, compilation not counted; 0 if no step was left.
        """
        recipe, first, seconds = self.recipe, len(self.history.losses), 0.0
        if first == recipe.steps:
            return 0.0
        # Compiled ahead of the first step, which so takes as long as others.
        step = self._step.lower(self.state, self.batch(first)).compile()
        if first == 0:
            self.history.held_out[0] = self.held_out_loss()
        interval = 0.1 if sys.stderr.isatty() else 5.0  # seconds between updates of the bar: a log needs few
        bar = tqdm.tqdm(
            total=recipe.steps, initial=first, desc="training", unit="step", dynamic_ncols=True, mininterval=interval,
            disable=not report,
        )  # fmt: skip
        with bar:
            for i in range(first, recipe.steps):
                start = time.perf_counter()
                self.state, loss, load = step(self.state, self.batch(i))
                self.history.losses.append(float(loss))  # waits for the step
                seconds += time.perf_counter() - start
                self.history.load = np.asarray(load.addressable_data(0)).tolist()
                rate = (i + 1 - first) * recipe.batch * recipe.length / seconds
                bar.set_postfix_str(f"loss {self.history.losses[-1]:.3f}, {rate:,.0f} tokens/s", refresh=False)
                bar.update()
                done = i + 1
                if done % math.ceil(recipe.steps / EVALUATIONS) == 0 or done == recipe.steps:
                    self.history.held_out[done] = self.held_out_loss()
                if checkpoints is not None:
                    checkpoints.save(self, last=done == recipe.steps)
        return (recipe.steps - first) * recipe.batch * recipe.length / seconds

    def model(self) -> DeepSeek:
        """The model with its present parameters, all of them on one device."""
        whole = NamedSharding(self._rows.mesh, jax.P())
        params, rest = jax.jit(lambda *trees: trees, out_shardings=whole)(self.state.params, self.state.rest)
        params, rest = jax.tree.map(lambda x: jnp.asarray(np.asarray(x.addressable_data(0))), (params, rest))
        return nnx.merge(self.graphdef, params, rest)


def _placed(whole: NamedSharding, x: jax.Array) -> jax.Array:
    """``x`` where it is if it is on the mesh, else a copy on each of its devices."""
    on_mesh = isinstance(x.sharding, NamedSharding) and x.sharding.mesh.shape == whole.mesh.shape
    return x if on_mesh else jax.device_put(x, whole)


class Checkpoints:
    """Saves and restores trainers. A checkpoint is whole or is not there, whenever the process is killed.

    Args:
      path: folder.
      every: steps from one to the next.
    """

    def __init__(self, path: pathlib.Path, every: int):
        options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2, create=True)
        self._manager = ocp.CheckpointManager(
            path.absolute(), options=options, item_names=("state", "history", "recipe")
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """The step of the last whole checkpoint."""
        return self._manager.latest_step()

    def save(self, trainer: Trainer, *, last: bool) -> None:
        """Saves ``trainer`` if a checkpoint is due, or if it is the last."""
        step = len(trainer.history.losses)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(trainer.state),
            history=ocp.args.JsonSave(trainer.history.to_json()),
            recipe=ocp.args.JsonSave(dataclasses.asdict(trainer.recipe)),
        )
        self._manager.save(step, args=items, force=last and step != self.latest)

    def restore(self, trainer: Trainer) -> None:
        """Brings ``trainer`` to the last whole checkpoint; on another mesh than it was saved from, if need be.

        Raises:
          ValueError: there is none, or it is of a run with another recipe.
        """
        step = self.latest
        if step is None:
            raise ValueError(f"no checkpoint in {self._manager.directory}: start the run without --resume")
        saved = self._manager.restore(step, args=ocp.args.Composite(recipe=ocp.args.JsonRestore())).recipe
        wanted = dataclasses.asdict(trainer.recipe)
        if changed := [f"{name} {saved[name]} -> {value}" for name, value in wanted.items() if saved[name] != value]:
            raise ValueError(
                f"the run in {self._manager.directory} is another one: {', '.join(changed)}. Give the options that it "
                "was started with, or start a new one in another --output"
            )
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.state)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(types), history=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        trainer.state, trainer.history = restored.state, History.from_json(restored.history)
