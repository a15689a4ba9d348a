import argparse
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import glass_jax as glass
from models import data, report, train
from models.char_lm import CharLM

ROOT = pathlib.Path(__file__).parents[2]
SMALL = CharLM(context=8, embedding=8, hidden=64, layers=2)


@pytest.fixture(scope="module")
def corpus():
    return data.load()


def losses(corpus, mesh, steps=4, seed=0):
    options = train.Options(steps=steps, batch=64, mesh=mesh, seed=seed)
    result = train.train(SMALL, corpus, options, train.make_mesh(mesh))
    return np.array([*result.losses, *result.held_out.values()])


@pytest.fixture(scope="module")
def on_one_device(corpus):
    return losses(corpus, (1, 1))


@pytest.mark.parametrize("mesh", [(4, 2), (8, 1), (1, 8)], ids=lambda mesh: "dp{}_tp{}".format(*mesh))
def test_losses_are_the_same_on_one_device_and_on_eight(corpus, on_one_device, mesh):
    np.testing.assert_allclose(losses(corpus, mesh), on_one_device, rtol=0, atol=1e-4)


def test_the_same_seed_is_the_same_run(corpus):
    first = losses(corpus, (4, 2), seed=3)
    np.testing.assert_array_equal(first, losses(corpus, (4, 2), seed=3))


def test_another_seed_is_another_run(corpus, on_one_device):
    assert not np.allclose(losses(corpus, (1, 1), seed=4), on_one_device, atol=1e-3)


def test_held_out_loss_falls_below_that_of_character_frequencies(corpus):
    options = train.Options(steps=120, batch=128, mesh=(2, 1))
    result = train.train(SMALL, corpus, options, train.make_mesh((2, 1)))
    assert min(result.held_out) == 0 and max(result.held_out) == 120
    assert result.held_out[120] < data.unigram_entropy(corpus.held_out) < result.held_out[0]


def test_parameters_stay_where_the_shardings_put_them(corpus):
    mesh = train.make_mesh((4, 2))
    result = train.train(SMALL, corpus, train.Options(steps=2, batch=64), mesh)
    for leaf, sharding in zip(jax.tree.leaves(result.params), jax.tree.leaves(SMALL.shardings(mesh)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
def test_a_step_over_the_mesh_sums_and_never_gathers(implementation):
    mesh = train.make_mesh((4, 2))
    shapes, shardings = jax.eval_shape(SMALL.init, jax.random.key(0)), SMALL.shardings(mesh)
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    batch = (jax.ShapeDtypeStruct(shape, "int32", sharding=rows) for shape in ((64, SMALL.context), (64,)))
    step = jax.jit(jax.grad(SMALL.loss), out_shardings=shardings)
    with glass.configure(implementation=implementation):
        hlo = step.lower(params, *batch).compile().as_text()
    collectives = re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", hlo)
    assert set(collectives) == {"all-reduce"}


def test_one_step_on_the_npu_model_agrees_with_xla(corpus):
    mesh = train.make_mesh((4, 2))
    params = jax.device_put(SMALL.init(jax.random.key(0)), SMALL.shardings(mesh))
    results = report.steps(SMALL, params, *next(data.batches(corpus.train, 64, SMALL.context, 0)))
    assert {"loss", "logits", "gradient of embedding", "gradient of layers.1.w"} < set(results["xla"])
    for name, want in results["xla"].items():
        assert report.relative_error(results["npu_model"][name], want) < 1e-5, name


@pytest.mark.parametrize(
    ("text", "shape"),
    [("data=4,tensor=2", (4, 2)), ("tensor=8", (1, 8)), ("data=2", (2, 1)), ("tensor=1,data=3", (3, 1))],
)
def test_mesh_option(text, shape):
    assert train.parse_mesh(text) == shape


@pytest.mark.parametrize("text", ["", "4", "data", "data=0", "data=-1", "data=two", "model=2"])
def test_mesh_option_that_means_nothing(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write for example data=4,tensor=2"):
        train.parse_mesh(text)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match=r"data=16,tensor=4 needs 64 devices and JAX has 16 \(cpu\)"):
        train.make_mesh((16, 4))


@pytest.mark.parametrize(
    ("mesh", "batch", "message"),
    [
        ((4, 2), 30, "batch of 30 does not split over data=4"),
        ((1, 5), 64, "hidden width 64 does not split over tensor=5"),
    ],
)
def test_what_does_not_split_over_the_mesh(mesh, batch, message):
    with pytest.raises(ValueError, match=message):
        train.check(train.Options(mesh=mesh, batch=batch), SMALL)


@pytest.mark.parametrize("argv", [["--steps", "0"], ["--batch", "x"], ["--mesh", "data=x"], ["--dtype", "int8"]])
def test_options_that_mean_nothing_end_with_one_line(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        train.parse(argv)
    assert stop.value.code == 2
    assert f"error: argument {argv[0]}" in capsys.readouterr().err


def test_relative_error():
    assert report.relative_error(np.array([3.0, 4.0]), np.array([3.0, 0.0])) == pytest.approx(4 / 3)
    assert report.relative_error(np.zeros(3), np.zeros(3)) == 0


def test_the_command_does_the_whole_job(tmp_path):
    command = [sys.executable, "-m", "models.train", "--steps", "3", "--batch", "64", "--output", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = (float(text) for text in re.findall(r"held-out loss .*: (\d+\.\d+)", done.stdout))
    assert after < before
    assert "8 simulated CPU devices" in done.stdout
    assert float(re.search(r"largest relative difference (\S+);", done.stdout)[1]) < 1e-5
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "ascend" / "manifest.json").exists() and str(tmp_path / "ascend") in done.stdout


def test_a_mesh_that_does_not_fit_is_one_line_from_the_command(tmp_path):
    command = [sys.executable, "-m", "models.train", "--mesh", "tensor=5", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == "error: the hidden width 512 does not split over tensor=5: use a divisor of 512"
