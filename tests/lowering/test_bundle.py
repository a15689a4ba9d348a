"""Bundles of ``glass.export``: what is in them, that they reload, and that their bytes depend on nothing else."""

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stub_kernels

import glass_jax as glass
from glass_jax import errors
from glass_jax.lowering import ascend, bundle

ROOT = pathlib.Path(__file__).resolve().parents[2]
VECTOR = jax.ShapeDtypeStruct((16,), jnp.float32)


def files(path: pathlib.Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


def manifest(path: pathlib.Path) -> dict:
    return json.loads((path / "manifest.json").read_text())


def reloaded(path: pathlib.Path) -> jax.export.Exported:
    return jax.export.deserialize(bytearray((path / "module.stablehlo").read_bytes()))


def plain(x):
    return {"sum": jnp.sin(x).sum(), "twice": (x + x, x.astype(jnp.bfloat16))}


def with_kernels(alpha, x):
    for _ in range(3):
        x = stub_kernels.axpy(alpha, x, x)
    return jax.lax.fori_loop(0, 2, lambda _, x: stub_kernels.axpy(alpha, x, x), jnp.concatenate([x, x]))


@pytest.fixture
def kernels():
    with stub_kernels.installed():
        yield


# --- contents ------------------------------------------------------------------------------------------------------


def test_without_kernels(tmp_path):
    path = glass.export(plain, VECTOR, path=tmp_path / "new" / "bundle", platforms=["cpu", "ascend"])
    assert path == tmp_path / "new" / "bundle"
    described = manifest(path)
    assert described["kernels"] == {} and list((path / "kernels").iterdir()) == []
    assert described["function"] == {
        "devices": 1,
        "inputs": [{"dtype": "float32", "path": "args[0]", "shape": [16]}],
        "name": "plain",
        "outputs": [
            {"dtype": "float32", "path": "result['sum']", "shape": []},
            {"dtype": "float32", "path": "result['twice'][0]", "shape": [16]},
            {"dtype": "bfloat16", "path": "result['twice'][1]", "shape": [16]},
        ],
        "platforms": ["cpu", "ascend"],
    }
    x = np.linspace(0, 1, 16, dtype=np.float32)
    result = reloaded(path).call(x)
    np.testing.assert_allclose(result["sum"], np.sin(x.astype(np.float64)).sum(), rtol=1e-6)
    np.testing.assert_array_equal(result["twice"][0], x + x)


def test_kernels(kernels, tmp_path):
    path = glass.export(with_kernels, np.float32(2), VECTOR, path=tmp_path / "bundle")
    source = (stub_kernels.STUB / "axpy.c").read_bytes()
    sha = hashlib.sha256(source).hexdigest()
    assert {name: content for name, content in files(path).items() if name.startswith("kernels/")} == {
        f"kernels/{sha}.asc": source
    }
    described = manifest(path)
    assert described["function"]["platforms"] == ["ascend"]
    (kernel,) = described["kernels"].values()
    assert {name: value for name, value in kernel.items() if name != "launches"} == {
        "arch": "dav-3510",
        "entry": "axpy_kernel",
        "versions": {"tilelang": "0"},
    }
    # The three equal launches are one; the loop's has twice the blocks, from the same source.
    assert [launch["block_dim"] for launch in kernel["launches"]] == [2, 4]
    assert kernel["launches"][1] == {
        "arguments": [
            {"dtype": "float32", "name": "x", "output": False, "shape": [32]},
            {"dtype": "float32", "name": "alpha", "output": False, "shape": [1]},
            {"dtype": "float32", "name": "y", "output": False, "shape": [32]},
            {"dtype": "float32", "name": "out", "output": True, "shape": [32]},
        ],
        "block_dim": 4,
        "dynamic_ub_bytes": 4096,
        "launch_order": [1, 3, 0, 2],
        "workspace_bytes": 0,
    }


def test_runtime_sources_are_all_shipped(tmp_path):
    path = glass.export(plain, VECTOR, path=tmp_path / "bundle")
    sources = ROOT / "glass_jax" / "lowering" / "runtime"
    assert files(path / "runtime") == files(sources)


def test_options_of_a_jitted_function_are_kept(tmp_path):
    jitted = jax.jit(lambda x, n: x * n, static_argnums=1, donate_argnums=0)
    path = glass.export(jitted, VECTOR, 4, path=tmp_path / "bundle", platforms=["cpu"])
    assert [leaf["path"] for leaf in manifest(path)["function"]["inputs"]] == ["args[0]"]
    assert "tf.aliasing_output" in reloaded(path).mlir_module()


def arguments_of_main(path: pathlib.Path) -> list[str]:
    """The text of each argument of the module's function: its type and attributes."""
    (main,) = re.findall(r"@main\((.*)\) -> ", reloaded(path).mlir_module())
    return re.split(r", (?=%arg)", main)


def test_donated_arguments_share_buffers_with_results(tmp_path):
    """The first is never used, the second has the type of the second result, the third of none."""
    step = jax.jit(lambda unused, cache, x, y: (y.sum() + x.sum(), cache * 2 + y), donate_argnums=(0, 1, 2))
    other = jax.ShapeDtypeStruct((3,), jnp.float32)
    with pytest.warns(UserWarning, match=r"argument 2 is donated, .* float32\[3\]"):
        path = glass.export(step, VECTOR, VECTOR, other, VECTOR, path=tmp_path / "bundle")
    cache, x, y = arguments_of_main(path)
    assert "tf.aliasing_output = 1 : i32" in cache
    assert not any("aliasing" in text or "donor" in text for text in (x, y))


def test_two_donated_arguments_take_two_results(tmp_path):
    step = jax.jit(lambda a, b, c: (b + 1, a + c), donate_argnums=(0, 1, 2))
    with pytest.warns(UserWarning, match="argument 2 is donated"):
        path = glass.export(step, VECTOR, VECTOR, VECTOR, path=tmp_path / "bundle")
    a, b, c = arguments_of_main(path)
    assert "tf.aliasing_output = 0" in a and "tf.aliasing_output = 1" in b and "aliasing" not in c


def test_donated_shards_are_offered(tmp_path):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharded = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("d")))
    step = jax.jit(lambda cache, x: cache + x, donate_argnums=0)
    path = glass.export(step, sharded, sharded, path=tmp_path / "bundle")
    cache, x = arguments_of_main(path)
    assert "jax.buffer_donor = true" in cache and "sdy.sharding" in cache and "donor" not in x


