"""Exported models in a process of their own, in which nothing can import fedtailor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

_CODE = """
import sys
from pathlib import Path
sys.modules["fedtailor"] = None  # an import of it fails
import torch
from safetensors.torch import load_file, save_file
inputs, outputs, *folders = sys.argv[1:]
batches, logits = load_file(inputs), {}
for number, folder in enumerate(folders):
    before = set(sys.modules)
    sys.path.insert(0, folder)
    import model
    start = f"{number}/"
    batch = {n[len(start):]: v for n, v in batches.items() if n.startswith(start)}
    with torch.no_grad():
        logits[str(number)] = model.Model().logits(batch)
    sys.path.pop(0)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]
assert not any(name.startswith("fedtailor.") for name in sys.modules)
save_file(logits, outputs)
"""


def logits_of(
    batches: Mapping[Path, Mapping[str, Tensor]], scratch: Path, python: str = sys.executable
) -> dict[Path, Tensor]:
    """The logits of each folder's ``model.py`` on a batch."""
    inputs = {
        f"{number}/{name}": value.clone()
        for number, batch in enumerate(batches.values())
        for name, value in batch.items()
    }
    save_file(inputs, scratch / "inputs.safetensors")
    files = [str(scratch / f"{name}.safetensors") for name in ("inputs", "outputs")]
    command = [python, "-I", "-c", _CODE, *files, *map(str, batches)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = load_file(files[1])
    return {folder: found[str(number)] for number, folder in enumerate(batches)}
