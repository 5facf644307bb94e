"""What checksums cost: the share of a round's commit that goes into them.

A commit stages the private states of a cohort, writes the server's state, the logs and
``commit.json``, brings all to the disk and moves the states to their places. It is timed with the
checksums of every file and row, and without them, in turns in one process. On a disk the times of
one commit and of the next differ by far more than checksums cost. So what they cost is the median
difference of the pairs in memory, where nothing waits for a disk; a commit is the median of those
on the disk of the folder for temporary files, and the share is the ratio of the two.

    python -m benchmarks.checksums

writes a line for each size to benchmarks/results/checksums-cpu.jsonl, and the table beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from benchmarks.harness import ROOT, circumstances, markdown, software, spread, versions, write

from fedtailor.engine.results import Round
from fedtailor.method import Cohort
from fedtailor.params import Params
from fedtailor.store import client_states
from fedtailor.store.client_states import FileStates
from fedtailor.store.committed import PRIVATE_FILE
from fedtailor.store.row_file import RowFile
from fedtailor.store.trial import TrialStore

RESULTS = ROOT / "benchmarks" / "results"
MEMORY = Path("/dev/shm")
CLIENTS, PAIRS = 200, 100
SIZES = ((0, 100_000), (1, 100_000), (10, 100_000), (100, 100_000), (10, 1_000_000))  # c, bytes
SERVER = 1_000_000  # bytes of its state


class _NoHash:
    """Takes all bytes and looks at none."""

    def update(self, part: object) -> None:
        pass

    def hexdigest(self) -> str:
        return 16 * "0"

    def intdigest(self) -> int:
        return 0


@contextmanager
def without_checksums() -> Iterator[None]:
    """Files and rows without checksums. fedtailor has no such setting; only the hash is replaced,
    by one that does nothing, and all else is the code that runs use."""
    none = SimpleNamespace(xxh3_64=_NoHash, xxh3_64_intdigest=lambda part: 0)
    with (
        patch("fedtailor.store.format.xxhash", none),
        patch("fedtailor.store.trial.xxh3_64", _NoHash),
        patch.object(client_states, "RowFile", partial(RowFile, checksums=False)),
    ):
        yield


def tensors(nbytes: int) -> Params:
    """Eight tensors of so many bytes together."""
    return {f"layer.{k}.weight": torch.randn(nbytes // 32) for k in range(8)}


class _Run:
    """A run directory that commits one round after the other."""

    def __init__(self, folder: Path, cohort: int, nbytes: int) -> None:
        self.directory = TrialStore(folder, 10**6)
        self.cohort, self.state, self.server = cohort, tensors(nbytes), tensors(SERVER)
        first = {name: torch.zeros_like(value) for name, value in self.state.items()}
        keeps = first if cohort else {}
        self.states = FileStates(CLIENTS, lambda client: keeps, folder / PRIVATE_FILE)
        self.directory.restore(self.states)

    def commit(self, number: int) -> float:
        """Commit a round; the seconds that it takes."""
        clients = tuple(range(self.cohort)) or (0,)
        examples = torch.ones(len(clients), dtype=torch.float64)
        done = Round(
            number=number,
            server=self.server,
            cohort=Cohort(clients, examples, number, torch.tensor(0), CLIENTS),
            losses=(0.5,) * len(clients),
            steps=(4,) * len(clients),
            lr_scale=1.0,
            bytes_down=1,
            bytes_up=1,
            costs=None,
            evaluations=(),
            diagnostics={},
            seconds={"train": 1.0},
            executor="sequential",
            norms=(1.0,) * len(clients),
        )
        start = time.perf_counter()
        if self.cohort:
            self.states.begin(number)
            for client in clients:
                self.states.stage(client, self.state)
        self.directory.commit(done)
        return time.perf_counter() - start


def measure(on: Path, cohort: int, nbytes: int) -> tuple[list[float], list[float]]:
    """The seconds of commits with checksums, and without, pair by pair."""
    took: tuple[list[float], list[float]] = [], []
    with tempfile.TemporaryDirectory(prefix="fedtailor-", dir=on) as folder:
        run = _Run(Path(folder) / "with", cohort, nbytes)
        with without_checksums():
            bare = _Run(Path(folder) / "without", cohort, nbytes)

        def once(number: int) -> tuple[float, float]:
            """Each first in every other pair."""
            if number % 2:
                seconds = run.commit(number)
            with without_checksums():
                other = bare.commit(number)
            return seconds if number % 2 else run.commit(number), other

        for number in range(1, PAIRS + 4):
            pair = once(number)
            if number > 3:
                took[0].append(pair[0])
                took[1].append(pair[1])
        assert bool(run.states.checksums) == (cohort > 0)
    return took


def main() -> None:
    """Measure every size, print the table and write it."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    load, records, rows = os.getloadavg()[0], [], []
    for cohort, nbytes in SIZES:
        pairs = list(zip(*measure(MEMORY, cohort, nbytes), strict=True))
        on_disk, _ = measure(Path(tempfile.gettempdir()), cohort, nbytes)
        more, commit = [a - b for a, b in pairs], statistics.median(on_disk)
        share, in_memory = statistics.median(more) / commit, [(a - b) / a for a, b in pairs]
        records.append(
            {"cohort": cohort, "state_bytes": nbytes if cohort else 0, "pairs": PAIRS,
             "checksums_ms": 1e3 * statistics.median(more), "commit_ms": 1e3 * commit,
             "share": share, "share_in_memory": statistics.median(in_memory)}
        )  # fmt: skip
        title = f"{cohort} of {nbytes / 1e6:g} MB" if cohort else "none"
        times = [spread(more, 2, 1e3), spread(on_disk, 1, 1e3)]
        rows.append([title, *times, f"{100 * share:.1f}", spread(in_memory, 1, 100)])
    notes = [
        *circumstances("python -m benchmarks.checksums", load),
        software(versions("torch", "xxhash")),
        f"{PAIRS} pairs; median (first to third quartile); the server's state has "
        f"{SERVER / 1e6:g} MB",
    ]
    text = "# What the checksums of a commit cost\n\n" + "".join(f"- {note}\n" for note in notes)
    header = [
        *("private states", "checksums, ms", "a commit on disk, ms"),
        *("share of it, %", "share of a commit in memory, %"),
    ]
    text += "\n" + markdown(header, rows)
    print(text)
    write(RESULTS / "checksums-cpu", text, records)


if __name__ == "__main__":
    main()
