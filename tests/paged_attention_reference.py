"""paged_attention in NumPy float64, and inputs that punish reading what is not part of a context."""

import jax.numpy as jnp
import numpy as np


def paged_attention(q, k_cache, v_cache, page_table, context_lens, scale=None) -> np.ndarray:
    """Attention token by token, one row and one head after the other."""
    q, k_cache, v_cache = (np.asarray(x).astype(np.float64) for x in (q, k_cache, v_cache))
    batch, heads, dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    scale = dim**-0.5 if scale is None else scale
    out = np.zeros_like(q)
    for row in range(batch):
        places = [(int(page_table[row][t // page]), t % page) for t in range(int(context_lens[row]))]
        if not places:
            continue
        k, v = (np.stack([cache[place] for place in places]) for cache in (k_cache, v_cache))
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = k[:, shared] @ q[row, head] * scale
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v[:, shared] / weights.sum()
    return out


def operands(heads, kv_heads, dim, page, lengths, dtype="float32", *, table_pages=None, seed=0):
    """q, k_cache, v_cache, page_table and context_lens with scattered pages.

    All that is not part of a context is NaN, and what follows a context in its row of the table is nonsense.
    """
    rng = np.random.default_rng(seed)
    batch, used = len(lengths), [-(-length // page) for length in lengths]
    table_pages = max([1, *used]) if table_pages is None else table_pages
    pages = sum(used) + 3
    shuffled = iter(rng.permutation(pages))
    table = rng.choice([-1, -7, pages, 2**31 - 1], (batch, table_pages)).astype(np.int32)
    caches = np.full((2, pages, page, kv_heads, dim), np.nan, np.float32)
    for row, length in enumerate(lengths):
        for number in range(used[row]):
            table[row, number] = number_of_page = next(shuffled)
            tokens = min(page, length - number * page)
            caches[:, number_of_page, :tokens] = rng.standard_normal((2, tokens, kv_heads, dim))
    q = rng.standard_normal((batch, heads, dim))
    arrays = [jnp.asarray(x, jnp.float32).astype(dtype) for x in (q, *caches)]
    return *arrays, jnp.asarray(table), jnp.asarray(lengths, jnp.int32)
