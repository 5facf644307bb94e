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


@pytest.mark.parametrize("client", ["ward 7", "b.1", "2", 2])
def test_a_client_goes_by_its_name_at_the_site_at_the_server_or_by_number(
    client: str | int, tmp_path: Path
) -> None:
    (tmp_path / "e.toml").write_text('data.classes = ["no", "yes"]\nmethods.fedsdg = {}\n')
    deployment = init(tmp_path / "d", tmp_path / "e.toml", ["a", "b:2"], "127.0.0.1:8000")
    folder = deployment.site("b") / "states/run/fedsdg/seed-0"
    (folder / "client-2").mkdir(parents=True)
    (folder / "data.json").write_text('{"names": ["", "ward 3", "ward 7"]}')
    (folder / "client-2/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"client-2/model\.safetensors"):
        export(deployment, "b", tmp_path / "adapter", client=client)
