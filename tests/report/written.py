"""Run directories whose results are written by hand, and the verdict on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fedtailor.report.table import table
from fedtailor.report.verdict import Verdict
from fedtailor.store.format import FORMAT
from fedtailor.store.read import read_all
from tests.report.conftest import ENVIRONMENT

K = 20
NOISE = [0.01 * ((7 * k) % K - 9.5) for k in range(K)]  # the clients differ, by 0 in the mean


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def written(
    path: Path,
    test: dict[str, Sequence[float]],
    validation: dict[str, float | list[float]] | None = None,
    *,
    seeds: Sequence[int] = (0,),
    is_lm: bool = False,
    names: Sequence[str] | None = None,
    digest: str = "d",
    sent: dict[str, int] | None = None,
    diverged: Sequence[str] = (),
    finished: bool = True,
    has_cpu_seconds: bool = True,
    majority: float | None = None,
    one_model: Sequence[str] = (),
    examples: int = 50,
    trained: dict[str, Sequence[int]] | None = None,
) -> Path:
    """Write a run of one evaluated round: for each method the test results of its clients, and its
    validation result, which all of its clients have, or one for each (the mean test result if it is
    not given). ``trained``: by method the clients that took part (all if it is not given)."""
    clients = len(next(iter(test.values())))
    methods = [{"label": label, "name": label.split("-")[0]} for label in test]
    experiment = {"format": FORMAT, "name": path.name, "rounds": 1, "seeds": list(seeds)}
    _write(path / "experiment.json", experiment | {"methods": methods})
    _write(path / "environment.json", ENVIRONMENT)
    for seed in seeds:
        partition = {"digest": f"{digest}{seed}", "data": "data", "clients": clients}
        partition |= {"classes": [] if is_lm else ["a", "b"], "names": names}
        partition |= {"task": "causal-lm" if is_lm else "classification", "modality": "text"}
        _write(path / f"partitions/seed-{seed}.json", partition)
        held = dict.fromkeys(("train", "validation", "test"), np.full(clients, examples, np.int32))
        if majority is not None:
            correct = np.full(clients, round(majority * examples), np.int32)
            held |= {"majority": np.zeros(clients, np.int32), "majority_correct": correct}
        save_file(held, path / f"partitions/seed-{seed}.safetensors")
        for label, values in test.items():
            chosen = float(np.mean(values)) if validation is None else validation[label]
            held_out = chosen if isinstance(chosen, list) else [chosen] * clients
            splits = {"validation": held_out, "test": list(values)}
            if np.isnan(held_out[0]):
                del splits["validation"]
            lines = [
                {"round": 1, "model": "personal", "split": split, "clients": list(range(clients)),
                 "num_examples": [examples] * clients, "loss": of, "accuracy": of}
                for split, of in splits.items()
            ]  # fmt: skip
            lines += [line | {"model": "global"} for line in lines if label in one_model]
            size = (sent or {}).get(label, 0 if label == "local" else 1000)
            cohort = list((trained or {}).get(label, range(clients)))
            history = {"round": 1, "cohort": cohort, "train_loss": 1.0,
                       "losses": [1.0] * len(cohort), "steps": [1] * len(cohort), "lr_scale": 1.0,
                       "bytes_down": size * clients, "bytes_up": size * clients}  # fmt: skip
            seconds = 2.0 + size / 1000
            timing = {"round": 1, "seconds": {"train": seconds}, "peak_memory_mb": None}
            timing["cpu_seconds"] = 2 * seconds if has_cpu_seconds else None
            folder = path / f"methods/{label}/seed-{seed}"
            folder.mkdir(parents=True)
            lengths = {}
            for name, of in (("history", [history]), ("clients", lines), ("timings", [timing])):
                text = "".join(json.dumps(line) + "\n" for line in of)
                (folder / f"{name}.jsonl").write_text(text)
                lengths[name] = len(text)
            reason = "the loss is not finite" if label in diverged else None
            commit = {"round": 1, "rounds": 1 if finished else 3, "finished": finished}
            _write(
                folder / "commit.json", commit | {"bytes": lengths, "diverged": reason, "best": {}}
            )
            costs = {"trained": 1, "communicated": 1, "private": 1, "model": 1}
            _write(folder / "costs.json", costs | {"down": {}, "up": {}})
    return path


def verdict_of(*paths: Path) -> Verdict:
    (found,) = table(read_all(paths)).verdicts
    return found


def around(base: float, noise: Sequence[float] = NOISE) -> list[float]:
    return [base + x for x in noise]


ALONE = [0.5] * K
