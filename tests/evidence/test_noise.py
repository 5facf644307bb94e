"""The page on noise says what the results say."""

import re
from pathlib import Path

import pytest
from evidence.noise import FIGURE, PAGE, Results, draw, found, page


@pytest.mark.slow
def test_the_page_is_what_the_script_writes_and_the_figure_has_every_method(
    tmp_path: Path,
) -> None:
    assert PAGE.read_text() == page()
    draw(found(), tmp_path / "noise.svg")
    methods = {*found().methods} - {"local"}
    for drawing in (tmp_path / "noise.svg", FIGURE):
        assert methods <= {*re.findall(r">([a-z-]+)</text>", drawing.read_text())}


def test_a_method_is_compared_with_training_alone_on_the_same_clients() -> None:
    """Which has the scores of one epsilon at all of them, as it sends nothing."""
    alone = {"0": 0.25, "1": 0.5, "2": 0.75}
    results = Results({
        (0.3, "local", "8", 0): alone,
        (0.3, "fedper", "1", 0): {"0": 0.5, "1": 0.75, "2": 1.0},
        (0.3, "fedper", "8", 0): {"0": 0.5, "1": None, "2": 1.0},
        (0.3, "fedper", "8", 1): alone,  # training alone has not run with this seed
    })  # fmt: skip
    assert results.methods == ["local", "fedper"]
    assert results.seeds(0.3, "fedper") == [0]
    lead = results.lead(0.3, "fedper", "1", [0])
    assert lead is not None
    assert (lead.difference, lead.num_clients) == (0.25, 3)
    both = results.lead(0.3, "fedper", "8", [0])
    assert both is not None
    assert both.num_clients == 2
    assert results.accuracy(0.3, "fedper", "8", [0]) == 75.0
    assert results.lead(0.3, "fedper", "3", [0]) is None
