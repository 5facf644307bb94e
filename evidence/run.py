"""Run what the manifests list, in order of worth, and add one line of results for each run.

    python -m evidence.run --minutes 120
    python -m evidence.run --manifest evidence/manifest-papers.toml --seed 10

A run is one method with one seed in one setting of an experiment file. Those that have a line are
not run again; one that was interrupted goes on. The directories of runs lie outside the repository.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.data.labels import label_counts, label_overlap
from fedtailor.engine.executors.work import ClientRequest
from fedtailor.engine.prepare import as_trained, client_works, first_server, memory_states
from fedtailor.errors import DivergedError
from fedtailor.objectives.objective import OWN_METRIC
from fedtailor.objectives.text_metrics import WRITTEN
from fedtailor.params import to_device
from fedtailor.runs.build import Inputs
from fedtailor.runs.manifest import open_run
from fedtailor.store.files import write_atomically
from fedtailor.store.format import has_commit
from fedtailor.store.logs import read_commit
from fedtailor.store.metrics import ATTACK_SUCCESS, summary, values_of
from fedtailor.store.read import EvaluationLine, Trial, read
from fedtailor.store.selection import by_round, select_round
from fedtailor.torch_private import count_flops

from .shown import shown

HERE = Path(__file__).parent
MAP = HERE / "manifest.toml"
CROSS = HERE / "manifest-cross.toml"
PAPERS, PRIVACY = HERE / "manifest-papers.toml", HERE / "manifest-privacy.toml"
MANIFESTS = (MAP, PAPERS, CROSS, PRIVACY)
RESULTS = HERE / "results.jsonl"
EXPERIMENTS = HERE.parent / "experiments"


@dataclass(frozen=True)
class Run:
    """One method with one seed in one setting of an experiment file."""

    file: str
    settings: tuple[str, ...]
    method: str
    seed: int

    def experiment(self) -> ft.Experiment:
        """The experiment, with this method and this seed alone."""
        whole = ft.load(EXPERIMENTS / self.file, [*self.settings, f"seeds=[{self.seed}]"])
        if self.method not in whole.methods:
            raise ft.InputError(f"{self.file} with {self.settings} has no method {self.method!r}")
        engine = replace(whole.engine, processes=1)  # on a CPU; cores are for other work
        return replace(whole, methods={self.method: whole.methods[self.method]}, engine=engine)

    @property
    def command(self) -> str:
        """What a reader types to run it."""
        changes = [*self.settings, f"seeds=[{self.seed}]", f'methods=["{self.method}"]']
        return f"fedtailor run experiments/{self.file} " + " ".join(f"--set '{c}'" for c in changes)


# Fields that are younger than some results: at these values a run is what it was without them.
LATER: Mapping[str, Any] = {
    "rotations": 1, "shuffled": 0.0, "gate": None, "max_share": None, "revision": None,
    "buffer": None, "above_norm": "refuse", "max_norm": None, "norm_factor": 1000.0,
    "norm_quantile": 0.5, "target": 0, "poisoned": 0.5, "scale": [],
    "text_pair": None, "class_weights": None, "huber_delta": None,
    "attention": "sdpa", "chat_template": None, "dtype": "fp32", "picture_size": None,
    "quantise": None, "micro_batch": None, "pack": False,
    "within_rounds": False, "beta": None, "reference": None, "templates": [], "by_client": [],
    "lora": {"rslora": False, "dropout": 0.0, "dora": False},
    "generate": {"examples": 0, "tokens": 64, "every": None}, "noise_by": "server",
    "stop": None,
}  # fmt: skip
# The rule of a method without one, and an experiment without an attack, as they were.
NO_RULE: Mapping[str, Any] = {"rule": "none", "attackers": 0, "keep": None}


def resolved(experiment: ft.Experiment) -> dict[str, Any]:
    """All that decides the results of an experiment, as plain values. How it is computed, and what
    it is called, doesn't; nor do `LATER` fields at the values that they name."""
    content: dict[str, Any] = json.loads(json.dumps(experiment.as_dict()))
    for key in ("name", "engine"):
        del content[key]
    if content["attack"]["kind"] == "none":
        del content["attack"]
    if not experiment.faults.is_active:
        del content["faults"]
    if not experiment.privacy.is_active:
        del content["privacy"]
    if not experiment.secure_aggregation.is_active:
        del content["secure_aggregation"]
    for method in content["methods"]:
        if method["robust"]["rule"] == "none" and not method["robust"]["before"]:
            method["robust"] = dict(NO_RULE)
        if method["name"] == "fedmerge" and method["lr_w"] is None:
            method["lr_w"] = 100.0  # unused; it was the default
        if method["name"] == "fedsdg" and method["gate"] is not None:
            method["lr_gate"] = 5e-3  # unused; it was the default
    sectioned = ("data", "public", "model", "split", "local", "cohort", "schedule", "attack")
    names = (*sectioned, "evaluate", "privacy")
    sections = (content[name] for name in names if name in content)
    for section in (*sections, *content["methods"]):
        for field, value in LATER.items():
            if section.get(field, ...) == value:
                del section[field]
    return content


