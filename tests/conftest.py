"""Which tests share a worker: those of one file, or of one method in the conformance suite; and
what a test draws without a seed of its own: the same each time."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = str(item.path)
        if item.path.name == "test_conformance.py" and isinstance(item, pytest.Function):
            group += str(item.callspec.params["name"]) + str(item.callspec.params["on"])
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)
