"""Over Flower or in one process: the same numbers, to the bit, with nothing private on the way."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from safetensors.torch import load_file

import fedtailor as ft
from fedtailor.flower import Timeouts, serve
from fedtailor.methods import METHODS
from fedtailor.models import load_model
from fedtailor.params import decode
from fedtailor.store.client_states import SEEN
from fedtailor.store.files import read_json, write_json
from tests import kinds
from tests.engine.test_privacy import backbone as without_norm
from tests.flower.grid import DIGITS, DirectGrid, experiment, grid
from tests.small import digits_backbone, private_rows, same_bits

QUICK = Timeouts(start=20.0, reply=20.0, poll=0.0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in METHODS},
    "fedhft": {"warmup_rounds": 1, "clusters": 2},  # by default it clusters in a later round
    "krum": {"name": "fedavg", "robust": {"rule": "krum"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_over_flower_is_the_run_in_one_process(name: str, tmp_path: Path) -> None:
    needs_public = METHODS[CASES[name].get("name", name)].needs_public
    public = {"name": "digits", "limit": 20} if needs_public else {}
    chosen = experiment(name, CASES[name], public=public, rounds=2)
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    direct = grid(chosen, tmp_path / "clients")
    far = serve(direct, chosen, tmp_path / "far", backbone=digits_backbone(), timeouts=QUICK)
    near, far = (out / "methods" / name / "seed-0" for out in (near, far))
    assert same_bits(load_file(near / "server.safetensors"), load_file(far / "server.safetensors"))
    assert lines(near / "history.jsonl") == lines(far / "history.jsonl")
    costs = [read_json(out / "costs.json") for out in (near, far)]
    assert costs[0] | {"flops": None} == costs[1]  # the server has no examples to count with
    _assert_same_evaluations(lines(near / "clients.jsonl"), lines(far / "clients.jsonl"))
    _assert_private(near / "private.safetensors", far, tmp_path / "clients", direct)


@pytest.mark.parametrize("above", ["refuse", pytest.param("clip", marks=pytest.mark.slow)])
def test_a_bound_on_norms_acts_in_the_same_way(above: str, tmp_path: Path) -> None:
    cohort = {"size": 3, "above_norm": above, "norm_factor": 1.0}
    chosen = experiment("fedper", rounds=4, cohort=cohort)
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    direct = grid(chosen, tmp_path / "clients")
    far = serve(direct, chosen, tmp_path / "far", backbone=digits_backbone(), timeouts=QUICK)
    near, far = (out / "methods/fedper/seed-0" for out in (near, far))
    history = lines(near / "history.jsonl")
    assert history == lines(far / "history.jsonl")
    assert any("notes" in line for line in history) == (above == "refuse")
    assert same_bits(load_file(near / "server.safetensors"), load_file(far / "server.safetensors"))
    _assert_private(near / "private.safetensors", far, tmp_path / "clients", direct)


@pytest.mark.slow
def test_a_quantised_language_model_with_packed_rows_is_the_same(tmp_path: Path) -> None:
    data, model = kinds.data("instruct"), ft.ModelConfig(kinds.model("instruct"), quantise="nf4")

    def backbone() -> ft.Backbone:
        return load_model(model, data.objective, data.num_classes, 0)

    local, fields = {"batch_size": 8, "pack": True}, {"trainable": "lora", "rank": 2}
    chosen = experiment("fedavg", fields, rounds=2, split={"clients": 4}, local=local)
    near = ft.run(chosen, tmp_path / "near", data=data, backbone=backbone()).path
    direct = grid(chosen, tmp_path / "clients", dataset=data, model=backbone)
    far = serve(direct, chosen, tmp_path / "far", backbone=backbone(), timeouts=QUICK)
    near, far = (out / "methods/fedavg/seed-0" for out in (near, far))
    assert lines(near / "history.jsonl") == lines(far / "history.jsonl")
    assert same_bits(load_file(near / "server.safetensors"), load_file(far / "server.safetensors"))


@pytest.mark.slow
def test_noise_with_the_same_secret_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the sites don't learn the secret, but what the run spends of their clients' privacy."""
    spent = {"noise": 2.0, "clip": 0.1, "delta": 0.1, "sampling": "poisson", "clip_quantile": 0.5}
    chosen = experiment("fedbn", rounds=3, cohort={"size": 3}, privacy=spent)
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    direct = grid(chosen, tmp_path / "clients")
    secret = Path("methods/fedbn/seed-0/secret.json")
    (tmp_path / "far" / secret).parent.mkdir(parents=True)
    shutil.copy(near / secret, tmp_path / "far" / secret)
    content = read_json(near / "experiment.json")
    content["data"]["name"] = None  # the server has none
    write_json(tmp_path / "far/experiment.json", content)
    capsys.readouterr()
    far = serve(direct, chosen, tmp_path / "far", backbone=digits_backbone(), timeouts=QUICK)
    said = capsys.readouterr().err
    assert "fedtailor: fedbn, seed 0: epsilon " in said
    assert "PLD, Poisson sampling" in said
    near, far = (out / "methods/fedbn/seed-0" for out in (near, far))
    history = lines(near / "history.jsonl")
    assert history == lines(far / "history.jsonl")
    assert len({line["clip"] for line in history}) > 1
    assert same_bits(load_file(near / "server.safetensors"), load_file(far / "server.safetensors"))
    hidden = read_json(near / "secret.json")["secret"]
    assert direct.sent
    assert not any(hidden in str(one.content) for one in direct.sent)


