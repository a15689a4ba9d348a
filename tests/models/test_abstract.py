"""Models on meshes with no devices, lowered for Ascend."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from models import abstract
from models.abstract import AbstractModel, bytes_on_device
from models.deepseek import TINY, V3, V3_2


def mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def test_memory_of_a_device():
    """Experts are split over expert and tensor axis, heads over the tensor axis, norms over none."""
    on = mesh(data=2, expert=4, tensor=2)
    config = dataclasses.replace(TINY, num_hidden_layers=1, first_k_dense_replace=0)
    values = abstract.parameters.named(AbstractModel.create(config, on).state)
    name = "blocks.0.mlp.gate"
    assert bytes_on_device(values[name]) == values[name].size * 2 // 8
    name = "blocks.0.attention.k_up"
    assert bytes_on_device(values[name]) == values[name].size * 2 // 2
    name = "blocks.0.mlp.router"
    assert bytes_on_device(values[name]) == values[name].size * 4
    assert bytes_on_device([]) == 0


def test_decode_step_of_v3_without_allocating():
    """Two of the published model's layers on 256 devices: shapes of the step's results."""
    config = dataclasses.replace(V3, num_hidden_layers=2, first_k_dense_replace=1)
    model = AbstractModel.create(config, mesh(data=4, expert=16, tensor=4))
    step, arguments = model.decode_step(256, pages=512, page_size=64, pages_of_sequence=2)
    with jax.sharding.use_abstract_mesh(model.mesh):
        scores, cache = jax.eval_shape(step, *arguments)
    assert scores.shape == (256, 1, V3.vocab_size)
    assert scores.sharding.spec == jax.P(("data", "expert"), None, "tensor")
    assert [pages.shape for pages in cache] == [(512, 64, 1, 576)] * 2
    assert cache[0].dtype == jnp.bfloat16
    assert bytes_on_device(arguments[3]) == 2 * 512 * 64 * 576 * 2 // 64


def test_the_caches_of_sparse_attention():
    config = dataclasses.replace(V3_2, num_hidden_layers=1, first_k_dense_replace=1)
    model = AbstractModel.create(config, mesh(data=4, expert=16, tensor=4))
    step, arguments = model.decode_step(256, pages=512, page_size=64, pages_of_sequence=64)
    with jax.sharding.use_abstract_mesh(model.mesh):
        scores, ((latents, keys),) = jax.eval_shape(step, *arguments)
    assert scores.shape == (256, 1, V3.vocab_size)
    assert latents.shape == (512, 64, 1, 576) and keys.shape == (512, 64, 1, 128)
    assert latents.sharding.spec == keys.sharding.spec == jax.P(("data", "expert"), None, None, None)


def check_report(capsys, tmp_path, arguments, sparse=()):
    assert abstract.main([*arguments, "--output", str(tmp_path / "bundle")]) == 0
    printed = capsys.readouterr().out
    assert " 0 violations of the rules of the 950DT" in printed
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    kernels = {kernel["entry"] for kernel in manifest["kernels"].values()}
    assert kernels == set(re.findall(r"^  (\w+)$", printed, re.MULTILINE))
    assert {name.partition("_")[0] for name in kernels} == {"gemm", "grouped", "mla", "rms", "swiglu", *sparse}
    return printed


def test_command(capsys, tmp_path):
    arguments = ["--config", "tiny", "--mesh", "data=2,expert=2,tensor=2", "--sequences", "8", "--length", "64"]
    assert "on 8 devices" in check_report(capsys, tmp_path, [*arguments, "--page-size", "16"])


@pytest.mark.slow
def test_v3_lowers_for_256_devices(capsys, tmp_path):
    """All 61 layers."""
    assert "671.03 billion parameters on 256 devices" in check_report(capsys, tmp_path, ["--config", "v3"])


@pytest.mark.slow
def test_v3_2_lowers_for_256_devices(capsys, tmp_path):
    printed = check_report(capsys, tmp_path, ["--config", "v3.2"], sparse=("layer", "mqa", "topk"))
    assert "671.88 billion parameters on 256 devices" in printed


def test_what_is_no_mesh(capsys):
    with pytest.raises(SystemExit):
        abstract.main(["--mesh", "data:4"])
    assert "'data:4' is no mesh" in capsys.readouterr().err
