"""English text that every Python installation has, as arrays of character numbers.

The text is ``pydoc_data.topics``: the language reference as ``help()`` shows it, 460,000 characters in 79 topics.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

VOCABULARY = "\n" + "".join(chr(code) for code in range(32, 127))
"""Every character the model knows: the line feed and printable ASCII, 96 in all."""

_ASCII = str.maketrans(
    {"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "°": " degrees", "ß": "ss"}
)
_NUMBER = np.array([VOCABULARY.index(c if c in VOCABULARY else "?") for c in map(chr, range(128))], np.int32)
_HELD_OUT_EVERY = 16  # one topic in so many is kept from training


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text cut into a part to train on and a part to judge by.

    Attributes:
      train: character numbers, ``[n]`` int32.
      held_out: character numbers of topics that are not in ``train``, ``[m]`` int32.
    """

    train: np.ndarray
    held_out: np.ndarray


def encode(text: str) -> np.ndarray:
    """Character numbers of ``text``, ``[n]`` int32; a character outside :data:`VOCABULARY` becomes ``?``."""
    return _NUMBER[np.frombuffer(text.translate(_ASCII).encode("ascii", errors="replace"), np.uint8)]


def decode(ids: np.ndarray) -> str:
    """The text that the character numbers ``ids`` ``[n]`` stand for."""
    return "".join(VOCABULARY[i] for i in ids)


def load() -> Corpus:
    """The Python language reference; every sixteenth topic is held out."""
    from pydoc_data import topics

    # Lines and blanks that draw tables are cut to eight characters: a model's text would get lost in them.
    texts = [re.sub(r"([^\w])\1{8,}", lambda run: 8 * run[1], topics.topics[name]) for name in sorted(topics.topics)]
    return Corpus(
        train=encode("\n".join(text for i, text in enumerate(texts) if i % _HELD_OUT_EVERY)),
        held_out=encode("\n".join(text for i, text in enumerate(texts) if i % _HELD_OUT_EVERY == 0)),
    )


def windows(ids: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Stretches of a text, ``[B, length + 1]``: to predict each of ``length`` characters' successor.

    Args:
      ids: character numbers, ``[n]``.
      starts: where each begins, ``[B]``, at most ``n - length - 1``.
      length: characters to predict.
    """
    return ids[starts[:, None] + np.arange(length + 1)]


def batch(ids: np.ndarray, size: int, length: int, seed: int, step: int) -> np.ndarray:
    """Random :func:`windows` of ``ids``, ``[size, length + 1]``: the same for the same seed and step."""
    random = np.random.default_rng([seed, step])
    return windows(ids, random.integers(len(ids) - length, size=size), length)


def unigram_entropy(ids: np.ndarray) -> float:
    """Nats a character that a model pays which knows how often each character occurs, and nothing else."""
    share = np.bincount(ids) / len(ids)
    share = share[share > 0]
    return float(-np.sum(share * np.log(share)))