@pytest.mark.slow
def test_sites_noise_their_records_as_in_one_process_with_the_same_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spent = {"level": "record", "noise": 2.0, "clip": 0.1, "delta": 0.1}
    chosen = experiment("fedper", rounds=2, privacy=spent)
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=without_norm()).path
    run, trial = "0123456789abcdef" * 2, Path("methods/fedper/seed-0")
    (tmp_path / "far" / trial).mkdir(parents=True)
    write_json(tmp_path / "far" / trial / "flower.json", {"run": run})
    content = read_json(near / "experiment.json")
    content["data"]["name"] = None  # the server has none
    write_json(tmp_path / "far/experiment.json", content)
    sites = [tmp_path / f"clients/node-{node}/{run}/fedper/seed-0" for node in range(2)]
    for place in (tmp_path / "far" / trial, *sites):
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(near / trial / "secret.json", place)
    direct = grid(chosen, tmp_path / "clients", model=without_norm)
    capsys.readouterr()
    far = serve(direct, chosen, tmp_path / "far", backbone=without_norm(), timeouts=QUICK)
    assert "fedtailor: fedper, seed 0: epsilon " in capsys.readouterr().err
    history = [lines(out / trial / "history.jsonl") for out in (near, far)]
    assert history[0] == history[1]
    assert history[0][-1]["level"] == "record"
    servers = [load_file(out / trial / "server.safetensors") for out in (near, far)]
    assert same_bits(*servers)


