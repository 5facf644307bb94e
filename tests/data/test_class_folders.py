"""A folder of pictures by class, or by client and class, is a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedtailor.data import DataConfig, load_data
from fedtailor.data.survey import survey
from fedtailor.data.table import Images
from fedtailor.data.tables import local_table
from fedtailor.errors import InputError
from fedtailor.inference.rows import read_rows


def pictures(folder: Path, *files: str) -> str:
    for number, file in enumerate(files):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".png", ".PNG"):
            Image.new("L", (4, 4), 10 * number).save(path)
        elif path.suffix:
            path.write_text("x")
        else:
            path.mkdir()
    return str(folder)


def test_folders_name_the_classes(tmp_path: Path) -> None:
    path = pictures(tmp_path, "dog/b.png", "dog/a.PNG", "cat/a.png", "cat/.b.png", "readme.md")
    table = local_table(path)
    assert table.remove_columns("image")[:] == {
        "label": ["cat", "dog", "dog"], "file": ["cat/a.png", "dog/a.PNG", "dog/b.png"],
    }  # fmt: skip
    data = load_data(DataConfig(path=path))
    assert data.classes == ("cat", "dog")
    assert data.labels.tolist() == [0, 1, 1]
    assert data.inputs.values[:, 0, 0, 0].tolist() == [20, 10, 0]


def test_folders_may_name_the_clients(tmp_path: Path) -> None:
    names = [f"{site}/{name}/{n}.png" for site in "xyz" for name in ("cat", "dog") for n in "12"]
    path = pictures(tmp_path, *names, "w/cat/1.png", "w/dog")  # w has no dog
    roles = survey(path).roles(None, None, None)
    assert (roles.source, roles.label, roles.client) == ("image", "label", "client")
    data = load_data(DataConfig(path=path, client="client"))
    assert data.client_names == ("w", "x", "y", "z")
    assert np.bincount(data.groups).tolist() == [1, 4, 4, 4]


def test_train_and_test_are_the_official_splits(tmp_path: Path) -> None:
    path = pictures(tmp_path / "set", "train/cat/a.png", "train/dog/a.png", "test/dog/a.png")
    data = load_data(DataConfig(path=path))
    assert (data.num_train, data.labels.tolist()) == (2, [0, 1, 1])
    pictures(tmp_path / "set", "val/dog/a.png")
    with pytest.raises(InputError, match="has the folders test, train, val; only train and test"):
        load_data(DataConfig(path=path))
    two = DataConfig(path=f"{path}/train", test_path=f"{path}/val")
    assert load_data(two).num_train == 2


def test_other_pictures_in_the_same_files_are_others(tmp_path: Path) -> None:
    path = pictures(tmp_path / "set", "cat/a.png", "dog/a.png")
    before = load_data(DataConfig(path=path))
    (tmp_path / "set/cat").rename(tmp_path / "was-cat")
    (tmp_path / "set/dog").rename(tmp_path / "set/cat")
    (tmp_path / "was-cat").rename(tmp_path / "set/dog")
    after = load_data(DataConfig(path=path))
    assert after.digest != before.digest
    assert np.array_equal(after.inputs.values, before.inputs.values[::-1])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ("a/notes.txt",),
            "is a folder without JSON files or pictures .*: FOLDER/CLASS/pict",
        ),
        (("cat/a.png", "b.png"), "'b.png' lies in no folder of a class"),
        (("cat/a.png", "dog/x/b.png"), "'dog/x/b.png' and 'cat/a.png' are not equally deep"),
        (("a/b/c/d.png",), "'a/b/c/d.png' lies in no folder of a class"),
        (("cat/a.png", "dog"), "the folder 'dog' has no pictures; remove or fill it"),
        (("x/cat/a.png", "y"), "the folder 'y' has no pictures; remove or fill it"),
        (("train/a.png", "test/b.png"), "'a.png' lies in no folder of a class"),
        (("train/cat/a.png", "val/cat/a.png"), "has the folders train, val; only train and test"),
        (("cat/a.png", "dog/bad.jpg"), "dog/bad.jpg.* is no picture that can be read"),
    ],
)
def test_other_folders_are_refused(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_data(DataConfig(path=pictures(tmp_path, *files)))
    assert "\n" not in str(error.value)


def test_links_that_lead_back_end(tmp_path: Path) -> None:
    path = pictures(tmp_path, "cat/a.png", "dog/a.png")
    (tmp_path / "cat/again").symlink_to(tmp_path)
    with pytest.raises(InputError, match=r"'cat/again/.*lies in no folder of a class"):
        local_table(path)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_may_name_the_files(kind: str, tmp_path: Path) -> None:
    path = pictures(tmp_path / "pets", "cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png")
    of_folder = load_data(DataConfig(path=path), None)
    rows = local_table(path).select_columns(["file", "label"])
    table = tmp_path / f"pets/table.{kind}"
    rows.to_csv(table) if kind == "csv" else rows.to_json(table)
    assert survey(str(table)).column("file").kind == "picture"
    config = DataConfig(path=str(table), image="file", picture_size=3)
    of_table = load_data(config, None)
    assert isinstance(of_folder.inputs, Images)
    assert np.array_equal(of_table.inputs.values, of_folder.inputs.resized(3, 3).values)
    assert of_table.classes == of_folder.classes
    assert len(read_rows(str(table), config, images=True).inputs) == 4
    (tmp_path / "pets/dog/a.png").unlink()
    with pytest.raises(InputError, match=r"can't read .*pets/dog/a.png: No such file"):
        load_data(config, None)


def test_texts_have_no_size_in_pixels(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,label\na.png,x\nb.png,y\n")
    with pytest.raises(InputError, match=r"data\.picture_size = 3 is for pictures"):
        load_data(DataConfig(path=str(tmp_path / "t.csv"), picture_size=3), None)


def test_predictions_of_a_folder_have_its_labels(tmp_path: Path) -> None:
    path = pictures(tmp_path, "cat/a.png", "dog/a.png")
    rows = read_rows(path, DataConfig(), images=True)
    assert rows.inputs == [tmp_path / "cat/a.png", tmp_path / "dog/a.png"]
    assert rows.labels == ["cat", "dog"]
    pictures(tmp_path, "b.png")
    rows = read_rows(path, DataConfig(), images=True)
    assert (len(rows.inputs), rows.labels) == (3, None)
