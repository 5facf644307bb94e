"""Kill runs with SIGKILL at random moments, go on at once, and compare with undisturbed runs.

    make kills                                              1,000 kills
    python -m tests.random_kills --kinds flower --kills 50  of one kind

The kinds are the executors, two ranks as torchrun starts them, and a deployment over Flower, where
a kill takes any process but the sites' commands and their SuperNodes. A run is killed and continued
until it is through. Then its files must have the bytes of an undisturbed run. Over Flower a kill
may take a process of a site, and the run may go on without this site for some rounds: it must name
them then. A killed run leaves no process behind, and in the end no temporary folder is left. Prints
one line for each kind; exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import fedtailor as ft
from fedtailor.engine.executors.process_group import init_process_group
from tests import forked
from tests.deploy.live import PICTURES, Command, is_running, live, until
from tests.small import digits, digits_backbone

SHARES = {"sequential": 250, "vectorised": 200, "processes": 300, "ranks": 200, "flower": 50}
METHODS: dict[str, ft.Method] = {
    "fedsdg": ft.FedSDG(rank=2), "fedhft": ft.FedHFT(clusters=2), "pfedgate": ft.PFedGate(),
    "fedsq": ft.FedSQ(), "fedmerge": ft.FedMerge(models=2), "fedavg": ft.FedAvg(),
    "ditto": ft.Ditto(), "scaffold": ft.Scaffold(), "apfl": ft.APFL(), "fedadam": ft.FedAdam(),
}  # fmt: skip
SMALL = ft.Experiment(
    methods=METHODS,
    rounds=6,
    split=ft.SplitConfig(6, "dirichlet", alpha=1.0),
    cohort=ft.CohortConfig(size=4),
    local=ft.LocalConfig(steps=2),
    evaluate=ft.EvaluateConfig(every=2),
)
SITE = ("--data", "digits", "--insecure", "--set", "limit=48")
TEXT = PICTURES.replace("rounds = 40", "rounds = 20").replace("every = 40", "every = 10")


def working(label: str, kind: str, out: Path) -> Callable[[], int]:
    """What each process of a run does: run one method, or go on with it."""
    ranks = kind == "ranks"
    engine = ft.EngineConfig(
        executor="sequential" if ranks else kind,  # type: ignore[arg-type]
        processes=2 if kind == "processes" else None,
    )
    experiment = replace(SMALL, methods={label: METHODS[label]}, engine=engine)

    def work() -> int:
        if not ranks:
            ft.run(experiment, out, data=digits(), backbone=digits_backbone())
            return 0
        with init_process_group() as group:
            ft.run(experiment, out, data=digits(), backbone=digits_backbone(), group=group)
        return 0

    return work


def simulated(kind: str, kills: int, folder: Path, draw: random.Random) -> None:
    """Runs of one executor, or of ranks."""
    size, done, runs, labels = 2 if kind == "ranks" else 1, 0, 0, list(METHODS)
    whole: dict[str, tuple[dict[str, bytes], float]] = {}
    while done < kills:
        label = labels[runs % len(labels)]
        if label not in whole:
            out, begun = folder / f"{label}-whole", time.monotonic()
            codes = forked.run(size, working(label, kind, out), folder / "said.txt")
            assert set(codes) == {0}, (folder / "said.txt").read_text()[-2000:]
            whole[label] = forked.contents(out), time.monotonic() - begun
        expected, seconds = whole[label]
        out = folder / f"{label}-{runs}"
        while True:
            said = folder / "said.txt"
            said.unlink(missing_ok=True)
            with forked.ranks(size, working(label, kind, out), said) as processes:
                chosen = draw.choice(processes)
                chosen.join(draw.uniform(0, 1.2 * seconds))
                children = _killed(chosen.pid) if chosen.exitcode is None else None
                if children is not None:
                    chosen.join()
                    until("children end", lambda of=children: not any(map(is_running, of)), 10.0)
                    done += 1
                    continue  # leaving the block kills a rank that has not noticed yet
                codes = forked.ended(processes)
            assert set(codes) == {0}, f"{label} on {kind}: {codes}\n{said.read_text()[-2000:]}"
            break
        assert forked.contents(out) == expected, f"{label} on {kind}: {out} ends with other bytes"
        shutil.rmtree(out)
        runs += 1
    print(f"{kind}: {done} kills of {runs} runs, all ended with the same bytes", flush=True)


def _killed(pid: int | None) -> list[int] | None:
    """Kill a process; its children until then. None: it had just ended."""
    assert pid is not None
    try:
        threads = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(child) for path in threads for child in path.read_text().split()]
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return children


def over_flower(kills: int, folder: Path, draw: random.Random) -> None:
    """A deployment of two sites; any process is killed but the sites' commands and SuperNodes."""
    done = same = without = 0
    lost = False  # whether a kill of this run has taken a process of a site
    expected: dict[str, bytes] | None = None
    with live(folder, TEXT, ["a", "b"]) as made:
        server = made.server("--insecure")
        for site in "ab":
            made.deploy("client", "--site", site, *SITE, *(["--set", "skip=48"] * (site == "b")))
        out, through, longest = made.folder / "run", False, 25.0
        while done < kills or not through:
            run, begun = made.deploy("run"), time.monotonic()
            is_left_alone = expected is None or done >= kills
            ended = _ends(run, 1e6 if is_left_alone else draw.uniform(0.0, longest))
            if not ended:
                processes = made.processes()
                pid = draw.choice(_targets(processes))
                os.kill(pid, signal.SIGKILL)
                done += 1
                lost |= pid not in _of_server(processes)
                print(f"kill {done}: {dict(processes)[pid][:150]}", flush=True)
                seconds = 5.0
                while not _ends(run, seconds):  # an interrupt is lost where a library catches it
                    run.process.send_signal(signal.SIGINT)
                    seconds = 60.0
            if _ends(server, 3.0):
                until("the server's processes end", lambda: not _of_server(made.processes()), 180.0)
                server = made.server("--insecure")
            through = ended and run.code() == 0
            if through:
                found = _contents(out)
                if expected is None:  # on a busy machine a run takes minutes
                    expected, longest = found, max(longest, (time.monotonic() - begun) / 4)
                elif found == expected:
                    same += 1
                else:
                    differing = [n for n in found if found[n] != expected.get(n)]
                    is_told = lost and any(name.endswith("refused.jsonl") for name in found)
                    assert is_told, f"over Flower other bytes: {differing}"
                    without += 1
                print(f"through: {same} with the same bytes, {without} without a site", flush=True)
                shutil.rmtree(out)
                for place in made.folder.glob("sites/*/states"):
                    shutil.rmtree(place, ignore_errors=True)
                lost = False
    print(
        f"flower: {done} kills; {same} runs ended with the same bytes, and {without} went on "
        "without a site whose process was killed, and name the rounds",
        flush=True,
    )