def digest(settings: Mapping[str, Any]) -> str:
    """A short name of `resolved` settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def planned(manifests: Sequence[Path] = MANIFESTS) -> list[Run]:
    """The runs that the manifests list, in their order, each once."""
    entries = [entry for path in manifests for entry in tomllib.loads(path.read_text())["runs"]]
    return list(dict.fromkeys(run for entry in entries for run in _expanded(entry)))


def _expanded(entry: Mapping[str, Any]) -> Iterator[Run]:
    """The runs of one entry: for each seed, for each trial, for each method."""
    trials: Sequence[Sequence[str]] = entry.get("trials", [[]])
    for seed in entry["seeds"]:
        for trial in trials:
            for method in entry["methods"]:
                chosen = (setting.replace("{method}", method) for setting in trial)
                yield Run(entry["file"], (*entry.get("set", ()), *chosen), method, seed)


def run_folder(name: str, settings: Sequence[str]) -> str:
    """A run directory of its own for each of an experiment's settings.

    >>> run_folder("map", ["preset=images,clean", "split.alpha=0.1"])
    'runs/map-images-clean-alpha-0.1'
    """
    parts = [f"runs/{name}"]
    for setting in settings:
        key, _, value = setting.partition("=")
        parts += [value] if key == "preset" else [key.rpartition(".")[2], value]
    return "-".join(parts).replace(",", "-")


def lines(path: Path = RESULTS) -> list[dict[str, Any]]:
    """The lines of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# What pages say where a line has none.
NO_ENDS = """\
The perplexities count no end-of-text token: these runs are older than that token, which a run now
adds to each text."""


def has_ends(line: Mapping[str, Any]) -> bool:
    """Whether the result is of texts as they are now: a language model's texts end with an
    end-of-text token, and had none where the line does not say so."""
    return "ends" in line or line.get("results", {}).get("metric") != "loss"


def execute(run: Run, folder: Path) -> dict[str, Any]:
    """Run, or go on with, one run below ``folder``; its line of results."""
    experiment = run.experiment()
    out = folder / digest(resolved(experiment))
    goes_on = out.exists()
    begun, cpu = time.monotonic(), time.process_time()
    try:
        ft.run(experiment, out, summary=False)
        came_to: dict[str, Any] = {"results": results(out)}
    except DivergedError as error:
        came_to = {"failed": str(error)}
    came_to["seconds"] = round(time.monotonic() - begun, 1)
    came_to["cpu_seconds"] = round(time.process_time() - cpu, 1)
    if goes_on:
        came_to["resumed"] = True  # and these seconds are not all
    return _line(run, experiment, came_to)


def _line(run: Run, experiment: ft.Experiment, came_to: Mapping[str, Any]) -> dict[str, Any]:
    """A line of results, to be kept."""
    settings, line = resolved(experiment), dict(came_to)
    if "results" in line:
        if line["results"]["metric"] == "loss":
            line["ends"] = True
        line["results"]["flops"] = round(flops_of_step(experiment) * line["results"].pop("steps"))
    return {
        "file": run.file,
        "set": list(run.settings),
        "method": run.method,
        "seed": run.seed,
        "digest": digest(settings),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {_device(experiment)}",
        "settings": settings,
        "clients": clients_of(experiment),
        **line,
    }


def line_in(place: Path, whole: ft.Experiment, run: Run) -> dict[str, Any] | None:
    """What a run directory, of the ``whole`` experiment, says of a run; None if it is not among
    that, or has not ended."""
    if run.method not in whole.methods or run.seed not in whole.seeds:
        return None
    own = replace(whole, methods={run.method: whole.methods[run.method]}, seeds=(run.seed,))
    if resolved(own) != resolved(run.experiment()):
        return None
    folder = place / "methods" / run.method / f"seed-{run.seed}"
    commit = read_commit(folder) if has_commit(folder) else None
    line: dict[str, Any] = {
        "file": run.file, "set": list(run.settings), "method": run.method, "seed": run.seed,
        "settings": resolved(own),
    }  # fmt: skip
    if commit is not None and commit.diverged is not None:
        return line | {"failed": commit.diverged}
    if commit is None or not commit.finished:
        return None
    return line | {"results": results(place, (run.method, run.seed))}


