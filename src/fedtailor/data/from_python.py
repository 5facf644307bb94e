"""Examples from Python: a DataFrame, arrays, a file or a data set of the hub, not tokenised yet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..disk_cache import hash_of
from ..errors import InputError, brief
from ..objectives import objective_of
from ..objectives.encoding import Tokenizer
from ..objectives.objective import Objective
from ..user_code import FROM_PYTHON
from .columns import Columns, joined_inputs, of_flags
from .config import DataConfig
from .images import picture_array
from .roles import check_default, find_roles
from .sources import load_data
from .table import Dataset, Indices
from .tokens import bytes_of

if TYPE_CHECKING:
    import pandas as pd

_FIRST = 100  # rows by which a table's task is recognised
_KEPT = (
    *("task", "classes", "scale", "huber_delta", "beta", "reference", "templates"),
    *("picture_size", "max_length", "limit", "skip", "limit_test"),
)


@dataclass(frozen=True)
class Data:
    """Examples for `fedtailor.run`, not tokenised yet: the experiment says the tokenizer and the
    length. Make one with `from_pandas`, `from_arrays`, `from_csv` or `from_hub`, which all take:

    - ``text``: the column with the texts; None: the first one called text, sentence or content.
    - ``text_pair``: the column with a second text of each example; None: none, unless two columns
      are called like a pair, such as premise and hypothesis.
    - ``label``: the column with the classes, words or whole numbers; None: the first one called
      label, labels, target or category. For ``multi-label`` a column of lists, or several columns
      of 0 and 1.
    - ``client``: the column that says who owns a row, words or whole numbers; None: ``[split]``
      of the experiment divides the rows.
    - ``task``: ``causal-lm`` takes the texts alone; None: the experiment's, or classification.
    - ``classes``: the names of all classes, in order; (): those of the rows.

    ``fields`` are the fields of the experiment's ``[data]`` that stand there instead of its own.
    ``columns`` are the rows, if they are in memory.
    """

    fields: Mapping[str, Any]
    columns: Columns | None = field(default=None, repr=False)

    @classmethod
    def from_pandas(
        cls,
        frame: pd.DataFrame,
        *,
        text: str | None = None,
        text_pair: str | None = None,
        label: str | Sequence[str] | None = None,
        client: str | None = None,
        test: pd.DataFrame | None = None,
        task: str | None = None,
        classes: Sequence[str] = (),
    ) -> Data:
        """Texts from a DataFrame, one example a row; ``test`` are rows for test alone; None: some
        of each client's rows.

        Raises:
            InputError: a column is missing, or a value in it; a value is of another kind.

        >>> import pandas as pd
        >>> frame = pd.DataFrame({"note": ["well", "ill"], "ward": ["a", "b"], "label": [0, 1]})
        >>> Data.from_pandas(frame, text="note", client="ward").columns.clients
        ['a', 'b']
        """
        objective = objective_of(task)
        frames = [frame] if test is None else [frame, test]
        for rows, name in zip(frames, ("the data", "test"), strict=False):
            _check_frame(rows, name)
        config = DataConfig(
            text=text, text_pair=text_pair, label=_columns(label), client=client, task=task
        )
        if objective.joins_columns:
            frames = [_joined(rows, config, objective) for rows in frames]
            config = replace(config, text=None, text_pair=None, label=None)
        train = frames[0]
        if task is None and label is None:
            check_default(train.head(_FIRST).to_dict("list"), "")
        texts = [name for name in train if train[name].dtype.kind not in "biufcmM"]
        sources, labels, owner = find_roles([*train.columns], texts, config, objective, "")

        def examples(rows: pd.DataFrame) -> _Arrays:
            used = (*sources, *labels, *(() if owner is None else (owner,)))
            if absent := [name for name in used if name not in rows]:
                listed = ", ".join(map(str, rows.columns))
                raise InputError(f"no column {absent[0]!r} in the test rows; columns: {listed}")
            values = {
                name: _values(_plain(rows[name].tolist()), f"column {name!r}", rows.index)
                for name in used
            }
            for name in sources:
                are_pairs = isinstance(values[name][0], tuple)
                _check_inputs(values[name], f"column {name!r}", objective, are_pairs, rows.index)
            inputs, *seconds = (values[name] for name in sources)
            targets = values[labels[0]] if labels else None
            if len(labels) > 1:
                targets = of_flags({name: values[name] for name in labels})
            return _Arrays(
                list(zip(inputs, *seconds, strict=True)) if seconds else inputs,
                targets,
                None if owner is None else values[owner],
            )

        both = reduce(_Arrays.joined, map(examples, frames))
        places = f"column {', '.join(map(repr, labels))}", f"column {owner!r}"
        flags = labels if len(labels) > 1 else ()
        return cls._in_memory(both, len(frame), objective.name, classes, places, flags)

    @classmethod
    def from_arrays(
        cls,
        inputs: Any,
        labels: Any = None,
        clients: Any = None,
        *,
        test: tuple[Any, ...] | None = None,
        task: str | None = None,
        classes: Sequence[str] = (),
    ) -> Data:
        """Pictures or texts from arrays or lists, N examples.

        Args:
            inputs: pictures ``[N, H, W]`` or ``[N, C, H, W]``, whole numbers (of bytes or 16
                bits, scaled to [0, 1]) or floats (taken as they are); or N texts, pairs of texts
                (tuples) or lists of words.
            labels: ``[N]``; None for ``causal-lm``.
            clients: ``[N]``.
            test: examples for test alone: their inputs, labels and clients; None: some of each
                client's.

        Raises:
            InputError: lengths or shapes don't fit; a value is missing or of another kind.

        >>> data = Data.from_arrays(np.zeros((2, 8, 8), np.uint8), labels=["cat", "dog"])
        >>> data.columns.read(np.arange(2)).shape
        (2, 1, 8, 8)
        """
        objective = objective_of(task)
        train = both = _Arrays.of((inputs, labels, clients), objective)
        if test is not None:
            if not isinstance(test, list | tuple) or len(test) not in (1, 2, 3):
                raise InputError(
                    f"test = {brief(test, 60)}: must be a tuple of inputs, labels and clients"
                )
            both = train.joined(_Arrays.of(test, objective, "test "))
        if objective.reads_targets and both.labels is None:
            raise InputError(f"{objective.name} needs labels; give them, or another task")
        both = replace(both, labels=both.labels if objective.reads_targets else None)
        return cls._in_memory(both, len(train.inputs), objective.name, classes)

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        *,
        test: str | Path | None = None,
        text: str | None = None,
        text_pair: str | None = None,
        label: str | Sequence[str] | None = None,
        client: str | None = None,
        task: str | None = None,
        classes: Sequence[str] = (),
    ) -> Data:
        """A csv file with one example a row, and one with rows for ``test`` alone; jsonl, parquet
        and Arrow files work, too."""
        for name, one in (("path", path), ("test", "" if test is None else test)):
            if not isinstance(one, str | Path):
                raise InputError(f"{name} = {brief(one, 60)}: must be a file's name")
        fields = {"path": str(path), "test_path": None if test is None else str(test)}
        columns = _named({"text": text, "text_pair": text_pair, "client": client})
        return cls({**fields, **columns, "label": _columns(label), **_stated(task, classes)})

    @classmethod
    def from_hub(
        cls,
        name: str,
        *,
        subset: str | None = None,
        text: str | None = None,
        text_pair: str | None = None,
        image: str | None = None,
        label: str | Sequence[str] | None = None,
        client: str | None = None,
        train_split: str = "train",
        test_split: str | None = "test",
        task: str | None = None,
        classes: Sequence[str] = (),
    ) -> Data:
        """A data set of the Hugging Face hub (``owner/set``), or a built-in one.

        Args:
            name: its name.
            subset: its configuration.
            image: the column with the pictures, instead of ``text``.
            train_split: the split with the training rows.
            test_split: the split with rows for test alone; None: some of each client's rows.
        """
        fields: dict[str, Any] = {
            "name": name, "subset": subset, "train_split": train_split, "test_split": test_split,
            "text": text, "text_pair": text_pair, "image": image, "client": client,
        }  # fmt: skip
        if name is None or train_split is None:
            raise InputError("a data set of the hub needs a name, and a split to train on")
        return cls({**_named(fields), "label": _columns(label), **_stated(task, classes)})

    @classmethod
    def _in_memory(
        cls,
        rows: _Arrays,
        num_train: int,
        task: str,
        classes: Sequence[str],
        places: tuple[str, str] = ("labels", "clients"),
        flags: tuple[str, ...] = (),
    ) -> Data:
        inputs = rows.inputs

        def read(some: Indices) -> Any:
            return [inputs[row] for row in some] if isinstance(inputs, list) else inputs[some]

        num_test = len(inputs) - num_train
        is_pair = isinstance(inputs, list) and isinstance(inputs[0], tuple)
        pair = ("text", "text_pair") if is_pair else ()
        columns = Columns(
            read, num_train, num_test, rows.labels, flags, rows.clients, places, pair=pair
        )
        name = FROM_PYTHON + _hash(rows, num_train)
        return cls({"name": name, **_stated(task, classes)}, columns)

    def config(self, config: DataConfig) -> DataConfig:
        """An experiment's ``[data]`` with this source; the length of texts and limits stay. Raises
        InputError where it has templates, and this source has its prompts already."""
        if config.templates and self.columns is not None:
            raise InputError(
                "data.templates fill in columns of files; these data are in memory: write the "
                "prompts into them"
            )
        return DataConfig(**{**{name: getattr(config, name) for name in _KEPT}, **self.fields})

    def load(self, config: DataConfig, tokenizer: Tokenizer | None) -> Dataset:
        """Read and tokenise the examples; ``config`` as `config` returns it.

        Raises:
            InputError: they can't be read, or are of another kind.
        """
        return load_data(config, tokenizer, columns=self.columns)


@dataclass(frozen=True)
class _Arrays:
    """Inputs, labels and clients of the same length."""

    inputs: list[Any] | NDArray[Any]
    labels: list[Any] | None = None
    clients: list[Any] | None = None

    @staticmethod
    def of(values: Sequence[Any], objective: Objective, where: str = "") -> _Arrays:
        """Take inputs, labels and clients; labels and clients may be absent. Messages name what is
        not there or of another kind, and ``where``."""
        _check_listed(values[0], f"{where}inputs")
        inputs, others = _inputs(values[0], objective), {}
        for name, column in zip(("labels", "clients"), values[1:], strict=False):
            if column is not None:
                _check_listed(column, where + name)
                is_plain = not isinstance(column, list | tuple)
                listed = np.asarray(column).tolist() if is_plain else _plain(column)
                others[name] = _values(listed, name)
                if len(others[name]) != len(inputs):
                    raise InputError(
                        f"{name} has {len(others[name])} entries for {len(inputs)} inputs; "
                        "there must be one for each"
                    )
        if objective.joins_columns and "labels" in others:
            inputs = objective.conversations([None, _plain(values[0]), None, others["labels"]])
        return _Arrays(inputs, **others)

    def joined(self, test: _Arrays) -> _Arrays:
        for name in ("labels", "clients"):
            if (getattr(self, name) is None) != (getattr(test, name) is None):
                raise InputError(f"{name} must be given for the training and the test examples")
        inputs: list[Any] | NDArray[Any]
        if isinstance(self.inputs, list) and isinstance(test.inputs, list):
            inputs = self.inputs + test.inputs
        elif isinstance(self.inputs, list) or isinstance(test.inputs, list):
            raise InputError("the training and the test inputs must both be texts, or pictures")
        elif self.inputs.shape[1:] != test.inputs.shape[1:]:
            raise InputError(
                f"training pictures are {self.inputs.shape[1:]}, test pictures "
                f"{test.inputs.shape[1:]}; they must be alike"
            )
        else:
            inputs = np.concatenate([self.inputs, test.inputs])
        labels = None if self.labels is None else self.labels + (test.labels or [])
        clients = None if self.clients is None else self.clients + (test.clients or [])
        return _Arrays(inputs, labels, clients)


def _joined(frame: pd.DataFrame, config: DataConfig, objective: Objective) -> pd.DataFrame:
    """The table with a column of inputs that are made of several others."""
    names = [str(name) for name in frame.columns]

    def cells(name: str) -> list[Any]:
        column = frame[name]
        return _plain(column.astype(object).where(column.notna(), None).tolist())

    values = joined_inputs(names, config, objective, cells)
    return frame.assign(**{objective.input_names[0]: values})


def _check_listed(values: Any, name: str) -> None:
    """Raise InputError where something is no list or array of examples, or has none."""
    is_one = isinstance(values, str | bytes | Mapping) or hasattr(values, "columns")
    if is_one or not hasattr(values, "__getitem__") or getattr(values, "shape", None) == ():
        raise InputError(
            f"{name} = {brief(values, 60)}: must be a list or an array, with one entry an example"
        )
    if not len(values):
        raise InputError(f"{name} = {brief(values, 60)}: there are no examples; one is needed")


def _check_frame(frame: Any, name: str) -> None:
    """Raise InputError where something is no DataFrame, has no rows, or two columns of one name."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise InputError(f"{name} must be a pandas DataFrame, got {brief(frame, 60)}")
    if not len(frame):
        raise InputError(f"{name} has no rows; one is needed")
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise InputError(f"{name} has two columns called {twice!r}; rename one")


