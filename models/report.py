"""What a training run shows: set-up, loss curve, experts' load, sample, agreement of the NPU model, exported bundle."""

from __future__ import annotations

import functools
import json
import pathlib
import textwrap
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import glass_jax as glass
from glass_jax import text
from models import data, parameters
from models.deepseek import DeepSeek, next_token_loss
from models.generate import Generator
from models.training import History, Trainer

REPLAYED_BATCH = 2  # sequences of the replayed steps
_SAMPLE_LENGTH = 300
_TEMPERATURE = 0.5
_ROWS, _PAGES, _PAGE_SIZE = 4, 32, 64  # of the exported decode step
_IMPLEMENTATIONS = ("xla", "npu_model")


def heading(text: str) -> str:
    """``text``, underlined."""
    return f"\n{text}\n{'-' * len(text)}"


def setup(trainer: Trainer, corpus: data.Corpus, mesh: Mesh) -> str:
    """The text, the model and the mesh in a few lines."""
    recipe, config = trainer.recipe, trainer.config
    size = sum(leaf.size for leaf in jax.tree.leaves(trainer.state.params))
    platform = mesh.devices.flat[0].platform
    devices = f"{mesh.size} {'simulated CPU' if platform == 'cpu' else platform} device{'s' * (mesh.size > 1)}"
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    return textwrap.dedent(f"""\
        text   Python language reference, {len(corpus.train):,} characters and {len(corpus.held_out):,} held out
        model  {recipe.config}: {layers} layers of {config.hidden_size} features, {config.num_attention_heads} heads,
               {config.n_routed_experts} experts (top {config.num_experts_per_tok}) in {layers - dense} of them;
               {size:,} parameters, {recipe.dtype} activations
        mesh   {axes} on {devices}, {recipe.batch} sequences of {recipe.length} a step""")


def plot(history: History, unigram: float, path: pathlib.Path) -> None:
    """Writes the loss curve as a PNG.

    Args:
      history: of the run.
      unigram: the loss of a model that knows only how often each character occurs.
      path: the file.
    """
    matplotlib.use("agg")
    from matplotlib import pyplot

    losses, held_out = history.losses, history.held_out
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.6, linewidth=1, label="training batch")
    axes.plot(list(held_out), list(held_out.values()), color="tab:red", marker="o", markersize=4, label="held-out text")
    axes.axhline(unigram, color="gray", linestyle="--", linewidth=1, label=f"character frequencies ({unigram:.2f})")
    axes.set(xlabel="step", ylabel="loss (nats a character)", title="DeepSeek language model", xlim=(0, len(losses)))
    axes.set_ylim(bottom=0, top=1.05 * max(*held_out.values(), unigram))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def expert_load(load: Sequence[Sequence[int]], devices: int) -> str:
    """A table of the share of tokens that each device's experts had in the last step.

    Args:
      load: tokens of each expert, ``[layers with experts][E]``.
      devices: size of the expert axis; device d has the experts ``d*E/devices`` and on.
    """
    rows = []
    for layer, each in enumerate(np.asarray(load)):
        shares = each.reshape(devices, -1).sum(axis=1) / each.sum()
        busiest = each.max() / each.mean()
        rows.append([str(layer), *(f"{share:.1%}" for share in shares), f"{busiest:.2f}x", str(int((each == 0).sum()))])
    header = ["MoE layer", *(f"device {d}" for d in range(devices)), "busiest expert", "unused"]
    return "load of the experts in the last step, by device of the expert axis:\n" + text.table([header, *rows])


