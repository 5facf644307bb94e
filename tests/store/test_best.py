"""The best round, known while a run goes on, is the one that the report selects in the end."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtailor.engine.results import Round
from fedtailor.engine.scoring import SPLITS, Evaluation
from fedtailor.methods.local import Local
from fedtailor.store import read
from fedtailor.store.best import BestRound, best_rounds, best_then
from fedtailor.store.selection import select_round
from tests.small import last_round

# what one client with two examples gets in a round; None: the round is not evaluated
Results = list[float | None]
NUMBERS = st.sampled_from([0.0, 0.5, 0.75, 1.0])


@pytest.fixture(scope="module")
def some_round() -> Round:
    done, _ = last_round(Local(), sizes=(3,), rounds=1)
    return done


def evaluated(number: int, value: float, validation: int) -> list[Evaluation]:
    """Of the second client, which has ``validation`` examples for validation."""
    evaluations = []
    for model in ("personal", "global"):
        for split in SPLITS:
            count = validation if split == "validation" else 2
            result = (None, value if count else None)
            counts = (0, count)
            evaluations.append(Evaluation(model, split, (0, 1), counts, result, result))  # type: ignore[arg-type]
    return evaluations


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("validation", [0, 2])
@given(results=st.lists(st.one_of(st.none(), NUMBERS, st.just(math.nan)), min_size=1, max_size=6))
def test_it_is_the_round_that_a_report_selects(
    some_round: Round, metric: Literal["accuracy", "loss"], validation: int, results: Results
) -> None:
    best: dict[str, BestRound] = {}
    lines: list[read.EvaluationLine] = []
    for number, value in enumerate(results, start=1):
        evaluations = [] if value is None else evaluated(number, value, validation)
        done = replace(some_round, number=number, evaluations=tuple(evaluations))
        before, best = best, best_rounds(best, done, metric)
        if "personal" in best:
            if best["personal"] != before.get("personal"):
                then = {model: best[model] for model in ("personal", "global")}
            assert best_then(best) == then
        lines += [
            read.EvaluationLine(
                number, e.model, e.split, e.clients, e.num_examples, e.loss, e.accuracy
            )
            for e in evaluations
        ]
    commit = read.Commit(len(results), len(results), True, {})
    trial = read.Trial("a", "local", 0, Path(), commit, [], lines, [], None)
    for model in ("personal", "global"):
        selected = select_round(trial, model, metric)  # type: ignore[arg-type]
        assert (selected is None) == (model not in best)
        if selected is not None:
            assert best[model].round == selected.round
            assert (best[model].validation is not None) == selected.by_validation
