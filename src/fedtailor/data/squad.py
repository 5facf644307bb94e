"""SQuAD's JSON: articles with paragraphs, each with questions, as one row a question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, brief

_LARGEST = 2**31 - 1
_KINDS = {str: "a text", list: "a list", int: "a whole number"}


def is_squad(content: Any) -> bool:
    """Whether parsed JSON has SQuAD's form: its ``data`` hold objects with ``paragraphs``."""
    articles = content.get("data") if isinstance(content, dict) else None
    return isinstance(articles, list) and any(
        isinstance(article, dict) and "paragraphs" in article for article in articles
    )


def squad_rows(content: Any, file: Path) -> Iterator[dict[str, Any]]:
    """A row for each question, as the hub's data set ``squad`` has them: ``id``, ``title``,
    ``context``, ``question`` and ``answers``, a dict of the lists ``text`` and ``answer_start``,
    empty for a question that has no answer in the text. A question of which the file does not say
    the answers has none of that column. Raises InputError where a key is missing, or holds
    something else."""
    for a, article in enumerate(content["data"]):
        at = f"{file}: data[{a}]"
        paragraphs = _value(article, "paragraphs", list, at)
        title = _value({"title": "", **article}, "title", str, at)
        for p, paragraph in enumerate(paragraphs):
            at = f"{file}: data[{a}].paragraphs[{p}]"
            context = _value(paragraph, "context", str, at)
            for q, question in enumerate(_value(paragraph, "qas", list, at)):
                at = f"{file}: data[{a}].paragraphs[{p}].qas[{q}]"
                text = _value(question, "question", str, at)
                row = {"id": str(_value(question, "id", (str, int), at)), "title": title}
                row |= {"context": context, "question": text}
                yield row | _answers(question, at)


def answers_column(cells: Sequence[Any] | None) -> dict[str, Any]:
    """The column of answers with the types of the hub's, which empty lists do not show; nothing if
    these are no such answers. Raises ValueError or TypeError where one is of another type."""
    import pyarrow

    present = [cell for cell in cells or () if cell is not None]
    if not present or not all(
        isinstance(cell, dict)
        and cell.keys() == {"text", "answer_start"}
        and all(isinstance(values, list) for values in cell.values())
        for cell in present
    ):
        return {}
    kinds = {"text": pyarrow.string(), "answer_start": pyarrow.int32()}
    kind = pyarrow.struct({key: pyarrow.list_(kind) for key, kind in kinds.items()})
    return {"answers": pyarrow.array(cells, kind)}


def _answers(question: dict[str, Any], at: str) -> dict[str, Any]:
    impossible = question.get("is_impossible") is True
    if not impossible and "answers" not in question:
        return {}
    answers = [] if impossible else _value(question, "answers", list, at)
    places = [f"{at}.answers[{number}]" for number in range(len(answers))]
    pairs = list(zip(answers, places, strict=True))
    texts = [_value(answer, "text", str, place) for answer, place in pairs]
    starts = [_value(answer, "answer_start", int, place) for answer, place in pairs]
    return {"answers": {"text": texts, "answer_start": starts}}


def _value(holder: Any, key: str, kind: type | tuple[type, ...], at: str) -> Any:
    if not isinstance(holder, dict) or key not in holder:
        raise InputError(f"{at} has no {key!r}, which SQuAD's JSON needs: {brief(holder, 60)}")
    value = holder[key]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds or (type(value) is int and not 0 <= value <= _LARGEST):
        needed = " or ".join(_KINDS[one] for one in kinds)
        raise InputError(f"{at}.{key} is {brief(value, 60)}; SQuAD's JSON has {needed} there")
    return value
