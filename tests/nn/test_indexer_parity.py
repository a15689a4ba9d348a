"""Sparse latent attention against the public reference implementation, with its own random weights."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import random_modules
from glass_jax.nn import MLA, Indexer

transformers = pytest.importorskip("transformers", reason="the reference comes with pip install 'glass_jax[parity]'")
torch = pytest.importorskip("torch", reason="the reference comes with pip install 'glass_jax[parity]'")
reference = pytest.importorskip(
    "transformers.models.deepseek_v32.modeling_deepseek_v32", reason="this transformers has no DeepSeek-V3.2"
)

LENGTH, TOPK = 19, 6
SIZES = {"q_lora_rank": 12, "qk_rope_head_dim": 4}
CONFIG = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "index_topk": TOPK,
    "index_head_dim": 10,
    "index_n_heads": 8,
}


def theirs():
    torch.manual_seed(0)
    config = transformers.DeepseekV32Config(**CONFIG, **SIZES, attn_implementation="eager")
    attention = reference.DeepseekV32Attention(config, layer_idx=0).eval()
    with torch.no_grad():
        for name, weight in attention.named_parameters():
            mean = float(name.endswith("norm.weight"))
            weight.copy_(mean + 0.3 * torch.randn(weight.shape))
    return config, attention


def ours(attention):
    w = {name: weight.detach().numpy() for name, weight in attention.named_parameters()}
    ups = w["kv_b_proj.weight"].reshape(4, -1, 16).transpose(0, 2, 1)
    values = {
        "q_down": {"kernel": w["q_a_proj.weight"].T},
        "q_norm": {"scale": w["q_a_layernorm.weight"]},
        "q": {"kernel": w["q_b_proj.weight"].T},
        "kv_down": {"kernel": w["kv_a_proj_with_mqa.weight"].T},
        "kv_norm": {"scale": w["kv_a_layernorm.weight"]},
        "k_up": ups[:, :, :6],
        "v_up": ups[:, :, 6:],
        "out": {"kernel": w["o_proj.weight"].T},
        "indexer": {
            "q": {"kernel": w["indexer.wq_b.weight"].T},
            "k": {"kernel": w["indexer.wk.weight"].T},
            "k_norm": {"scale": w["indexer.k_norm.weight"], "bias": w["indexer.k_norm.bias"]},
            "weights": {"kernel": w["indexer.weights_proj.weight"].T},
        },
    }

    def make():
        indexer = Indexer(32, num_heads=8, head_dim=10, topk=TOPK, **SIZES, rngs=nnx.Rngs(0))
        heads = {"qk_nope_head_dim": 6, "v_head_dim": 10}
        return MLA(32, num_heads=4, kv_lora_rank=16, indexer=indexer, **heads, **SIZES, rngs=nnx.Rngs(0))

    return random_modules.build(make, values)


def test_sparse_attention():
    config, attention = theirs()
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 32)).astype(np.float32)
    hidden, positions = torch.from_numpy(x), torch.arange(LENGTH)[None].expand(2, -1)
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1).expand(2, 1, -1, -1)
    with torch.no_grad():
        rotation = reference.DeepseekV32RotaryEmbedding(config)(hidden, positions)
        want = attention(hidden, rotation, mask, position_ids=positions)[0].numpy()
    np.testing.assert_allclose(nnx.jit(MLA.__call__)(ours(attention), jnp.asarray(x)), want, atol=1e-5)
