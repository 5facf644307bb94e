"""What a model card says."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from fedtailor.data.config import DataConfig, SplitConfig
from fedtailor.export.card import division


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
