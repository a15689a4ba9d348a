"""The models against the public reference implementation: logits and greedy continuations."""

import numpy as np
import pytest
from flax import nnx

import deepseek_reference as reference
from models.deepseek import DeepSeek
from models.generate import Generator
from models.hf import load_hf, save_hf
from models.hf_config import config_to_hf
from models.safetensors import Checkpoint

transformers = pytest.importorskip("transformers", reason="the reference comes with pip install 'glass_jax[parity]'")
torch = pytest.importorskip("torch", reason="the reference comes with pip install 'glass_jax[parity]'")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
SCALED = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
V2, V3, V32 = "DeepseekV2", "DeepseekV3", "DeepseekV32"
CASES = {
    "v3": (V3, {"q_lora_rank": 20, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}),
    "v3_yarn": (V3, {"q_lora_rank": 20, "first_k_dense_replace": 1, "rope_scaling": SCALED}),
    "v3_yarn_no_mscale": (V3, {"q_lora_rank": None, "first_k_dense_replace": 1, "rope_scaling": YARN}),
    "v3_half_split": (V3, {"q_lora_rank": None, "first_k_dense_replace": 1, "rope_interleave": False}),
    "v3_not_renormalized": (V3, {"q_lora_rank": 20, "first_k_dense_replace": 1, "norm_topk_prob": False}),
    "v32": (
        V32,
        {
            "q_lora_rank": 20,
            "first_k_dense_replace": 1,
            "index_topk": 9,
            "index_n_heads": 8,
            "index_head_dim": 20,
            "rope_scaling": SCALED,
        },
    ),
    "v2_greedy": (V2, {"q_lora_rank": None, "first_k_dense_replace": 1, "rope_scaling": SCALED}),
    "v2_groups": (
        V2,
        {
            "q_lora_rank": 20,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
        },
    ),
}
PROMPTS = [[5, 9, 3], list(range(20, 36)), [63]]
NEW = 8


QUICK = ("v3_yarn", "v32", "v2_groups")


@pytest.fixture(scope="module", params=[pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES])
def pair(request, tmp_path_factory):
    """The reference's model with random weights, and ours that reads what it saved, in several files."""
    kind, changes = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes, attn_implementation="eager")
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, bias in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.1 * torch.randn(bias.shape))
    path = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(path, max_shard_size="60KB")
    return theirs, load_hf(path)[1], path


def scores(theirs, ids):
    with torch.no_grad():
        return theirs(torch.as_tensor(ids)).logits.numpy()


def test_logits(pair):
    theirs, ours, _ = pair
    ids = np.random.default_rng(0).integers(0, 64, (2, 48))
    np.testing.assert_allclose(nnx.jit(DeepSeek.__call__)(ours, ids), scores(theirs, ids), atol=1e-4)


def test_greedy_continuation(pair):
    """Token by token, through the paged cache, prompts of unequal length together."""
    theirs, ours, _ = pair
    want = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW):
            ids.append(int(scores(theirs, [ids])[0, -1].argmax()))
        want.append(ids[len(prompt) :])
    assert Generator(ours, rows=2, max_length=32, page_size=8).generate(PROMPTS, max_new_tokens=NEW) == want


def test_they_read_what_we_write(pair, tmp_path):
    theirs, ours, _ = pair
    save_hf(tmp_path, ours, max_file_bytes=50_000)
    again = type(theirs).from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = np.random.default_rng(1).integers(0, 64, (1, 40))
    np.testing.assert_array_equal(scores(again, ids), scores(theirs, ids))


def test_the_numpy_judge_agrees(pair):
    """The float64 implementation that judges the modules where the reference is not installed."""
    theirs, ours, path = pair
    ids = np.random.default_rng(2).integers(0, 64, 12)
    want = reference.logits(ids, Checkpoint(path), config_to_hf(ours.config))
    np.testing.assert_allclose(scores(theirs, ids[None])[0], want, atol=1e-4)