@pytest.mark.slow
def test_who_diverges_under_noise_is_named_on_stderr_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once a round in one process; over Flower each at its site."""
    spent = {"noise": 2.0, "clip": 0.1, "delta": 0.1}
    optimiser = {"optimiser": {"name": "sgd", "lr": 1e6, "weight_decay": 1e3}}
    more = {"cohort": {"size": 2}, "local": {"batch_size": 4, "epochs": 4}}
    chosen = experiment("fedbn", optimiser, rounds=1, privacy=spent, **more)
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    (cohort,) = (line["cohort"] for line in lines(near / "methods/fedbn/seed-0/history.jsonl"))
    names = ", ".join(str(client) for client in cohort)
    told = [line for line in capsys.readouterr().err.splitlines() if "change nothing" in line]
    assert told == [
        "fedtailor: fedbn, seed 0, round 1: under [privacy] these clients send that they change "
        f"nothing, since their numbers are no longer finite: {names}"
    ]
    direct = grid(chosen, tmp_path / "clients")
    far = serve(direct, chosen, tmp_path / "far", backbone=digits_backbone(), timeouts=QUICK)
    told = [line for line in capsys.readouterr().err.splitlines() if "chang" in line]
    assert len(told) == len(cohort)
    for line in told:
        assert line.startswith("fedtailor: fedbn, seed 0, round 1: ")
        assert line.endswith("; under [privacy] it sends that it changes nothing")
    for out in (near, far):
        for path in (out / "run.log", out / "methods/fedbn/seed-0/history.jsonl"):
            assert "finite" not in path.read_text()
            assert "nothing" not in path.read_text()


@pytest.mark.parametrize("level", ["client", "record"])
def test_over_flower_noise_from_the_seed_is_refused(level: str, tmp_path: Path) -> None:
    privacy = {"level": level, "noise": 2.0, "clip": 0.1, "delta": 0.1, "secret": False}
    chosen = experiment("fedbn", privacy=privacy)
    with pytest.raises(ft.InputError, match=r"set privacy\.secret = true"):
        serve(
            grid(chosen, tmp_path / "c"), chosen, tmp_path / "far", backbone=digits_backbone(),
            timeouts=QUICK,
        )  # fmt: skip


@pytest.mark.slow
def test_training_alone_has_the_same_turns_at_the_same_rates(tmp_path: Path) -> None:
    chosen = experiment(
        "local", rounds=4, cohort={"size": 3}, schedule={"name": "linear"}, evaluate={"every": 2}
    )
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    direct = grid(chosen, tmp_path / "clients")
    far = serve(direct, chosen, tmp_path / "far", backbone=digits_backbone(), timeouts=QUICK)
    near, far = (out / "methods/local/seed-0" for out in (near, far))
    history = lines(near / "history.jsonl")
    assert history == lines(far / "history.jsonl")
    assert [len(line["cohort"]) for line in history] == [3, 2, 3, 2]
    assert len({line["lr_scale"] for line in history}) == 2
    _assert_same_evaluations(lines(near / "clients.jsonl"), lines(far / "clients.jsonl"))
    _assert_private(near / "private.safetensors", far, tmp_path / "clients", direct)


def _assert_same_evaluations(near: list[dict[str, Any]], far: list[dict[str, Any]]) -> None:
    """A global model's examples share other batches: equal up to rounding."""
    assert len(near) == len(far)
    for a, b in zip(near, far, strict=True):
        assert {**a, "loss": None} == {**b, "loss": None}
        for x, y in zip(a["loss"], b["loss"], strict=True):
            assert (x is None and y is None) or math.isclose(x, y, rel_tol=1e-5)


def _assert_private(path: Path, far: Path, kept: Path, direct: DirectGrid) -> None:
    if not path.exists():
        assert not list(kept.rglob("round-*.safetensors"))
        return
    rows = private_rows(path)
    last = {client: done["round"] for done in lines(far / "history.jsonl")
            for client in done["cohort"]}  # fmt: skip
    assert set(last) == set(rows.pop(SEEN).nonzero().flatten().tolist())
    sent = _sent(direct)
    for client, number in last.items():
        (found,) = kept.rglob(f"client-{client}/round-{number:06d}.safetensors")
        private = load_file(found)
        assert same_bits(private, {name: value[client] for name, value in rows.items()})
        for name, value in private.items():
            for other, content in sent:
                assert name != other
                alike = value.dtype == content.dtype and value.shape == content.shape
                telling = value.numel() > 3 and not value.eq(value.flatten()[0]).all()
                assert not (telling and alike and value.equal(content)), name


def _sent(direct: DirectGrid) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for message in direct.answered:
        arrays = message.content["payloads"]
        assert isinstance(arrays, ArrayRecord)
        for array in arrays.values():
            found += decode(array.data).items()
    return found


def brier(labels: np.ndarray, probabilities: np.ndarray) -> float:
    return -float(((np.eye(probabilities.shape[1])[labels] - probabilities) ** 2).mean())


@pytest.mark.slow
def test_metrics_are_worked_out_at_the_sites(tmp_path: Path) -> None:
    """The server has no function of its own for ``brier``, only its name."""
    wanted = {"metrics": ["macro_f1", "auc", "brier"], "confusion": True}
    chosen = experiment("fedper", rounds=2, evaluate=wanted)
    model, given = digits_backbone(), {"brier": brier}
    ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=model, metrics=given)
    direct = grid(chosen, tmp_path / "clients", metrics=given)
    serve(direct, chosen, tmp_path / "far", backbone=digits_backbone(), timeouts=QUICK)
    near, far = (tmp_path / name / "methods/fedper/seed-0" for name in ("near", "far"))
    assert lines(near / "clients.jsonl") == lines(far / "clients.jsonl")
    assert "brier" in lines(far / "clients.jsonl")[0]["metrics"]
    files = [load_file(folder / "confusion-000002.safetensors") for folder in (near, far)]
    assert same_bits(*files)
    assert files[0]["personal/test"].shape == (5, 10, 10)
