"""The README's example runs as it is printed."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(README), "exec"), {"__name__": "readme"})
    assert float(capsys.readouterr().out) < 1e-4
    assert (tmp_path / "mlp" / "module.stablehlo").stat().st_size > 0


def test_links_lead_somewhere():
    for document in (README, *(README.parent / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"
