"""One method of each form, in an environment that has torch, transformers and peft, but not
fedtailor."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedtailor.export.folder import write_model
from tests.export.apart import logits_of
from tests.export.test_backbones import FORMS, bases, batch_for, model_of, without_labels
from tests.models.small import CAUSAL, SEQUENCE


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment, which sees the installed packages but no editable
    one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    packages = {str(Path(torch.__file__).parents[1])}
    (site,) = folder.glob("lib/*/site-packages")
    (site / "others.pth").write_text("\n".join(packages) + "\n")
    return folder / "bin/python"


@pytest.mark.slow
def test_every_form_runs_where_fedtailor_is_not_installed(python: Path, tmp_path: Path) -> None:
    command = [str(python), "-I", "-c", "import torch, peft, fedtailor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "No module named 'fedtailor'" in done.stderr
    base = bases(tmp_path)["bert, native"]
    ours, batches = {}, {}
    for form in FORMS:
        model, logits = model_of(base, FORMS[form])
        folder = tmp_path / form
        folder.mkdir()
        write_model(model, folder)
        ours[folder], batches[folder] = logits, without_labels(batch_for(base))
    for folder, exported in logits_of(batches, tmp_path, str(python)).items():
        torch.testing.assert_close(exported, ours[folder], atol=1e-5, rtol=1e-5)


_FROM_PRETRAINED = """
import sys
sys.modules["fedtailor"] = None
import torch, transformers
from safetensors.torch import load_file, save_file
outputs, *models = sys.argv[1:]
logits = {}
for number, (folder, auto, inputs) in enumerate(zip(models[::3], models[1::3], models[2::3])):
    batch = load_file(inputs)
    if "attention_mask" in batch:
        batch["attention_mask"] = batch["attention_mask"].long()
    with torch.no_grad():
        model = getattr(transformers, auto).from_pretrained(folder).eval()
        logits[str(number)] = model(**batch).logits
save_file(logits, outputs)
"""


@pytest.mark.slow
def test_transformers_alone_loads_a_full_model(tmp_path: Path) -> None:
    autos = {"bert, native": SEQUENCE, "gpt2, last": SEQUENCE, "gpt2": CAUSAL}
    found, ours, models = bases(tmp_path), [], []
    for name, auto in autos.items():
        inputs = str(tmp_path / f"{name}.safetensors")
        save_file(without_labels(batch_for(found[name])), inputs)
        for form in ("full", "lora"):
            model, logits = model_of(found[name], FORMS[form])
            folder = tmp_path / f"{name} {form}"
            folder.mkdir()
            write_model(model, folder, merge=True)
            ours.append(logits)
            models += [str(folder), auto, inputs]
    outputs = tmp_path / "outputs.safetensors"
    command = [sys.executable, "-I", "-c", _FROM_PRETRAINED, str(outputs), *models]
    subprocess.run(command, check=True, capture_output=True)
    exported = load_file(outputs)
    mask = batch_for(found["gpt2"])["attention_mask"].bool()
    for number, logits in enumerate(ours):
        pair = exported[str(number)], logits
        if logits.dim() == 3:  # what follows padding is not predicted
            pair = pair[0][mask], pair[1][mask]
        torch.testing.assert_close(*pair, atol=1e-3, rtol=1e-3)
