"""``topk`` in NumPy, and what makes any result of it right: properties, whichever of equal elements are chosen."""

import numpy as np

NOTHING = 2**31 - 1


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


def topk(x, k, end=None) -> tuple[np.ndarray, np.ndarray]:
    """Largest first, among equals lowest index first, as float64; ``[..., v]``."""
    x = np.asarray(x)
    values, indices = np.full((*x.shape[:-1], k), -np.inf), np.full((*x.shape[:-1], k), NOTHING)
    for row in np.ndindex(*x.shape[:-1]):
        length = x.shape[-1] if end is None else int(np.asarray(end)[row])
        order = np.argsort(-x[row][:length].astype(np.float64), kind="stable")[:k]
        indices[row][: len(order)] = order
        values[row][: len(order)] = x[row][order].astype(np.float64)
    return values, indices


def check(x, k, values, indices, end=None, value_fill=-np.inf, index_fill=NOTHING) -> None:
    """Asserts that ``values`` and ``indices`` are k largest elements of each row, in any order."""
    x, values, indices = np.asarray(x), np.asarray(values), np.asarray(indices)
    assert values.dtype == x.dtype and indices.dtype == np.int32
    assert values.shape == indices.shape == (*x.shape[:-1], k)
    for row in np.ndindex(*x.shape[:-1]):
        length = x.shape[-1] if end is None else int(np.asarray(end)[row])
        count = min(k, length)
        chosen = indices[row][:count]
        assert len(set(chosen.tolist())) == count, "an index twice"
        assert ((chosen >= 0) & (chosen < length)).all(), f"indices {chosen} of a row of {length}"
        np.testing.assert_array_equal(bits(values[row][:count]), bits(x[row][chosen]))
        rest = np.delete(x[row][:length], chosen).astype(np.float64)
        if count and rest.size:
            assert values[row][:count].astype(np.float64).min() >= rest.max()
        np.testing.assert_array_equal(values[row][count:].astype(np.float64), value_fill)
        np.testing.assert_array_equal(indices[row][count:], index_fill)
