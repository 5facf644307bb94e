"""The cross table says what the results say, and its runs are planned with equal budgets."""

from typing import Any

import pytest
from evidence.cross import PAGE, README, TABLE, page, table, with_short
from evidence.cross_cells import (
    BASELINES,
    DATA,
    FILE,
    LEFT_OUT,
    SEEDS,
    SYSTEMS,
    Cell,
    best,
    cells,
)
from evidence.rates import validation
from evidence.run import EXPERIMENTS, Run, planned

import fedtailor as ft
from fedtailor.runs.build import Inputs


@pytest.mark.slow
def test_the_page_the_table_and_the_readme_are_what_the_script_writes() -> None:
    found = cells()
    assert PAGE.read_text() == page(found), "write it again: python -m evidence.cross"
    assert TABLE.read_text() == table(found)
    assert README.read_text() == with_short(README.read_text(), found)


@pytest.mark.slow
def test_every_cell_is_planned_and_all_methods_of_a_data_set_have_as_many_trials() -> None:
    runs, trials = set(planned()), {(c.data, c.method): c.trials[1] for c in cells()}
    for data in DATA:
        possible = {m for m in SYSTEMS + BASELINES if (data.settings, m) not in LEFT_OUT}
        for method in SYSTEMS + BASELINES:
            of = {Run(FILE, data.settings, method, seed) for seed in SEEDS}
            assert of <= runs if method in possible else not of & runs, (data.name, method)
        assert len({trials[data, method] for method in possible}) == 1, data.name


@pytest.mark.parametrize("method", ["fedsdg", "fedhft", "fedsa-lora", "fedalt"])
def test_the_library_refuses_lora_in_a_network_without_blocks(method: str) -> None:
    others = ["data.name=digits", "data.limit_test=none", "model.image_size=28"]  # always at hand
    settings = ["preset=images", f'methods=["{method}"]', *others]
    experiment = ft.load(EXPERIMENTS / FILE, settings)
    with pytest.raises(ft.InputError, match="no recognised transformer blocks"):
        Inputs.load(experiment, None, None).check()


def line(seed: int, *losses: float) -> Any:
    personal = {
        "clients": list(range(len(losses))), "loss": list(losses), "validation": 1.5,
        "num_examples": [1] * len(losses),
    }  # fmt: skip
    results = {"metric": "loss", "bytes_down": 2, "bytes_up": 1, "personal": personal}
    return {"seed": seed, "results": results, "cpu_seconds": 3.0}


def test_of_language_models_the_lowest_loss_is_the_best() -> None:
    chat = next(data for data in DATA if data.is_text)
    low, high = ({seed: line(seed, x, x + 1) for seed in SEEDS} for x in (1.0, 2.0))
    few = {0: line(0, 0.1, 0.2)}
    found = [
        Cell(chat, "local", low, (3, 3)), Cell(chat, "fedavg", high, (3, 3)),
        Cell(chat, "ditto", few, (3, 3)), Cell(chat, "apfl", few | low, (1, 3)),
    ]  # fmt: skip
    assert best(found) == ["local"]
    numbers = found[0].numbers()
    assert numbers["mean"] == pytest.approx(4.4817, abs=1e-4)  # e^1.5
    assert numbers["decile"] == pytest.approx(7.3891, abs=1e-4)  # e^2
    assert (numbers["bytes_client_round"], numbers["flops"]) == (3, None)
    assert validation(low[0]) == -1.5
