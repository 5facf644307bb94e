"""The page's table of every client."""

from __future__ import annotations

from ...units import fixed
from ..text import TextTable
from .content import Json

_MAX_ROWS = 1000  # with 12 methods a row takes 0.6 kB of the page


def every_client(shown: Json) -> TextTable:
    """Show the results of the shown clients as a table: a row a client and group."""
    labels, groups, metric = shown["methods"], shown["groups"], shown["metric"]
    digits = 1 if metric["isPercentage"] else 3
    found: dict[tuple[int, int], dict[int, float]] = {}
    columns = shown["results"]
    if columns:
        for method, group, client, value in zip(
            *(columns[name] for name in ("method", "group", "client", "value")), strict=True
        ):
            if value is not None:
                found.setdefault((group, client), {})[method] = value
    cells, keys = [], []
    for (group, client), values in sorted(found.items())[:_MAX_ROWS]:
        of = groups[group]
        shared = [of["title"]] if len(groups) > 1 else []
        texts = [fixed(values[k], digits) if k in values else "-" for k in range(len(labels))]
        sizes = str(of["train"][client]), str(of["test"][client])
        cells.append([of["names"][client], *shared, *sizes, *texts])
        keys.append(f"{group}:{client}")
    header = ["client", *(["clients of"] if len(groups) > 1 else []), "train", "test", *labels]
    title = f"Every client: examples, and test {metric['axis']} by method"
    return TextTable(title, header, cells, keys=keys, note=_left_out(shown, len(found)))


def _left_out(shown: Json, rows: int) -> str:
    """Say which clients the table lacks, and which file has them; empty if it has all."""
    parts = []
    if rows > _MAX_ROWS:
        parts.append(f"The table shows the first {_MAX_ROWS:,} of {rows:,} rows.")
    sampled = [group for group in shown["groups"] if len(group["names"]) < group["all"]]
    if sampled:
        most = max(sampled, key=lambda group: group["all"])
        parts.append(
            f"Of up to {most['all']:,} clients the page has {len(most['names'])}, evenly spaced."
        )
    if not parts:
        return ""
    where = "methods/METHOD/seed-SEED/clients.jsonl"
    return " ".join([*parts, f"In the run directory {where} has all of them."])
