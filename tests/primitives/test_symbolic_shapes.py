"""Operations exported for arrays of any size, called with some."""

import jax
import layouts
import numpy as np
import pytest

import glass_jax as glass

ANY = set("bmrstpnv")  # dimensions that are symbols: batches, rows, tokens, pages, columns; not heads, groups, features
FUNCTIONS = {"mla_prefill": glass.mla_prefill}  # in place of one that holds an array of a certain size
KNOWN = {"mla_prefill": {"v"}}


@pytest.mark.parametrize("name", layouts.OPERATIONS)
def test_exported_for_any_size(name):
    function, *operands = layouts.OPERATIONS[name]
    function = FUNCTIONS.get(name, function)
    scope = jax.export.SymbolicScope()
    types = []
    for array, dims in operands:
        symbols = [
            dim if dim in ANY - KNOWN.get(name, set()) else str(size)
            for dim, size in zip(dims.split(), array.shape, strict=True)
        ]
        shape = jax.export.symbolic_shape(",".join(symbols), scope=scope)
        types.append(jax.ShapeDtypeStruct(shape, array.dtype))
    exported = jax.export.export(jax.jit(function))(*types)
    given, wanted = exported.call(*layouts.arrays(name)), jax.jit(function)(*layouts.arrays(name))
    for actual, expected in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        actual, expected = (np.asarray(x).astype(np.float32) for x in (actual, expected))
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
