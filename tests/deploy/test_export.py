from __future__ import annotations

from pathlib import Path

import pytest

from fedtailor.deploy.export import export
from fedtailor.deploy.folder import init
from fedtailor.errors import InputError


def test_a_model_that_is_damaged_is_told(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text('data.classes = ["no", "yes"]\nmethods.fedsdg = {}\n')
    deployment = init(tmp_path / "d", tmp_path / "e.toml", ["a"], "127.0.0.1:8000")
    path = deployment.site("a") / "states/run/fedsdg/seed-0/client-0/model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"damaged")
    with pytest.raises(InputError, match=f"the model is damaged: {path}"):
        export(deployment, "a", tmp_path / "adapter")