def _named(fields: dict[str, Any]) -> dict[str, Any]:
    """The same fields. Raises InputError where one is no text."""
    for name, value in fields.items():
        if value is not None and not isinstance(value, str):
            raise InputError(f"{name} = {brief(value, 60)}: must be a text")
    return fields


def _plain(values: Sequence[Any]) -> list[Any]:
    """NumPy's scalars and arrays as Python's values."""
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


def _inputs(values: Any, objective: Objective) -> list[Any] | NDArray[Any]:
    """N texts, pairs or lists of words, or pictures ``[N, C, H, W]``, uint8 or float32."""
    if objective.joins_columns:
        values = objective.conversations([_plain(values)])
    first = next((value for value in values if value is not None), None)
    of_texts = isinstance(first, list | tuple) and (
        not first or any(isinstance(part, str) for part in first)
    )
    if isinstance(first, str) or of_texts:
        texts = _values(list(values), "inputs")
        are_pairs = bool(objective.second_names) or isinstance(first, tuple)
        _check_inputs(texts, "inputs", objective, are_pairs)
        return texts
    if any(hasattr(value, "convert") for value in values):
        raise InputError("inputs are PIL's images; give arrays: [np.array(i.convert('RGB')), ...]")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise InputError(f"inputs are neither texts nor pictures: {error}") from None
    array = picture_array(array, "the pictures")
    is_odd = array.ndim == 4 and array.shape[1] not in (1, 3)
    if array.ndim not in (3, 4) or is_odd or not array.size:
        raise InputError(
            f"pictures have the shape {array.shape}; allowed: [N, H, W], or [N, C, H, W] with 1 or "
            "3 channels (of [N, H, W, C]: np.moveaxis(images, -1, 1))"
        )
    return array[:, None] if array.ndim == 3 else array


