"""Shapes of ``rms_norm`` and ``layer_norm``: the norms of DeepSeek's models, and rows that hardware does not like."""

from __future__ import annotations

TOKENS = (1, 128, 4096)  # decoded one by one, decoded in a batch, a prompt

WIDTHS = {
    "v2_lite_hidden": 2048,
    "v2_lite_kv_latent": 512,  # and V3's
    "v3_hidden": 7168,
    "v3_q_latent": 1536,  # and V2's
    "v3_inner": 18432,
    "indexer_key": 128,
    "odd": 1001,
    "short": 7,
}