def test_donation_to_several_platforms_is_refused(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    with pytest.raises(errors.UnsupportedError, match="a bundle for each platform"):
        glass.export(step, VECTOR, path=tmp_path / "bundle", platforms=["cpu", "ascend"])


def test_sharded_arguments(tmp_path):
    mesh = jax.make_mesh((4,), ("x",))
    sharded = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("x")))
    path = glass.export(plain, sharded, path=tmp_path / "bundle", platforms=["cpu", "ascend"])
    assert manifest(path)["function"]["devices"] == 4
    x = jax.device_put(np.arange(16, dtype=np.float32), sharded.sharding)
    result = jax.jit(reloaded(path).call)(x)
    np.testing.assert_array_equal(result["twice"][0], 2 * np.arange(16))


def test_kernels_of_a_sharded_function_are_those_of_a_shard(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("x"), jax.P()))
    lhs = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=rows)
    rhs = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=whole)
    described = manifest(glass.export(glass.gemm, lhs, rhs, path=tmp_path / "bundle"))
    assert described["function"]["devices"] == 4
    (kernel,) = described["kernels"].values()
    (launch,) = kernel["launches"]
    assert [(argument["name"], argument["shape"][-2:]) for argument in launch["arguments"]] == [
        ("lhs", [16, 32]),
        ("rhs", [32, 16]),
        ("out", [16, 16]),
    ]


def test_gemm_runs_on_the_cpu_and_launches_its_kernel_on_ascend(tmp_path):
    rng = np.random.default_rng(0)
    lhs, rhs = rng.standard_normal((17, 40)), rng.standard_normal((40, 24))
    operands = [x.astype(np.float32) for x in (lhs, rhs)]
    path = glass.export(glass.gemm, *operands, path=tmp_path / "bundle", platforms=["cpu", "ascend"])
    exported = reloaded(path)
    assert ascend.TARGET in exported.mlir_module()
    np.testing.assert_allclose(exported.call(*operands), lhs @ rhs, rtol=1e-5, atol=1e-5)
    ((sha, kernel),) = manifest(path)["kernels"].items()
    source = (path / "kernels" / f"{sha}.asc").read_bytes()
    assert hashlib.sha256(source).hexdigest() == sha
    assert kernel["arch"] == "dav-3510" and f"{kernel['entry']}(".encode() in source
    assert {"tilelang"} <= kernel["versions"].keys()


