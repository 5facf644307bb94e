"""Parts of a model, by name."""

import gc
import weakref

import pytest
from torch import nn

from fedtailor.errors import InputError
from fedtailor.layers.parts import (
    check_split,
    in_norm,
    matching,
    require_blocks,
    train_layers,
    units,
)
from fedtailor.layers.trainable import choose_trainable
from fedtailor.objectives import CausalLM
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from tests.small import digits_backbone
from tests.text import tiny_bert


def test_without_blocks_the_error_lists_candidates() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(InputError, match=r"no recognised transformer blocks.*candidates: 0, 1\.\*"):
        require_blocks(Backbone(model))


def test_layers_are_chosen_by_pattern_with_what_is_inside_them() -> None:
    task = Task(tiny_bert(), lambda b: train_layers(b, ("*.layer.1", "classifier")))
    assert all(n.startswith(("bert.encoder.layer.1.", "classifier.")) for n in task.trained)
    whole = Task(tiny_bert())
    assert len([n for n in whole.trained if ".layer.1." in n]) == len(task.trained) - 2
    assert Task(tiny_bert(), lambda b: train_layers(b, ())).trained == whole.trained
    norm = Task(digits_backbone(), lambda b: train_layers(b, ("norm",)))
    assert norm.trained == {"norm.weight", "norm.bias"}
    assert norm.buffers == {"norm.running_mean", "norm.running_var"}


def test_a_pattern_that_names_no_layer_lists_the_layers() -> None:
    with pytest.raises(
        InputError,
        match=r"layers 'haed' names no layer of model 'digits net'; .*: conv, norm, hidden, head$",
    ):
        train_layers(digits_backbone(), ("head", "haed"))
    with pytest.raises(InputError, match="'dropout' names no layer"):  # nothing to train in there
        train_layers(digits_backbone(), ("dropout",))


def test_units_are_the_items_of_lists_and_what_stands_beside_them() -> None:
    assert units(digits_backbone().model) == (("conv", "norm"), ("hidden",), ("head",))
    assert units(tiny_bert().model) == (
        ("bert.embeddings",),
        ("bert.encoder.layer.0",),
        ("bert.encoder.layer.1",),
        ("bert.pooler",),
        ("classifier",),
    )


def test_private_parts_are_chosen_by_pattern_or_are_the_head() -> None:
    task = Task(digits_backbone())
    head = {name for name in task.state if matching(task, ())(name)}
    assert head == {"head.weight", "head.bias"}
    chosen = {name for name in task.state if matching(task, ("conv", "norm"))(name)}
    assert chosen == {name for name in task.state if name.startswith(("conv.", "norm."))}
    with pytest.raises(InputError, match=r"'haed' names no part .*: conv, norm, hidden, head$"):
        matching(task, ("head", "haed"))
    with pytest.raises(InputError, match=r"recognised task head; name its modules in model.head"):
        matching(Task(Backbone(nn.Linear(2, 2))), ())
    writes = Backbone(nn.Sequential(nn.Linear(2, 2)), objective=CausalLM())
    with pytest.raises(InputError, match=r"task head; name the private parts .*; its parts: 0$"):
        matching(Task(writes), ())
    assert not any(matching(task, None)(name) for name in task.state)


@pytest.mark.slow
def test_a_part_is_remembered_by_model_and_no_longer_than_it() -> None:
    two, other = Task(Backbone(nn.Sequential(nn.Linear(2, 2)))), Task(digits_backbone())
    assert matching(two, ("0",)) is matching(two, ("0",))
    assert matching(two, ("0",)) is not matching(two, ("*",))
    assert matching(other, ("*",)) is not matching(two, ("*",))
    gone = weakref.ref(two)
    del two
    gc.collect()
    assert gone() is None


def test_a_split_leaves_something_on_both_sides() -> None:
    task = Task(digits_backbone())
    for patterns in ((), ("conv", "norm"), None):
        check_split(task, "private", patterns)
    with pytest.raises(InputError, match=r"^private = \['\*'\] matches all of .*; allowed: some"):
        check_split(task, "private", ("*",))
    with pytest.raises(InputError, match=r"^shared = \['dropout'\] matches nothing of"):
        check_split(task, "shared", ("dropout",))
    head_alone = Task(digits_backbone(), lambda b: choose_trainable(b, "head", 8, 16.0))
    with pytest.raises(InputError, match=r"^private = the task head matches all of"):
        check_split(head_alone, "private", ())


def test_normalisations_are_known_with_their_statistics() -> None:
    task = Task(digits_backbone())
    inside = in_norm(task)
    assert {n for n in task.state if inside(n)} == {n for n in task.state if n.startswith("norm.")}
    task = Task(tiny_bert())
    inside = in_norm(task)
    assert {n for n in task.state if inside(n)} == {n for n in task.state if "LayerNorm" in n}


class PreNorm(nn.Module):
    """The usual wrapper of a vision transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(2), nn.Linear(2, 2)


def test_a_block_whose_class_is_named_after_its_norm_is_none() -> None:
    for model, path in ((nn.Sequential(PreNorm()), "0.norm"), (PreNorm(), "norm")):
        task = Task(Backbone(model))
        inside = in_norm(task)
        assert {n for n in task.state if inside(n)} == {f"{path}.weight", f"{path}.bias"}
