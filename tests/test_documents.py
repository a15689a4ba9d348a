"""Every snippet of Python in docs/ runs as it is printed, after what its document takes for granted."""

import pathlib
import re
import runpy
import shlex
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMPORTS = "import jax, jax.numpy as jnp, numpy as np\nimport glass_jax as glass\nfrom glass_jax import sharding\n"

# What each document's snippets need around them: <n> stands for the n-th one, indented as its place is.
AROUND = {
    "ascend.md": """
f, x = lambda x: glass.gemm(x, x), jnp.ones((16, 16))
<0>
assert "glass_tilelang_call" in traced.lower(lowering_platforms=("ascend",)).as_text()
""",
    "expert-parallelism.md": """
rng = np.random.default_rng(0)
x, topk_weights = rng.normal(size=(8 * 4, 16)).astype("float32"), rng.random((8 * 4, 2), "float32")
topk_idx, w = rng.integers(0, 64, (8 * 4, 2)).astype("int32"), rng.normal(size=(64, 16, 5)).astype("float32")
<0>
assert out.shape == (32, 5)


def handle_of(x, topk_idx, topk_weights):
    return glass.sharding.moe_dispatch(x, topk_idx, topk_weights, axis_name="x", num_experts=64, capacity=8)[1]


handles = jax.jit(mesh.shard_map(handle_of, in_specs=jax.P("x"), out_specs=jax.P("x")))
handle = handles(x, 0 * topk_idx, topk_weights)
try:
    <1>
except glass.errors.CollectiveError as error:
    assert "moe_dispatch dropped" in str(error)
else:
    raise AssertionError("nothing was dropped")
loads, layer = rng.random((3, 256)), 1


def program(x, topk_idx, topk_weights):
    <2>
    return rows


simulated = glass.sharding.SimulatedMesh({"x": 32})
jax.jit(simulated.shard_map(program, in_specs=jax.P("x"), out_specs=jax.P("x")))(x, topk_idx, topk_weights)


def gather(pages, slots, cache):
    <3>
    return cache, lost


pages, cache = jnp.ones((8, 4, 2)) * jnp.arange(8.0)[:, None, None], jnp.zeros((8 * 9, 4, 2))
gathered = jax.jit(mesh.shard_map(gather, in_specs=jax.P("x"), out_specs=jax.P("x")))
kept, lost = gathered(pages, 8 - jnp.arange(8), cache)
np.testing.assert_array_equal(kept[:, 0, 0], np.tile([0, 7, 6, 5, 4, 3, 2, 1, 0], 8))
assert not lost.any()
""",
    "fusion.md": """
params = {"scale": jnp.ones(256), "shift": jnp.zeros(256), "up": jnp.ones((256, 1024)), "bias": jnp.ones(1024)}
params, x = params | {"down": jnp.ones((1024, 256))}, jnp.ones((32, 256))
<0>
assert len(glass.fuse(block, report=True)(params, x).fused) == 2
""",
    "guide-clusters.md": """
<0>
<1>
assert y.shape == x.shape and float(total) == float(total)
""",
    "guide-kernels.md": """
<0>
<1>
assert glass.verify(scaled_residual, chip="950DT")
<2>
<3>
np.testing.assert_array_equal(out, 2.5)
np.testing.assert_array_equal(gradients[1], 0.5)
<4>
<5>
assert list(pathlib.Path("add_half").glob("*"))
""",
    "host.md": """
<0>
np.testing.assert_allclose(y, 77)
assert glass.verify(glass.gemm, x, w, run=True) == []
""",
    "models.md": """
<0>
assert int(load.sum()) == 2 * 16 * 2
<1>
assert config == TINY and [len(text) for text in texts] == [8, 8, 8]
""",
    "operations.md": """
x, w = (np.random.default_rng(0).normal(size=(rows, 300)).astype("float32") for rows in (5, 200))
<0>
assert y.dtype == "bfloat16" and lhs_scale.shape == (5, 3) and rhs_scale.shape == (2, 3)
assert np.linalg.norm(y - x @ w.T) < 0.05 * np.linalg.norm(x @ w.T)
q, kv, kv_scale, weights = (jnp.ones(shape) for shape in ((3, 8, 32), (2050, 32), 2050, (3, 8)))
starts, ends = jnp.zeros(3, int), jnp.arange(3) + 2048
<1>
assert chosen.shape == (3, 2048) and jnp.isfinite(logits).sum() == 2048 + 2049 + 2050
""",
    "planning.md": """
<0>
assert plan.algorithm == "halving_doubling" and round(plan.seconds, 5) == 0.00109
assert all(pathlib.Path(name).stat().st_size for name in ("plan.json", "plan.png"))
<1>
assert "96.9% of the communication is hidden" in str(found)
x = jnp.ones((8, 64))
batch, batches, state = x, [x, x], 0.0
mesh = sharding.SimulatedMesh({"x": 8})


def train_step(state, batch):
    total = mesh.shard_map(lambda x: sharding.all_reduce(x, "x"), in_specs=jax.P("x"), out_specs=jax.P("x"))
    return state + jnp.sum(total(batch))


<2>
assert len(p.rows()) == 8 and pathlib.Path("profile.json").exists()
<3>
""",
    "sharding.md": """
<0>
np.testing.assert_allclose(y, 1 / 4096)
layer = jnp.sin


def program(gradient, x):
    <1>
    return total, y


mesh.shard_map(program, in_specs=P("x"), out_specs=P("x"))(jnp.ones((1024, 2)), jnp.ones((1024, 2)))
""",
}
# Not run: what it needs is a kernel of the reader's own, or processes (tests/test_debugging.py, tests/sharding).
LEFT_OUT = {("planning.md", 4), ("verification.md", 0)}


def snippets(document: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


DOCUMENTS = {path.name: snippets(path) for path in sorted((ROOT / "docs").glob("*.md")) if snippets(path)}


@pytest.mark.parametrize("name", sorted(AROUND))
def test_snippets_run(name, tmp_path, monkeypatch):
    def snippet(match):
        return textwrap.indent(DOCUMENTS[name][int(match[2])], match[1])

    program = "import pathlib\n" + IMPORTS + re.sub(r"^( *)<(\d)>$", snippet, AROUND[name], flags=re.MULTILINE)
    file = tmp_path / "document.py"  # TileLang reads the source of kernels from their file
    file.write_text(program)
    monkeypatch.chdir(tmp_path)
    assert "assert" in AROUND[name]  # what a document claims is checked, not only run
    runpy.run_path(str(file), run_name="document")


def test_no_snippet_is_forgotten():
    run = {(name, int(number)) for name, text in AROUND.items() for number in re.findall(r"<(\d)>", text)}
    assert run | LEFT_OUT == {(name, number) for name, found in DOCUMENTS.items() for number in range(len(found))}


def test_commands_exist():
    """Commands in README and docs are of targets, programs and options that there are."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for line in re.findall(r"^    ((?:make|python -m) .*)$", document.read_text(), re.MULTILINE):
            words = shlex.split(line, comments=True)
            if words[0] == "make":
                assert words[1] in targets, f"{document.name}: {line}"
            else:
                module = ROOT / (words[2].replace(".", "/"))
                assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), (
                    f"{document.name}: {line}"
                )
                source = "".join(path.read_text() for path in [module.with_suffix(".py")] if path.exists())
                for option in (word for word in words[3:] if word.startswith("--")):
                    assert f'"{option}"' in source, f"{document.name}: {line}: there is no {option}"
