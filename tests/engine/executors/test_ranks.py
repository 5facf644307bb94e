"""Several ranks give the bits of one process, and end together."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import fedtailor as ft
from fedtailor.engine.executors.process_group import init_process_group
from fedtailor.errors import InputError
from fedtailor.methods import METHODS
from tests import forked
from tests.forked import FILE, GOES_ON, command, contents, go
from tests.small import digits, digits_backbone
from tests.test_conformance import VARIANTS

EXPERIMENT = ft.Experiment(
    # FedHFT clusters after more rounds than there are here
    methods={name: m() for name, m in METHODS.items()} | {"fedhft": ft.FedHFT(warmup_rounds=1)},
    rounds=2,
    public=ft.DataConfig(name="digits", limit=40),
    split=ft.SplitConfig(6, "dirichlet", alpha=0.5, min_examples=5),
    local=ft.LocalConfig(batch_size=16, steps=1),
    evaluate=ft.EvaluateConfig(every=2, clients=3),
    cohort=ft.CohortConfig(size=4, novel=1),
    engine=ft.EngineConfig("sequential"),
)


def run_on(size: int, experiment: ft.Experiment, out: Path) -> Path:
    def work() -> None:
        with init_process_group() as group:
            ft.run(experiment, out, data=digits(), backbone=digits_backbone(), group=group)

    said = out.with_suffix(".txt")
    codes = forked.run(size, work, said)
    assert codes == [0] * size, said.read_text()
    return out


SOME = (  # of each kind one: a mean, a private part, nothing sent, shapes by client, caches, ...
    "fedavg", "fedsdg", "local", "fedavg-ft", "heterofl", "flora", "fedmd", "fedsq", "fedmerge",
    "scaffold", "fedhft",
)  # fmt: skip


def only(*names: str) -> ft.Experiment:
    methods = {name: EXPERIMENT.methods[name] for name in names}
    return replace(EXPERIMENT, methods=methods)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    experiment = only(*SOME)
    return run_on(1, experiment, folder / "one"), run_on(2, experiment, folder / "two")


@pytest.mark.parametrize("name", SOME)
def test_two_ranks_give_the_bits_of_one_process(name: str, both: tuple[Path, Path]) -> None:
    one, two = (contents(out / "methods" / name) for out in both)
    assert {"seed-0/server.safetensors", "seed-0/clients.jsonl"} <= one.keys()
    assert one.keys() == two.keys()
    assert [file for file in one if one[file] != two[file]] == []
    assert '"executor": "ranks"' in (both[1] / f"methods/{name}/seed-0/timings.jsonl").read_text()


@pytest.mark.long
@pytest.mark.parametrize("which", ["all other methods", "variants"])
def test_so_does_every_method(which: str, tmp_path: Path) -> None:
    experiment = only(*METHODS.keys() - {*SOME})
    if which == "variants":
        experiment = replace(EXPERIMENT, methods=VARIANTS, rounds=3)
    one, two = (contents(run_on(size, experiment, tmp_path / str(size))) for size in (1, 2))
    assert one == two


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "engine"), [(2, ft.EngineConfig("processes", processes=2)), (3, ft.EngineConfig())]
)
def test_with_processes_or_more_ranks_than_clients(
    size: int, engine: ft.EngineConfig, tmp_path: Path
) -> None:
    experiment = replace(only("fedsdg", "fedavg-ft"), cohort=ft.CohortConfig(size=2), engine=engine)
    ours, theirs = (contents(run_on(n, experiment, tmp_path / str(n))) for n in (1, size))
    assert ours == theirs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def refuse() -> None:
    raise InputError("this can't be trained on")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


ENDS = {  # what happens, to which rank, all exit codes, what is said
    "a rank refuses": (refuse, 1, [2, 2], "fedtailor: this can't be trained on (rank 1 on "),
    "a rank is killed": (die, 1, [2, -9], "fedtailor: rank 1: the connection to it has ended"),
    "torchrun ends the first one": (
        on_sigterm, 0, [2, 2], "fedtailor: rank 0: told to end (SIGTERM), as torchrun does where ",
    ),
    "the first one is killed": (
        die, 0, [-9, 2], "fedtailor: rank 0: the connection to it has ended",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    file = tmp_path_factory.mktemp("undisturbed") / "run.toml"
    file.write_text(FILE)
    return contents(go(1, file))


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.slow if of[1] == 1 else pytest.mark.long)
        for what, of in ENDS.items()
    ],
)
def test_ranks_end_together_and_the_command_goes_on(
    what: str, file: Path, undisturbed: dict[str, bytes]
) -> None:
    spoil, rank, codes, line = ENDS[what]
    said, out = file.with_suffix(".txt"), file.with_suffix("")
    start = time.monotonic()
    assert forked.run(2, command(file, spoil=spoil, rank=rank), said) == codes
    assert time.monotonic() - start < 60
    lines = [text for text in said.read_text().splitlines() if text.startswith("fedtailor: ")]
    assert len(lines) == 1
    assert lines[0].startswith(line)
    assert (spoil is refuse) or lines[0].endswith(GOES_ON)
    assert json.loads((out / "methods/fedper/seed-0/commit.json").read_text())["round"] == 1
    assert contents(go(3, file)) == undisturbed  # another number of ranks


@pytest.mark.slow
def test_a_method_that_diverges_leaves_the_others_running(tmp_path: Path) -> None:
    wild = ft.FedAvg(optimiser=ft.Optimiser("sgd", lr=1e6, weight_decay=1e6))
    methods = {"wild": wild, "fedper": ft.FedPer()}
    experiment = replace(EXPERIMENT, methods=methods, local=ft.LocalConfig(steps=6))
    ours, theirs = (run_on(size, experiment, tmp_path / str(size)) for size in (1, 2))
    assert contents(ours) == contents(theirs)
    why = [
        json.loads((out / "methods/wild/seed-0/commit.json").read_text())["diverged"]
        for out in (ours, theirs)
    ]
    assert why[0] is not None
    assert why[0] == why[1]


def test_the_other_ranks_end_well_where_every_method_diverges(tmp_path: Path) -> None:
    wild = ft.FedAvg(optimiser=ft.Optimiser("sgd", lr=1e6, weight_decay=1e6))
    experiment = replace(EXPERIMENT, methods={"wild": wild}, local=ft.LocalConfig(steps=6))
    said = tmp_path / "said"

    def work() -> None:
        with init_process_group() as group:
            ft.run(experiment, tmp_path / "out", data=digits(), backbone=digits_backbone(),
                   group=group)  # fmt: skip

    first, other = forked.run(2, work, said)
    assert first
    assert other == 0, said.read_text()
    assert "lower the learning rate or set optimiser.clip" in said.read_text()


def most_memory() -> float:
    """Of this process so far, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1e3


