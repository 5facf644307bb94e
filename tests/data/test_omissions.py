"""What is left out is counted by client, from the file to the federation."""

import copy
import csv
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fedtailor.data import DataConfig, SplitConfig, load_data, partition
from fedtailor.data.omissions import of_clients
from fedtailor.models.chat import TEMPLATES

ROWS = [
    *(("fine", "good", "berlin"), ("bad", "poor", "berlin"), ("long " * 9, "good", "berlin")),
    *(("fine", "good", "lagos"), ("bad", "", "lagos"), ("", "poor", "lagos")),
    *(("bad", "poor", "lagos"), ("bad", "poor", "oslo"), ("bad", "", "oslo")),
]


def load(tokenizer, tmp_path, **fields):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label", "site"), *ROWS])
    config = DataConfig(path=str(path), client="site", max_length=6, **fields)
    return load_data(config, tokenizer)


def test_a_file_with_gaps(tokenizer, tmp_path):
    dataset = load(tokenizer, tmp_path)
    assert dataset.client_names == ("berlin", "lagos", "oslo")
    assert dataset.groups.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert [(one.kind, one.count, one.text) for one in dataset.omissions] == [
        ("no-label", 2, "2 rows without a label, left out: lagos (1), oslo (1)"),
        ("no-text", 1, "1 row without text, kept as empty inputs: lagos (1)"),
        ("cut-text", 1, "1 row cut to 6 tokens, the rest is ignored (data.max_length): berlin (1)"),
    ]


