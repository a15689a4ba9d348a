"""What a training run shows: set-up, loss curve, sample, agreement of the NPU model with XLA, exported bundle."""

from __future__ import annotations

import functools
import json
import pathlib
import textwrap
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax.sharding import Mesh

import glass_jax as glass
from models import data
from models.char_lm import CharLM, Params

_SAMPLE_LENGTH = 300
_TEMPERATURE = 0.6
_EXPORTED_BATCH = 16  # windows that the exported function takes at once


def heading(text: str) -> str:
    """``text``, underlined."""
    return f"\n{text}\n{'-' * len(text)}"


def setup(model: CharLM, corpus: data.Corpus, mesh: Mesh, batch: int) -> str:
    """The text, the model and the mesh in a few lines."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    platform = mesh.devices.flat[0].platform
    devices = f"{mesh.size} {'simulated CPU' if platform == 'cpu' else platform} device{'s' * (mesh.size > 1)}"
    layers = " > ".join(map(str, model.widths))
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return textwrap.dedent(f"""\
        text   Python language reference, {len(corpus.train):,} characters and {len(corpus.held_out):,} held out
        model  {model.context} characters of {model.embedding} features, layers {layers}
               {parameters:,} parameters, {model.dtype} matrix products
        mesh   {axes} on {devices}, {batch} windows a step""")


def plot(losses: list[float], held_out: dict[int, float], unigram: float, path: pathlib.Path) -> None:
    """Writes the loss curve as a PNG.

    Args:
      losses: of each step, in nats a character.
      held_out: the held-out loss by step.
      unigram: the loss of a model that knows only how often each character occurs.
      path: the file.
    """
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.6, linewidth=1, label="training batch")
    axes.plot(list(held_out), list(held_out.values()), color="tab:red", marker="o", markersize=4, label="held-out text")
    axes.axhline(unigram, color="gray", linestyle="--", linewidth=1, label=f"character frequencies ({unigram:.2f})")
    axes.set(xlabel="step", ylabel="loss (nats a character)", title="Character language model", xlim=(0, len(losses)))
    axes.set_ylim(bottom=0, top=1.05 * max(*held_out.values(), unigram))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def sample(model: CharLM, params: Params, prompt: str, seed: int) -> str:
    """Text that the model continues ``prompt`` with, indented, both ends marked."""
    window = data.encode(prompt.rjust(model.context, "\n"))[-model.context :]
    generate = jax.jit(functools.partial(model.generate, length=_SAMPLE_LENGTH, temperature=_TEMPERATURE))
    drawn = generate(jax.device_get(params), window, key=jax.random.key(seed))
    return textwrap.indent(f"{prompt}|{data.decode(np.asarray(drawn))}", "  ")


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """Frobenius norm of the difference over that of ``want``, in float64."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), np.finfo(np.float64).tiny))


def steps(model: CharLM, params: Params, contexts: jax.Array, targets: jax.Array) -> dict[str, dict[str, np.ndarray]]:
    """Logits, and loss and gradients of a training step, by XLA and by the NPU model: by implementation and name.

    The logits are those of the inference function, where kernels apply the activations. A step that is differentiated
    takes the sums from the kernels, because the derivative of an activation needs them.
    """
    infer, step, results = jax.jit(model.logits), jax.jit(jax.value_and_grad(model.loss)), {}
    for implementation in ("xla", "npu_model"):
        with glass.configure(implementation=implementation):
            logits = jax.device_get(infer(params, contexts))
            loss, grads = jax.device_get(step(params, contexts, targets))
        named = {
            f"gradient of {jax.tree_util.keystr(path, simple=True, separator='.')}": leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        }
        results[implementation] = {"logits": logits, "loss": loss} | named
    return results


def replay(model: CharLM, params: Params, contexts: jax.Array, targets: jax.Array) -> str:
    """A table of the relative differences between XLA's step and the NPU model's."""
    start = time.perf_counter()
    xla, npu = steps(model, params, contexts, targets).values()
    seconds = time.perf_counter() - start
    errors = {name: relative_error(npu[name], xla[name]) for name in xla}
    return "\n".join(
        [
            f"loss {xla['loss']:.7f} (XLA), {npu['loss']:.7f} (NPU model); relative differences (Frobenius norm):",
            *(f"  {name:24} {error:8.1e}" for name, error in errors.items()),
            f"largest relative difference {max(errors.values()):.1e}; both took {seconds:.1f} s with compilation",
            "0.0e+00: the same bits. In a differentiated step the kernels only multiply, and the model runs a kernel's",
            "loop over K as one product of XLA's; for the logits they apply bias and activation, too.",
        ]
    )


def export(model: CharLM, params: Params, path: pathlib.Path) -> str:
    """Exports the model's logits for Ascend, and lists the bundle."""
    contexts = jax.ShapeDtypeStruct((_EXPORTED_BATCH, model.context), jnp.int32)
    bundle = glass.export(model.logits, params, contexts, path=path)
    manifest = json.loads((bundle / "manifest.json").read_text())
    lines = [f"bundle  {bundle}"]
    for sha, kernel in sorted(manifest["kernels"].items(), key=lambda item: item[1]["entry"]):
        lines.append(f"kernel  {kernel['entry']} ({sha[:12]}.asc, {kernel['arch']})")
        for launch in kernel["launches"]:
            arguments = ", ".join(f"{a['name']} {a['dtype']}{a['shape']}" for a in launch["arguments"])
            lines.append(f"        {launch['block_dim']} blocks: {arguments}")
    return "\n".join(lines)
