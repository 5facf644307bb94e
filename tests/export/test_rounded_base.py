"""Runs on rounded weights, from a table to an export of the exact model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedtailor.cli.main import main
from tests import kinds


@pytest.mark.slow
@pytest.mark.parametrize("rounded", ['quantise = "nf4"', 'dtype = "bf16"\nquantise = "int8"'])
def test_a_rounded_base_goes_everywhere(
    rounded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = kinds.finished("instruct")
    text = (folder / "e.toml").read_text()
    for section, more in (
        ("[methods.fedavg]", 'trainable = "lora"'),
        ("[model]", rounded),
        ("[engine]", "processes = 2"),
    ):
        text = text.replace(section, f"{section}\n{more}")
    text = text.replace('"sequential"', '"processes"')
    (tmp_path / "e.toml").write_text(text)
    run, ask = str(tmp_path / "run"), str(tmp_path / "ask.jsonl")
    Path(ask).write_text((folder / "rows.jsonl").read_text().splitlines()[0])
    assert main(["run", str(tmp_path / "e.toml"), "--out", run]) == 0
    for method in ("fedavg", "fedsdg"):
        of = [run, "--method", method]
        capsys.readouterr()
        assert main(["predict", *of, "--client", "a", "--input", ask, "--json"]) == 0
        assert "text" in json.loads(capsys.readouterr().out)
        new = tmp_path / f"{method}.jsonl"
        new.write_text((folder / "rows.jsonl").read_text().replace('"c"', '"d"'))
        assert main(["onboard", *of, "--data", str(new), "--client", "d"]) == 0
        out, merged = tmp_path / f"{method}-out", tmp_path / f"{method}-merged"
        assert main(["export", *of, "--client", "a", "--out", str(out)]) == 0
        capsys.readouterr()
        assert main(["export", *of, "--client", "a", "--merge", "--out", str(merged)]) == 0
        assert "unrounded" in capsys.readouterr().err
        assert "unrounded" in (out / "README.md").read_text()
        _same_base(out, merged)
        done = subprocess.run(
            [sys.executable, "use.py", "the ward has"],
            cwd=merged,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def _same_base(out: Path, merged: Path) -> None:
    """The base of an adapter is the original one, and the merged model is that with the LoRA."""
    original = load_file(Path(kinds.model("instruct")) / "model.safetensors")
    given = json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
    whole = load_file(merged / "model.safetensors")
    lora = load_file(out / "adapter_model.safetensors")
    assert load_file(Path(given) / "model.safetensors").keys() == original.keys()
    assert whole.keys() >= original.keys()
    for name, value in original.items():
        start = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{start}.lora_A.weight" in lora:
            value = value + lora[f"{start}.lora_B.weight"] @ lora[f"{start}.lora_A.weight"]
        torch.testing.assert_close(whole[name], value, atol=1e-6, rtol=0)  # float32, too
    assert lora
