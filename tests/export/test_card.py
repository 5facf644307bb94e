"""What a model card says."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

import fedtailor as ft
from fedtailor.data.config import DataConfig, SplitConfig
from fedtailor.export.card import _served, card, division


@pytest.mark.parametrize(
    ("data", "split", "text"),
    [
        (
            DataConfig(path="a.csv", client="hospital"),
            SplitConfig(scheme="natural"),
            "a.csv, divided by the column 'hospital' among 8 clients",
        ),
        (
            DataConfig(),  # of a deployment
            SplitConfig(scheme="natural"),
            "the sites' data, of 8 clients with rows of their own",
        ),
        (DataConfig("digits"), SplitConfig(), "digits, divided at random among 8 clients"),
        (
            DataConfig("digits"),
            SplitConfig(scheme="dirichlet", alpha=0.3),
            "digits, divided by Dirichlet(0.3) among 8 clients",
        ),
        (
            DataConfig("digits"),
            SplitConfig(scheme="shards"),
            "digits, divided by label, 2 shards a client, among 8 clients",
        ),
    ],
)
def test_how_the_data_were_divided_is_said_in_words(
    data: DataConfig, split: SplitConfig, text: str
) -> None:
    assert division(data, split, 8) == text


def test_every_scheme_has_words() -> None:
    for scheme in get_args(get_type_hints(SplitConfig)["scheme"]):
        assert "8 clients" in division(DataConfig("digits"), SplitConfig(scheme=scheme), 8)


EXPERIMENT = ft.Experiment(
    {"fedsdg": ft.FedSDG(), "local": ft.METHODS["local"]()}, data=ft.DataConfig(path="sites.csv")
)
TOGETHER = "that 7 clients trained together, each on its own data, with federated learning"


@pytest.mark.parametrize(
    ("label", "joined", "sentence", "data"),
    [
        ("fedsdg", None, f"A model {TOGETHER}.", "sites.csv, divided at random among 7 clients"),
        (
            "fedsdg", "fitted",
            f"A model fitted to the data of oslo, starting from a model {TOGETHER}.",
            "sites.csv, divided at random among 7 clients; then those of oslo",
        ),
        (
            "fedsdg", "global",
            f"A model {TOGETHER}; oslo joined afterwards and uses it unchanged.",
            "sites.csv, divided at random among 7 clients",
        ),
        (
            "local", None, "A model that oslo trained alone, on its own data.",
            "sites.csv, divided at random among 7 clients",
        ),
        (
            "local", "fitted", "A model that oslo trained alone, on its own data.",
            "those of oslo",
        ),
    ],
)  # fmt: skip
def test_a_card_says_who_trained_the_model(
    label: str, joined: str | None, sentence: str, data: str
) -> None:
    about: dict[str, Any] = {
        "label": label, "method": label, "client": "oslo", "clients": 7, "seed": 0, "form": "plain",
        "modality": "image", "task": "classification", "network": {"kind": "pytorch"},
        "id2label": {}, "max_length": 0,
        "base": {"name": "net", "licence": "MIT", "get": None},
    }  # fmt: skip
    lines = card(EXPERIMENT, about, [], joined).splitlines()
    assert sentence in lines
    assert f"| data | {data} |" in lines


@pytest.mark.parametrize(
    ("client", "name"),
    [("sales", "sales"), ("0", "0"), ("north-2", "north-2"), ("a b", "client"), (None, "client")],
)
def test_vllm_serves_an_adapter_by_its_clients_name(client: str | None, name: str) -> None:
    network, settings = {"source": "base"}, {"rank": 4}
    about = {"client": client, "task": "causal-lm", "network": network, "settings": settings}
    assert f" --lora-modules {name}=.\n" in _served(about)[1]
