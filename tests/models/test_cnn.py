from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.export.folder import export_model
from fedtailor.models import BUILTIN, ModelConfig, load_model
from fedtailor.models.cnn import cnn, lenet, resnet9
from fedtailor.task.backbone import Backbone
from tests.small import digits, digits_federation

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
NETWORKS = {name: entry.network for name, entry in BUILTIN.items() if entry.network}


def network(name: str, picture: tuple[int, ...] = GREY, seed: int = 0, **fields: Any) -> Backbone:
    config = ModelConfig(name, **{"pretrained": False, **fields})
    return load_model(config, "classification", 10, seed, "image", picture=picture)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_are_as_many_as_the_papers_count() -> None:
    assert size(cnn(GREY, 10)) == 2_171_786
    assert size(cnn(COLOUR, 100)) == 3_537_444
    assert size(lenet(COLOUR, 10)) == 256_830
    convolutions = 9 * (3 * 64 + 64 * 128 + 2 * 128**2 + 128 * 256 + 256 * 512 + 2 * 512**2)
    norms = 2 * (64 + 3 * 128 + 256 + 3 * 512)
    assert size(resnet9(COLOUR, 10)) == convolutions + norms + 513 * 10 == 6_573_130


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("picture", [GREY, COLOUR, (3, 37, 21)])
def test_every_picture_gives_logits(name: str, picture: tuple[int, int, int]) -> None:
    backbone = network(name, picture, width=0.1)
    batch = {"pixel_values": torch.rand(4, *picture)}
    assert backbone.logits(backbone.model(**backbone.prepare(batch))).shape == (4, 10)
    assert backbone.head == ("head",)
    assert (backbone.blocks, backbone.tokenizer) == ((), None)


def test_pixels_are_scaled_to_one_on_both_sides() -> None:
    pixels = torch.tensor([0.0, 0.5, 1.0]).view(1, 3, 1, 1).expand(-1, -1, 32, 32)
    inputs = network("lenet", COLOUR, width=0.1).prepare({"pixel_values": pixels})
    assert inputs.keys() == {"input"}
    assert inputs["input"][0, :, 5, 5].tolist() == [-1.0, 0.0, 1.0]


def test_another_picture_size() -> None:
    backbone = network("cnn", GREY, image_size=16)
    assert backbone.model.get_parameter("hidden.weight").shape == (2048, 64)
    inputs = backbone.prepare({"pixel_values": torch.rand(2, 1, 28, 28)})
    assert inputs["input"].shape == (2, 1, 16, 16)


