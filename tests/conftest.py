"""Which tests share a worker: those of one file, or of one method in the conformance suite."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = str(item.path)
        if item.path.name == "test_conformance.py" and isinstance(item, pytest.Function):
            group += str(item.callspec.params["name"]) + str(item.callspec.params["on"])
        item.add_marker(pytest.mark.xdist_group(group))
