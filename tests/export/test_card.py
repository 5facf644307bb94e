"""What a model card says of who trained the model."""

from __future__ import annotations

from typing import Any

import pytest

import fedtailor as ft
from fedtailor.export.card import card

EXPERIMENT = ft.Experiment(
    {"fedsdg": ft.FedSDG(), "local": ft.METHODS["local"]()}, data=ft.DataConfig(path="sites.csv")
)
TOGETHER = "that 7 clients trained together, each on its own data, with federated learning"


@pytest.mark.parametrize(
    ("label", "joined", "sentence", "data"),
    [
        ("fedsdg", None, f"A model {TOGETHER}.", "sites.csv, divided iid among 7 clients"),
        (
            "fedsdg", "fitted",
            f"A model fitted to the data of client oslo, starting from a model {TOGETHER}.",
            "sites.csv, divided iid among 7 clients; then those of client oslo",
        ),
        (
            "fedsdg", "global",
            f"A model {TOGETHER}; client oslo joined afterwards and did not fit it.",
            "sites.csv, divided iid among 7 clients",
        ),
        (
            "local", None, "A model that client oslo trained alone, on its own data.",
            "sites.csv, divided iid among 7 clients",
        ),
        (
            "local", "fitted", "A model that client oslo trained alone, on its own data.",
            "those of client oslo",
        ),
    ],
)  # fmt: skip
def test_a_card_says_who_trained_the_model(
    label: str, joined: str | None, sentence: str, data: str
) -> None:
    about: dict[str, Any] = {
        "label": label, "method": label, "client": "oslo", "clients": 7, "seed": 0, "form": "plain",
        "task": "classification", "network": {"kind": "pytorch"}, "id2label": {}, "max_length": 0,
        "base": {"name": "net", "licence": "MIT", "get": None},
    }  # fmt: skip
    lines = card(EXPERIMENT, about, [], joined).splitlines()
    assert sentence in lines
    assert f"| data | {data} |" in lines
