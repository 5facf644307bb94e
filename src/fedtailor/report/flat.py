"""The comparison as one table of plain numbers, for Python, a spreadsheet or another program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..store.metrics import Metric
from .cells import ranked
from .rows import Row, Spread
from .table import Table
from .text import inert

if TYPE_CHECKING:
    import pandas as pd


def frame(rows: Sequence[Row], metric: Metric) -> pd.DataFrame:
    """Return one row a method in full precision, by its label: accuracies are fractions, columns
    with ``seed_std`` deviations over seeds, ``bytes_`` those of a client and round."""
    import pandas as pd

    return pd.DataFrame([_flat(row, metric) for row in rows]).set_index("label")


def to_csv(comparison: Table) -> str:
    """Format the `frame` as CSV, the best first, each with its run; what is not known is empty."""
    rows = ranked(comparison)
    found = frame(rows, comparison.metric).reset_index()
    found["run"] = [row.run for row in rows]

    def cell(value: Any) -> Any:  # as a spreadsheet has it
        if isinstance(value, tuple):
            return "; ".join(map(str, value))
        return inert(value) if isinstance(value, str) else value

    return str(found.map(cell).to_csv(index=False, lineterminator="\n"))


def _flat(row: Row, metric: Metric) -> dict[str, Any]:
    personal = row.personal_model
    flat: dict[str, Any] = {"label": row.label, "method": row.method, "progress": row.progress}
    flat["seeds"] = tuple(row.seeds)
    if personal is not None:
        over_clients = {"weighted": personal.weighted, "std": personal.std}
        over_clients |= {"decile": personal.bottom_decile, "worst": personal.worst}
        others = {"accuracy": personal.accuracy, "loss": personal.loss, **personal.metrics}
        for name, value in {metric: personal.mean, **over_clients, **others}.items():
            flat |= _columns(name, value)
        flat["rounds"] = tuple(personal.rounds)
        if personal.majority is not None:
            flat |= _columns("majority", personal.majority)
            flat["did_not_learn"] = personal.did_not_learn
    for name, model in (("global", row.global_model), ("novel", row.novel_clients)):
        flat |= {} if model is None else _columns(name, model.mean)
    flat |= {} if row.before is None else _columns("before", row.before)
    rare = {"simulated_seconds": row.simulated_seconds, "epsilon": row.epsilon}
    flat |= {name: value for name, value in rare.items() if value is not None}
    sizes = ("bytes_down", "bytes_up", "trained", "communicated", "private")
    work = ("flops", "seconds", "cpu_seconds")
    return {**flat, **{name: getattr(row, name) for name in (*sizes, *work)}}


def _columns(name: str, value: Spread) -> dict[str, float]:
    std = {} if value.std is None else {f"{name}_seed_std": value.std}
    return {name: value.mean, **std}
