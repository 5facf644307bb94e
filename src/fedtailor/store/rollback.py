"""Going back: a method that has diverged is taken back to its best round, from where the same
command goes on.

The server's state of that round, and the private states that have changed since, are kept beside
the last ones. So it is the only round, beside the last one, that a run can go on from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, naming, unknown
from ..uploads.norms import about_norms
from .best import best_then
from .checked import load_json
from .client_states import best_path, staged_path
from .committed import (
    MOST_ROLL_BACKS,
    PRIVATE_FILE,
    Commit,
    CommittedStates,
    commit_of,
    expected_files,
    private_files,
    read_server,
    refusals_until,
    write_commit,
)
from .format import check_committed, check_tensors, checksum, combined_checksum, trial_folder
from .logs import LOGS, committed_bytes, read_log
from .read import read_experiment
from .records import RoundLine
from .row_file import RowFile
from .run_directory import LOG, locked, log_lines
from .trial import TrialStore


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
    experiment = read_experiment(out)
    labels = [method["label"] for method in experiment["methods"]]
    if label is not None and label not in labels:
        raise unknown("method", label, labels, where=str(out), kind="it has")
    if seed is not None and seed not in experiment["seeds"]:
        allowed = ", ".join(map(str, experiment["seeds"]))
        raise InputError(f"no seed {seed} in {out}; allowed: {allowed}")
    if experiment.get("privacy", {}).get("clip") is not None:
        raise InputError(
            f"{out} has [privacy]: its rounds are spent, and can't be taken back; begin anew with "
            "--overwrite"
        )
    if experiment.get("secure_aggregation", {}).get("threshold") is not None:
        raise InputError(
            f"{out} has [secure_aggregation]: of two sums of a round one could tell a single "
            "client's update; begin anew with another seed"
        )
    with locked(out):
        todo, problems, lines = [], [], list[str]()
        for trial in _trials(experiment, out, label, seed):
            if trial.commit.is_going_back:  # and a kill may have cut it short
                TrialStore(trial.folder, trial.commit.rounds)
                lines.append(f"{trial.title}: is rolled back to round {trial.commit.round}")
            elif trial.commit.diverged is None and label is None:
                continue
            elif problem := trial.problem():
                problems.append(f"{trial.title}, {problem}")
            else:
                trial.check()  # each, before one of them goes back
                todo.append(trial)
        if not todo and not lines:
            nothing = f"nothing in {out} has diverged; --method takes back one that has not"
            raise InputError("; ".join(problems) or nothing)
        with naming(out / LOG), (out / LOG).open("a") as log:
            for trial in todo:
                said = trial.about()
                trial.roll_back()
                log.write(log_lines(said))
                log.flush()
                lines += said
    return [*lines, *problems]


def _trials(
    experiment: Mapping[str, Any], out: Path, label: str | None, seed: int | None
) -> Iterator[_Trial]:
    asynchronous = experiment.get("cohort", {}).get("buffer") is not None
    for name in [one["label"] for one in experiment["methods"]] if label is None else [label]:
        for number in experiment["seeds"] if seed is None else [seed]:
            folder = trial_folder(out, name, number)
            if (commit := commit_of(folder)) is not None:
                yield _Trial(folder, name, number, commit, asynchronous)


@dataclass(frozen=True)
class _Trial:
    folder: Path
    label: str
    seed: int
    commit: Commit
    is_asynchronous: bool

    @property
    def title(self) -> str:
        return f"{self.label}, seed {self.seed}"

    def problem(self) -> str | None:
        """Why it can't go back; None: it can."""
        commit, best = self.commit, self.commit.best_round
        if "personal" not in commit.best:
            return "has no best round to go back to: it was never evaluated"
        if best == commit.round:
            return f"has its best round, {best}, as its last one: the run itself goes on there"
        if self.is_asynchronous:
            return "is asynchronous: what clients were training on at its best round is not kept"
        if len(commit.rolled_back) >= MOST_ROLL_BACKS:
            return f"has gone back {MOST_ROLL_BACKS} times, the most that are allowed"
        if staged_path(self.folder / PRIVATE_FILE, commit.round).exists():
            return "was killed while it put states into their places: let it go on for a round"
        return None

    def check(self) -> None:
        """Check all that going back reads and writes; nothing is changed."""
        folder, commit, best = self.folder, self.commit, self.commit.best_round
        check_committed(expected_files(folder, commit))
        CommittedStates(folder, best, commit)  # which are checked
        for path in private_files(folder, commit) if (folder / PRIVATE_FILE).exists() else ():
            check_tensors(path)
        for about in best_then(commit.best).values():
            read_server(folder, commit, about.round)
        self._logs()
        refusals_until(folder, best)
        for path in (folder, folder / PRIVATE_FILE):
            if path.exists() and not os.access(path, os.W_OK):
                raise InputError(f"{path} can't be written")

    def about(self) -> list[str]:
        """The lines that say that it goes back, and what norms say of how it was spoiled."""
        folder, commit, best = self.folder, self.commit, self.commit.best_round
        history = read_log(RoundLine, folder / "history.jsonl", commit)
        norms = about_norms({line.round: line.norm_by_client for line in history}, best)
        went = f"{self.title}: rolled back from round {commit.round} to round {best}"
        return [went, *(f"{self.title}: {line}" for line in norms)]

    def roll_back(self) -> None:
        """Go back. A kill loses nothing: before the commit nothing is changed, and whoever opens
        the directory after it does the rest."""
        folder, commit, best = self.folder, self.commit, self.commit.best_round
        logs = self._logs()
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
            best=best_then(commit.best),
            checksums=checksums,
            rolled_back=(*commit.rolled_back, commit.round),
        )
        write_commit(folder, back)
        store = TrialStore(folder, commit.rounds)  # which does the rest
        path = folder / PRIVATE_FILE
        if path.exists():
            states = {PRIVATE_FILE: combined_checksum(RowFile.open(path).checksums())}
            checksums = {**store.last.checksums, **states}
            write_commit(folder, replace(store.last, checksums=checksums))

    def _logs(self) -> dict[str, bytes]:
        logs, commit = {}, self.commit
        for log in LOGS:
            path = self.folder / f"{log}.jsonl"
            content = committed_bytes(path, commit).splitlines(keepends=True)
            lines = [(load_json(line, str(path)), line) for line in content]
            logs[log] = b"".join(x for said, x in lines if said["round"] <= commit.best_round)
        return logs
