"""Run directories that another version of the package wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.runs.check import check
from fedtailor.runs.manifest import open_run
from fedtailor.store.format import FORMAT
from tests.small import digits, digits_backbone, two_methods


def test_a_directory_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = {"data": digits(), "backbone": digits_backbone()}
    ft.run(two_methods(), out, **given)  # type: ignore[arg-type]
    file = out / "experiment.json"
    content = json.loads(file.read_text())
    assert content.pop("format") == FORMAT
    del content["checksum"]
    assert open_run(out).methods == dict(two_methods().methods)
    for version, age in ((None, "an older"), (1, "an older"), (FORMAT + 1, "a newer")):
        changed = {**content, "format": version} if version else content
        file.write_text(json.dumps(changed))
        told = f"run format {version or 1} of {age} version of fedtailor"
        for use in (
            lambda: open_run(out),
            lambda: ft.run(two_methods(), out, **given),  # type: ignore[arg-type, misc]
            lambda: check(out),
        ):
            with pytest.raises(InputError, match=told):
                use()
