"""The platform ``ascend`` and the custom call that a kernel lowers to."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import stub_kernels
from jax.extend.core import Primitive
from jax.interpreters import mlir

from glass_jax import errors
from glass_jax.lowering import ascend

VECTOR = jax.ShapeDtypeStruct((16,), jnp.float32)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)

# An operation as the library defines them: a formula everywhere, the kernel where the platform is ascend.
axpy_p = Primitive("axpy")
axpy_p.def_abstract_eval(lambda alpha, x, y: x)
mlir.register_lowering(axpy_p, mlir.lower_fun(lambda alpha, x, y: alpha * x + y, multiple_results=False))
mlir.register_lowering(axpy_p, mlir.lower_fun(stub_kernels.axpy, multiple_results=False), platform=ascend.PLATFORM)


@pytest.fixture(autouse=True)
def kernels():
    with stub_kernels.installed():
        yield


def attributes(text: str) -> dict[str, str]:
    """The attributes of the only custom call in StableHLO text."""
    (config,) = re.findall(r"@glass_tilelang_call\(.*?mhlo\.backend_config = \{(.*?)\}", text)
    return dict(re.findall(r"(\w+) = (.*?)(?:, (?=\w+ =)|$)", config))


def test_platform_is_known_and_changes_nothing_else():
    code = """if True:
        import jax
        from glass_jax.lowering import ascend
        print({device.platform for device in jax.devices()}, jax.jit(lambda x: x + 1)(1))
    """
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "{'cpu'} 2\n"
    assert run.stderr == ""


def test_no_ascend_devices():
    with pytest.raises(RuntimeError, match=r"npu_model.*glass\.export"):
        jax.devices("ascend")


def test_a_backend_that_runs_is_kept(monkeypatch):
    asked = []

    def refuse(name, *args, **kwargs):
        asked.append(name)
        raise RuntimeError("Backend ascend already initialized")

    monkeypatch.setattr("jax.extend.backend.register_backend_factory", refuse)
    ascend._register_platform()  # raises nothing
    assert asked == ["ascend"]


def test_only_ascend_gets_the_call():
    traced = jax.jit(axpy_p.bind).trace(SCALAR, VECTOR, VECTOR)
    assert ascend.TARGET in traced.lower(lowering_platforms=("ascend",)).as_text()
    cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert ascend.TARGET not in cpu and "stablehlo.multiply" in cpu


def test_attributes():
    lowered = jax.jit(stub_kernels.axpy).lower(SCALAR, VECTOR, VECTOR)
    made = stub_kernels.compile_stub(stub_kernels.StubKernel("axpy", 2))
    assert attributes(lowered.as_text()) == {
        "abi": "1 : i64",
        "arch": '"dav-3510"',
        "block_dim": "2 : i64",
        "dynamic_ub_bytes": "4096 : i64",
        "entry": '"axpy_kernel"',
        "kernel": f'"{made.sha}"',
        # The function takes alpha, out, x, y; the operands are x, alpha, y, and then comes the result.
        "launch_order": "dense<[1, 3, 0, 2]> : tensor<4xi64>",
        "workspace_bytes": "0 : i64",
    }
    assert "api_version=API_VERSION_TYPED_FFI" in lowered.as_text(dialect="hlo")


def test_results_among_the_operands():
    lowered = jax.jit(stub_kernels.split).lower(jax.ShapeDtypeStruct((32,), jnp.float32))
    # The function takes high, low, pairs; the operand is pairs, the results are low and high.
    assert attributes(lowered.as_text())["launch_order"] == "dense<[2, 1, 0]> : tensor<3xi64>"
    assert [out.shape for out in lowered.out_info] == [(16,), (16,)]


def test_inside_shard_map_the_kernel_is_of_the_shards():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(alpha, x, y):
        return axpy_p.bind(jax.lax.pcast(alpha, "x", to="varying"), x, y)

    f = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), jax.P("x"), jax.P("x")), out_specs=jax.P("x"))
    whole = VECTOR.update(shape=(96,))
    text = jax.jit(f).trace(SCALAR, whole, whole).lower(lowering_platforms=("ascend",)).as_text()
    assert attributes(text)["block_dim"] == "3 : i64"


def test_workspace_is_numbered_last():
    lowered = jax.jit(lambda *args: stub_kernels.axpy(*args, workspace_bytes=512)).lower(SCALAR, VECTOR, VECTOR)
    found = attributes(lowered.as_text())
    assert found["workspace_bytes"] == "512 : i64"
    assert found["launch_order"] == "dense<[1, 3, 4, 0, 2]> : tensor<5xi64>"  # alpha, out, workspace, x, y


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ((VECTOR, VECTOR), r"axpy_kernel takes 3 operands \(x, alpha, y\), got 2"),
        ((VECTOR, SCALAR, VECTOR), r"alpha = float32\[1\], got float32\[\]"),
        (
            (VECTOR.update(dtype=jnp.bfloat16), SCALAR.update(shape=(1,)), VECTOR),
            r"x = float32\[16\], got bfloat16\[16\]",
        ),
    ],
)
def test_operands_that_are_not_the_kernels(operands, message):
    kernel = stub_kernels.StubKernel("axpy", 2)
    with pytest.raises(errors.HardwareConstraintError, match=message):
        jax.eval_shape(lambda *args: ascend.call(kernel, *args, chip=stub_kernels.CHIP), *operands)
