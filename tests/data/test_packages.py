import sys
from collections import Counter

import numpy as np
import pytest

from fedtailor.data import BUILTIN, packages
from fedtailor.errors import InputError

from .test_images import idx


@pytest.mark.slow
def test_20_newsgroups_has_its_official_split(tmp_path):
    columns = packages.tab_files("20newsgroups")
    assert (columns.num_train, columns.num_test) == (11_293, 7_528)
    assert len(set(columns.labels)) == 20
    text, last = columns.read(np.array([0, 18_820]))
    assert text.startswith("alt atheism faq")
    assert columns.labels[0] == "alt.atheism"
    assert columns.labels[-1] == "talk.religion.misc"
    assert last
    assert not any(name.startswith("orangecontrib.text") for name in sys.modules)


def test_r8_has_its_official_split(tmp_path):
    columns = packages.tab_files("reuters-r8")
    assert (columns.num_train, columns.num_test) == (5_485, 2_189)
    assert Counter(columns.labels[:5_485])["grain"] == 41
    assert Counter(columns.labels[5_485:])["grain"] == 10


@pytest.mark.slow
def test_chitchat_has_senders(tmp_path):
    columns = packages.chitchat()
    assert (columns.num_train, columns.num_test) == (258_145, 0)
    assert columns.read(np.array([1])) == ["How are you doing today?"]
    counts = Counter(columns.clients)
    assert len(counts) == 1_315
    assert sum(count >= 100 for count in counts.values()) == 263


def test_digits_fill_the_range_of_bytes(tmp_path):
    columns = packages.digits()
    values = columns.read(np.arange(columns.num_train))
    assert values.shape == (1_797, 1, 8, 8)
    assert (values.min(), values.max(), values.dtype) == (0, 255, np.uint8)


def test_files_in_the_cache_come_first(tmp_path):
    folder = tmp_path / "reuters-r8"
    folder.mkdir()
    for split in ("train", "test"):
        text = f"Category\tText\nd\tstring\nclass\t\n\nearn\ta {split} story\n"
        (folder / f"reuters-r8-{split}.tab").write_text(text)
    columns = packages.tab_files("reuters-r8")
    assert columns.labels == ["earn", "earn"]
    assert columns.read(np.array([1, 0])) == ["a test story", "a train story"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Author\tText\n", "must have the columns Category, Text; it begins"),
        ("Category\tText\nd\tstring\nclass\t\n\nno tab\n", "line 5 has no tab: 'no tab'"),
    ],
)
def test_bad_tab_files(text, message, tmp_path):
    (tmp_path / "reuters-r8").mkdir()
    for split in ("train", "test"):
        (tmp_path / "reuters-r8" / f"reuters-r8-{split}.tab").write_text(text)
    with pytest.raises(InputError, match=message):
        packages.tab_files("reuters-r8")


def write_fashion(folder, values, labels):
    folder.mkdir()
    for split in ("train", "t10k"):
        (folder / f"{split}-images-idx3-ubyte").write_bytes(idx(values))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels))


def test_fashion_mnist_from_files_in_the_cache(digits, tmp_path):
    labels = digits.labels[:20].astype(np.uint8)
    write_fashion(tmp_path / "fashion-mnist", digits.inputs.values[:20, 0], labels)
    columns = packages.fashion_mnist()
    assert (columns.num_train, columns.num_test) == (20, 20)
    assert np.array_equal(columns.read(np.array([3, 23]))[0], digits.inputs.values[3])
    assert columns.labels[20:] == labels.tolist()


def test_fashion_mnist_labels_must_fit(digits, tmp_path):
    labels = digits.labels[:19].astype(np.uint8)
    write_fashion(tmp_path / "fashion-mnist", digits.inputs.values[:20, 0], labels)
    with pytest.raises(InputError, match=r"doesn't fit its label file: \(20, 8, 8\), \(19,\)"):
        packages.fashion_mnist()


def test_every_built_in_says_what_it_is():
    for name, builtin in BUILTIN.items():
        assert builtin.description, name
        assert builtin.licence, name
        assert builtin.get.startswith(("pip install", "make ")), name