def _contents(out: Path) -> dict[str, bytes]:
    """Every file that depends on the experiment alone; the name of a run over Flower is drawn."""
    found = forked.contents(out)
    for name in (name for name in found if name.endswith("flower.json")):
        content = json.loads(found[name])
        found[name] = json.dumps(content["models"]).encode()
    return found


def _ends(command: Command, seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        command.process.wait(seconds)
        return True
    return False


def _targets(processes: list[tuple[int, str]]) -> list[int]:
    """All but the sites' commands and their SuperNodes."""
    return [pid for pid, line in processes if "client" not in line and "supernode" not in line]


def _of_server(processes: list[tuple[int, str]]) -> list[int]:
    """What runs of the server, and of the command that starts runs."""
    nodes = [f"--parent-pid {pid} " for pid, line in processes if "supernode" in line]
    targets = _targets(processes)
    return [
        pid
        for pid, line in processes
        if pid in targets and not any(node in f"{line} " for node in nodes)
    ]


def main() -> None:
    """Kill as often as asked; what is left of it is an error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--kills", type=int, help="of each kind; default: 1,000 in all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    # a shell's background ignores it, and so would the commands that are started
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name) / "temporary"
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)
        for kind in options.kinds:
            folder, kills = Path(name) / kind, options.kills or SHARES[kind]
            folder.mkdir()
            if kind == "flower":
                over_flower(kills, folder, draw)
            else:
                simulated(kind, kills, folder, draw)
        left = list(temporary.glob("fedtailor-*"))
        if left:
            sys.exit(f"left in the temporary folder: {left}")


if __name__ == "__main__":
    main()