def test_width_multiplies_channels_and_hidden_layers() -> None:
    def widths(name: str, width: float) -> list[int]:
        model = network(name, width=width).model
        return [len(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]

    assert widths("cnn", 1.0) == [32, 64, 2048, 10]
    assert widths("cnn", 0.25) == [8, 16, 512, 10]
    assert widths("lenet", 2.0) == [64, 128, 240, 168, 10]
    assert widths("resnet9", 0.5) == [32, 64, 64, 64, 128, 256, 256, 256, 10]
    assert widths("resnet9", 0.001) == [1] * 8 + [10]


def test_resnet9_is_the_function_that_its_name_stands_for() -> None:
    model = resnet9((3, 32, 32), 10, width=0.1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def block(x: Tensor, path: str, pool: bool) -> Tensor:
        x = F.conv2d(x, state[f"{path}.conv.weight"], padding=1)
        norm = (state[f"{path}.norm.{end}"] for end in ("running_mean", "running_var"))
        x = F.batch_norm(x, *norm, state[f"{path}.norm.weight"], state[f"{path}.norm.bias"])
        return F.max_pool2d(x.relu(), 2) if pool else x.relu()

    def residual(x: Tensor, path: str) -> Tensor:
        inner = block(x, f"{path}.branch.conv1", False)
        return x + block(inner, f"{path}.branch.conv2", False)

    x = torch.rand(2, 3, 32, 32)
    h = residual(block(block(x, "stem", False), "conv1", True), "residual1")
    h = residual(block(block(h, "conv2", True), "conv3", True), "residual2")
    assert h.shape == (2, 51, 4, 4)
    expected = F.linear(h.amax((2, 3)), state["head.weight"], state["head.bias"])
    torch.testing.assert_close(model.eval()(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["cnn", "lenet"])
def test_the_plain_networks_are_chains_of_the_paper_s_layers(name: str) -> None:
    model = NETWORKS[name](COLOUR, 10, 0.2)
    x = torch.rand(2, 3, 32, 32)
    h = x
    for path in ("conv1", "conv2"):
        weight, bias = (model.get_parameter(f"{path}.{end}") for end in ("weight", "bias"))
        h = F.max_pool2d(F.conv2d(h, weight, bias).relu(), 2)
    h = h.flatten(1)
    for path in ("hidden",) if name == "cnn" else ("hidden1", "hidden2"):
        weight, bias = (model.get_parameter(f"{path}.{end}") for end in ("weight", "bias"))
        h = F.linear(h, weight, bias).relu()
    expected = F.linear(h, model.get_parameter("head.weight"), model.get_parameter("head.bias"))
    torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_chain_can_be_cut_anywhere_and_changes_nothing_in_place(name: str) -> None:
    model = network(name, width=0.1).model
    assert isinstance(model, nn.Sequential)
    x = torch.rand(2, 1, 28, 28)
    logits = model(x)
    for cut in range(1, len(model)):
        prefix = model[:cut](x)
        before = prefix.clone()
        assert model[cut:](prefix).equal(logits)
        assert prefix.equal(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_both_executors_train_alike_in_float64(name: str) -> None:
    backbone = network(name, (1, 8, 8), width=0.05, image_size=16)
    backbone.model.double()

    def prepare(batch: dict[str, Tensor]) -> dict[str, Any]:
        return backbone.prepare({"pixel_values": batch["pixel_values"].double()})

    def server(executor: Literal["sequential", "vectorised"]) -> dict[str, Tensor]:
        method = ft.FedAvg(optimiser=ft.Optimiser("sgd", lr=0.05))
        task = ft.Task(dataclasses.replace(backbone, prepare=prepare), method.adapt)
        engine = ft.EngineConfig(executor, clients_per_step=3)
        plan = ft.Plan(1, ft.LocalConfig(batch_size=8, steps=2), engine=engine)
        (done,) = ft.rounds(method, task, digits_federation(), plan)
        assert len(task.buffers) == (16 if name == "resnet9" else 0)
        assert done.server.keys() == task.state.keys()
        return done.server

    one, many = server("sequential"), server("vectorised")
    for path, value in one.items():
        assert not value.equal(backbone.model.state_dict()[path]), path
        torch.testing.assert_close(many[path], value, atol=1e-9, rtol=1e-9)


@pytest.mark.slow
def test_a_run_makes_the_network_for_its_data_and_exports_it(tmp_path: Path) -> None:
    experiment = ft.Experiment(
        methods={"lora": ft.FedAvg(trainable="lora", rank=2)},
        rounds=1,
        split=ft.SplitConfig(3),
        local=ft.LocalConfig(steps=2),
        model=ModelConfig(
            "lenet", pretrained=False, width=0.1, image_size=16, targets=("hidden*",)
        ),
    )
    run = ft.run(experiment, tmp_path / "run", data=digits()).path
    assert '"picture": [' in (run / "partitions/seed-0.json").read_text()
    folder = export_model(run, "lora", tmp_path / "adapter")
    assert (folder / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "picture", "fields", "message"),
    [
        ("cnn", GREY, {"pretrained": True}, "no weights for model 'cnn'; set model.pretrained = f"),
        ("lenet", GREY, {"dropout": 0.1}, "'lenet' has no dropout"),
        ("cnn", GREY, {"revision": "v1"}, "model.revision = 'v1' .* 'cnn' is built in; leave it"),
        ("efficientnet-lite0", GREY, {"width": 0.5}, "has no width; .* to resnet9, cnn, lenet"),
        ("cnn", (1, 8, 8), {}, "8 x 8 are too small for cnn; it takes 16 x 16 and more"),
        ("lenet", (3, 32, 15), {}, "32 x 15 are too small for lenet"),
        ("resnet9", GREY, {"image_size": 7}, "7 x 7 are too small for resnet9; it takes 8 x 8"),
        ("lenet", (1, 28, 2000), {}, "28 x 2000 are too large for lenet; it takes up to 1024"),
        ("resnet9", None, {}, "'resnet9' is made for the data's pictures"),
    ],
)
def test_bad_input_is_told_in_one_line(
    name: str, picture: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        network(name, picture, **fields)
    assert "\n" not in str(error.value)
