"""The folder of an export: what is in it, for one client or all, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.export.folder import ClientModel, export_model, write_model
from fedtailor.export.templates.base import build
from fedtailor.export.templates.plain import Model
from fedtailor.params import Batch, Params
from fedtailor.runs.experiment import load
from fedtailor.runs.trained import TrainedMethod, open_trained
from fedtailor.user_code import load as load_object
from tests.export.apart import logits_of
from tests.export.net import net
from tests.inference.conftest import NEW
from tests.small import digits

EXPERIMENT = """
name = "digits"
rounds = 1
data = {name = "digits", limit = 120, limit_test = 30}
split = {clients = 3, min_examples = 5}
model = {factory = "net.py:net", targets = ["hidden"]}
local = {batch_size = 8, steps = 2}
engine = {executor = "sequential"}
[methods.fedavg]
trainable = "head"
[methods.fedsdg]
rank = 2
[methods.fedem]
components = 2
"""


class Pair(NamedTuple):
    """An export's folder, its logits, and ours."""

    folder: Path
    exported: Tensor
    ours: Tensor


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "net.py").write_text((Path(__file__).parent / "net.py").read_text())
    (folder / "digits.toml").write_text(EXPERIMENT)
    return ft.run(load(folder / "digits.toml"), folder / "run").path