# --- determinism ---------------------------------------------------------------------------------------------------


def test_same_bytes_whatever_was_lowered_before(kernels, tmp_path):
    function = jax.jit(with_kernels)
    first = glass.export(function, np.float32(2), VECTOR, path=tmp_path / "first")
    function.trace(np.float32(2), VECTOR).lower(lowering_platforms=("ascend",))  # cached, with source locations
    fresh = jax.jit(with_kernels)
    fresh.trace(np.float32(2), VECTOR).lower(lowering_platforms=("ascend",))
    for again in (function, fresh, with_kernels):
        assert files(glass.export(again, np.float32(2), VECTOR, path=tmp_path / "again")) == files(first)
    assert str(ROOT).encode() not in (first / "module.stablehlo").read_bytes()
    assert b"test_bundle" not in (first / "module.stablehlo").read_bytes()


def test_locations_return_after_an_export(tmp_path):
    glass.export(plain, VECTOR, path=tmp_path / "bundle", platforms=["cpu"])
    assert "test_bundle.py" in jax.jit(plain).lower(VECTOR).as_text(debug_info=True)


def test_same_bytes_from_another_process_folder_and_cache(tmp_path):
    code = """
import jax, jax.numpy as jnp, sys
import glass_jax as glass
def model(x, w):
    return jax.nn.relu(glass.gemm(x, w, activation="gelu")).sum(axis=0)
x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((20, 64), (64, 48)))
glass.export(model, x, w, path=sys.argv[1], platforms=["cpu", "ascend"])
"""
    processes = []
    for i in range(2):
        script = tmp_path / ("deeper/" * i) / f"script{i}.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text("\n" * 7 * i + code)
        cache = {"GLASS_CACHE_DIR": str(tmp_path / "cache")} if i else {}
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | cache
        processes.append(subprocess.Popen([sys.executable, script, tmp_path / f"bundle{i}"], env=environment))
    assert [process.wait() for process in processes] == [0, 0]
    first, second = (files(tmp_path / f"bundle{i}") for i in range(2))
    assert first == second
    assert len([name for name in first if name.endswith(".asc")]) == 1


# --- where it is written -------------------------------------------------------------------------------------------


def test_a_bundle_is_replaced_as_a_whole(kernels, tmp_path):
    path = tmp_path / "bundle"
    path.mkdir()  # an empty folder is as good as none
    glass.export(with_kernels, np.float32(2), VECTOR, path=path)
    (path / "runtime" / "libglass_ffi.so").write_bytes(b"built earlier")
    glass.export(plain, VECTOR, path=str(path))
    assert manifest(path)["kernels"] == {} and list((path / "kernels").iterdir()) == []
    assert not (path / "runtime" / "libglass_ffi.so").exists()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", ["notes", "{}", "[1]", '{"format": "another"}'])
def test_anything_else_is_left_alone(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(errors.GlassError, match="not a bundle"):
        glass.export(plain, VECTOR, path=tmp_path)
    with pytest.raises(errors.GlassError, match="not a bundle"):
        glass.export(plain, VECTOR, path=tmp_path / "manifest.json")
    assert files(tmp_path) == {"manifest.json": content.encode()}


def test_nothing_is_left_of_an_export_that_fails(tmp_path):
    glass.export(plain, VECTOR, path=tmp_path / "bundle")
    before = files(tmp_path)
    with pytest.raises(ZeroDivisionError):
        glass.export(lambda x: x * (1 // 0), VECTOR, path=tmp_path / "bundle")
    assert files(tmp_path) == before


def test_what_calls_back_into_python(tmp_path):
    with pytest.raises(errors.UnsupportedError, match=r"jax\.debug\.print"):
        glass.export(lambda x: jax.debug.print("{}", x), VECTOR, path=tmp_path / "bundle", platforms=["cpu"])


@pytest.mark.parametrize("platforms", [[], ["npu"], "ascend", ["cpu", "Ascend"]])
def test_platforms_that_are_not(tmp_path, platforms):
    with pytest.raises(errors.HardwareConstraintError, match=", ".join(bundle.PLATFORMS)):
        glass.export(plain, VECTOR, path=tmp_path / "bundle", platforms=platforms)
    assert list(tmp_path.iterdir()) == []
