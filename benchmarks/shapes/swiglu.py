"""Shapes of ``swiglu``: the inner dimensions of DeepSeek's models, and one that hardware does not like."""

from __future__ import annotations

TOKENS = (1, 128, 4096)  # decoded one by one, decoded in a batch, a prompt

WIDTHS = {
    "v2_lite_expert": 1408,
    "v2_lite_dense": 10944,
    "v3_expert": 2048,
    "v3_dense": 18432,
    "odd": 1001,
}