def collected(place: Path, runs: Iterable[Run]) -> Iterator[dict[str, Any]]:
    """The lines of those runs that are in a run directory."""
    whole = open_run(place)
    for run in runs:
        line = line_in(place, whole, run)
        if line is not None:
            came_to = {name: line[name] for name in ("results", "failed") if name in line}
            yield _line(run, run.experiment(), came_to)


def _device(experiment: ft.Experiment) -> str:
    """The chip's name, or what the experiment says."""
    used = experiment.engine.device
    chip = torch.cuda.is_available() and used != "cpu"
    return torch.cuda.get_device_name() if chip else used


def alone(run: Run, folder: Path, seconds: float | None = None) -> dict[str, Any] | None:
    """The same in a process of its own, whose memory is this run's. None: it was not done after so
    many seconds, and was stopped."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, run, folder))
    process.start()
    theirs.close()
    try:
        if ours.poll(None if seconds is None else max(0.0, seconds)):
            line: dict[str, Any] = ours.recv()
            return line
        process.terminate()
        return None
    except EOFError:
        raise SystemExit(f"this run has failed: {run.command}") from None
    finally:
        process.join()


def _send(connection: Connection, run: Run, folder: Path) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # cleans up
    connection.send(execute(run, folder))


def clients_of(experiment: ft.Experiment) -> dict[str, float]:
    """How many clients there are, their training examples, whether these are pairs of texts, and
    what their labels have in common."""
    (federation,) = Inputs.load(experiment, None, None).federations.values()
    examples = [len(federation.rows(k, "train")) for k in range(federation.num_clients)]
    found = {"number": len(examples), "median_examples": float(np.median(examples))}
    if federation.dataset.pair:
        found["pairs"] = True
    if federation.dataset.class_numbers is not None:
        found["label_overlap"] = round(label_overlap(label_counts(federation)), 4)
    return found


def flops_of_step(experiment: ft.Experiment) -> float:
    """Floating-point operations of a local step: the mean over the first round of the client with
    the median number of examples. What is computed once for each example is not counted."""
    inputs, plan = Inputs.load(experiment, None, None), experiment.plan
    ((seed, federation),) = inputs.federations.items()
    (method,) = experiment.methods.values()
    task = inputs.task(method, seed)
    federation = as_trained(method, task, federation, plan)
    clients = sorted(range(federation.num_clients), key=federation.num_examples)
    client = clients[len(clients) // 2]
    train = client_works(method, task, federation, plan).train
    private = memory_states(method, task, federation).read(client)
    steps = federation.num_steps(client, plan.local)
    scale = plan.schedule.factor(1, plan.rounds)
    request = ClientRequest(client, 1, private, "train", plan.local.passes, scale, steps)
    server = to_device(first_server(method, task, federation), task.device)
    ready = train.prepare(server, request)
    return count_flops(lambda: train.complete(request, ready)) / steps


def results(out: Path, only: tuple[str, int] | None = None) -> dict[str, Any]:
    """What a run directory says of its one method and seed, or of the label and the seed that
    ``only`` names."""
    run = read(out, only)
    (trial,) = run.trials
    metric = run.objective.selects
    assert trial.costs is not None
    values: dict[str, Any] = {
        "metric": metric,
        "bytes_down": sum(trial.costs.down.values()),
        "bytes_up": sum(trial.costs.up.values()),
        "trained": trial.costs.trained,
        "private": trial.costs.private,
        "memory_mb": max(t.peak_memory_mb or 0.0 for t in trial.timings),
        "steps": sum(record.num_steps for record in trial.history),
    }
    for model in ("personal", "global", "novel"):
        selected = select_round(trial, model, metric)  # type: ignore[arg-type]
        if selected is not None:
            validation = _at(trial, model, "validation", selected.round)
            values[model] = {
                "round": selected.round,
                "validation": validation and round(summary(validation, metric).mean, 6),
                "clients": list(selected.test.clients),
                "num_examples": list(selected.test.num_examples),
                metric: [_rounded(value) for value in values_of(selected.test, metric)],
            }
            if ATTACK_SUCCESS in selected.test.metrics:
                values[model][ATTACK_SUCCESS] = _rounded(
                    summary(selected.test, ATTACK_SUCCESS).mean
                )
    return values | _written(trial) | shown(trial, run.partitions[trial.seed], metric)


def _written(trial: Trial) -> dict[str, Any]:
    """What the clients' models wrote last on test examples, by its metrics; empty if nothing."""
    for number, found in sorted(by_round(trial, "personal", "test").items(), reverse=True):
        metrics = {
            name: [_rounded(value) for value in of_clients]
            for name, of_clients in found.metrics.items()
            if name in (OWN_METRIC, *WRITTEN) and any(v is not None for v in of_clients)
        }
        if metrics:
            clients = {"clients": list(found.clients), "num_examples": list(found.num_examples)}
            return {"written": {"round": number, **clients, **metrics}}
    return {}


