import pytest
import torch
from torch import nn

from fedtailor import random
from fedtailor.errors import InputError
from fedtailor.task.step import KeyedDropout, StepContext, bind, key_dropout


def test_dropout_depends_on_key_and_position_not_on_padding() -> None:
    step = StepContext()
    dropout = KeyedDropout(0.25, 0)
    bind(dropout, step)
    x = torch.ones(4, 7, 64)
    with step.passing(training=True, key=random.key(1)):
        y = dropout(x)
        longer = dropout(torch.ones(6, 9, 64))
    assert longer[:4, :7].equal(y)
    assert abs((y == 0).float().mean() - 0.25) < 0.05
    assert y.max() == pytest.approx(1 / 0.75)
    with step.passing(training=True, key=random.key(2)):
        assert not dropout(x).equal(y)
    assert dropout(x).equal(x)


@pytest.mark.parametrize(
    "module", [nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.LSTM(2, 2, num_layers=2, dropout=0.5)]
)
def test_dropout_that_cannot_be_keyed_is_refused(module: nn.Module) -> None:
    with pytest.raises(InputError, match=r"0 (is a|drops out)"):
        key_dropout(nn.Sequential(module))


def test_a_dropout_that_stands_in_two_places_is_replaced_in_both() -> None:
    shared = nn.Dropout(0.5)
    model = nn.Sequential(shared, nn.Sequential(shared))
    key_dropout(model)
    assert sum(isinstance(module, KeyedDropout) for module in model.modules()) == 2
