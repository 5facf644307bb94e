"""The documentation names what there is."""

import dataclasses
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.methods import METHODS

ROOT = Path(__file__).parent.parent
SECTIONS = [
    ft.DataConfig, ft.SplitConfig, ft.ModelConfig, ft.LocalConfig,
    ft.CohortConfig, ft.ScheduleConfig, ft.EngineConfig, ft.EvaluateConfig,
]  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_documented_with_its_default(section: type) -> None:
    text = (ROOT / "docs/experiments.md").read_text()
    for field in dataclasses.fields(section):
        assert f"| `{field.name}` | `{field.default}` |" in text, field.name


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page_and_says_where_it_differs(name: str) -> None:
    page = (ROOT / f"docs/methods/{name}.md").read_text()
    assert f"methods/{name}.md" in (ROOT / "mkdocs.yml").read_text()
    assert len(page) > 200
    module = __import__(METHODS[name].__module__, fromlist=["_"])
    assert module.__doc__ is not None
    assert "Differs from the paper" in module.__doc__


def test_every_experiment_file_is_valid() -> None:
    for path in (ROOT / "experiments").glob("*.toml"):
        assert ft.load(path).methods