def _values(values: list[Any], where: str, index: Any = None) -> list[Any]:
    """The same values, whole floats as ints; InputError where one is missing."""
    missing = [row for row, value in enumerate(values) if _is_missing(value)]
    if missing:
        raise InputError(
            f"{where}: {len(missing)} of {len(values)} values are missing, the first "
            f"{_row(missing[0], index)}; fill them in, or leave these rows out"
        )
    if all(isinstance(value, float) and value.is_integer() for value in values):
        return [int(value) for value in values]
    return values


def _is_missing(value: Any) -> bool:
    """Whether it is None, a NaN, NaT or pandas.NA: what differs from itself, or can't say."""
    if isinstance(value, list | tuple | dict | np.ndarray):
        return False
    same = value == value
    return value is None or not isinstance(same, bool) or not same


def _check_inputs(
    inputs: Iterable[Any], where: str, objective: Objective, are_pairs: bool, index: Any = None
) -> None:
    """Raise InputError where an input is not what the task reads."""
    reads_pairs = are_pairs and objective.takes_pairs
    for row, value in enumerate(inputs):
        parts = [value]
        if objective.reads_words and isinstance(value, list):
            parts = value
        elif reads_pairs:
            parts = list(value) if isinstance(value, tuple) and len(value) == 2 else [None]
        if not all(isinstance(part, str) for part in parts):
            needed = "pairs of texts (tuples)" if reads_pairs else "single texts (str)"
            needed = "lists of words" if objective.reads_words else needed
            raise InputError(
                f"{where} holds {brief(value, 60)} {_row(row, index)}; all must be {needed}"
            )


