"""What secure aggregation costs: CPU seconds of the server and of a client, and bytes on the wire.

100 clients send updates of 137,000 values. A third of those that leave do so before they have sent
their shares, the others after they have masked their values. The clients' sides are simulated in
this process, and their time is taken off that of the server. Bytes are those of the values and
of the messages as JSON, up and down, beside four bytes for each value.

    OMP_NUM_THREADS=1 python benchmarks/secure_aggregation.py

writes benchmarks/results/secure_aggregation-cpu.md.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import circumstances
from numpy.typing import NDArray
from tabulate import tabulate

from fedtailor.uploads.secure.config import SecureAggregationConfig
from fedtailor.uploads.secure.fixed_point import FixedPoint
from fedtailor.uploads.secure.keys import add_masks
from fedtailor.uploads.secure.messages import Masks, Setting, Weighing
from fedtailor.uploads.secure.server import Exchange
from fedtailor.uploads.secure.simulation import Simulation

RESULT = Path(__file__).parent / "results" / "secure_aggregation-cpu.md"
CLIENTS, VALUES = 100, 137_000
EQUAL = Weighing(lambda client: 1, lambda own, total, count: own / total)


class Measured(Simulation):
    """Clients that leave before they share, and what all of them have cost."""

    def __init__(self, gone: Sequence[int]) -> None:
        super().__init__(EQUAL)
        self.gone, self.seconds = gone, 0.0
        self.bytes = {"up": 0, "down": 0}

    def ask(self, step: str, setting: Setting, messages: Mapping[int, Any]) -> Mapping[int, Any]:
        start = time.process_time()
        there = {k: m for k, m in messages.items() if step == "keys" or k not in self.gone}
        answers = super().ask(step, setting, there)
        self.seconds += time.process_time() - start
        self.bytes["down"] += _bytes(there.values())
        self.bytes["up"] += _bytes(answers.values()) if step != "mask" else 0  # it keeps the masks
        return answers


def _bytes(messages: Any) -> int:
    return sum(len(json.dumps(_plain(message))) for message in messages)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def measure(leave: float, neighbours: int | None) -> list[Any]:
    """A row of the table."""
    rng = np.random.default_rng(0)
    gone = rng.permutation(CLIENTS)[: round(leave * CLIENTS)].tolist()
    early, late = gone[: len(gone) // 3], gone[len(gone) // 3 :]
    config = SecureAggregationConfig(0.6, neighbours=neighbours)
    clients = Measured(early)
    exchange = Exchange(Setting("run/1", tuple(range(CLIENTS)), config), clients)
    begin = time.process_time()
    masks = exchange.open(range(CLIENTS), EQUAL)
    there, total = sorted(masks.keys() - {*late}), np.zeros(VALUES, np.uint32)
    values, numbers = rng.normal(0, 0.01, VALUES), FixedPoint(config.range, CLIENTS)
    for k in masks:
        own = time.process_time()
        sent = _masked(numbers.encoded(values, masks[k].weight), masks[k])
        clients.seconds += time.process_time() - own
        if k in there:
            total += sent
    _masked(total, exchange.close(there))
    server = time.process_time() - begin - clients.seconds
    plain = 4 * VALUES * len(there)
    up, down = ((plain + clients.bytes[way]) / plain for way in ("up", "down"))
    degree, left = config.degree(CLIENTS), f"{len(early)} + {len(late)}"
    return [degree, left, server, clients.seconds / CLIENTS, up, down]


def _masked(values: NDArray[np.uint32], masks: Masks) -> NDArray[np.uint32]:
    return add_masks(values, masks.plus, masks.minus)


def main() -> None:
    """Print the table, and write it."""
    load = os.getloadavg()[0]
    rows = [measure(leave, near) for near in (None, 98) for leave in (0.0, 0.3)]
    names = ["neighbours", "leave early + late", "server CPU s", "CPU s a client"]
    names += ["bytes up / plain", "bytes down / plain"]
    table = tabulate(rows, names, "github", floatfmt=".2f")
    notes = circumstances("OMP_NUM_THREADS=1 python benchmarks/secure_aggregation.py", load)
    head = ["# Secure aggregation", *(f"- {note}" for note in notes)]
    RESULT.write_text("\n".join([*head, "", table, ""]))
    print(table)


if __name__ == "__main__":
    main()
