"""``topk`` in NumPy, and what makes any result of it right: properties, whichever of equal elements are chosen."""

import numpy as np

NOTHING = 2**31 - 1


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


def bounds(x, row, start, end) -> tuple[int, int]:
    """The first element of a row of ``x`` that counts, and the first one after those."""
    first = 0 if start is None else int(np.asarray(start)[row])
    last = x.shape[-1] if end is None else int(np.asarray(end)[row])
    return first, max(first, last)


def topk(x, k, end=None, start=None) -> tuple[np.ndarray, np.ndarray]:
    """Largest first, among equals lowest index first, as float64; ``[..., v]``."""
    x = np.asarray(x)
    values, indices = np.full((*x.shape[:-1], k), -np.inf), np.full((*x.shape[:-1], k), NOTHING)
    for row in np.ndindex(*x.shape[:-1]):
        first, last = bounds(x, row, start, end)
        order = first + np.argsort(-x[row][first:last].astype(np.float64), kind="stable")[:k]
        indices[row][: len(order)] = order
        values[row][: len(order)] = x[row][order].astype(np.float64)
    return values, indices


def check(x, k, values, indices, end=None, value_fill=-np.inf, index_fill=NOTHING, start=None) -> None:
    """Asserts that ``values`` and ``indices`` are k largest elements of each row, in any order."""
    x, values, indices = np.asarray(x), np.asarray(values), np.asarray(indices)
    assert values.dtype == x.dtype and indices.dtype == np.int32
    assert values.shape == indices.shape == (*x.shape[:-1], k)
    for row in np.ndindex(*x.shape[:-1]):
        first, last = bounds(x, row, start, end)
        count = min(k, last - first)
        chosen = indices[row][:count]
        assert len(set(chosen.tolist())) == count, "an index twice"
        assert ((chosen >= first) & (chosen < last)).all(), f"indices {chosen} of a row from {first} to {last}"
        np.testing.assert_array_equal(bits(values[row][:count]), bits(x[row][chosen]))
        rest = np.delete(x[row][first:last], chosen - first).astype(np.float64)
        if count and rest.size:
            assert values[row][:count].astype(np.float64).min() >= rest.max()
        np.testing.assert_array_equal(values[row][count:].astype(np.float64), value_fill)
        np.testing.assert_array_equal(indices[row][count:], index_fill)
