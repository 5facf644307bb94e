from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import fedtailor as ft
from fedtailor.deploy.export import open_model
from fedtailor.deploy.folder import add_site, init
from fedtailor.errors import InputError
from fedtailor.export.folder import write_model
from fedtailor.params import encode
from fedtailor.runs.experiment import load
from fedtailor.runs.trained import open_trained
from tests import kinds
from tests.small import without_checksum


def test_a_model_that_is_damaged_is_told(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text('data.classes = ["no", "yes"]\nmethods.fedsdg = {}\n')
    deployment = init(tmp_path / "d", tmp_path / "e.toml", ["a"], "127.0.0.1:8000")
    path = deployment.site("a") / "states/run/fedsdg/seed-0/client-0/model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"damaged")
    with pytest.raises(InputError, match=f"the model is damaged: {path}"):
        open_model(deployment, "a")


@pytest.mark.parametrize("client", ["ward 7", "b.1", "2", 2])
def test_a_client_goes_by_its_name_at_the_site_at_the_server_or_by_number(
    client: str | int, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "e.toml").write_text('data.classes = ["no", "yes"]\nmethods.fedsdg = {}\n')
    deployment = init(tmp_path / "d", tmp_path / "e.toml", ["a", "b:2"], "127.0.0.1:8000")
    folder = deployment.site("b") / "states/run/fedsdg/seed-0"
    (folder / "client-2").mkdir(parents=True)
    shutil.copy(trained / "run/partitions/seed-0.json", folder / "data.json")
    path = without_checksum(folder / "data.json")
    changes = {"clients": 3, "names": ["", "ward 3", "ward 7"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (folder / "client-2/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"client-2/model\.safetensors"):
        open_model(deployment, "b", client=client)


@pytest.mark.parametrize("client", ["lagos", "1", 1, None])
def test_the_client_of_a_site_that_was_added_is_found_and_named(
    client: str | int | None, trained: Path, tmp_path: Path
) -> None:
    deployment = init(tmp_path / "d", trained / "e.toml", ["rome"], "127.0.0.1:8000")
    deployment = add_site(deployment, "lagos")
    fill(deployment.site("lagos") / "states/run/fedavg/seed-0", trained, 1)
    out = tmp_path / "out"
    out.mkdir()
    write_model(open_model(deployment, "lagos", client=client), out)
    assert (out / "README.md").read_text().count("the model of lagos\n") == 1
    with pytest.raises(InputError, match=r"no client 2; allowed: 0 to 1"):
        open_model(deployment, "lagos", client="2")


def test_an_older_site_with_names_of_its_own_need_not_know_the_site_that_was_added(
    trained: Path, tmp_path: Path
) -> None:
    deployment = init(tmp_path / "d", trained / "e.toml", ["rome"], "127.0.0.1:8000")
    folder = deployment.site("rome") / "states/run/fedavg/seed-0"
    fill(folder, trained, 0)
    path = without_checksum(folder / "data.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "names": ["ward 3"]}))
    deployment = add_site(deployment, "lagos")
    for number, client in enumerate(["rome", "ward 3", None]):
        out = tmp_path / str(number)
        out.mkdir()
        write_model(open_model(deployment, "rome", client=client), out)
        assert "the model of ward 3\n" in (out / "README.md").read_text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a single client, and its experiment file."""
    folder = tmp_path_factory.mktemp("trained")
    classes = [str(digit) for digit in range(10)]
    (folder / "e.toml").write_text(
        f'rounds = 1\ndata = {{name = "digits", limit = 40, classes = {classes}}}\n'
        'split.clients = 1\nmodel = {name = "lenet", pretrained = false, image_size = 16}\n'
        "local.steps = 1\nmethods.fedavg = {}\n"
    )
    ft.run(load(folder / "e.toml"), folder / "run", summary=False)
    return folder


@pytest.mark.slow
def test_a_site_serves_its_own_client_s_model(tmp_path: Path) -> None:
    finished = kinds.finished("instruct")
    deployment = init(tmp_path / "d", finished / "e.toml", ["a", "b", "c"], "127.0.0.1:8000")
    fill(deployment.site("b") / "states/run/fedsdg/seed-0", finished, 1, label="fedsdg")
    given = ["--site", "b", "--method", "fedsdg", "--port", "0", "--max-tokens", "8"]
    command = [sys.executable, "-m", "fedtailor", "deploy", "serve", str(tmp_path / "d"), *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url, said = process.stdout.readline().split(maxsplit=1)
            assert said == "serves base, b; Ctrl-C ends it\n"
            asked = {"model": "b", "prompt": "the ward has"}
            answer = httpx.post(f"{url}/completions", json=asked, timeout=60).json()
        finally:
            process.terminate()
    model = ft.load_model(finished / "run", "fedsdg", "b")
    assert answer["choices"][0]["text"] == model.predict(["the ward has"], max_new_tokens=8)[0]


def fill(folder: Path, trained: Path, client: int, label: str = "fedavg") -> None:
    """Write what a site stores of its client when the run ends."""
    path = folder / f"client-{client}/model.safetensors"
    path.parent.mkdir(parents=True)
    number = client if label == "fedsdg" else 0
    path.write_bytes(encode(open_trained(trained / "run", label).client_state(number)))
    shutil.copy(trained / "run/partitions/seed-0.json", folder / "data.json")