def _at(trial: Trial, model: str, split: str, number: int) -> EvaluationLine | None:
    chosen = [
        evaluation
        for evaluation in trial.evaluations
        if (evaluation.model, evaluation.split, evaluation.round) == (model, split, number)
        and any(evaluation.num_examples)
    ]
    return chosen[0] if chosen else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(HERE), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Run until nothing is left, or the time is over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument(
        "--within", type=float, metavar="MINUTES",
        help="stop after so many, in the middle of a run too; the same command goes on after the "
        "last round that has ended",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, default=Path.home() / ".cache/fedtailor/evidence",
        help="where run directories are kept; default: ~/.cache/fedtailor/evidence",
    )  # fmt: skip
    parser.add_argument(
        "--results", type=Path, default=RESULTS,
        help="the file that gets a line a run; default: evidence/results.jsonl",
    )  # fmt: skip
    parser.add_argument("--manifest", type=Path, action="append", help="only what this one lists")
    parser.add_argument("--file", help="only runs of this experiment file")
    parser.add_argument(
        "--seed", type=int, help="only runs with this seed; trials of rates have 10"
    )
    parser.add_argument(
        "--from", type=Path, nargs="+", metavar="RUN", dest="places", default=[],
        help="run nothing: take what these run directories have of the planned runs",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list what is left, and stop")
    parser.add_argument("--commit", action="store_true", help="commit each line as it comes")
    options = parser.parse_args()
    done = {line["digest"] for line in lines(options.results) if has_ends(line)}
    begun = time.monotonic()
    within = None if options.within is None else 60 * options.within
    if missing := [path for path in options.manifest or () if not path.is_file()]:
        parser.error(f"no manifest {missing[0]}")
    if any(value is not None and value <= 0 for value in (options.minutes, options.within)):
        parser.error("--minutes and --within take a number above 0")
    chosen = [
        run
        for run in planned(options.manifest or MANIFESTS)
        if options.file in (None, run.file) and options.seed in (None, run.seed)
    ]
    if not chosen:
        parser.error("no run is planned with this --file and this --seed")
    for place in options.places:
        for line in collected(place, chosen):
            if line["digest"] not in done:
                _keep(line, options)
                done.add(line["digest"])
    if options.places:
        return
    if options.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --list | head
    for run in chosen:
        if digest(resolved(run.experiment())) in done:
            continue
        if options.list:
            print(run.command)
            continue
        passed = time.monotonic() - begun
        if passed > 60 * options.minutes or (within is not None and passed >= within):
            break
        print(run.command, file=sys.stderr, flush=True)
        line = alone(run, options.folder, None if within is None else within - passed)
        if line is None:
            print(f"stopped after {options.within:g} minutes; the same command goes on after the "
                  "last round that has ended", file=sys.stderr)  # fmt: skip
            break
        _keep(line, options)
        done.add(line["digest"])


def _keep(line: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Add a line to the results."""
    old = lines(options.results)
    others = [one for one in old if one["digest"] != line["digest"]]
    if len(others) < len(old):  # it takes the place of one whose texts had no end
        content = "".join(json.dumps(one) + "\n" for one in others)
        write_atomically(options.results, content.encode())
    with options.results.open("a") as file:
        file.write(json.dumps(line) + "\n")
    if options.commit:
        path = str(options.results.resolve())
        _git("add", path)
        _git("commit", "-q", "-m", f"Add results of {line['method']}, {line['file']}", path)


if __name__ == "__main__":
    main()
