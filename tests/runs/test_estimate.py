"""What a run is going to cost."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from torch import nn

from fedtailor.objectives import OBJECTIVES
from fedtailor.runs.estimate import _most_written
from fedtailor.task.backbone import Backbone


def test_no_more_is_written_than_the_model_has_room_for() -> None:
    model = nn.Linear(2, 2)
    unlimited = Backbone(model, objective=OBJECTIVES["instruct"])
    assert _most_written(unlimited, 500) == 500
    model.config = SimpleNamespace(max_position_embeddings=128)  # type: ignore[assignment]
    assert _most_written(unlimited, 500) == 127
    assert _most_written(unlimited, 5) == 5
    assert _most_written(replace(unlimited, objective=OBJECTIVES["seq2seq"]), 500) == 128
