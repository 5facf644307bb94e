"""What a local table holds, and which of its columns may be the input, the label and the client."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import InputError, unknown
from ..objectives import DEFAULT, OBJECTIVES, CausalLM, Regression, objective_of
from ..objectives.cells import is_whole, trimmed, usual_column
from ..objectives.classification import check_few_classes, check_labels
from ..objectives.objective import Objective
from .columns import check_several, first_values
from .images import side_for
from .names import check_names
from .roles import check_roles, pair_of, recognised
from .tables import is_csv, local_table, with_all_numbers

Kind = Literal["text", "integer", "number", "date", "picture", "other"]

_TEXTS = ("text", "sentence", "content", "review", "comment", "message", "note", "body", "post")
_LABELS = (
    "label", "labels", "target", "category", "class", "diagnosis", "sentiment", "topic", "rating",
    "stars", "outcome", "y",
)  # fmt: skip
_CLIENTS = (
    "client", "site", "hospital", "clinic", "shop", "store", "company", "user", "customer",
    "patient", "device", "centre", "center", "institution",
)  # fmt: skip
_GROUPS = ("region", "department", "branch", "author", "speaker", "city")  # clients, or labels
_MAX_CLASSES = 200
_MAX_INTEGERS = 20  # more whole numbers, such as ages, are taken as a label only if they are named
_SENTENCE = 4  # words
_REPEATED = 8  # times that a value occurs on average, where it is no text
_GUESSED = (DEFAULT.name, Regression.name, CausalLM.name)  # by the values of each column
_ANSWERS = ("answers", "tags", "ner_tags", "pos_tags", "score", "price")  # of other tasks
_DATE = re.compile(
    r"([0-9]{4}([-/.])[0-9]{1,2}\2[0-9]{1,2}|[0-9]{1,2}([-/.])[0-9]{1,2}\3[0-9]{2,4})"
    r"([T ][0-9]{1,2}:[0-9]{2}.*)?"
)
_KINDS: dict[str, Kind] = {  # by how the name of a column's type begins
    **dict.fromkeys(("string", "large_string"), "text"),
    **dict.fromkeys(("date", "timestamp"), "date"),
    **dict.fromkeys(("int", "uint", "bool"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
}
_WORDS = 6.0  # characters of a word and the space behind it
_TOKENS = 1.4  # of a word


@dataclass(frozen=True)
class Column:
    """A column: how many values differ, how many are missing, characters of the longer texts."""

    name: str
    kind: Kind
    distinct: int
    missing: int
    names_clients: bool = False  # texts or whole numbers
    long: int = 0  # 95 of 100 texts are no longer
    side: int | None = None  # pixels of the squares that pictures are to become


@dataclass(frozen=True)
class Roles:
    """The columns that an experiment uses."""

    source: str  # texts or pictures
    label: str | tuple[str, ...] | None  # None: a language model trains on the texts alone
    client: str | None
    task: str = DEFAULT.name
    pair: str | None = None  # the second text of each input

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns of labels, one as a rule."""
        return (self.label,) if isinstance(self.label, str) else self.label or ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The columns of inputs, two of pairs."""
        return (self.source,) if self.pair is None else (self.source, self.pair)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of inputs and labels."""
        return (*self.sources, *self.labels)


