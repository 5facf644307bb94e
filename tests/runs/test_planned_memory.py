"""The memory that a start summary says, beside that of the run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

from tests import kinds
from tests.models.small import save

_RUN = """
import resource, sys
from fedtailor.cli.main import main
code = main(["run", sys.argv[1], "--out", sys.argv[2]])
print("peak", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""
_EXPERIMENT = """
rounds = 2
[data]
path = "{rows}"
task = "causal-lm"
client = "ward"
max_length = 256
[split]
scheme = "natural"
[local]
batch_size = 8
[model]
name = "{model}"
[engine]
executor = "sequential"
checkpointing = {checkpointing}
[methods.fedlora]
rank = 2
"""


@pytest.mark.long  # a busy machine changes what is measured
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_a_run_takes_the_memory_that_was_said(checkpointing: str, tmp_path: Path) -> None:
    """Long texts, of which few are as long, and a large vocabulary."""
    folder = kinds.save_model(tmp_path / "model", "causal-lm")
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        vocab_size=50_000, max_position_embeddings=256, pad_token_id=0, eos_token_id=3,
    )  # fmt: skip
    save(folder, config, "AutoModelForCausalLM")
    draw = np.random.default_rng(0)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(64):
            words = draw.choice(kinds.WORDS, 300 if number % 8 < 2 else 12)
            file.write(json.dumps({"text": " ".join(words), "ward": "ab"[number % 2]}) + "\n")
    experiment = tmp_path / "e.toml"
    experiment.write_text(
        _EXPERIMENT.format(rows=tmp_path / "rows.jsonl", model=folder, checkpointing=checkpointing)
    )
    command = [sys.executable, "-c", _RUN, str(experiment), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"memory +([\d.]+) ([MG])B with", done.stderr)
    assert found is not None
    said = float(found[1]) * {"M": 1e6, "G": 1e9}[found[2]]
    peak = int(done.stdout.rpartition("peak ")[2])
    assert said == pytest.approx(peak, rel=0.2), (said, peak)
