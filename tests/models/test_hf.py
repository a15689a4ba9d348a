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
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported in a deepseek_v3; 'sigmoid' is"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"mlp_layer_types": ["dense", "sparse", "dense"]}, "the first 1 of 3 layers"),
        ({"model_type": "deepseek_v2"}, "scoring_func='sigmoid' is not supported in a deepseek_v2"),
        ({"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        (
            {"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": True},
            "norm_topk_prob=True is not supported in a deepseek_v2",
        ),
    ],
)
def test_what_cannot_be_read(change, message):
    with pytest.raises(errors.UnsupportedError, match=message):
        config_from_hf(config_to_hf(TINY) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": ..., "v_head_dim": ...}, "of a deepseek_v3 lacks hidden_size, v_head_dim"),
        ({"model_type": "deepseek_v32"}, "of a deepseek_v32 lacks index_topk"),
        ({"vocab_size": "many"}, "vocab_size='many', expected int"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True, expected int"),
        ({"rope_scaling": {"type": "yarn"}}, "lacks factor"),
    ],
)
def test_what_a_configuration_lacks(change, message):
    raw = config_to_hf(TINY) | change
    with pytest.raises(ValueError, match=message):
        config_from_hf({name: value for name, value in raw.items() if value is not ...})


def test_no_shared_experts():
    assert config_from_hf(config_to_hf(TINY) | {"n_shared_experts": None}).n_shared_experts == 0


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


WEIGHT = "model.layers.0.mlp.gate_proj.weight"  # [200, 160] in 8 bits below
SCALES = f"{WEIGHT}_scale_inv"


@pytest.fixture(scope="module")
def fp8_tensors(tmp_path_factory):
    """Tensors and config.json of a model with one weight in 8 bits, without its scales."""
    path = tmp_path_factory.mktemp("fp8")
    save_hf(path, make(dataclasses.replace(CONFIG, hidden_size=160, num_hidden_layers=1, intermediate_size=200)))
    tensors = {name: np.array(value) for name, value in Checkpoint(path).items()}
    tensors[WEIGHT] = np.asarray(tensors[WEIGHT] * 100, ml_dtypes.float8_e4m3fn)
    return tensors, json.loads((path / "config.json").read_text())


def write(path, tensors, raw, **quantization):
    if quantization:
        raw = raw | {"quantization_config": {"quant_method": "fp8"} | quantization}
    (path / "config.json").write_text(json.dumps(raw))
    safetensors.save(path, tensors.items(), 10**9)


@pytest.mark.parametrize("block", [None, (128, 128), (64, 64), (16, 48)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.float8_e8m0fnu], ids=["float32", "e8m0"])
def test_blockwise_fp8(fp8_tensors, tmp_path, block, dtype):
    """Scales of blocks as config.json says, else of 128 by 128, as V3 is published; ragged at the edges."""
    tensors, raw = fp8_tensors
    rows, columns = block or (128, 128)
    grid = -(-200 // rows), -(-160 // columns)
    scales = np.random.default_rng(0).uniform(0.5, 2, grid).astype(np.float32).astype(dtype)
    write(tmp_path, tensors | {SCALES: scales}, raw, **({"weight_block_size": block} if block else {}))
    _, model = load_hf(tmp_path)
    want = tensors[WEIGHT].astype(np.float64) * np.kron(scales.astype(np.float64), np.ones((rows, columns)))[:200, :160]
    np.testing.assert_allclose(model.blocks[0].mlp.gate.kernel[...], want.T, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, f"{WEIGHT} is float8_e4m3fn and its scales, {SCALES}, are missing"),
        ({SCALES: np.ones((2, 2), np.float32)}, r"_scale_inv is \(2, 2\), expected \(4, 3\): one for .* 64 by 64 of"),
        ({SCALES: np.ones((4, 3), np.int32)}, "_scale_inv is int32, expected float32 or float8_e8m0fnu"),
        ({WEIGHT: np.ones((200, 160), np.float32), SCALES: np.ones((4, 3), np.float32)}, "which only fp8 weights have"),
        ({WEIGHT: np.ones((200, 160), np.int8)}, f"{WEIGHT} is int8, expected floats"),
        ({"model.norm.weight": np.ones(160, ml_dtypes.float8_e4m3fn)}, "model.norm.weight_scale_inv, are missing"),
        ({"other_scale_inv": np.ones((4, 3), np.float32)}, "other_scale_inv belongs to no parameter"),
    ],
)
def test_scales_that_do_not_fit(fp8_tensors, tmp_path, change, message):
    tensors, raw = fp8_tensors
    write(tmp_path, tensors | change, raw, weight_block_size=[64, 64])
    with pytest.raises(ValueError, match=message):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "awq"}, {"weight_block_size": None}, {"weight_block_size": [128]}], ids=str
)
def test_other_quantizations_are_refused(fp8_tensors, tmp_path, quantization):
    write(tmp_path, *fp8_tensors, **quantization)
    with pytest.raises(errors.UnsupportedError, match="quantization_config has"):
        load_hf(tmp_path)


def test_a_type_that_is_not_computed_in(folder, tmp_path):
    tensors, raw = dict(Checkpoint(folder)), json.loads((folder / "config.json").read_text())
    write(tmp_path, tensors, raw | {"torch_dtype": "float8_e4m3fn"})
    with pytest.raises(errors.UnsupportedError, match="dtype='float8_e4m3fn'"):
        load_hf(tmp_path)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:01\n", "pointer of Git LFS"),
        (b"{", "the file is no JSON"),
        (b"[]", "holds a list, expected an object"),
    ],
)
def test_a_damaged_configuration(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        load_hf(tmp_path)