def _row(row: int, index: Any) -> str:
    """A row by its label in a DataFrame, or else by its number from 0, as Python counts."""
    return f"at [{row}]" if index is None else f"in the row with the index {index.tolist()[row]!r}"


def _columns(label: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    return label if label is None or isinstance(label, str) else _names("label", label)


def _stated(task: str | None, classes: Sequence[str]) -> dict[str, Any]:
    """The fields of ``[data]`` that are given; the experiment says the others."""
    fields: dict[str, Any] = {} if task is None else {"task": objective_of(task).name}
    return fields if classes in ((), [], None) else fields | {"classes": _names("classes", classes)}


def _names(name: str, values: Any) -> tuple[str, ...]:
    """The names of a list. Raises InputError where it is something else."""
    is_list = isinstance(values, list | tuple) and values
    if not is_list or not all(isinstance(one, str) for one in values):
        raise InputError(f"{name} = {brief(values, 60)}: must be a list of names")
    return tuple(values)


def _hash(rows: _Arrays, num_train: int) -> str:
    head = repr((num_train, rows.labels, rows.clients)).encode()
    if isinstance(rows.inputs, list):
        return hash_of(head, map(bytes_of, rows.inputs))
    head += repr((rows.inputs.shape, rows.inputs.dtype.str)).encode()
    return hashlib.sha256(head + np.ascontiguousarray(rows.inputs).tobytes()).hexdigest()[:32]
