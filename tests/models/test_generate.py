import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import random_modules
from glass_jax import errors
from models.deepseek import TINY, DeepSeek
from models.generate import Generator, PageAllocator
from models.hf_generation import generation_from_hf

CONFIG = dataclasses.replace(
    TINY,
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    intermediate_size=24,
    num_attention_heads=2,
    kv_lora_rank=8,
    q_lora_rank=None,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=4,
    moe_intermediate_size=8,
)
NEW = 7


def make():
    return DeepSeek(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model():
    return random_modules.random_module(make, deviation=0.4)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 40, n).tolist() for n in (3, 15, 1, 8, 16, 5)]


@pytest.fixture(scope="module")
def score(model):
    """The scores after a text, by the whole model, which has no cache."""
    whole = nnx.jit(DeepSeek.__call__)

    def score(text):
        tokens = np.zeros((1, 24), np.int32)
        tokens[0, : len(text)] = text
        return np.asarray(whole(model, tokens)[0, len(text) - 1], np.float64)

    return score


@pytest.fixture(scope="module")
def greedy(score, prompts):
    """The continuations, one prompt at a time."""

    def continue_(prompt):
        text = list(prompt)
        for _ in range(NEW):
            text.append(int(np.argmax(score(text))))
        return text[len(prompt) :]

    return [continue_(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def generator(model):
    """Three rows and pages for little more than two: prompts have to wait for both."""
    return Generator(model, rows=3, max_length=24, page_size=4, pages=11)


def test_greedy_is_the_whole_models_choice(generator, prompts, greedy):
    for _ in range(2):  # the second time in pages that hold the first one's tokens
        assert generator.generate(prompts, max_new_tokens=NEW) == greedy
        assert generator.free_pages == 11


def test_end_of_text_ends_a_continuation(generator, prompts, greedy):
    def until(*ends):
        lengths = [next((i for i, token in enumerate(tokens) if token in ends), NEW) for tokens in greedy]
        return [tokens[: length + 1] for tokens, length in zip(greedy, lengths, strict=True)]

    first, second = greedy[1][2], greedy[0][4]
    assert generator.generate(prompts, max_new_tokens=NEW, eos_id=first) == until(first) != greedy
    several = generator.generate(prompts, max_new_tokens=NEW, eos_id=[first, second])
    assert several == until(first, second) != until(first)


def test_what_is_drawn_does_not_depend_on_the_batch(generator, model, prompts):
    options = {"max_new_tokens": NEW, "temperature": 1.5, "key": jax.random.key(3)}
    drawn = generator.generate(prompts, **options)
    assert Generator(model, rows=6, max_length=24, page_size=8).generate(prompts, **options) == drawn
    assert generator.generate(prompts, **options | {"key": jax.random.key(4)}) != drawn


def test_draws_follow_the_temperature(generator, prompts, greedy):
    cold = generator.generate(prompts, max_new_tokens=NEW, temperature=1e-4, key=jax.random.key(0))
    assert cold == greedy


def test_a_share_of_the_probability(generator, score):
    """Tokens are drawn as NumPy says: from the fewest of the most probable that have the share together."""
    weights = np.exp(score([5, 9]) / 2)
    shares = weights / weights.sum()
    order = np.argsort(-shares)
    count = int(np.searchsorted(np.cumsum(shares[order]), 0.5)) + 1
    assert 1 < count < 20
    options = {"max_new_tokens": 1, "temperature": 2.0, "top_p": 0.5, "key": jax.random.key(1)}
    drawn = [tokens[0] for tokens in generator.generate([[5, 9]] * 300, **options)]
    assert set(drawn) == set(order[:count].tolist())
    got = np.bincount(drawn, minlength=40)[order[:count]] / 300
    np.testing.assert_allclose(got, shares[order[:count]] / shares[order[:count]].sum(), atol=0.1)


def test_on_a_mesh(prompts, greedy):
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        on_mesh = random_modules.random_module(make, deviation=0.4)
        generator = Generator(on_mesh, rows=4, max_length=24, page_size=8)
        assert generator.generate(prompts, max_new_tokens=NEW) == greedy


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1] * 20], {}, "prompt 0 has 20 tokens, 27 with max_new_tokens=7: more than max_length=24"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1]], {"temperature": 1.0}, "pass key="),
        ([[1]], {"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be an integer"),
        ([[1], [40]], {}, "prompt 1 holds 40, and the model has tokens 0 to 39"),
        ([[3, -1]], {}, "prompt 0 holds -1"),
        ([[1, 2.0]], {}, "prompt 0 is float64"),
        ([np.array([[1]])], {}, r"prompt 0 is int64 of shape \(1, 1\)"),
        ([1, 2], {}, r"prompt 0 is int64 of shape \(\)"),
        ([[2**70]], {}, "prompt 0 is object"),
        ([[1]], {"eos_id": 40}, "eos_id holds 40"),
        ([[1]], {"eos_id": [1, 1.5]}, "eos_id is float64"),
        ([[1]], {"temperature": -0.5, "key": jax.random.key(0)}, "temperature=-0.5 must be a number, 0 or more"),
        ([[1]], {"temperature": float("nan"), "key": jax.random.key(0)}, "temperature=nan"),
        ([[1]], {"top_p": 0.0}, "top_p=0.0 must be more than 0"),
    ],
)
def test_what_cannot_be_generated(generator, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generator.generate(prompts, **{"max_new_tokens": NEW} | options)


def test_a_prompt_that_no_cache_can_hold(model, monkeypatch):
    """It is an error before the others have been computed."""
    small = Generator(model, rows=1, max_length=24, page_size=4, pages=2)
    monkeypatch.setattr(small, "_prefill", lambda rows: pytest.fail("something was computed"))
    with pytest.raises(ValueError, match="prompt 1 needs 4 pages and a device has 2"):
        small.generate([[1], [1] * 9], max_new_tokens=NEW)


def test_an_interruption_leaves_nothing_behind(generator, prompts, greedy, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(generator, "_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generator.generate(prompts, max_new_tokens=NEW)
    assert generator.free_pages == 11
    assert generator.generate(prompts[:2], max_new_tokens=NEW) == greedy[:2]


# --- as it is published ----------------------------------------------------------------------------------------------


PUBLISHED = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": True}


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        (PUBLISHED | {"temperature": 0.6, "top_p": 0.95}, {"eos_id": (1,), "temperature": 0.6, "top_p": 0.95}),
        (PUBLISHED, {"eos_id": (1,), "temperature": 1.0, "top_p": 1.0}),
        ({"eos_token_id": [1, 5], "temperature": 0.6, "top_k": 50}, {"eos_id": (1, 5)}),
        ({}, {"eos_id": ()}),
    ],
    ids=["sampled", "sampled as it is", "greedy", "nothing"],
)
def test_published_options(tmp_path, generator, raw, want):
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    options = generation_from_hf(tmp_path)
    assert options == want
    assert len(generator.generate([[3]], max_new_tokens=1, key=jax.random.key(0), **options)) == 1


def test_without_published_options(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1, "top_k": 3}))
    assert generation_from_hf(tmp_path) == {"eos_id": (1,)}


