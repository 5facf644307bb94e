"""The page on which method to use says what the results say."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from evidence.map_cells import language_models
from evidence.map_figure import draw
from evidence.run import lines
from evidence.when import (
    MEASURED,
    PAGE,
    TABLE,
    advice,
    first_choice,
    measured,
    page,
    table,
)

from evidence import cross_cells, map_tuning


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return measured()


@pytest.mark.slow
def test_the_page_and_the_advice_are_what_the_script_writes(found: list[dict[str, Any]]) -> None:
    assert MEASURED.read_text() == advice(found)
    assert PAGE.read_text() == page(found)
    assert TABLE.read_text() == table(found)


@pytest.mark.slow
def test_methods_that_are_best_most_often_come_first() -> None:
    found = [
        {"modality": "text", "pretrained": True, "clients": {"label_overlap": overlap}, "chosen": k}
        for k, overlap in [("fedsq", 0.8), ("fedper", 0.3), ("ditto", 0.1), ("fedsq", 0.5)]
    ]
    rows = [line.split("|")[2:5] for line in first_choice(found).splitlines()[2:5]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [
            "50 and 80 %",
            "[`fedsq`](methods/fedsq.md)",
            "2 of 4 settings",
        ],
        ["10 %", "[`ditto`](methods/ditto.md)", "1 of 4 settings"],
        ["30 %", "[`fedper`](methods/fedper.md)", "1 of 4 settings"],
    ]
    assert " 10 to 80 % " in first_choice([one | {"chosen": "fedsq"} for one in found])


@pytest.mark.slow
def test_the_language_models_have_the_perplexities_of_the_cross_table() -> None:
    (chat,) = [cell.measured() for cell in language_models()]
    crossed = {cell.method: cell for cell in cross_cells.cells() if cell.data.is_text}
    for label, one in chat["methods"].items():
        numbers = crossed[label].numbers()
        assert one["perplexity"] == pytest.approx(numbers["mean"], abs=1e-5)
        assert one["bytes"] == pytest.approx(numbers["bytes_client_round"], abs=1)
    perplexities = [one["perplexity"] for one in chat["methods"].values()]
    assert perplexities[0] == min(perplexities)
    validation = {
        label: sum(
            line["results"]["personal"]["validation"] for line in crossed[label].lines.values()
        )
        for label in chat["methods"]
    }
    assert chat["chosen"] == min(validation, key=lambda label: validation[label])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modality", "called", "base"),
    [("text", "texts", "rounds=5"), ("image", "pictures", "preset=images")],
)
def test_best_rates_at_the_end_are_counted(
    modality: str, called: str, base: str, found: list[dict[str, Any]]
) -> None:
    here = {m for cell in found if cell["modality"] == modality for m in cell["methods"]}
    scores: dict[str, dict[float, float]] = {}
    for line in lines():
        tuned = (line["file"], line["seed"], line["set"][:1]) == ("map.toml", 10, [base])
        if tuned and line["method"] in here:
            (method,) = line["settings"]["methods"]
            score = line["results"]["personal"]["validation"]
            of = scores.setdefault(line["method"], {})
            rate = method["optimiser"]["lr"]
            of[rate] = max(score, of.get(rate, 0.0))
    best = {m: max(of, key=lambda lr: of[lr]) for m, of in scores.items()}
    at_end = Counter(best[m] for m, of in scores.items() if best[m] in (min(of), max(of)))
    said = " ".join(map_tuning.edges(found).split())
    between = said.partition(" each method's best rate lies between others")[0]
    assert (called in between) == (not at_end)
    for rate, count in at_end.items():
        assert f"one tried, {rate:g}, for {count} of {len(scores)} methods" in said


def test_methods_whose_best_rate_is_at_the_end_are_named() -> None:
    def tried(method: str, scores: dict[str, float]) -> dict[tuple[str, ...], Any]:
        return {
            (f"methods.{method}.optimiser.lr={lr}",): {
                "results": {"metric": "accuracy", "personal": {"validation": score}}
            }
            for lr, score in scores.items()
        }

    inside = tried("ditto", {"1e-3": 0.5, "3e-3": 0.6, "1e-2": 0.4})
    at_end = tried("fedper", {"1e-3": 0.5, "3e-3": 0.6, "1e-2": 0.7})
    between = "each method's best rate lies between others that were tried."
    assert map_tuning.ends({"posts": {"ditto": inside}}) == f"On posts {between}"
    assert map_tuning.ends({
        "posts": {"fedper": at_end, "ditto": inside}, "chat": {"ditto": inside}
    }).startswith(
        f"On chat {between} On posts the best rate is the largest one tried, 0.01, for 1 of 2 "
        "methods: `fedper`. "
    )  # fmt: skip


@pytest.mark.slow
def test_sentences_follow_the_settings_of_the_trials(found: list[dict[str, Any]]) -> None:
    assert "On pictures those of `fedmerge` (`largest_step`) and `pfedgate` (`lr_gate`)" in (
        map_tuning.budget(found)
    )
    without = [
        {**cell, "methods": {k: v for k, v in cell["methods"].items() if k != "pfedgate"}}
        for cell in found
    ]
    assert "pfedgate" not in map_tuning.budget(without) + map_tuning.absent(without)
    assert "`fedalt`, `fedhft`, `fedsa-lora` and `fedsdg` have no rows" in map_tuning.absent(found)


@pytest.mark.slow
def test_points_that_rest_on_few_seeds_are_hollow(tmp_path: Path) -> None:
    def cell(data: str, overlap: float, *seeds: int) -> dict[str, object]:
        one = {"over_alone": [0.1, 0.05, 0.15], "seeds": list(seeds)}
        clients = {"number": 20, "median_examples": 60, "label_overlap": overlap}
        methods = {"fedper": one, "local": {**one, "over_alone": [0, 0, 0]}}
        return {"data": data, "alpha": 0.3, "settings": [], "clients": clients, "methods": methods}

    full = [cell("a", 0.1, 0, 1, 2), cell("a", 0.4, 0, 1, 2), cell("b", 0.2, 0, 1, 2)]
    few = [cell("a", 0.1, 0, 1, 2), cell("a", 0.4, 0), cell("b", 0.2, 0, 1)]
    # the points of one setting stand in two panels
    for found, number in ((full, 0), (few, 3)):
        draw(found, tmp_path / "when.svg", {})
        hollow = (tmp_path / "when.svg").read_text().count('fill="white" stroke="#0067a5"')
        assert hollow == number
