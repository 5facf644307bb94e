"""Prompts by client: a client's task, in words around the columns of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from ..errors import InputError, brief, unknown
from ..objectives.cells import is_blank

_PARTS = Formatter()


@dataclass(frozen=True)
class Template:
    """The prompt of some clients, by name: {NAME} stands for the column NAME of a row, {{ and }}
    for braces."""

    clients: tuple[str, ...] = ()
    prompt: str = ""

    def check(self) -> None:
        """Raise InputError where there is no client, or the prompt says the same of every row."""
        try:
            has_columns = bool(self.columns)
            if any(form or turned for _, _, form, turned in _PARTS.parse(self.prompt)):
                raise ValueError("a column's name alone stands in braces")
        except ValueError as error:
            raise InputError(f"data.templates: {brief(self.prompt, 60)}: {error}") from None
        if not self.clients or not has_columns:
            raise InputError(
                f"data.templates has clients = {list(self.clients)} and prompt = "
                f"{brief(self.prompt, 60)}; it needs the names of clients, and a column in braces, "
                "such as 'Is this correct? {text}'"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that stand in braces."""
        return tuple(name for _, name, _, _ in _PARTS.parse(self.prompt) if name is not None)

    def filled(self, cells: Sequence[Any]) -> str:
        """Return the prompt with the cells of its `columns`."""
        texts = iter("" if is_blank(cell) else str(cell) for cell in cells)
        parts = _PARTS.parse(self.prompt)
        return "".join(text + ("" if name is None else next(texts)) for text, name, _, _ in parts)


def left_over(
    templates: Sequence[Template], cells: Sequence[Any] | None, clients: Sequence[Any], column: str
) -> list[Any] | None:
    """Return the cells of a ``column``, without those that a template has in its prompt."""
    names = {client for one in templates if column in one.columns for client in one.clients}
    if cells is None:
        return None
    pairs = zip(cells, clients, strict=True)
    return [None if str(client).strip() in names else cell for cell, client in pairs]


def fill(
    templates: Sequence[Template],
    prompts: Sequence[Any],
    clients: Sequence[Any],
    columns: Sequence[str],
    cells_of: Callable[[str], Sequence[Any]],
) -> list[Any]:
    """Return the prompt of each row: that of its client's template, or else its own, in a table
    with such ``columns``, each with `cells_of` it. Raises InputError where a client has two
    templates; a template names no column; a row has neither a template nor a prompt."""
    found = list(prompts)
    owners: dict[str, Template] = {}
    for template in templates:
        for name in template.clients:
            if name in owners:
                raise InputError(f"data.templates has client {name!r} twice")
            owners[name] = template
        for name in template.columns:
            if name not in columns:
                raise unknown("column", name, columns, where="data.templates", kind="columns")
    cells = {name: cells_of(name) for one in templates for name in one.columns}
    for row, client in enumerate(clients):
        if (of := owners.get(str(client).strip())) is not None:
            found[row] = of.filled([cells[name][row] for name in of.columns])
        elif is_blank(found[row]):
            raise InputError(
                f"row {row + 1} has no prompt, and its client, {brief(client)}, no template in "
                "data.templates; give one of them"
            )
    return found