def sample(model: DeepSeek, prompt: str, seed: int) -> str:
    """Text that the model continues ``prompt`` with, indented, both ends marked."""
    generator = Generator(model, rows=1, max_length=len(prompt) + _SAMPLE_LENGTH, page_size=_PAGE_SIZE)
    start = time.perf_counter()
    (drawn,) = generator.generate(
        [data.encode(prompt)], max_new_tokens=_SAMPLE_LENGTH, temperature=_TEMPERATURE, key=jax.random.key(seed)
    )
    seconds = time.perf_counter() - start
    body = textwrap.indent(f"{prompt}|{data.decode(drawn)}", "  ")
    return f"{body}\n{_SAMPLE_LENGTH} characters in {seconds:.1f} s with compilation"


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """Frobenius norm of the difference over that of ``want``, in float64."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), np.finfo(np.float64).tiny))


def training_step(model: DeepSeek, ids: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """A training step by XLA and by the NPU model: what each layer makes of ``ids`` ``[B, length + 1]``, and gradients.

    Returns:
      By implementation and name.
    """
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, ids):
        model, features = nnx.merge(graphdef, params, rest), {}
        x = features["embedding"] = model.embed(ids[:, :-1])
        for i, block in enumerate(model.blocks):
            x, _ = block(x)
            features[f"layer {i}"] = x
        features["logits"] = model.logits(x)
        return next_token_loss(features["logits"], ids[:, 1:]), features

    def step(params, rest, ids):
        (value, features), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, ids)
        return features | {"loss": value} | _by_layer(grads)

    return _by_implementation(step, params, rest, ids)


def decode_step(model: DeepSeek, ids: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """A decode step after the prompts ``ids`` ``[B, S]``, likewise, and the rows that it adds to each layer's cache."""
    state = nnx.split(model)
    rows, length = ids.shape
    pages = -(-(length + 1) // _PAGE_SIZE)
    table = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    lengths = np.full(rows, length - 1, np.int32)
    cache = model.empty_cache(rows * pages, _PAGE_SIZE)
    _, cache = jax.jit(lambda *args: nnx.merge(*state).prefill(*args))(ids[:, :-1], lengths, cache, table)

    def step(model_state, token, cache):
        model, features = nnx.merge(state[0], model_state), {}
        x, valid = model.embed(token), jnp.ones(token.shape, bool)
        for i, block in enumerate(model.blocks):
            x, _ = block.decode(x, lengths, valid, cache[i], table)
            features[f"layer {i}"] = x
        return features | {"logits": model.logits(x)}

    return _by_implementation(step, state[1], ids[:, -1:], cache)


def _by_implementation(step, *args) -> dict[str, dict[str, np.ndarray]]:
    results, step = {}, jax.jit(step)
    for implementation in _IMPLEMENTATIONS:
        with glass.configure(implementation=implementation):
            results[implementation] = jax.device_get(step(*args))
    return results


def _by_layer(grads: nnx.State) -> dict[str, jax.Array]:
    """Gradients, those of a layer's parameters side by side."""
    parts: dict[str, list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        name = f"layer {names[1]}" if names[0] == "blocks" else names[0]
        parts.setdefault(f"gradient of {name}", []).append(leaf.ravel())
    return {name: jnp.concatenate(leaves) for name, leaves in parts.items()}


def replay_training(model: DeepSeek, ids: np.ndarray) -> str:
    """A table of the relative differences between XLA's training step and the NPU model's."""
    return _differences("training step", training_step, model, ids)


def replay_decoding(model: DeepSeek, ids: np.ndarray) -> str:
    """A table of the relative differences between XLA's decode step and the NPU model's."""
    return _differences("decode step", decode_step, model, ids)


def _differences(what: str, steps, model: DeepSeek, ids: np.ndarray) -> str:
    start = time.perf_counter()
    xla, npu = steps(model, ids).values()
    seconds = time.perf_counter() - start
    errors = {name: relative_error(npu[name], xla[name]) for name in xla}
    return "\n".join(
        [
            f"{what}: relative differences (Frobenius norm)",
            *(f"  {name:24} {error:8.1e}" for name, error in errors.items()),
            f"largest relative difference {max(errors.values()):.1e}; both took {seconds:.1f} s with compilation",
        ]
    )


def export(model: DeepSeek, path: pathlib.Path) -> str:
    """Exports the model's decode step for Ascend, verifies its kernels, and lists the bundle."""
    graphdef, state = nnx.split(model)

    def decode(values, tokens, lengths, cache, table):
        return nnx.merge(graphdef, parameters.from_named(state, values)).decode(tokens, lengths, cache, table)

    arguments = (
        parameters.named(state),
        jax.ShapeDtypeStruct((_ROWS, 1), jnp.int32),
        jax.ShapeDtypeStruct((_ROWS,), jnp.int32),
        jax.eval_shape(functools.partial(model.empty_cache, _PAGES, _PAGE_SIZE)),
        jax.ShapeDtypeStruct((_ROWS, _PAGES // _ROWS), jnp.int32),
    )
    violations = glass.verify(decode, *arguments)
    bundle = glass.export(decode, *arguments, path=path)
    kernels: Mapping[str, dict] = json.loads((bundle / "manifest.json").read_text())["kernels"]
    launches = [
        [kernel["entry"], ", ".join(sorted({str(launch["block_dim"]) for launch in kernel["launches"]})), sha[:12]]
        for sha, kernel in sorted(kernels.items(), key=lambda item: item[1]["entry"])
    ]
    return "\n".join(
        [
            text.table([["kernel", "blocks", "source"], *launches]),
            f"{len(kernels)} kernels, {len(violations)} violations of what the hardware takes",
            *map(str, violations),
            f"bundle  {bundle}",
        ]
    )
