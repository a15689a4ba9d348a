"""The ``glass`` and ``tilec`` commands: what they print, write and return."""

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from glass_jax import config
from glass_jax.cli import main as cli
from glass_jax.hw import chips, verifier

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = ("--m", "64", "--n", "48", "--k", "32")

KERNELS = """
import functools

import tilelang
import tilelang.ascend.language as T


def copy_rows(rows, columns, dtype="float32"):
    @T.prim_func
    def copy(x: T.Tensor((rows, 256), dtype), y: T.Tensor((rows, 256), dtype)):
        with T.Kernel(1) as bx:
            u = T.alloc_shared((rows, columns), dtype)
            T.copy(x[0:rows, 0:columns], u)
            T.copy(u, y[0:rows, 0:columns])

    return copy


small = copy_rows(16, 64)
jitted = tilelang.jit(out_idx=[-1])(copy_rows)
cached = functools.cache(copy_rows)
number = 3
"""


@pytest.fixture
def kernels(tmp_path):
    """A Python file with TileLang kernels."""
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return path


def run(capsys, *args, command=cli.main):
    """Exit code, standard output and standard error of a command."""
    code = command([str(arg) for arg in args])
    return code, *capsys.readouterr()


# --- doctor --------------------------------------------------------------------------------------------------------


def test_doctor(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path))
    (tmp_path / "a.kernel").write_bytes(b"x" * 2048)
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    for title in ("Versions", "Chips", "Kernel cache", "JAX devices", "Configuration"):
        assert f"{title}\n" in out
    for name in chips.names():
        assert re.search(rf"^  {name} ", out, re.MULTILINE)
    assert re.search(
        r"950DT +Ascend950DT +32 +64 +1650 +432.5 +512 KiB +64 KiB +64 KiB +256 KiB +248 KiB +\? +yes", out
    )
    assert re.search(r"910B3 +Ascend910B3 +20 +40 +1800 +294.9 .* no$", out, re.MULTILINE)
    assert str(tmp_path) in out
    assert re.search(r"kernels +1\n +size +2 KiB", out)
    assert re.search(r"chip +950DT +default; set GLASS_CHIP", out)


def test_doctor_loads_no_compiler_and_tells_what_the_environment_sets():
    code = "import sys; from glass_jax.cli.main import main; main(['doctor']); print({'tvm', 'torch'} & {*sys.modules})"
    env = os.environ | {"GLASS_CHIP": "ascend910b1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")
    assert re.search(r"chip +910B1 +GLASS_CHIP=ascend910b1", done.stdout)


# --- lower: operations ---------------------------------------------------------------------------------------------


def test_lower_prints_ascend_c_and_tilec_is_the_same(capsys):
    code, source, _ = run(capsys, "lower", "gemm", *SMALL)
    assert code == 0
    assert "__global__" in source
    assert "asc_copy_gm2l1" in source
    assert run(capsys, "gemm", *SMALL, command=cli.tilec) == (0, source, "")


def test_dry_run_shows_program_and_memory_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "lower", "gemm", *SMALL, "--dry-run", "--output", "build", "--dtype", "float16")
    assert code == 0
    assert "kernel gemm" in out
    assert re.search(r"param lhs +gm +float16\[1, 64, 32\]", out)
    assert "gemm " in out and "blocks" in out
    assert "memory of 950DT" in out
    assert re.search(r"L0C +[\d.]+ KiB of +256.0 KiB", out)
    assert "__global__" not in out
    assert list(tmp_path.iterdir()) == []


def test_options_reach_the_kernel(capsys):
    options = ("--bias", "--activation", "gelu", "--out-dtype", "float32", "--transpose-rhs", "--batch", "3")
    _, out, _ = run(capsys, "lower", "gemm", *SMALL, *options, "--dtype", "float16", "--dry-run")
    assert re.search(r"param lhs +gm +float16\[3, 64, 32\]", out)
    assert re.search(r"param rhs +gm +float16\[3, 48, 32\]", out)
    assert re.search(r"param bias +gm +float32\[1, 48\]", out)
    assert re.search(r"param out +gm +float32\[3, 64, 48\]", out)
    assert "tanh(" in out


def test_verify_of_a_sound_kernel(capsys):
    code, out, _ = run(capsys, "lower", "gemm", *SMALL, "--verify")
    assert (code, out.count("\n")) == (0, 1)
    assert "on 950DT: violations: 0" in out


def test_910_can_be_verified_against_but_not_generated_for(capsys, tmp_path):
    code, out, _ = run(capsys, "lower", "gemm", *SMALL, "--bias", "--verify", "--target", "910B3")
    assert code == 1
    assert "[copy-path]" in out and "910B3 has no path L0C -> UB" in out
    for more in ((), ("--output", tmp_path / "build")):
        code, out, err = run(capsys, "lower", "gemm", *SMALL, "--target", "910B3", *more)
        assert (code, out) == (2, "")
        assert "910B3 (dav-c220) can be verified against but not generated for" in err
    assert not (tmp_path / "build").exists()


