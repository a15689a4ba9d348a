import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import measure, npu_model
from benchmarks.measure import Report, Verdict


@pytest.mark.parametrize(
    ("verdict", "met", "text"),
    [
        (Verdict("a over b", 1.5, promise=("at most", 1.5)), True, "a over b: 1.50x (promised: at most 1.5x) met"),
        (
            Verdict("a over b", 1.51, promise=("at most", 1.5)),
            False,
            "a over b: 1.51x (promised: at most 1.5x) NOT MET",
        ),
        (Verdict("faster by", 9, promise=("at least", 8)), True, "faster by: 9.00x (promised: at least 8x) met"),
        (
            Verdict("faster by", 7, promise=("at least", 8), remark="old CPU"),
            False,
            "faster by: 7.00x (promised: at least 8x) NOT MET; old CPU",
        ),
        (Verdict("extra", 0.05, "s", promise=("at most", 0.1)), True, "extra: 0.050 s (promised: at most 0.1 s) met"),
        (Verdict("ratio", 2.0), None, "ratio: 2.00x"),
    ],
)
def test_verdicts(verdict, met, text):
    assert verdict.met is met
    assert str(verdict) == text


def test_interleaved_calls_its_sides_in_turn():
    calls = []

    def side(name):
        return lambda: calls.append(name) or jnp.zeros(())

    times = measure.interleaved({"a": side("a"), "b": side("b")}, seconds=0.0)
    assert calls == ["a", "b"] * (1 + 3 * 5)
    assert set(times) == {"a", "b"} and min(times.values()) > 0


def test_the_pallas_kernel_that_is_measured_multiplies():
    lhs, rhs = (np.random.default_rng(seed).standard_normal((256, 256)).astype(np.float16) for seed in (0, 1))
    want = lhs.astype(np.float64) @ rhs.astype(np.float64)
    got = np.asarray(npu_model.pallas_gemm(lhs, rhs), np.float64)
    assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)


def test_a_process_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        measure.python("1 / 0")


def test_the_command_prints_and_writes_what_it_found(monkeypatch, tmp_path, capsys):
    report = Report("squares", {"ours": 0.002, "theirs": 0.004}, [Verdict("faster by", 2.0, promise=("at least", 1.5))])
    monkeypatch.setattr(command, "BENCHMARKS", {"one": lambda: [report]})
    assert command.main(["--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "ours         2.000 ms" in out and "1 of 1 promises met" in out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["benchmarks"]["one"][0]["verdicts"][0]["met"] is True
    assert result["machine"]["cpus"] > 0


def test_an_unknown_name_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        command.main(["gem"])
    assert "no benchmark gem; there are import, compile" in capsys.readouterr().err
