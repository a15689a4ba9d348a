import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import random_modules
from glass_jax import errors
from glass_jax.nn import YaRN
from models import safetensors
from models.deepseek import TINY, V2_LITE, V3, V3_2, DeepSeek
from models.hf import load_hf, save_hf
from models.hf_config import config_from_hf, config_to_hf
from models.safetensors import Checkpoint

CONFIG = dataclasses.replace(TINY, vocab_size=32, hidden_size=16, num_hidden_layers=2, q_lora_rank=8)
GROUPED_V2 = dataclasses.replace(V2_LITE, n_group=8, topk_group=3, q_lora_rank=1536)


@pytest.fixture(scope="module")
def model():
    return make(CONFIG)


def make(config):
    return random_modules.random_module(lambda: DeepSeek(config, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("hf")
    save_hf(path, model)
    return path


def flat(model):
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_same(got, want):
    got, want = flat(got), flat(want)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


# --- configuration -------------------------------------------------------------------------------------------------


CONFIGS = {"tiny": TINY, "v2-lite": V2_LITE, "v3": V3, "v3.2": V3_2, "v2 groups": GROUPED_V2}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_configuration_comes_back(config):
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def test_both_spellings_of_the_rotation():
    raw = config_to_hf(V3)
    scaling = raw.pop("rope_scaling")
    newer = {"rope_type": "yarn", "rope_theta": raw.pop("rope_theta")} | {
        k: v for k, v in scaling.items() if k != "type"
    }
    assert config_from_hf(raw | {"rope_parameters": newer}) == V3
    minimal = {"type": "yarn", "factor": 4.0}
    yarn = config_from_hf(raw | {"rope_scaling": minimal, "max_position_embeddings": 512}).yarn
    assert yarn == YaRN(factor=4.0, original_length=512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ],
)
def test_what_cannot_be_read(change, message):
    with pytest.raises(errors.UnsupportedError, match=message):
        config_from_hf(config_to_hf(TINY) | change)


# --- parameters ----------------------------------------------------------------------------------------------------


def test_a_model_comes_back(model, folder):
    config, loaded = load_hf(folder)
    assert config == CONFIG
    assert_same(loaded, model)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_several_files(model, tmp_path):
    save_hf(tmp_path, model, max_file_bytes=20_000)
    assert (tmp_path / safetensors.INDEX).exists()
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 5
    assert_same(load_hf(tmp_path)[1], model)


def test_layout_of_the_public_checkpoints(model, folder):
    tensors, attention = Checkpoint(folder), model.blocks[1].attention
    up = tensors["model.layers.1.self_attn.kv_b_proj.weight"].reshape(
        CONFIG.num_attention_heads, -1, CONFIG.kv_lora_rank
    )
    np.testing.assert_array_equal(up[:, : CONFIG.qk_nope_head_dim], attention.k_up[...].transpose(0, 2, 1))
    np.testing.assert_array_equal(up[:, CONFIG.qk_nope_head_dim :], attention.v_up[...].transpose(0, 2, 1))
    expert = tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    np.testing.assert_array_equal(expert, model.blocks[1].mlp.down[3].T)


def test_onto_a_mesh(model, folder, monkeypatch):
    """Each device's part is read for it: no read is of more than a device holds."""
    reads = []
    make_array = jax.make_array_from_callback

    def watched(shape, sharding, read):
        def reading(index):
            part = read(index)
            reads.append((part.shape, sharding.shard_shape(shape)))
            return part

        return make_array(shape, sharding, reading)

    monkeypatch.setattr(jax, "make_array_from_callback", watched)
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        _, loaded = load_hf(folder)
    assert_same(loaded, model)
    assert all(part == shard for part, shard in reads)
    mlp = loaded.blocks[1].mlp
    assert mlp.gate[...].sharding.spec == jax.P("expert", None, "tensor")
    assert loaded.blocks[1].attention.k_up[...].sharding.spec == jax.P("tensor", None, None)


def test_dtypes(folder, tmp_path):
    _, model = load_hf(folder, dtype=jnp.bfloat16)
    assert model.head.kernel[...].dtype == jnp.bfloat16
    assert model.blocks[1].mlp.router[...].dtype == jnp.float32
    save_hf(tmp_path, model)
    _, again = load_hf(tmp_path)  # config.json knows the type
    assert again.dtype == jnp.bfloat16
    assert_same(again, model)


def test_blockwise_fp8(tmp_path):
    """Weights of 8 bits with a scale for each block of 128 by 128, as V3 is published; ragged at the edges."""
    config = dataclasses.replace(CONFIG, hidden_size=160, num_hidden_layers=1, intermediate_size=200)
    save_hf(tmp_path, make(config))
    tensors, name = dict(Checkpoint(tmp_path)), "model.layers.0.mlp.gate_proj.weight"
    values = np.asarray(tensors[name] * 100, ml_dtypes.float8_e4m3fn)
    scales = np.random.default_rng(0).uniform(0.5, 2, (2, 2)).astype(np.float32)
    tensors |= {name: values, f"{name}_scale_inv": scales}
    safetensors.save(tmp_path, [(key, np.array(value)) for key, value in tensors.items()], 10**9)
    _, model = load_hf(tmp_path)
    want = values.astype(np.float32) * np.kron(scales, np.ones((128, 128)))[:200, :160]
    np.testing.assert_allclose(model.blocks[0].mlp.gate.kernel[...], want.T, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors: tensors.update(extra=np.zeros(2)), "extra belongs to no parameter"),
        (
            lambda tensors: tensors.update({"lm_head.weight": np.zeros((3, 16))}),
            r"lm_head.weight is \(3, 16\), expected",
        ),
    ],
    ids=["missing", "left over", "shape"],
)
def test_tensors_that_do_not_fit(folder, tmp_path, change, message):
    tensors = {name: np.array(value) for name, value in Checkpoint(folder).items()}
    change(tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    safetensors.save(tmp_path, tensors.items(), 10**9)
    with pytest.raises(ValueError, match=message):
        load_hf(tmp_path)


def test_layers_that_predict_further_tokens_are_left_out(model, folder, tmp_path):
    tensors = {name: np.array(value) for name, value in Checkpoint(folder).items()}
    tensors["model.layers.2.eh_proj.weight"] = np.zeros((2, 2), np.float32)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    safetensors.save(tmp_path, tensors.items(), 10**9)
    assert_same(load_hf(tmp_path)[1], model)


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "int64", "bool"])
def test_tensors_come_back(tmp_path, dtype):
    value = np.arange(12).reshape(3, 4).astype(dtype)
    safetensors.save(tmp_path, [("a", value), ("none", value[:0]), ("scalar", value[1, 2])], 10**9)
    tensors = Checkpoint(tmp_path)
    assert len(tensors) == 3
    np.testing.assert_array_equal(tensors["a"][1:, 2:], value[1:, 2:])
    assert tensors["a"].dtype == np.dtype(dtype)
    assert tensors["none"].shape == (0, 4)
    assert tensors["scalar"].shape == ()


def test_unknown_types_are_named(tmp_path):
    header = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / safetensors.SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(ValueError, match="tensors of F4"):
        Checkpoint(tmp_path)


def test_the_formats_own_library_reads_them(tmp_path):
    library = pytest.importorskip("safetensors.numpy", reason="the safetensors package comes with glass_jax[parity]")
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    safetensors.save(tmp_path, [("a", value), ("b", value.T)], 10**9)
    tensors = library.load_file(tmp_path / safetensors.SINGLE)
    np.testing.assert_array_equal(tensors["a"], value)
    np.testing.assert_array_equal(tensors["b"], value.T)