@pytest.mark.slow
def test_texts_that_a_client_has_several_times_are_told(tokenizer, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label,site\na,x,b\na ,y,b\na,x,c\n,x,b\n,x,b\nd,y,c\n")
    dataset = load_data(DataConfig(path=str(path), client="site"), tokenizer)
    assert len(dataset.inputs) == 6
    told = [one.text for one in dataset.omissions if one.kind == "repeated"]
    assert told == [
        "1 row with the text of an earlier row of the same client, kept: one may be trained on, "
        "one tested: b (1)"
    ]
    chat = DataConfig(path=str(path), client="site", task="causal-lm")
    assert "repeated" not in {one.kind for one in load_data(chat, tokenizer).omissions}


@pytest.mark.parametrize("task", ["classification", "instruct"])
def test_texts_are_told_that_are_there_several_times_or_cut(task, tokenizer, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na a a a a a,x\nb,y\na a a a a a,x\nb,x\n")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATES["alpaca"]
    config = DataConfig(path=str(path), task=task, text="text", label="label", max_length=7)
    repeated, cut = {"classification": (2, 2), "instruct": (1, 4)}[task]
    rest = {
        "classification": "the rest is",
        "instruct": "the beginning and what does not fit of an answer are",
    }[task]
    again = "with the text of an earlier row, kept: one may be trained on, one tested"
    told = {one.kind: one.text for one in load_data(config, tokenizer).omissions}
    assert told["cut-text"] == f"{cut} rows cut to 7 tokens, {rest} ignored (data.max_length)"
    assert told["repeated"] == f"{repeated} row{'s' * (repeated > 1)} {again}"


def test_pictures_are_told_that_are_there_several_times(tmp_path):
    sites = ("a", "b")
    for site, name, grey in (*((s, "cat", 9) for s in sites), ("a", "dog", 9), ("a", "dog2", 7)):
        folder = tmp_path / site / name[:3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), grey).save(folder / f"{name}.png")
    by_site = DataConfig(path=str(tmp_path), client="client")
    again = "of the same client, kept: one may be trained on, one tested: a (1)"
    assert [one.text for one in load_data(by_site).omissions if one.kind == "repeated"] == [
        f"1 row with the picture of an earlier row {again}"
    ]


def test_blanks_around_a_name_make_no_other_client(tokenizer, tmp_path):
    path = tmp_path / "rows.csv"
    sites = ["berlin ", "berlin", " lagos", "\tberlin"]
    path.write_text(
        "text,label,site\n" + "".join(f"a b {n},{n % 2},{s}\n" for n, s in enumerate(sites))
    )
    dataset = load_data(DataConfig(path=str(path), client="site"), tokenizer)
    assert dataset.client_names == ("berlin", "lagos")
    assert dataset.groups.tolist() == [0, 0, 1, 0]
    what = "with spaces around the client's name, which are ignored: berlin (2)"
    assert [one.text for one in dataset.omissions] == [f"2 rows {what}"]


def test_blanks_around_a_label_make_no_other_class(tokenizer, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na,good \nb,good\nc,poor\nd, \ne,\n")
    dataset = load_data(DataConfig(path=str(path)), tokenizer)
    assert dataset.classes == ("good", "poor")
    counts = {one.kind: one.count for one in dataset.omissions}
    assert counts == {"label-blanks": 1, "no-label": 2}


@pytest.mark.slow
def test_a_label_that_looks_like_none_is_told(tokenizer, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label,site\na,good,x\nb,poor,x\nc,N/A,y\n")
    config = DataConfig(path=str(path), client="site")
    (told,) = load_data(config, tokenizer).omissions
    assert told.text == (
        "1 row with the label 'N/A', which counts as a class; if it means that there is no label, "
        "empty these cells: y (1)"
    )
    named = replace(config, classes=("N/A", "good", "poor"))
    assert not load_data(named, tokenizer).omissions


def test_a_class_that_no_training_row_has_is_told(tokenizer, tmp_path):
    train, test = tmp_path / "a.csv", tmp_path / "test.csv"
    train.write_text("text,label\none,flu\ntwo,cold\n")
    test.write_text("text,label\nthree,ebola\n")
    classes = ("cold", "ebola", "flu", "gout")
    config = DataConfig(path=str(train), test_path=str(test), classes=classes)
    (told,) = load_data(config, tokenizer).omissions
    assert (told.count, told.text) == (2, "no training row has the classes ebola, gout")


@pytest.mark.slow
def test_small_clients_are_left_out_by_name(tokenizer, tmp_path):
    dataset = load(tokenizer, tmp_path)
    config = SplitConfig(scheme="natural", min_examples=3, validation=0, test=0.3)
    parts = partition(dataset, config, 0)
    assert parts.names == ("berlin", "lagos")
    small, few = parts.omissions
    assert few.text.endswith("as any other: berlin (1), lagos (1)")
    what = "1 client with fewer than 3 rows (split.min_examples), left out: oslo (1)"
    assert (small.kind, small.text) == ("min-examples", what)
    drawn = partition(dataset, SplitConfig(1, "natural", min_examples=1), 0)
    not_drawn, _ = drawn.omissions
    assert not_drawn.kind == "not-drawn"
    assert not_drawn.count == 2
    assert set(drawn.names).isdisjoint(not_drawn.text.split(": ")[1].split(", "))
    assert partition(dataset, SplitConfig(2), 0).names is None


def test_many_clients_have_a_short_sentence_too():
    (many,) = of_clients("not-drawn", np.arange(30), "left out", None)
    assert many.text.endswith(": " + ", ".join(map(str, range(20))) + ", and 10 more")
    assert many.short == "30 clients left out: 0, 1, 2, and 27 more"
    (few,) = of_clients("not-drawn", np.arange(5), "left out", None)
    assert (few.text, few.short) == ("5 clients left out: 0, 1, 2, 3, 4", "")


def test_clients_and_rows_without_a_counterpart_in_the_test_split(tokenizer, tmp_path):
    with (tmp_path / "test.csv").open("w", newline="") as file:
        rows = [("text", "label", "site"), ("fine", "good", "berlin"), ("bad", "poor", "rome")]
        csv.writer(file).writerows(rows)
    dataset = load(tokenizer, tmp_path, test_path=str(tmp_path / "test.csv"))
    parts = partition(dataset, SplitConfig(scheme="natural", min_examples=3), 0)
    assert parts.names == ("berlin", "lagos")
    assert [(one.kind, one.text.split(": ")[1]) for one in parts.omissions] == [
        ("min-examples", "oslo (1)"),
        ("no-client", "rome (1)"),
        ("no-test-row", "lagos"),
        ("few-test-rows", "berlin (1)"),
    ]
    assert "with fewer than 3 training rows (split" in parts.omissions[0].text


def test_names_and_omissions_are_no_part_of_the_digest(tokenizer, tmp_path):
    whole = load(tokenizer, tmp_path)
    renamed = [(text, label, site.upper()) for text, label, site in ROWS]
    path = tmp_path / "renamed.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label", "site"), *renamed])
    config = DataConfig(path=str(path), client="site", max_length=6)
    again = load_data(config, tokenizer)
    assert again.digest == whole.digest
    assert again.client_names == ("BERLIN", "LAGOS", "OSLO")
    assert np.array_equal(again.groups, whole.groups)
