"""The main job: its parts in this process on small models, and the whole command once."""

import argparse
import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from models import data, deepseek, report, train, training

ROOT = pathlib.Path(__file__).parents[2]
SMALL = dataclasses.replace(
    deepseek.TINY, hidden_size=32, num_hidden_layers=2, intermediate_size=64, moe_intermediate_size=32, q_lora_rank=16
)
RECIPE = training.Recipe(steps=4, batch=8, length=16)


@pytest.fixture(scope="module")
def corpus():
    return data.load()


def trained(corpus, mesh, recipe=RECIPE):
    with jax.set_mesh(train.make_mesh(mesh)):
        trainer = training.Trainer(SMALL, recipe, corpus)
        trainer.train(report=False)
    return trainer


def losses(trainer):
    return np.array([*trainer.history.losses, *trainer.history.held_out.values()])


@pytest.fixture(scope="module")
def on_one_device(corpus):
    return trained(corpus, (1, 1, 1))


@pytest.fixture(scope="module")
def on_eight_devices(corpus):
    return trained(corpus, (2, 2, 2))


def test_losses_are_the_same_on_one_device_and_on_eight(on_one_device, on_eight_devices):
    np.testing.assert_allclose(losses(on_eight_devices), losses(on_one_device), rtol=0, atol=1e-4)


def test_parameters_are_split_over_the_mesh(on_eight_devices):
    params = on_eight_devices.state.params
    assert params["blocks"][1]["mlp"]["gate"].get_value().sharding.spec == jax.P("expert", None, "tensor")
    assert params["blocks"][0]["attention"]["out"]["kernel"].get_value().sharding.spec[0] == "tensor"


def test_every_token_has_its_experts(on_eight_devices):
    load = np.array(on_eight_devices.history.load)
    assert load.shape == (1, SMALL.n_routed_experts)
    assert load.sum() == RECIPE.batch * RECIPE.length * SMALL.num_experts_per_tok


@pytest.mark.slow
def test_another_seed_is_another_run(corpus, on_one_device):
    other = trained(corpus, (1, 1, 1), dataclasses.replace(RECIPE, seed=1))
    assert not np.allclose(losses(other), losses(on_one_device), atol=1e-3)


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_on_another_mesh(corpus, on_one_device, tmp_path):
    class StoppedError(Exception):
        pass

    def stop_after_three(trainer, *, last):
        save(trainer, last=last)
        if len(trainer.history.losses) == 3:
            raise StoppedError

    with jax.set_mesh(train.make_mesh((1, 1, 1))), training.Checkpoints(tmp_path, 2) as checkpoints:
        trainer, save = training.Trainer(SMALL, RECIPE, corpus), checkpoints.save
        checkpoints.save = stop_after_three
        with pytest.raises(StoppedError):
            trainer.train(checkpoints, report=False)
    with jax.set_mesh(train.make_mesh((1, 2, 1))), training.Checkpoints(tmp_path, 2) as checkpoints:
        trainer = training.Trainer(SMALL, RECIPE, corpus)
        checkpoints.restore(trainer)
        assert len(trainer.history.losses) == 2
        trainer.train(checkpoints, report=False)
        assert checkpoints.latest == RECIPE.steps
    np.testing.assert_allclose(trainer.history.losses, on_one_device.history.losses, rtol=0, atol=1e-4)
    with jax.set_mesh(train.make_mesh((1, 1, 1))), training.Checkpoints(tmp_path, 2) as checkpoints:
        trainer = training.Trainer(SMALL, dataclasses.replace(RECIPE, seed=5), corpus)
        with pytest.raises(ValueError, match="is another one: seed 0 -> 5"):
            checkpoints.restore(trainer)


def test_resuming_needs_a_checkpoint(on_one_device, tmp_path):
    with training.Checkpoints(tmp_path, 2) as checkpoints, pytest.raises(ValueError, match="without --resume"):
        checkpoints.restore(on_one_device)


