"""Going back: a method that has diverged is taken back to its best round, from where the same
command goes on.

The server's state of that round, and the private states that have changed since, are kept beside
the last ones. So it is the only round, beside the last one, that a run can go on from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..engine.client_store import best_path, staged_path
from ..engine.row_file import RowFile
from ..errors import InputError, naming, unknown
from ..report.checked import load_json
from ..report.logs import LOGS
from ..report.read import read_trial
from ..report.records import BestRound
from ..report.select import Metric, selection_metric, summary
from ..robustness.norms import about_norms
from ..run_format import (
    check_committed,
    check_tensors,
    checksum,
    combined_checksum,
    committed_bytes,
    has_commit,
)
from .committed import (
    PRIVATE_FILE,
    Commit,
    CommittedStates,
    expected_files,
    private_files,
    read_commit,
    read_server,
    state_path,
    write_commit,
)
from .directory import RunDirectory, locked
from .experiment import Experiment
from .files import write_atomically
from .manifest import open_run, read_data_manifest
from .progress import LOG

_REFUSED = "refused.jsonl"


def rollback(out: Path | str, label: str | None = None, seed: int | None = None) -> list[str]:
    """Take methods of the run directory ``out`` that have diverged back to their best round on
    validation data; the same command then goes on from there. Later rounds are removed.

    Args:
        out: the run directory.
        label: of a method, which need not have diverged, and may have finished; None: all that have
            diverged.
        seed: of one seed; None: all of them.

    Returns:
        A line for each method with a seed that went back, what the norms of its uploads were until
        then, and a line for each client whose later ones were far larger than those of others.

    Raises:
        InputError: there is no such method or seed; nothing can go back; a file is damaged.
    """
    out = Path(out)
    experiment = open_run(out)
    if label is not None and label not in experiment.methods:
        raise unknown("method", label, experiment.methods)
    if seed is not None and seed not in experiment.seeds:
        allowed = ", ".join(map(str, experiment.seeds))
        raise InputError(f"no seed {seed} in {out}; allowed: {allowed}")
    with locked(out):
        parts = [
            part for part in _parts(experiment, out, label, seed) if label or part.commit.diverged
        ]
        problems = [f"{part.title}, {problem}" for part in parts if (problem := part.problem())]
        todo = [part for part in parts if part.problem() is None]
        if not todo:
            raise InputError("; ".join(problems) or f"nothing in {out} has diverged")
        lines = []
        with naming(out / LOG), (out / LOG).open("a") as log:
            for part in todo:
                said = part.roll_back()
                log.writelines(f"{line}\n" for line in said)
                lines += said
    return [*lines, *problems]


def _parts(
    experiment: Experiment, out: Path, label: str | None, seed: int | None
) -> Iterator[_Part]:
    """What has a committed round, of these methods and seeds."""
    for name in experiment.methods if label is None else [label]:
        for number in experiment.seeds if seed is None else [seed]:
            folder = out / "methods" / name / f"seed-{number}"
            if has_commit(folder):
                data = read_data_manifest(out / "partitions" / f"seed-{number}.json")
                select = selection_metric(
                    experiment.as_dict(), is_language_modelling=not data["classes"]
                )
                method = experiment.methods[name].name
                asynchronous = experiment.cohort.buffer is not None
                yield _Part(folder, name, number, method, select, read_commit(folder), asynchronous)


@dataclass(frozen=True)
class _Part:
    """One method with one seed, in a folder; ``select`` chooses its best round."""

    folder: Path
    label: str
    seed: int
    method: str
    select: Metric
    commit: Commit
    is_asynchronous: bool

    @property
    def title(self) -> str:
        """What it is called in a log."""
        return f"{self.label}, seed {self.seed}"

    def problem(self) -> str | None:
        """Why it can't go back; None: it can."""
        commit, best = self.commit, self.commit.best_round
        if not commit.best:
            return "has no best round to go back to: it was never evaluated"
        if best == commit.round:
            return f"has its best round, {best}, as its last one: the same command goes on there"
        if self.is_asynchronous:
            return "is asynchronous: what clients were training on at its best round is not kept"
        if not state_path(self.folder, best).exists():  # no round has made it
            return "was best as it began: begin it anew, in another directory or with --overwrite"
        if staged_path(self.folder / PRIVATE_FILE, commit.round).exists():
            return "was killed while it put states into their places: let it go on for a round"
        return None

    def roll_back(self) -> list[str]:
        """Go back; the lines that say so.

        Raises:
            InputError: a file is damaged; nothing is changed.
        """
        folder, commit, best = self.folder, self.commit, self.commit.best_round
        check_committed(expected_files(folder, commit))
        CommittedStates(folder, best, commit)  # which are checked
        for path in private_files(folder, commit) if (folder / PRIVATE_FILE).exists() else ():
            check_tensors(path)
        read_server(folder, commit, best)
        norms = about_norms(RunDirectory(folder, commit.rounds).norms(), best)
        logs = {log: _up_to(folder / f"{log}.jsonl", commit, log, best) for log in LOGS}
        checksums = {**commit.checksums, **{log: checksum(lines) for log, lines in logs.items()}}
        for name in (PRIVATE_FILE, best_path(folder / PRIVATE_FILE, best).name):
            checksums.pop(name, None)  # until the states are in their places
        back = replace(
            commit,
            round=best,
            bytes={log: len(lines) for log, lines in logs.items()},
            finished=False,
            diverged=None,
            stopped=True,
            best=self._best_up_to(best),
            checksums=checksums,
            rolled_back=(*commit.rolled_back, commit.round),
        )
        write_commit(folder, back)
        directory = RunDirectory(folder, commit.rounds)  # which does the rest
        _remove_later(folder, best)
        path = folder / PRIVATE_FILE
        if path.exists() and (file := RowFile.open(path)).has_checksums:
            states = {PRIVATE_FILE: combined_checksum(file.checksums())}
            checksums = {**directory.commit.checksums, **states}
            write_commit(folder, replace(directory.commit, checksums=checksums))
        went = f"{self.title}: rolled back from round {commit.round} to round {best}"
        return [went, *(f"{self.title}: {line}" for line in norms)]

    def _best_up_to(self, number: int) -> dict[str, BestRound]:
        """The best round of each model up to ``number``. Where it was a later one, it is
        ``number`` now, the only one whose state is kept."""
        best = {model: about for model, about in self.commit.best.items() if about.round <= number}
        trial = read_trial(self.folder, self.label, self.method, self.seed)
        for evaluation in trial.evaluations:
            is_later = evaluation.model in self.commit.best.keys() - best.keys()
            if is_later and (evaluation.round, evaluation.split) == (number, "validation"):
                mean = summary(evaluation, self.select).mean
                best[evaluation.model] = BestRound(number, mean)
        return best


def _up_to(path: Path, commit: Commit, log: str, number: int) -> bytes:
    """The lines of a log up to a round."""
    content = committed_bytes(path, commit.bytes[log], commit.checksums.get(log))
    return b"".join(_until(content.splitlines(keepends=True), path, number))


def _until(lines: Sequence[bytes], path: Path, number: int) -> Iterator[bytes]:
    """Those of ``lines``, of the log at ``path``, that say something of a round up to
    ``number``."""
    return (line for line in lines if load_json(line, str(path))["round"] <= number)


def _remove_later(folder: Path, number: int) -> None:
    """Remove what later rounds have written for good, and the refusals in them."""
    for path in folder.glob("*-*.safetensors"):
        match = re.fullmatch(r"(diagnostics|confusion)-(\d+)", path.stem)
        if match and int(match[2]) > number:
            path.unlink()
    path = folder / _REFUSED
    if path.exists():
        whole, _, _ = path.read_bytes().rpartition(b"\n")  # a kill may have cut the last line short
        lines = [line + b"\n" for line in whole.splitlines()]
        write_atomically(path, b"".join(_until(lines, path, number)))
