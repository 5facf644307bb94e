"""What benchmarks share: contenders in processes of their own, in turns, measured from outside.

A contender is a command. It is given ``--out PATH`` and writes a JSON object there. Where that has
``ends``, the readings of ``time.monotonic()`` at which its rounds ended, the rounds' seconds and
CPU seconds are worked out from them. Memory and CPU time are those of the whole process tree:
proportional set sizes (Linux's PSS, in which a page shared by two processes counts once) are summed
and sampled, so that a peak shorter than `INTERVAL` may be missed. Linux only.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INTERVAL = 0.4  # seconds between two samples of memory and CPU time
LIMIT = 1800  # seconds that a contender may take

_TICKS = os.sysconf("SC_CLK_TCK")

Record = dict[str, Any]


class ContenderError(Exception):
    """A contender ended with an error, or not in time."""


@dataclass(frozen=True)
class Contender:
    """A command, under the name that tables show, and how many threads each of its processes may
    use for a matrix product."""

    name: str
    command: tuple[str, ...]
    threads: int = 1


def run(contender: Contender, folder: Path) -> Record:
    """Run it once, its other files in ``folder``: what it found, and ``seconds`` in all,
    ``peak_mb``; with ``ends``, ``first_s`` until its first round's end, start-up and all, and
    ``rounds_s`` and ``rounds_cpu_s`` of the later ones.

    Raises:
        ContenderError: with the end of its output.
    """
    out = folder / "found.json"
    paths = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    threads = {name: str(contender.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with tempfile.TemporaryFile() as output:
        start = time.monotonic()
        process = subprocess.Popen(
            [*contender.command, "--out", str(out)],
            env=os.environ | threads | {"PYTHONPATH": paths},
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )
        samples = _Samples(process.pid, start)
        try:
            while process.poll() is None and time.monotonic() - start < LIMIT:
                samples.take()
                time.sleep(INTERVAL)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.monotonic() - start
        if process.returncode:
            output.seek(0)
            said = output.read()[-4000:].decode(errors="replace")
            raise ContenderError(
                f"{shlex.join(contender.command)} gave {process.returncode}\n{said}"
            )
    found: Record = json.loads(out.read_text())
    found |= {"seconds": seconds, "peak_mb": samples.peak_mb}
    if ends := found.pop("ends", None):
        cpu = [samples.cpu_at(end) for end in ends]
        found |= {
            "first_s": ends[0] - start,
            "rounds_s": [b - a for a, b in pairwise(ends)],
            "rounds_cpu_s": [b - a for a, b in pairwise(cpu)],
        }
    return found


def in_turns(contenders: Sequence[Contender], repeats: int) -> Iterator[tuple[int, Contender]]:
    """Every contender once a repeat; each repeat starts with the next one."""
    for repeat in range(repeats):
        first = repeat % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            print(f"repeat {repeat + 1} of {repeats}: {contender.name}", file=sys.stderr)
            yield repeat, contender


class _Samples:
    """Memory and CPU time of a process and its descendants."""

    def __init__(self, root: int, start: float) -> None:
        self._root = root
        self._cpu: dict[int, float] = {}  # by process; those that have ended keep their last
        self._series = [(start, 0.0)]
        self.peak_mb = 0.0

    def take(self) -> None:
        stats = {int(entry.name): _stat(entry) for entry in Path("/proc").glob("[0-9]*")}
        tree, more = {self._root}, {self._root}
        while more:
            more = {pid for pid, (parent, _) in stats.items() if parent in more}
            tree |= more
        self._cpu |= {pid: stats[pid][1] for pid in tree & stats.keys()}
        self._series.append((time.monotonic(), sum(self._cpu.values())))
        self.peak_mb = max(self.peak_mb, sum(map(_pss_mb, tree)))

    def cpu_at(self, when: float) -> float:
        """CPU seconds until ``when``, between samples by interpolation."""
        before = max(sample for sample in self._series if sample[0] <= when)
        after = min((sample for sample in self._series if sample[0] > when), default=before)
        if after == before:
            return before[1]
        share = (when - before[0]) / (after[0] - before[0])
        return before[1] + share * (after[1] - before[1])


def _stat(process: Path) -> tuple[int, float]:
    """A process's parent and its CPU seconds; (-1, 0) if it has ended."""
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1, 0.0
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS


def _pss_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def spread(values: Sequence[float], digits: int = 2, factor: float = 1) -> str:
    """Median, and from the first to the third quartile."""
    middle = f"{statistics.median(values) * factor:.{digits}f}"
    if len(values) < 2:
        return middle
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle} ({low * factor:.{digits}f}-{high * factor:.{digits}f})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is words and the others numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def megabytes(field: str) -> float:
    """A field of Linux's /proc/self/status, such as VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"/proc/self/status has no {field}; this benchmark needs Linux")


def circumstances(command: str, load: float) -> list[str]:
    """Date, command and machine, as a table's notes; ``load`` is the load average at the start."""
    return [
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, `{command}`",
        f"{_processor()}, {os.cpu_count()} cores, {_memory_gb():.0f} GB; load {load:.1f} at the "
        f"start, {os.getloadavg()[0]:.1f} at the end",
    ]


def versions(*names: str) -> dict[str, str]:
    """The versions of these packages."""
    return {name: metadata.version(name) for name in names}


def software(found: Mapping[str, str]) -> str:
    """Python's version and these, as one of a table's notes."""
    parts = [f"Python {platform.python_version()}", *(f"{n} {v}" for n, v in found.items())]
    return ", ".join(parts)


def write(out: Path, text: str, records: Sequence[Record]) -> None:
    """``text`` as ``out.md``, and the records as ``out.jsonl``, dated."""
    out.parent.mkdir(exist_ok=True)
    out.with_suffix(".md").write_text(text)
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    lines = [json.dumps({"date": today, **record}) + "\n" for record in records]
    out.with_suffix(".jsonl").write_text("".join(lines))


def has_bf16() -> bool:
    """Whether the processor has arithmetic for bfloat16; without, it says nothing of its speed."""
    found = re.search(r"\b(avx512_bf16|amx_bf16)\b", Path("/proc/cpuinfo").read_text())
    return found is not None


NO_BF16 = "bf16 is not timed: this processor has no arithmetic for it"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