def test_the_loss_falls_below_that_of_character_frequencies(corpus):
    trainer = trained(corpus, (1, 1, 1), training.Recipe(steps=60, batch=32, length=32))
    assert trainer.history.held_out[60] < data.unigram_entropy(corpus.held_out) < trainer.history.held_out[0]


def test_steps_on_the_npu_model_agree_with_xla(corpus, on_one_device):
    model = on_one_device.model()
    ids = data.batch(corpus.train, 2, RECIPE.length, 0, 0)
    for results in (report.training_step(model, ids), report.decode_step(model, ids)):
        assert {"layer 0", "layer 1", "logits"} <= set(results["xla"])
        for name, want in results["xla"].items():
            assert report.relative_error(results["npu_model"][name], want) < 1e-5, name


def test_load_table():
    text = report.expert_load([[1, 3, 0, 0], [1, 1, 1, 1]], devices=2)
    rows = [line.split() for line in text.splitlines()[2:]]
    assert rows == [["0", "100.0%", "0.0%", "3.00x", "2"], ["1", "50.0%", "50.0%", "1.00x", "0"]]


@pytest.mark.parametrize(
    ("text", "shape"),
    [("data=4,tensor=2", (4, 1, 2)), ("expert=8", (1, 8, 1)), ("tensor=1,expert=2,data=3", (3, 2, 1))],
)
def test_mesh_option(text, shape):
    assert train.parse_mesh(text) == shape


@pytest.mark.parametrize("text", ["", "4", "data", "data=0", "data=-1", "data=two", "model=2"])
def test_mesh_option_that_means_nothing(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write for example data=2,expert=2,tensor=2"):
        train.parse_mesh(text)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match=r"data=16,expert=1,tensor=4 needs 64 devices and JAX has 16 \(cpu\)"):
        train.make_mesh((16, 1, 4))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch", "30"], "a batch of 30 does not split over data=2 x expert=2: use a multiple of 4"),
        (["--mesh", "data=1", "--processes", "3", "--coordinator", "x:1", "--output", "o"], "1 devices do not split"),
        (["--processes", "2", "--output", "o"], "several processes need all of"),
    ],
)
def test_runs_that_cannot_be(argv, message):
    with pytest.raises(ValueError, match=message):
        train.check(train.parse(argv))


def test_another_run_in_the_folder_is_kept(tmp_path):
    (tmp_path / "checkpoints" / "50").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds checkpoints: go on with --resume"):
        train.check(train.parse(["--output", str(tmp_path)]))
    train.check(train.parse(["--output", str(tmp_path), "--resume"]))


@pytest.mark.parametrize(
    "argv", [["--steps", "0"], ["--batch", "x"], ["--mesh", "data=x"], ["--dtype", "int8"], ["--config", "v4"]]
)
def test_options_that_mean_nothing_end_with_one_line(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        train.parse(argv)
    assert stop.value.code == 2
    assert f"error: argument {argv[0]}" in capsys.readouterr().err


def test_relative_error():
    assert report.relative_error(np.array([3.0, 4.0]), np.array([3.0, 0.0])) == pytest.approx(4 / 3)
    assert report.relative_error(np.zeros(3), np.zeros(3)) == 0


@pytest.mark.slow
def test_the_command_does_the_whole_job(tmp_path):
    command = [sys.executable, "-m", "models.train", "--steps", "3", "--batch", "8", "--length", "16"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # nearly all of its time is XLA's compiler
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (before, after) = re.search(r"held-out loss (\S+) before the first step, (\S+) nats", done.stdout).groups()
    assert float(after) < float(before)
    assert "8 simulated CPU devices" in done.stdout
    differences = re.findall(r"largest relative difference (\S+);", done.stdout)
    assert len(differences) == 2 and all(float(difference) < 1e-5 for difference in differences)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "ascend" / "manifest.json").exists() and str(tmp_path / "ascend") in done.stdout
    assert " kernels, 0 violations" in done.stdout


def test_an_error_is_one_line_from_the_command(tmp_path):
    command = [sys.executable, "-m", "models.train", "--batch", "3", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().startswith("error: a batch of 3 does not split over data=2 x expert=2")