@pytest.mark.slow
def test_a_picture_gets_labels_from_use_py_and_the_card_tells_where_it_comes_from(
    finished: Path, tmp_path: Path
) -> None:
    out = export_model(finished, "fedsdg", tmp_path / "out", client=1)
    Image.fromarray((digits().inputs.values[3, 0] * 16).astype(np.uint8)).save(tmp_path / "a.png")  # type: ignore[union-attr]
    code = "import sys, runpy; sys.modules['fedtailor'] = None; sys.argv = sys.argv[1:]; "
    code += "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-I", "-c", code, str(out / "use.py"), str(tmp_path / "a.png")]
    usage = subprocess.run([sys.executable, out / "use.py"], capture_output=True, text=True)
    assert usage.returncode == 1
    assert usage.stderr.startswith('Use the model: python use.py "some text", a .txt file with one')
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    values, labels = zip(*(line.split("  ") for line in lines), strict=True)
    assert sorted(labels) == sorted("0123456789")
    assert sum(map(float, values)) == pytest.approx(1, abs=0.01)
    assert sorted(values, reverse=True) == list(values)
    assert len((out / "use.py").read_text().splitlines()) <= 16
    missing = [sys.executable, out / "use.py", str(tmp_path / "nope.png")]
    told = subprocess.run(missing, capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (2, "")
    assert re.fullmatch(r"can't read .*nope\.png: .*No such file.*\n", told.stderr)
    card = (out / "README.md").read_text()
    assert "| client | client 1 |" in card
    assert "| data | digits, divided at random among 3 clients |" in card
    log = (finished / "methods/fedsdg/seed-0/clients.jsonl").read_text().splitlines()
    (test,) = (e for e in map(json.loads, log) if (e["model"], e["split"]) == ("personal", "test"))
    assert f"| test | {test['num_examples'][1]} | {100 * test['accuracy'][1]:.1f} % |" in card


@pytest.mark.slow
def test_the_card_says_so_if_all_clients_have_the_same_model(
    finished: Path, tmp_path: Path
) -> None:
    out = export_model(finished, "fedavg", tmp_path / "fedavg", client=1)
    card = (out / "README.md").read_text()
    assert ": the model of all clients (global)\n" in card
    assert "| client | client 1; all clients have this same model |" in card


@pytest.mark.slow
def test_a_picture_is_read_as_the_run_reads_it(finished: Path, tmp_path: Path) -> None:
    """Larger than those of the run, colourful, and turned by its EXIF orientation."""
    pixels = np.random.default_rng(0).integers(0, 256, (21, 13, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    out = export_model(finished, "fedavg", tmp_path / "out", client=1)
    about = json.loads((out / "export.json").read_text())
    about["inputs"]["size"] = [16, 16]  # as of a network that then resizes what it gets
    (out / "export.json").write_text(json.dumps(about))
    deep = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    Image.fromarray(deep).save(tmp_path / "b.png")
    Image.fromarray(pixels).convert("CMYK").save(tmp_path / "c.tif")
    Image.fromarray(np.dstack([pixels, pixels[..., 0]])).save(tmp_path / "d.png")
    model, client = Model(out), ft.load_model(finished, "fedavg", 1)
    for name in ("a.png", "b.png", "c.tif", "d.png"):
        exported = model.batch([str(tmp_path / name)])
        ours = client.examples(tmp_path / name).batch(np.arange(1))
        assert torch.equal(exported["pixel_values"], ours["pixel_values"])
    Image.fromarray(deep.astype(np.float32)).save(tmp_path / "e.tif")
    with pytest.raises(OSError, match=r"e\.tif is a picture of floats with values from 0 to 65520"):
        model.batch([str(tmp_path / "e.tif")])


def test_the_working_folder_may_be_the_output(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export_model(finished, "fedavg", Path(), client=1)
    assert Path("use.py").is_file()
    with pytest.raises(InputError, match=r"^\. holds something already"):
        export_model(finished, "fedavg", Path(), client=1)


def test_nothing_beside_the_output_is_touched(finished: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.new").mkdir()
    (tmp_path / "new").mkdir()
    out = export_model(finished, "fedavg", tmp_path / "out", client=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.new", "new", "out"]
    assert out.stat().st_mode == (tmp_path / "new").stat().st_mode


@pytest.fixture
def joined(finished: Path, tmp_path: Path) -> Path:
    """The run, with a client that has joined."""
    shutil.copytree(finished, tmp_path / "joined")
    ft.onboard(tmp_path / "joined", "fedsdg", NEW, "lagos")
    return tmp_path / "joined"


@pytest.mark.slow
def test_the_card_of_a_client_that_joined_names_the_round_after_which_it_did(
    joined: Path, tmp_path: Path
) -> None:
    ft.run(joined, settings="rounds=4")
    assert open_trained(joined, "fedsdg").round > 1
    out = export_model(joined, "fedsdg", tmp_path / "out", client="lagos")
    assert "Of this model, as it was after round 1, on" in (out / "README.md").read_text()


def test_a_client_that_joined_has_no_model_of_the_last_round(joined: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"client lagos joined after .* leave out --which last"):
        export_model(joined, "fedsdg", tmp_path / "out", client="lagos", which="last")


@pytest.mark.slow
def test_the_packages_that_the_card_names_are_enough(finished: Path, tmp_path: Path) -> None:
    out = export_model(finished, "fedavg", tmp_path / "out")
    (line,) = [x for x in (out / "README.md").read_text().splitlines() if x.startswith("pip ")]
    named = line.split()[2:]
    assert named == ["torch", "safetensors", "pillow", "numpy"]
    others = {"transformers", "peft", "fedtailor", "datasets", "pandas", "scipy", "pyarrow"}
    code = f"import sys, runpy; sys.modules.update(dict.fromkeys({others}));"
    code += f"sys.path.insert(0, {str(out)!r}); sys.argv = ['use.py', {str(tmp_path / 'a.png')!r}];"
    code += f"runpy.run_path({str(out / 'use.py')!r}, run_name='__main__')"
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    subprocess.run([sys.executable, "-I", "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_all_clients_are_also_those_that_joined(joined: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="client 1 and all clients; name one, or take all"):
        export_model(joined, "fedsdg", tmp_path / "both", client=1, all_clients=True)
    best = export_model(joined, "fedsdg", tmp_path / "best", all_clients=True)
    assert sorted(p.name for p in best.iterdir()) == ["0", "1", "2", "base", "lagos"]
    last = export_model(joined, "fedsdg", tmp_path / "last", all_clients=True, which="last")
    assert sorted(p.name for p in last.iterdir()) == ["0", "1", "2", "base"]


@pytest.mark.slow
def test_any_client_has_a_folder(tmp_path: Path) -> None:
    """Names that are no names of folders, long ones, two that begin alike, and one of ours."""
    long, number = "日" * 300, 400
    names = ["..", "a/b", "a%2Fb", "x:y", "base", "100 %", f"{long}1", f"{long}2"]
    data = ft.Data.from_arrays(
        digits().inputs.values[:number], labels=digits().labels[:number].tolist(),  # type: ignore[index]
        clients=[names[row % len(names)] for row in range(number)], classes=digits().classes,
    )  # fmt: skip
    experiment = ft.Experiment(
        {"fedavg": ft.FedAvg()}, rounds=1, split=ft.SplitConfig(scheme="natural")
    )
    backbone = ft.from_module(net(), targets=["hidden"])
    run = ft.run(experiment, tmp_path / "run", data=data, backbone=backbone, summary=False).path
    out = export_model(
        run, "fedavg", tmp_path / "a/b/out", all_clients=True, data=data, backbone=backbone
    )
    folders = {json.loads(p.read_text())["client"]: p.parent for p in out.glob("*/export.json")}
    assert sorted(folders) == sorted(names)
    plain = {"100 %": "100 %", "..": "%2E.", "a/b": "a%2Fb", "a%2Fb": "a%252Fb", "x:y": "x:y"}
    assert {name: folders[name].name for name in plain} == plain


@pytest.fixture(scope="module")
def pairs(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """The logits of several exports and ours, by the path of the folder."""
    out = tmp_path_factory.mktemp("exports")
    batch, ours = digits().batch(np.arange(5)), {}

    def expect(folder: Path, trained: TrainedMethod, client: int) -> None:
        with torch.no_grad():
            state = trained.client_state(client)
            ours[folder] = trained.method.predict(trained.task, state, batch)

    for label in ("fedavg", "fedsdg", "fedem"):
        export_model(finished, label, out / label, all_clients=True)
        for client in range(3):
            expect(out / label / str(client), open_trained(finished, label), client)
    merged = export_model(finished, "fedsdg", out / "merged", client=0, merge=True)
    expect(merged, open_trained(finished, "fedsdg"), 0)
    backbone = ft.from_module(net(), targets=["hidden"])
    methods = {"python-fedavg": ft.FedAvg(), "python-fedsq": ft.FedSQ()}
    experiment = ft.Experiment(methods, rounds=1, split=ft.SplitConfig(3))
    run = ft.run(experiment, out / "run", data=digits(), backbone=backbone).path
    for label in methods:
        folder = export_model(run, label, out / label, client=1, backbone=backbone)
        expect(folder, open_trained(run, label, backbone=backbone), 1)
    found = logits_of(dict.fromkeys(ours, batch), out)
    return {str(f.relative_to(out)): Pair(f, found[f], ours[f]) for f in ours}


@pytest.mark.slow
def test_every_folder_has_the_logits_of_the_run(pairs: dict[str, Pair]) -> None:
    assert len(pairs) == 12
    for name, pair in pairs.items():
        tolerance = 1e-4 if name == "merged" else 1e-5
        torch.testing.assert_close(pair.exported, pair.ours, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["fedavg", "fedsdg", "fedem"])
def test_all_clients_share_one_base(pairs: dict[str, Pair], label: str) -> None:
    folder = pairs[f"{label}/1"].folder
    assert sorted(path.name for path in folder.parent.iterdir()) == ["0", "1", "2", "base"]
    assert not (folder / "base").exists()
    moved = folder.parent / "elsewhere" / "1"
    shutil.copytree(folder, moved)
    with pytest.raises(FileNotFoundError, match=r"base is missing: .* several folders share"):
        build(moved, json.loads((moved / "export.json").read_text())["network"])
    shutil.rmtree(moved.parent)


@pytest.mark.slow
def test_a_merged_adapter_is_one_model(pairs: dict[str, Pair]) -> None:
    assert not (pairs["merged"].folder / "adapter_config.json").exists()


@pytest.mark.slow
def test_a_module_that_python_gives_takes_the_file_of_its_class_along(
    pairs: dict[str, Pair],
) -> None:
    assert (pairs["python-fedavg"].folder / "code/tests/export/net.py").is_file()


NAMED = (("a", "First"), ("b", "Second"))
PART = """
from torch import nn

class {name}(nn.Linear):
    pass

def net():
    return nn.Sequential(nn.Flatten(), {name}(64, 10))
"""


@pytest.mark.slow
def test_own_files_may_be_called_as_ours_are(tmp_path: Path) -> None:
    for folder, name in NAMED:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.py").write_text(PART.format(name=name))
    first, second = (load_object(f"{tmp_path / k / 'model.py'}:{n}") for k, n in NAMED)
    module = nn.Sequential(nn.Flatten(), first(64, 16), second(16, 10))
    backbone = ft.from_module(module, head=["2"])
    methods = {"fedavg": ft.FedAvg()}
    experiment = ft.Experiment(methods, rounds=1, split=ft.SplitConfig(3))
    batch, ours = digits().batch(np.arange(5)), {}
    factory = ft.ModelConfig(factory=f"{tmp_path / 'a/model.py'}:net", head=("1",))
    for name, config, given in (
        ("python", experiment, backbone),
        ("factory", replace(experiment, model=factory), None),
    ):
        run = ft.run(config, tmp_path / f"run-{name}", data=digits(), backbone=given).path
        out = export_model(run, "fedavg", tmp_path / "out" / name, client=1, backbone=given)
        trained = open_trained(run, "fedavg", backbone=given)
        with torch.no_grad():
            ours[out] = trained.method.predict(trained.task, trained.client_state(1), batch)
    found = logits_of(dict.fromkeys(ours, batch), tmp_path)
    for folder, logits in ours.items():
        torch.testing.assert_close(found[folder], logits, atol=1e-5, rtol=1e-5)


def test_several_models_are_not_merged(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fedem needs more than one set of weights"):
        export_model(finished, "fedem", tmp_path / "out", client=0, merge=True)
    assert list(tmp_path.iterdir()) == []


def test_code_that_needs_this_library_is_refused(tmp_path: Path) -> None:
    class Local(nn.Linear):
        pass

    backbone = ft.from_module(nn.Sequential(nn.Flatten(), Local(64, 10)))
    experiment = ft.Experiment({"fedavg": ft.FedAvg()}, rounds=1, split=ft.SplitConfig(3))
    run = ft.run(experiment, tmp_path / "run", data=digits(), backbone=backbone).path
    with pytest.raises(InputError, match=r"test_folder\.py imports fedtailor"):
        export_model(run, "fedavg", tmp_path / "out", client=1, backbone=backbone)


@dataclass(frozen=True)
class Halved(ft.FedAvg):
    """A method of one's own that says nothing of how it predicts."""

    name = "halved"

    def predict(self, task: ft.Task, state: Params, batch: Batch) -> Tensor:
        return super().predict(task, state, batch) / 2


def test_a_method_that_predicts_in_a_way_of_its_own_must_say_it_as_data(tmp_path: Path) -> None:
    task = ft.Task(ft.from_module(net()), Halved().adapt)
    data = {"task": "classification", "modality": "image", "classes": [], "clients": 1}
    model = ClientModel(ft.Experiment({"it": Halved()}), "it", 0, data, task, task.state)
    with pytest.raises(InputError, match="halved can't be exported: it has a predict of its own"):
        write_model(model, tmp_path)
    assert list(tmp_path.iterdir()) == []