def test_output_writes_source_and_launch(capsys, tmp_path):
    code, out, _ = run(capsys, "lower", "gemm", *SMALL, "--target", "950PR", "--output", tmp_path / "build")
    assert code == 0
    (source,), (manifest,) = (tmp_path / "build").glob("*.asc"), (tmp_path / "build").glob("*.json")
    assert str(source) in out and source.stem == manifest.stem
    launch = json.loads(manifest.read_text())
    assert launch["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert launch["arch"] == "dav-3510"
    assert 1 <= launch["block_dim"] <= 28
    assert f"{launch['entry']}(" in source.read_text()
    assert [argument["shape"] for argument in launch["arguments"]] == [[1, 64, 32], [1, 32, 48], [1, 64, 48]]


# --- lower: files --------------------------------------------------------------------------------------------------


def test_kernel_of_a_file(capsys, kernels):
    code, out, _ = run(capsys, "lower", f"{kernels}:small", "--dry-run")
    assert code == 0
    assert "alloc u  ub       float32[16, 64]" in out
    assert "copy x[0:+16, 0:+64] -> u[0:+16, 0:+64]" in out
    assert "__global__" in run(capsys, "lower", f"{kernels}:small")[1]


@pytest.mark.parametrize("name", ["copy_rows", "jitted", "cached"])
def test_kernel_with_arguments(capsys, kernels, name):
    code, out, _ = run(capsys, "lower", f"{kernels}:{name}", "rows=8", "--dry-run", "columns=32", "dtype=float16")
    assert code == 0
    assert "alloc u  ub       float16[8, 32]" in out


def test_violations_point_to_the_line(capsys, kernels):
    code, out, _ = run(capsys, "lower", f"{kernels}:copy_rows", "rows=16", "columns=63", "--verify")
    line = 1 + KERNELS.splitlines().index("            T.copy(x[0:rows, 0:columns], u)")
    assert code == 1
    assert f"kernels.py:{line}: [copy-rows] copy x -> u: rows stand 252 bytes apart in UB" in out
    code, out, _ = run(capsys, "lower", f"{kernels}:copy_rows", "rows=1024", "columns=64", "--verify", "--dry-run")
    assert code == 1
    assert "[memory-overflow] UB needs 262144 bytes and 950DT has 253952" in out
    assert "over by 8.0 KiB" in out


# --- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, message",
    [
        (("conv",), "'conv' is neither an operation (gemm) nor FILE:NAME"),
        (("gemm", "m=3"), "gemm takes options such as --m, not m=3"),
        (("gemm", "--target", "950TD"), "unknown chip '950TD': did you mean 950DT?"),
        (("gemm", *SMALL, "--dtype", "int8", "--activation", "gelu"), "activation"),
        (("missing.py:f",), "missing.py"),
        (("{file}:nothing",), "has no 'nothing'; it has cached, copy_rows, jitted, small"),
        (("{file}:number",), "'number' is int"),
        (("{file}:small", "--m", "3"), "--m describe an operation"),
        (("{file}:copy_rows", "rows"), "'rows' is not key=value"),
        (("{file}:copy_rows", "rows=3"), "columns"),
        (("{file}:copy_rows", "rows=3", "columns='a'"), "copy_rows"),
        (("{file}:small", "rows=3"), "takes no arguments"),
    ],
)
def test_mistakes_end_in_one_message(capsys, kernels, args, message):
    code, out, err = run(capsys, "lower", *(str(arg).format(file=kernels) for arg in args))
    assert (code, out) == (2, "")
    assert err.startswith("glass: ") and err.count("\n") == 1
    assert message in err
    assert "Traceback" not in err


def test_broken_file(capsys, tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    code, _, err = run(capsys, "lower", f"{tmp_path}/broken.py:f")
    assert code == 2
    assert "broken.py: ModuleNotFoundError: No module named 'no_such_module'" in err


@pytest.mark.parametrize(
    "args",
    [
        ("lower", "gemm", "--m", "0"),
        ("lower", "gemm", "--m", "x"),
        ("lower",),
        ("nothing",),
        (),
        ("doctor", "x"),
        ("lower", "gemm", "--x"),
    ],
)
def test_wrong_usage(capsys, args):
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 2
    assert "usage: glass" in capsys.readouterr().err


def test_debug_shows_the_traceback(capsys):
    with config.configure(debug=True), pytest.raises(ValueError, match="unknown chip"):
        cli.main(["lower", "gemm", "--target", "H100"])


def test_wrong_environment_variable():
    env = os.environ | {"GLASS_CHIP": "H100"}
    command = [sys.executable, "-m", "glass_jax.cli.main", "doctor"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown chip 'H100'" in done.stderr and "GLASS_CHIP=H100" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_mistake():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "glass_jax.cli.main", "doctor"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


# --- documentation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command, args, examples",
    [(cli.main, ["lower", "--help"], "glass lower gemm"), (cli.tilec, ["--help"], "tilec gemm")],
)
def test_help_has_examples(capsys, command, args, examples):
    with pytest.raises(SystemExit) as caught:
        command(args)
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert examples in out and "--target CHIP" in out and "exit codes" in out


def test_documentation_lists_every_rule():
    text = (ROOT / "docs" / "verification.md").read_text()
    for rule in verifier.RULES:
        assert f"| `{rule.id}` | {rule.hardware} |" in text
