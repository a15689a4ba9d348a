import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import data


@given(st.text(alphabet=data.VOCABULARY))
def test_decode_is_the_inverse_of_encode(text):
    ids = data.encode(text)
    assert ids.dtype == np.int32
    assert data.decode(ids) == text


@given(st.text())
def test_every_text_becomes_characters_of_the_vocabulary(text):
    ids = data.encode(text)
    assert np.all((ids >= 0) & (ids < len(data.VOCABULARY)))


def test_typographic_characters_become_ascii():
    assert data.decode(data.encode("the “with” statement’s – body…")) == 'the "with" statement\'s - body...'
    assert data.decode(data.encode("\tx\x00λ")) == "?x??"


def test_the_corpus_is_english_and_its_parts_are_different_topics():
    corpus = data.load()
    train, held_out = data.decode(corpus.train), data.decode(corpus.held_out)
    assert "statement" in train and "statement" in held_out
    assert 0.02 < len(held_out) / len(train) < 0.2
    assert held_out[:200] not in train


@given(st.integers(1, 8), st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_windows_are_slices_with_the_next_character(length, starts):
    ids = np.arange(100) ** 2
    for start, window in zip(starts, data.windows(ids, np.array(starts), length), strict=True):
        np.testing.assert_array_equal(window, ids[start : start + length + 1])


def test_batches_depend_on_seed_and_step_and_reach_the_last_character():
    ids = np.arange(20)
    first, again = data.batch(ids, 512, 4, seed=1, step=7), data.batch(ids, 512, 4, seed=1, step=7)
    np.testing.assert_array_equal(first, again)
    for seed, step in ((1, 8), (2, 7)):
        assert not np.array_equal(first, data.batch(ids, 512, 4, seed, step))
    assert set(first.ravel()) == set(range(20))


def test_unigram_entropy():
    assert data.unigram_entropy(np.repeat([3, 5, 6, 9], 7)) == pytest.approx(np.log(4))
    assert data.unigram_entropy(np.zeros(5, int)) == 0
