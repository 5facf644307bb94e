"""Small run directories, written file by file as docs/run-directory.md says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from fedtailor.report.comparison import compare
from fedtailor.store.format import FORMAT

K = 6
BLOCKS = 4
TEST = [20, 10, 30, 0, 10, 30]  # client 3 has no test examples
VALIDATION = [5, 5, 10, 5, 5, 10]
ENVIRONMENT = {
    "date": "2026-11-21",
    "python": "3.12.3",
    "machine": "8 cores",
    "threads": 1,
    "gpu": None,
    "versions": {"fedtailor": "0.1.0", "torch": "2.13.0"},
}
TAIL = b'{"round": 99, "cohort": [0'  # of a round that was not committed


def correct(label: str, seed: int, split: str, number: int, model: str) -> list[float | None]:
    """The made-up accuracy of every client: multiples of 0.05, so that sums are easy to check."""
    sizes = TEST if split == "test" else VALIDATION
    base = (
        {"fedavg": 8, "fedsdg": 10}.get(label, 6) + min(number, 4) - (2 if model == "global" else 0)
    )
    # Test goes on rising after validation has peaked at round 4: the last round must not be shown.
    late = 2 if split == "test" and number > 4 else -1 if number > 4 else 0
    return [
        0.05 * (base + late + (3 * k + seed) % 5) if size else None for k, size in enumerate(sizes)
    ]


def _lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def auc(accuracy: list[float | None]) -> list[float | None]:
    """A metric that falls as the accuracy rises, and is undefined for client 2."""
    return [None if a is None or k == 2 else 1 - a for k, a in enumerate(accuracy)]


def _evaluations(
    label: str, seed: int, rounds: int, is_lm: bool, with_auc: bool
) -> list[dict[str, Any]]:
    models = ["personal"] if label == "local" else ["personal", "global"]
    records = []
    for number in range(0, rounds + 1, 2):
        for model in models:
            for split, sizes in (("validation", VALIDATION), ("test", TEST)):
                accuracy = correct(label, seed, split, number, model)
                offset = 3.0 if is_lm else 2.0
                records.append(
                    {
                        "round": number,
                        "model": model,
                        "split": split,
                        "clients": list(range(K)),
                        "num_examples": sizes,
                        "loss": [None if a is None else offset - a for a in accuracy],
                        "accuracy": accuracy,
                        **({"metrics": {"auc": auc(accuracy)}} if with_auc else {}),
                    }
                )
    return records


def _write_trial(
    folder: Path,
    label: str,
    seed: int,
    done: int,
    rounds: int,
    tail: bytes,
    is_lm: bool,
    with_auc: bool,
) -> None:
    folder.mkdir(parents=True)
    size = 0 if label == "local" else 4000
    members = K if label == "local" else 2  # of a cohort; every client trains alone
    history = [
        {
            "round": number,
            "cohort": sorted((number + k) % K for k in range(members)),
            "train_loss": 1.5,
            "losses": [1.0, *[None] * (members - 1)],
            "steps": [3, *[0] * (members - 1)],
            "lr_scale": 1.0,
            "bytes_down": 2 * size,
            "bytes_up": size,
        }
        for number in range(1, done + 1)
    ]
    timings = [
        {
            "round": number,
            "seconds": {
                "data": 0.25,
                "train": 1.0,
                "aggregate": 0.25,
                "evaluate": 0.5,
                "commit": 0,
            },
            "cpu_seconds": 1.5,
            "peak_memory_mb": 100.0 + number,
        }
        for number in range(1, done + 1)
    ]
    logs = {
        "history": _lines(history),
        "clients": _lines(_evaluations(label, seed, done, is_lm, with_auc)),
        "timings": _lines(timings),
    }
    for name, text in logs.items():
        (folder / f"{name}.jsonl").write_bytes(text + tail)
    lengths = {name: len(text) for name, text in logs.items()}
    commit = {
        "round": done,
        "rounds": rounds,
        "finished": done == rounds,
        "bytes": lengths,
        "diverged": None,
        "best": {},
    }
    _write(folder / "commit.json", commit)
    scalars = size // 4
    parts = {"float32": size, "header": 0} if size else {}
    private = 500 if label == "local" else 0
    costs = {"trained": 1500, "communicated": scalars, "private": private}
    costs |= {"down": parts, "up": parts}
    _write(folder / "costs.json", costs | {"model": 100_000, "flops": 6000})
    if label == "fedsdg":
        clients = np.flatnonzero(np.arange(K) != 2)  # client 2 never took part
        logits = np.linspace(-2, 2, K * BLOCKS).reshape(K, BLOCKS)[clients]
        tensors = {"client/gates": 1 / (1 + np.exp(-logits)), "clients": clients}
        save_file(tensors, folder / f"diagnostics-{done:06d}.safetensors")


def hold(run: Path, seed: int, **columns: Any) -> None:
    """Set columns of what the clients hold; None takes one away."""
    path = run / "partitions" / f"seed-{seed}.safetensors"
    held = {**(load_file(path) if path.exists() else {}), **columns}
    save_file({n: np.array(v, np.int32) for n, v in held.items() if v is not None}, path)


def name(run: Path, seed: int, **entries: Any) -> None:
    """Set entries of what a partition says in words."""
    path = run / "partitions" / f"seed-{seed}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def write_run(
    path: Path,
    *,
    name: str = "letters",
    methods: tuple[str, ...] = ("fedavg", "fedsdg"),
    seeds: tuple[int, ...] = (0, 1),
    rounds: int = 8,
    done: int | None = None,
    epochs: int = 1,
    digest: str = "d1",
    tail: bytes = TAIL,
    is_lm: bool = False,
    with_auc: bool = False,
    select: str | None = None,
    attack: dict[str, Any] | None = None,
) -> Path:
    """Write a run directory; returns its path."""
    experiment = {
        "format": FORMAT,
        "name": name,
        "rounds": rounds,
        "seeds": list(seeds),
        "data": {"name": "letters"},
        "split": {"clients": K, "scheme": "dirichlet"},
        "model": {"name": "small"},
        "local": {"epochs": epochs},
        "cohort": {"size": 2},
        "engine": {"executor": "vectorised"},
        "evaluate": {"every": 2, "select": select},
        "attack": attack or {"kind": "none"},
        "methods": [{"label": method, "name": method} for method in methods],
    }
    _write(path / "experiment.json", experiment)
    _write(path / "environment.json", ENVIRONMENT)
    partition = {
        "clients": K,
        "task": "causal-lm" if is_lm else "classification",
        "modality": "text",
        "classes": [] if is_lm else ["a", "b", "c"],
    }
    held: dict[str, Any] = {
        "train": [60, 50, 40, 30, 20, 10],
        "validation": VALIDATION,
        "test": TEST,
    }
    if not is_lm:
        held["labels"] = [[60 - 10 * k, 0, 0] for k in range(3)] + [[0, 10, 20]] * 3
    for seed in seeds:
        where = path / "partitions" / f"seed-{seed}.json"
        _write(where, partition | {"digest": f"{digest}-{seed}" + "0" * 40})
        hold(path, seed, **held)
        for method in methods:
            trial = path / "methods" / method / f"seed-{seed}"
            last = rounds if done is None else done
            _write_trial(trial, method, seed, last, rounds, tail, is_lm, with_auc)
    return path


def row_of(paths: list[Path], label: str) -> dict[str, Any]:
    """The row of a method in the comparison."""
    rows = json.loads(compare(paths, as_json=True))["rows"]
    found: dict[str, Any] = next(row for row in rows if row["label"] == label)
    return found


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`write_run` into a folder of the test's own."""

    def make(folder: str = "first", **fields: Any) -> Path:
        return write_run(tmp_path / folder, **fields)

    return make


@pytest.fixture
def expected() -> Callable[[str, int, str], NDArray[np.float64]]:
    """The test accuracy that was written, ``[2 seeds, clients with examples]``."""

    def accuracy(label: str, number: int, model: str) -> NDArray[np.float64]:
        rows = [correct(label, seed, "test", number, model) for seed in (0, 1)]
        return np.array([[value for value in row if value is not None] for row in rows])

    return accuracy