@pytest.mark.long
def test_no_rank_holds_all_private_states(tmp_path: Path) -> None:
    """2.4 MB a client, all in one cohort. If each rank held half of 152 more, it would need 180 MB;
    what is on its way, and gaps in the heap, took up to 90."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8000), nn.ReLU(), nn.Linear(8000, 10))
    backbone = ft.Backbone(network, prepare=lambda batch: {"input": batch["pixel_values"]})

    def grown(clients: int) -> list[float]:
        def work() -> None:
            before = most_memory()
            experiment = replace(
                EXPERIMENT,
                rounds=1,
                methods={"local": ft.Local()},
                public=ft.DataConfig(),
                split=ft.SplitConfig(clients),
                cohort=ft.CohortConfig(),
                evaluate=ft.EvaluateConfig(every=2, clients=2),
            )
            out = tmp_path / str(clients)
            with init_process_group() as group:
                assert group is not None
                ft.run(experiment, out, data=digits(), backbone=backbone, group=group)
            (tmp_path / f"{clients}-{group.rank}").write_text(str(most_memory() - before))

        assert forked.run(2, work, tmp_path / "said") == [0, 0], (tmp_path / "said").read_text()
        return [float((tmp_path / f"{clients}-{rank}").read_text()) for rank in range(2)]

    few, many = grown(8), grown(160)
    for a, b in zip(few, many, strict=True):
        assert b - a < 130, (few, many)
