"""README's Python example runs, and is as short as it says."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.slow
def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    code = found[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    small = code.replace("limit=800, limit_test=500", "limit=240, limit_test=60").replace(
        "rounds=10", "rounds=1"
    )
    small = small.replace("clients=20", "clients=3")
    assert small != code
    exec(compile(small, "README.md", "exec"), {})
    assert "fedsdg" in capsys.readouterr().out