@pytest.mark.parametrize(
    "change", [{"top_k": 50}, {"repetition_penalty": 1.1}, {"num_beams": 4}, {"min_p": 0.1}], ids=str
)
def test_published_options_that_are_not_there(tmp_path, change):
    (tmp_path / "generation_config.json").write_text(json.dumps(PUBLISHED | change))
    with pytest.raises(errors.UnsupportedError, match=f"{next(iter(change))}=.* is not supported"):
        generation_from_hf(tmp_path)


def test_allocator():
    allocator = PageAllocator(range(4))
    first = allocator.take(3)
    assert len(set(first)) == 3
    assert allocator.available == 1
    with pytest.raises(ValueError, match="2 pages are asked for and 1 are free"):
        allocator.take(2)
    allocator.give_back(first[:2])
    assert set(allocator.take(3)).isdisjoint(first[2:])
    with pytest.raises(ValueError, match="page 7 comes back and was not taken"):
        allocator.give_back([7])


def test_allocator_never_gives_a_page_twice():
    rng, allocator, held = np.random.default_rng(0), PageAllocator(range(20)), []
    for _ in range(500):
        if held and rng.random() < 0.5:
            allocator.give_back(held.pop(rng.integers(len(held))))
        elif (count := int(rng.integers(0, 6))) <= allocator.available:
            held.append(allocator.take(count))
        pages = [page for each in held for page in each]
        assert len(set(pages)) == len(pages) == 20 - allocator.available
