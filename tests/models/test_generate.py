import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import random_modules
from models.deepseek import TINY, DeepSeek
from models.generate import Generator, PageAllocator

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
def greedy(model, prompts):
    """The continuations by the whole model, which has no cache, one prompt at a time."""
    score = nnx.jit(DeepSeek.__call__)

    def continue_(prompt):
        tokens = np.zeros((1, 24), np.int32)
        tokens[0, : len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + NEW):
            tokens[0, end] = jnp.argmax(score(model, tokens)[0, end - 1])
        return tokens[0, len(prompt) : len(prompt) + NEW].tolist()

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
    eos = greedy[1][2]
    want = [tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for tokens in greedy]
    assert generator.generate(prompts, max_new_tokens=NEW, eos_id=eos) == want


def test_what_is_drawn_does_not_depend_on_the_batch(generator, model, prompts):
    options = {"max_new_tokens": NEW, "temperature": 1.5, "key": jax.random.key(3)}
    drawn = generator.generate(prompts, **options)
    assert Generator(model, rows=6, max_length=24, page_size=8).generate(prompts, **options) == drawn
    assert generator.generate(prompts, **options | {"key": jax.random.key(4)}) != drawn


def test_draws_follow_the_temperature(generator, prompts, greedy):
    cold = generator.generate(prompts, max_new_tokens=NEW, temperature=1e-4, key=jax.random.key(0))
    assert cold == greedy


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
    ],
)
def test_what_cannot_be_generated(generator, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generator.generate(prompts, **{"max_new_tokens": NEW} | options)


def test_a_prompt_that_no_cache_can_hold(model):
    small = Generator(model, rows=1, max_length=24, page_size=4, pages=2)
    with pytest.raises(ValueError, match="prompt 0 needs 4 pages and a device has 2"):
        small.generate([[1] * 9], max_new_tokens=NEW)


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
