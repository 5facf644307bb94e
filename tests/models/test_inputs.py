"""Masks, positions and pixels, as a model's forward takes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fedtailor.errors import InputError
from fedtailor.models import from_module
from fedtailor.models.inputs import ImageInputs, ModuleInputs, TextInputs
from tests.models.small import call, tiny_backbone

TEXTS = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]),
    "attention_mask": torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]),
}


def seen(mask: torch.Tensor) -> list[list[int]]:
    """Which tokens each token attends to, of the last text."""
    return (mask[-1, 0] == 0).long().tolist()


def test_an_encoders_tokens_see_all_real_ones() -> None:
    inputs = TextInputs("tiny", "bert")(TEXTS)
    assert inputs.keys() == {"input_ids", "attention_mask", "token_type_ids"}
    assert seen(inputs["attention_mask"]) == [[1, 1, 0, 0]]
    assert inputs["token_type_ids"].equal(torch.zeros(2, 4, dtype=torch.int64))


def test_a_decoders_tokens_see_the_real_ones_up_to_themselves() -> None:
    inputs = TextInputs("tiny", "llama")(TEXTS)
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3]]
    assert seen(inputs["attention_mask"]) == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
    ]


def test_a_window_hides_what_is_further_back() -> None:
    whole = {name: value[:1] for name, value in TEXTS.items()}
    sliding = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert seen(TextInputs("tiny", "mistral", window=2)(whole)["attention_mask"]) == sliding
    both = TextInputs("tiny", "qwen2", window=2, by_layer=True)(whole)["attention_mask"]
    assert seen(both["sliding_attention"]) == sliding
    assert seen(both["full_attention"])[3] == [1, 1, 1, 1]


def test_positions_of_roberta_count_on_from_the_padding_index() -> None:
    config = SimpleNamespace(model_type="roberta", pad_token_id=1, max_position_embeddings=40)
    made = TextInputs.of("tiny", config, pooled=True)
    assert made.max_length == 38
    inputs = made(TEXTS)
    assert inputs["position_ids"].tolist() == [[2, 3, 4, 5], [2, 3, 1, 1]]
    assert inputs["real"] is TEXTS["attention_mask"]


def test_rotary_positions_limit_the_length() -> None:
    config = SimpleNamespace(model_type="llama", max_position_embeddings=3)
    with pytest.raises(InputError, match=r"4 tokens are too many for tiny; .* at most 3"):
        TextInputs.of("tiny", config, pooled=False)(TEXTS)


def test_deberta_limits_the_length_where_it_learns_positions() -> None:
    for learned, longest in ((True, 40), (False, None)):
        config = SimpleNamespace(
            model_type="deberta-v2", max_position_embeddings=40, position_biased_input=learned
        )
        assert TextInputs.of("tiny", config, pooled=False).max_length == longest


def test_an_unknown_architecture_gets_the_mask_of_real_tokens() -> None:
    inputs = TextInputs("tiny", "other")(TEXTS)
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_grey_pictures_are_normalised_a_channel_at_a_time_at_the_models_size() -> None:
    half = ImageInputs(
        "tiny", mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 0.25), size=(4, 4),
        interpolate=True,
    )  # fmt: skip
    inputs = half({"pixel_values": torch.full((2, 1, 8, 8), 0.75)})
    assert inputs["interpolate_pos_encoding"] is True
    assert inputs["pixel_values"].shape == (2, 3, 4, 4)
    expected = torch.tensor([0.75, 0.5, -1.0]).view(1, 3, 1, 1).expand(2, 3, 4, 4)
    torch.testing.assert_close(inputs["pixel_values"], expected)
    with pytest.raises(InputError, match="pictures have 2 channels; tiny takes 1 or 3"):
        half({"pixel_values": torch.zeros(1, 2, 8, 8)})


def test_a_module_that_names_no_argument_is_refused() -> None:
    class Anything(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return inputs[0]

    with pytest.raises(InputError, match="forward of Anything has no named argument"):
        ModuleInputs.of(Anything())


def test_too_long_texts_are_told_with_the_limit(tmp_path: Path) -> None:
    backbone = tiny_backbone(tmp_path, "roberta", "classification", "native")
    batch = {"input_ids": torch.ones(1, 39, dtype=torch.int64), "attention_mask": torch.ones(1, 39)}
    with pytest.raises(InputError, match=r"39 tokens .* at most 38"):
        backbone.prepare(batch)
    batch = {name: value[:, :38] for name, value in batch.items()}
    assert call(backbone, batch).isfinite().all()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.classifier = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.body(x))
        return result


def test_any_module_takes_a_single_input_by_its_own_name() -> None:
    backbone = from_module(Net(), targets=("body",))
    assert (backbone.blocks, backbone.head) == ((("body",),), ("classifier",))
    pixels = torch.rand(2, 4)
    batch = {"pixel_values": pixels, "labels": torch.zeros(2), "weight": torch.ones(2)}
    assert call(backbone, batch).equal(backbone.model(pixels))
    with pytest.raises(InputError, match="forward takes x"):
        backbone.prepare({"input_ids": pixels, "attention_mask": pixels})
    with pytest.raises(InputError, match=r"model.head 'hat' .* candidates: body, classifier"):
        from_module(Net(), head=("hat",))
