"""What this machine has for fedtailor, and what to do about what it lacks."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .. import data, models, random
from ..disk_cache import cache_dir
from ..models import ModelConfig, load_model
from ..models.source import hub_in_reach
from ..optim import ClientContext, Optimiser, train
from ..task.task import Task

_MIN_FREE = 2e9  # bytes; a converted model takes 540 MB
_STEPS, _BATCH = 5, 16
_USED_BY = {
    "minilm": "; fedtailor new takes it for texts, and so does the experiment quickstart",
    "efficientnet-lite0": "; fedtailor new takes it for pictures",
}
_EXTRAS = {
    "flower": "Flower (fedtailor deploy)",
    "tune": "Optuna (fedtailor tune)",
    "rouge": "rouge-score and sacrebleu (ROUGE and chrF of texts that models write)",
    "privacy": "dp-accounting and cryptography ([privacy], [secure_aggregation])",
    "figures": "vl-convert (fedtailor report --figures)",
    "track": "trackers (fedtailor track)",
}


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and, unless it is ok, what to do."""

    what: str
    status: Literal["ok", "warning", "problem"]
    text: str
    advice: str = ""


def findings() -> Iterator[Finding]:
    """Look at Python, packages, cache, data, models, the hub, and train a few steps."""
    python = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding("python", "ok", python)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = ", ".join(torch.cuda.get_device_name(number) for number in range(count))
    text = f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
    yield Finding("torch", "ok", text + (gpus or "no GPU (CPU only)"))
    yield from _packages()
    yield from _cache(cache_dir())
    yield _hub()
    yield from _models()
    yield from _data()
    yield _training_step()


def _packages() -> Iterator[Finding]:
    """Every requirement of the package that is not met, and its extras."""
    met = 0
    lacking: dict[str, list[str]] = {}  # by extra
    for line in metadata.requires("fedtailor") or ():
        needed = Requirement(line)
        extra = re.search(r"extra == [\"'](\w+)[\"']", str(needed.marker or ""))
        if extra and extra[1] not in _EXTRAS:
            continue
        name, allowed = needed.name, needed.specifier
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            if extra:
                lacking.setdefault(extra[1], []).append(name)
            else:
                text = f"{name} is missing"
                yield Finding("packages", "problem", text, f"pip install '{needed}'")
            continue
        if allowed.contains(installed, prereleases=True):
            met += 1
        else:
            text = f"{name} {installed} is not supported ({allowed})"
            yield Finding("packages", "warning", text, f"pip install '{name}{allowed}'")
    yield Finding("packages", "ok", f"{met} packages have versions that are supported")
    for extra_name, purpose in _EXTRAS.items():
        if extra_name in lacking:
            text = f"{purpose}: {', '.join(lacking[extra_name])} not installed"
            yield Finding("extras", "warning", text, f"pip install 'fedtailor[{extra_name}]'")
        else:
            yield Finding("extras", "ok", f"{purpose}: installed")


def _cache(folder: Path) -> Iterator[Finding]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        text = f"the cache {folder} can't be written"
        yield Finding("cache", "problem", text, "set FEDTAILOR_CACHE to a folder that can")
        return
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    text = f"cache {folder}: {size / 1e6:,.0f} MB; {free / 1e9:,.1f} GB are free on its disk"
    if free < _MIN_FREE:
        advice = "make room, or set FEDTAILOR_CACHE to a folder on another disk"
        yield Finding("cache", "warning", text, advice)
    else:
        yield Finding("cache", "ok", text)


def _hub() -> Finding:
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return Finding("hub", "ok", "the Hugging Face hub is switched off by HF_HUB_OFFLINE")
    if hub_in_reach():
        return Finding("hub", "ok", "the Hugging Face hub is in reach")
    advice = "built-in models and data sets, and earlier downloads, work without it"
    return Finding("hub", "warning", "the Hugging Face hub is not in reach", advice)


def _models() -> Iterator[Finding]:
    for name, entry in models.BUILTIN.items():
        lacking = [] if entry.network is not None else _lacking_packages(entry.get)
        if not lacking:
            yield Finding("models", "ok", f"model {name}")
            continue
        looked = f"no {', '.join(lacking)} in {sysconfig.get_path('purelib')}"
        text = f"model {name} is not on this machine ({looked}){_USED_BY.get(name, '')}"
        yield Finding("models", "warning", text, entry.get)


def _data() -> Iterator[Finding]:
    for name, entry in data.BUILTIN.items():
        if entry.read() is not None:
            yield Finding("data", "ok", f"data set {name}")
        else:
            yield Finding("data", "warning", f"data set {name} is not on this machine", entry.get)


def _lacking_packages(command: str) -> list[str]:
    """The packages that ``pip install ...`` would install and that are not there.

    >>> _lacking_packages("pip install --no-deps torch==2.0 no-such-one==1.0")
    ['no-such-one']
    """
    names = [word.partition("==")[0] for word in command.split()[2:] if not word.startswith("-")]
    installed = {canonicalize_name(one.name) for one in metadata.distributions() if one.name}
    return [name for name in names if canonicalize_name(name) not in installed]


def _training_step() -> Finding:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = ModelConfig("lenet", pretrained=False)
    backbone = load_model(config, None, 10, 0, "image", picture=(1, 28, 28))
    task = Task(backbone, device=device)
    batch = {
        "pixel_values": random.uniform(random.key(0), (_BATCH, 1, 28, 28)).to(device),
        "labels": torch.arange(_BATCH, device=device) % 10,
    }
    start = time.perf_counter()
    context = ClientContext(random.key(1).to(device))
    _, loss = train(task, task.state, [batch] * _STEPS, context, Optimiser("sgd", lr=0.1))
    spent = (time.perf_counter() - start) / _STEPS
    if not bool(torch.isfinite(loss).all()):
        advice = "reinstall PyTorch: its arithmetic is broken on this machine"
        return Finding("training", "problem", f"training on {device} gave a loss of {loss}", advice)
    text = f"a training step of LeNet with {_BATCH} pictures took {1e3 * spent:.1f} ms on {device}"
    return Finding("training", "ok", text)