@dataclass(frozen=True)
class Survey:
    """A table's columns and values; blanks around a value don't count."""

    path: str
    columns: tuple[Column, ...]
    table: Any  # of pyarrow
    first: Mapping[str, Sequence[Any]]  # values of each column

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.table)

    def counts(self, name: str, beside: str | None = None) -> Mapping[Any, int]:
        """Count the rows of each value of a column, where the column ``beside`` is not empty."""
        values = map(trimmed, self.table.column(name).to_pylist())
        others = map(trimmed, self.table.column(beside or name).to_pylist())
        pairs = zip(values, others, strict=True)
        return Counter(value for value, other in pairs if value is not None and other is not None)

    def column(self, name: str) -> Column:
        """Return the column of that name. Raises InputError where there is none."""
        by_name = {column.name: column for column in self.columns}
        if name not in by_name:
            raise unknown("column", name, by_name, where=self.path, kind="columns")
        return by_name[name]

    @property
    def recognised(self) -> Objective | None:
        """The task that the table is surely for, if that needs more than a text and a label."""
        found = recognised(self.first)
        if found is None:
            return None
        several = found[1].get("label")
        others = [column.name for column in self.columns if column.name not in (several or ())]
        if isinstance(several, tuple) and any(_is_called(name, _LABELS) for name in others):
            return None  # columns of 0 and 1 beside the label
        return found[0]

    def roles(
        self,
        text: str | None,
        label: str | None,
        client: str | None,
        text_pair: str | None = None,
        task: str | None = None,
    ) -> Roles:
        """Return the task and the columns to use: those that are named, and guesses for the others.
        A label or a client ``"none"`` says that there is none. Raises InputError where there is no
        such task; a column that is named or guessed can't be used, or none can be guessed; a class
        or a client has a name that can't be shown."""
        objective = None if task is None else objective_of(task)
        if objective is None and self._several(label):
            objective = next(one for one in OBJECTIVES.values() if one.takes_flags)
        if objective is None and text is None and text_pair is None and label is None:
            objective = self.recognised
        if objective is not None and objective.name not in _GUESSED:
            labels = self._several(label) or label
            named = {"text": text, "text_pair": text_pair, "label": labels}
            return self._roles_of(objective, named, client)
        if task == CausalLM.name:
            label = "none"
        source, pair = text, text_pair
        if text is None and text_pair is None and label != "none":
            source, pair = self._inputs({label, client})
        source = self._source(source)
        if pair is not None:
            self._check_kind(pair, ("text",), "the second text of a pair is a text")
        if label == "none" and self.column(source).kind != "text":
            raise InputError(f"column {source!r} of {self.path} holds pictures, which need labels")
        owner = None if client in (None, "none") else self._client(str(client))
        taken = {source, pair, owner}
        if task == Regression.name:
            label = self._numbers(label, taken)
        else:
            label = None if label == "none" else self._label(label, taken)
        roles = Roles(source, label, owner, pair=pair)
        check_roles(roles.sources, roles.labels, owner, "--")
        if client is None:
            owner = self._guessed_client({source, pair, label})
        if label is None:
            task = CausalLM.name
        elif task == Regression.name or self._has_numbers(self.column(label)):
            task = Regression.name
        else:
            task = DEFAULT.name
            check_names("class", self.counts(label), self._place(label))
        if owner is not None:
            check_names("client", self.counts(owner), self._place(owner))
        return Roles(source, label, owner, task, pair)

    def _roles_of(self, objective: Objective, named: dict[str, Any], client: str | None) -> Roles:
        """The columns of a task that is named or recognised."""
        names = [column.name for column in self.columns]
        found = objective.recognised(self.first)
        usual = {
            "text": objective.input_names,
            "text_pair": objective.second_names,
            "label": objective.target_names,
        }
        if objective.takes_images and named["text"] is None and named["text_pair"] is None:
            found_label = found.get("label") or usual_column(usual["label"], names)
            taken = Roles("", named["label"] or found_label, None).labels
            named["text"], named["text_pair"] = self._inputs({*taken, client})
        roles: dict[str, Any] = {
            role: name or found.get(role) or usual_column(usual[role], names)
            for role, name in named.items()
        }
        for role, name in roles.items():
            if name is None and usual[role]:
                option = f"--{role.replace('_', '-')}"
                raise InputError(
                    f"{self.path}: the task {objective.name!r} needs a column; name it with "
                    f"{option}: {self._listed()}"
                )
        chosen = Roles(roles["text"], roles["label"], None, objective.name, roles["text_pair"])
        for column in chosen.columns:
            self.column(column)
        if client is None:
            client = self._guessed_client({*chosen.columns})
        else:
            client = None if client == "none" else self._client(client)
        chosen = replace(chosen, client=client)
        check_roles(chosen.sources, chosen.labels, client, "--")
        return chosen

    def source_candidates(self) -> list[Column]:
        """Columns of texts or pictures, the likeliest first; none with a client's name."""
        found = [
            column
            for column in self.columns
            if column.kind in ("text", "picture")
            and (_is_called(column.name, _TEXTS) or not _is_called(column.name, _CLIENTS))
        ]
        texts = any(
            self._words(c.name) > 1 for c in found if c.kind == "text" and not self._has_names(c)
        )

        def order(one: Column) -> tuple[bool, bool, bool, int]:
            is_called = _is_called(one.name, _TEXTS)
            is_name = texts and self._has_names(one)
            return one.kind != "picture", not is_called, is_name, -one.long

        return sorted(found, key=order)

    def _has_names(self, one: Column) -> bool:
        """Whether few values, each in many rows, stand there: of wards rather than in notes."""
        return one.kind == "text" and one.distinct * _REPEATED <= self.rows - one.missing

    def label_candidates(self, taken: set[str | None]) -> list[Column]:
        """Columns that may hold classes, the likeliest first; ``taken`` have another role. Ages
        and columns with a client's name are not among them."""
        most = min(_MAX_CLASSES, max(2, self.rows // 2))
        found = [
            column
            for column in self.columns
            if column.name not in taken and self._may_be_label(column)
            if _is_called(column.name, _LABELS)
            or (
                2 <= column.distinct <= (most if column.kind == "text" else _MAX_INTEGERS)
                and not _is_called(column.name, _CLIENTS)
            )
        ]

        def order(c: Column) -> tuple[bool, bool, int]:
            return not _is_called(c.name, _LABELS), _is_called(c.name, _GROUPS), c.distinct

        return sorted(found, key=order)

    def client_candidates(self, taken: set[str | None]) -> list[Column]:
        """Columns that may name the client, the likeliest first; ``taken`` have another role."""
        found = [
            c
            for c in self.columns
            if c.names_clients and c.name not in taken and 2 <= c.distinct <= self.rows // 2
        ]
        return sorted(found, key=lambda c: (_client_rank(c.name), c.distinct))

    def tokens(self, *names: str, more: float = 0) -> int:
        """How many tokens to keep of the texts in some columns, and of ``more`` beside them: a
        power of two from 32 to 256."""
        if any(self.column(name).kind == "other" for name in names):  # lists of words
            return 128
        tokens = sum(self.column(name).long for name in names) / _WORDS * _TOKENS + more
        return next((size for size in (32, 64, 128) if tokens <= size), 256)

    def _place(self, name: str) -> str:
        return f"column {name!r} of {self.path}"

    def _check_kind(self, name: str, kinds: Sequence[Kind], allowed: str) -> str:
        if (kind := self.column(name).kind) not in kinds:
            raise InputError(f"{self._place(name)} holds {kind}s; {allowed}")
        return name

    def pair(self, taken: set[str | None]) -> tuple[str | None, str | None]:
        """The two columns of texts that are called like a pair; ``taken`` have another role."""
        texts = [c.name for c in self.columns if c.kind == "text" and c.name not in taken]
        texts = [name for name in texts if not _is_called(name, _LABELS)]
        usual = next((name for name in texts if _is_called(name, _TEXTS)), None)
        found = pair_of(texts, usual)
        return (found[0], found[1]) if found else (None, None)

    def _inputs(self, taken: set[str | None]) -> tuple[str, str | None]:
        """The column of inputs, or the two of pairs; ``taken`` have another role."""
        text, pair = self.pair(taken)
        return self._source(text), pair

    def _several(self, label: str | None) -> tuple[str, ...]:
        """The columns of labels that are named with commas between them; none where it is one."""
        parts = tuple(part.strip() for part in (label or "").split(","))
        return parts if len(parts) > 1 and all(c.name != label for c in self.columns) else ()

    def _source(self, name: str | None) -> str:
        if name is not None:
            allowed = "the model reads texts or pictures"
            return self._check_kind(name, ("text", "picture"), allowed)
        found = self.source_candidates()
        if not found:
            raise InputError(f"{self.path} has no text or picture column: {self._listed()}")
        chosen = found[0]
        if chosen.kind == "text" and _is_called(chosen.name, _TEXTS):
            return chosen.name
        alike = [c.name for c in found if c.kind == chosen.kind]  # as likely the input as this one
        if chosen.kind == "text":
            texts = [c.name for c in found if not self._has_names(c)]
            alike = [
                name
                for name in alike
                if self._words(name) >= _SENTENCE and (name in texts or chosen.name not in texts)
            ]
        if len(alike) > 1:
            raise InputError(
                f"columns {', '.join(map(repr, alike[:_SENTENCE]))} of {self.path} may each be the "
                "input; name the one to train on with --text, and of a pair of texts the second "
                "one with --text-pair"
            )
        return chosen.name

    def likeliest(self, taken: set[str | None]) -> Column | None:
        """Return the column that is the label: the first candidate, or one of numbers or lists that
        is called like one; ``taken`` have another role. Raises InputError where it holds lists."""
        found = self.label_candidates(taken)
        is_named = bool(found) and _is_called(found[0].name, _LABELS)
        others = [c for c in self.columns if c.kind in ("number", "other") and c.name not in taken]
        for column in [] if is_named else others:
            if _is_called(column.name, _LABELS) or column.name.lower() in _ANSWERS:
                if not self._has_numbers(column):
                    check_labels(self._place(column.name), self._values(column))
                return column
        return found[0] if found else None

    def _has_numbers(self, column: Column) -> bool:
        """Whether it holds numbers to predict."""
        return column.kind == "number" and not self._may_be_label(column)

    def _words(self, name: str) -> int:
        """How many words a text of the column has: the median of those that differ."""
        words = sorted(len(str(text).split()) for text in self.counts(name))
        return words[len(words) // 2] if words else 0

    def _values(self, column: Column) -> list[Any]:
        """The values that occur in a column; a list for lists and objects."""
        if column.kind == "other":
            return [[]] if column.missing < self.rows else []
        return list(self.counts(column.name))

    def _may_be_label(self, column: Column) -> bool:
        """Whether it holds words or whole numbers, which may be written 1.0."""
        if column.kind == "number" and column.distinct <= _MAX_INTEGERS:
            return all(float(value).is_integer() for value in self.counts(column.name))
        return column.kind in ("text", "integer")

    def _label(self, name: str | None, taken: set[str | None]) -> str:
        if name is None:
            chosen = self.likeliest(taken)
            if chosen is None:
                raise InputError(
                    f"no column of {self.path} looks like a label (2 to {_MAX_CLASSES} words or "
                    f"{_MAX_INTEGERS} whole numbers, and no client); name one with --label (and "
                    f"for numbers to predict --task {Regression.name}): {self._listed()}"
                )
            name = chosen.name
        others: tuple[Kind, ...] = ("text", "integer", "number", "other")
        self._check_kind(name, others, "labels are words or numbers")
        column, place = self.column(name), self._place(name)
        if self._has_numbers(column):
            return name
        check_labels(place, self._values(column))
        values = self.counts(name)
        check_several(place, values)
        present = self.rows - column.missing
        check_few_classes(place, column.distinct, present)
        if column.distinct == present:
            raise InputError(
                f"{place} has another value in each row; a label has a few values, each in many "
                "rows"
            )
        return name

    def _numbers(self, name: str | None, taken: Collection[str | None]) -> str:
        """The column of numbers to predict; ``taken`` have another role."""
        found = [
            column
            for column in self.columns
            if column.kind in ("number", "integer") and column.name not in taken
            if not _is_called(column.name, _CLIENTS)
        ]
        usual = [c for c in found if _is_called(c.name, (*_LABELS, *_ANSWERS))]
        if name is None and not usual and len(found) != 1:
            raise InputError(
                f"{self.path}: name the column of numbers to predict with --label: {self._listed()}"
            )
        return self.column(name).name if name is not None else (usual or found)[0].name

    def _guessed_client(self, taken: set[str | None]) -> str | None:
        """The first column with a client's name; one without empty cells goes first."""
        found = [c for c in self.client_candidates(taken) if _client_rank(c.name) < 2]
        return min(found, key=lambda column: column.missing > 0).name if found else None

    def _client(self, name: str) -> str:
        if not self.column(name).names_clients:
            self._check_kind(name, (), "clients are words or whole numbers")
        return name

    def _listed(self) -> str:
        return ", ".join(f"{c.name} ({c.kind}, {c.distinct} values)" for c in self.columns)


def survey(path: str) -> Survey:
    """Look at a file with a table, or a folder. Raises InputError where there is no such file,
    it can't be read, or it has no rows."""
    table = local_table(path)
    if is_csv(path):
        table = with_all_numbers(table, path)
    arrow = table.with_format("arrow")[:]

    columns = tuple(
        _column(table, arrow.column(name), name, feature)
        for name, feature in table.features.items()
    )
    return Survey(path, columns, arrow, first_values(table))


def _column(table: Any, values: Any, name: str, feature: Any) -> Column:
    from datasets import Image

    column = Column(name, "other", 0, values.null_count)
    if isinstance(feature, Image):
        side = side_for(table, name)
        return replace(column, kind="picture", distinct=len(values), side=side)
    dtype = str(getattr(feature, "dtype", ""))
    kind = next((kind for start, kind in _KINDS.items() if dtype.startswith(start)), None)
    if kind is None:
        return column
    present = values.unique().drop_null().to_pylist()
    column = replace(column, kind=kind, distinct=len({trimmed(one) for one in present} - {None}))
    if kind != "text":
        are_whole = kind == "number" and all(map(is_whole, present))
        return replace(column, names_clients=kind == "integer" or are_whole)
    lengths = sorted(len(text or "") for text in values.to_pylist())
    words = [word for text in present if (word := trimmed(text))]
    are_dates = bool(words) and all(map(_DATE.fullmatch, words))
    long = lengths[int(0.95 * (len(lengths) - 1))]
    kind = "date" if are_dates else "text"
    return replace(column, kind=kind, names_clients=not are_dates, long=long)


def _client_rank(name: str) -> int:
    """0: the name of a client; 1: of a group, which may be a client or a label; 2: another."""
    return 0 if _is_called(name, _CLIENTS) else 1 if _is_called(name, _GROUPS) else 2


def _is_called(name: str, usual: Sequence[str]) -> bool:
    """Whether a column has one of the usual names, or one of them as a word of its name.

    >>> _is_called("Hospital_ID", ["hospital"]), _is_called("hospitality", ["hospital"])
    (True, False)
    """
    words = name.lower().replace("-", "_").replace(" ", "_").split("_")
    return any(word in usual for word in words)
