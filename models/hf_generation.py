"""``generation_config.json``, what a published model is continued with, as options of ``Generator.generate``."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from glass_jax import errors
from models.safetensors import read_json

FILE = "generation_config.json"

# What changes the tokens that are drawn and is not there, with the values that change nothing.
_NOT_THERE = {
    "top_k": (None, 0),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "repetition_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0),
    "guidance_scale": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None, []),
    "sequence_bias": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
}


def generation_from_hf(path: str | os.PathLike) -> dict[str, Any]:
    """How the model in a folder is meant to be continued: ``generate(prompts, max_new_tokens=..., **options)``.

    Args:
      path: the folder. Without ``generation_config.json`` in it, ``config.json`` says which tokens end a text, and the
        token of the highest score is taken.

    Returns:
      ``eos_id``, a tuple, and where the model is sampled from ``temperature`` and ``top_p``; what is not in the file
      changes nothing. How long a continuation may be is left to the caller.

    Raises:
      UnsupportedError: the file asks for another way to draw tokens.
      ValueError: it is damaged.
    """
    path = pathlib.Path(path)
    raw = read_json(path / (FILE if (path / FILE).exists() else "config.json"))
    eos = raw.get("eos_token_id")
    options: dict[str, Any] = {"eos_id": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)}
    for name, neutral in _NOT_THERE.items():
        # Greedy choice is of the highest score, whatever part of the scores is kept.
        if raw.get(name) not in neutral and (raw.get("do_sample") or name not in ("top_k", "min_p", "typical_p")):
            raise errors.UnsupportedError(
                f"{path / FILE}: {name}={raw[name]!r} is not supported; temperature and top_p are, pass them yourself"
            )
    if raw.get("do_sample"):
        for name in ("temperature", "top_p"):
            options[name] = 1.0 if raw.get(name) is None else raw[name]
    return options
