"""Damaged files: what a run directory says of them, and that it never uses them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import fedtailor as ft
from fedtailor.optim import Optimiser
from fedtailor.report import compare
from fedtailor.runs.check import check
from fedtailor.runs.trained import open_trained
from fedtailor.store.client_states import FileStates
from fedtailor.store.files import load_tensors, save_tensors
from fedtailor.store.format import seal_tensors
from fedtailor.store.read import read, tensors
from fedtailor.store.row_file import RowFile
from fedtailor.store.trained_rows import read_trained_rows
from tests.forked import contents
from tests.runs.conftest import EXPERIMENT, FOLDER
from tests.small import digits, digits_backbone

METHOD = ft.FedSDG(rank=2, optimiser=Optimiser("sgd", lr=0.5))
LONG = replace(
    EXPERIMENT,
    methods={"fedsdg": METHOD},
    rounds=6,
    seeds=(1,),
    cohort=ft.CohortConfig(size=2),
    evaluate=ft.EvaluateConfig(every=3),
)
PART = FOLDER.with_name("seed-1")
NOT_READ = {".lock", "run.log"}


TWO = replace(EXPERIMENT, methods={"a": ft.FedAvg(), "b": ft.FedAvg()}, rounds=1, seeds=(0, 1))


class KilledError(Exception):
    pass


def go_on(out: Path) -> None:
    ft.run(LONG, out, data=digits(), backbone=digits_backbone())


def results(out: Path) -> dict[str, Any]:
    """All that a finished run is read for."""
    trained = open_trained(out, "fedsdg", data=digits(), backbone=digits_backbone())
    states = [trained.client_state(client) for client in range(3)]
    (row,) = json.loads(compare([out], as_json=True))["rows"]
    trial = read(out).trials[0]
    pictures = [(number, sorted(found)) for number, found in trial.diagnostics()]
    gates = tensors(out / PART / "private.safetensors")["gate_logits"]
    return {
        "models": (row["personal_model"], row["global_model"]),
        "pictures": pictures,
        "gates": gates.tolist(),
        "states": [{name: v.tolist() for name, v in state.items()} for state in states],
    }


def outcome(out: Path) -> dict[str, Any] | str:
    """`results` of a run that goes on; or the error that it ends with."""
    try:
        go_on(out)
        return results(out)
    except ft.InputError as error:
        return str(error)


def problems_of(out: Path) -> list[str]:
    """What `check` says is wrong."""
    try:
        return check(out).problems
    except ft.InputError as error:
        return [str(error)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("damage") / "whole"
    go_on(out)
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("damage") / "two"
    return ft.run(TWO, out, data=digits(), backbone=digits_backbone()).path


@pytest.fixture(scope="module")
def killed(whole: Path) -> Path:
    """As it stands after a kill right behind the fifth commit: its private states lie in a file of
    their own, and some of the best round's beside."""
    out, commit = whole.with_name("killed"), FileStates.commit

    def kill(states: FileStates) -> None:
        if (out / PART / "private-000005.safetensors").exists():
            raise KilledError
        commit(states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileStates, "commit", kill)
        with pytest.raises(KilledError):
            go_on(out)
    assert (out / PART / "private-000005.safetensors").exists()
    assert (out / PART / "private-best-000003.safetensors").exists()
    return out


def remove(path: Path, draw: np.random.Generator) -> None:
    path.unlink()


def cut(path: Path, draw: np.random.Generator) -> None:
    os.truncate(path, int(draw.integers(path.stat().st_size)))


def flip(path: Path, draw: np.random.Generator) -> None:
    content = bytearray(path.read_bytes())
    content[int(draw.integers(len(content)))] ^= 1 << int(draw.integers(8))
    path.write_bytes(content)


def exchange(path: Path, draw: np.random.Generator) -> None:
    """Hashes of other rows, whose checksum is right."""
    hashes = draw.integers(2**63, size=9).astype(np.uint64)
    path.write_bytes(b"".join(seal_tensors(save({"rows": hashes}))))


@pytest.mark.slow
def test_a_killed_run_ends_as_if_undisturbed(killed: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    assert not check(out).problems
    go_on(out)
    assert not check(out).problems
    assert contents(out) == contents(whole)
    assert results(out) == results(whole)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("private-000005.safetensors", remove, "private-000005.safetensors"),
        ("private-000005.safetensors", cut, "private-000005.safetensors"),
        ("private.safetensors", cut, "private.safetensors"),
        ("round-000005.safetensors", flip, "round-000005.safetensors"),
        ("clients.jsonl", flip, "clients.jsonl"),
    ],
)
def test_a_resume_names_the_damaged_file(
    killed: Path, tmp_path: Path, name: str, damage: Callable[..., None], message: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    damage(out / PART / name, np.random.default_rng(0))
    with pytest.raises(ft.InputError) as caught:
        go_on(out)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ("whole", "server.safetensors"),
        ("killed", "round-000005.safetensors"),
        ("killed", "round-000003.safetensors"),
        ("whole", "diagnostics-000003.safetensors"),
    ],
)
def test_a_file_of_another_run_in_the_place_of_the_own_one_is_noticed(
    request: pytest.FixtureRequest, tmp_path: Path, state: str, name: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(request.getfixturevalue(state), out)
    path = out / PART / name
    others = {key: value + 1 for key, value in load_tensors(path).items() if key != "clients"}
    save_tensors(path, {**load_tensors(path), **others})
    message = f"{path} is damaged: it is not the file that was committed"
    assert any(problem.startswith(message) for problem in problems_of(out))
    uses: dict[str, Callable[[], object]] = {
        "server.safetensors": lambda: open_trained(
            out, "fedsdg", data=digits(), backbone=digits_backbone(), which="last"
        ).client_state(0),
        "diagnostics-000003.safetensors": lambda: read(out),
    }
    with pytest.raises(ft.InputError, match=re.escape(message)):
        uses.get(name, lambda: go_on(out))()


def replaced(file: RowFile, rows: list[int]) -> None:
    """Other values, with right checksums."""
    row = file.read(rows[0])
    new = {name: value + (not name.startswith("__")) for name, value in row.items()}
    file.write(rows[0], {name: value[None] for name, value in new.items()})


def exchanged(file: RowFile, rows: list[int]) -> None:
    for row, state in zip(rows, [file.read(row) for row in reversed(rows)], strict=True):
        file.write(row, {name: value[None] for name, value in state.items()})


@pytest.mark.parametrize("name", ["private.safetensors", "private-best-000003.safetensors"])
@pytest.mark.parametrize("change", [replaced, exchanged])
def test_rows_that_were_not_committed_are_not_used(
    whole: Path, tmp_path: Path, change: Callable[..., None], name: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    path, data, net = out / PART / name, digits(), digits_backbone()
    flags = next(v for n, v in load_tensors(path).items() if n in ("__seen__", "__kept__"))
    change(RowFile.open(path), flags.nonzero()[:2, 0].tolist())
    message = f"{path} is damaged: it is not the file that was committed"
    assert [problem.startswith(message) for problem in problems_of(out)] == [True]
    start = replace(LONG, start_from=ft.StartConfig(run=str(out)))
    uses: list[Callable[[], object]] = [
        lambda: open_trained(out, "fedsdg", data=data, backbone=net).client_state(0),
        lambda: ft.run(start, tmp_path / "next", data=data, backbone=net),
        lambda: ft.run(replace(LONG, rounds=7), out, data=data, backbone=net),
    ]
    for use in uses:
        with pytest.raises(ft.InputError, match=re.escape(message)):
            use()


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("commit.json", "round", "5"),
        ("commit.json", "round", None),
        ("history.jsonl", "norms", ["a"]),
        ("history.jsonl", "cohort", [1.5]),
        ("timings.jsonl", "executor", 3),
        ("../../../partitions/seed-1.json", "names", 3),
        ("../../../environment.json", "versions", []),
    ],
)
def test_a_resume_names_the_file_with_a_value_of_another_type(
    whole: Path, tmp_path: Path, name: str, place: str, value: object
) -> None:
    """After a change by hand, with a right checksum."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    path = (out / PART / name).resolve()
    *before, last = path.read_bytes().splitlines(keepends=True)
    if path.suffix == ".json":
        before, last = [], path.read_bytes()
    changed = json.loads(last) | {place: value}
    changed.pop("checksum", None)
    path.write_bytes(b"".join(before) + json.dumps(changed).encode() + b"\n")
    if path.suffix == ".jsonl":
        commit = out / PART / "commit.json"
        about = json.loads(commit.read_bytes())
        del about["checksum"], about["checksums"][path.stem]
        about["bytes"][path.stem] = path.stat().st_size
        commit.write_text(json.dumps(about))
    with pytest.raises(ft.InputError, match=f"{path.name}.*{place}") as caught:
        ft.run(replace(LONG, rounds=7), out, data=digits(), backbone=digits_backbone())
    assert "\n" not in str(caught.value)


def test_rows_of_zeros_in_place_of_states_are_noticed(killed: Path, tmp_path: Path) -> None:
    """As a file system may leave them after a power loss."""
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    path = out / PART / "private.safetensors"
    size, header = path.stat().st_size, 8 + int.from_bytes(path.read_bytes()[:8], "little")
    os.truncate(path, header)
    os.truncate(path, size)
    with pytest.raises(ft.InputError, match=r"private\.safetensors is damaged"):
        go_on(out)


@pytest.mark.parametrize("damage", [cut, flip, remove, exchange])
def test_the_hashes_of_trained_rows_are_checked(
    whole: Path, tmp_path: Path, damage: Callable[..., None]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    rows = out / "partitions/seed-1-trained.safetensors"
    damage(rows, np.random.default_rng(0))
    (problem,) = problems_of(out)
    assert problem.startswith(f"{rows} is {'missing' if damage is remove else 'damaged'}")
    with pytest.raises(ft.InputError, match=f"{rows.name} is"):
        read_trained_rows(out, 1)
    if damage is remove:  # as of a run that is passed on without it
        results(out)
    else:
        with pytest.raises(ft.InputError, match=f"{rows.name} is damaged"):
            open_trained(out, "fedsdg", data=digits(), backbone=digits_backbone())


@pytest.mark.parametrize(
    ("state", "damage"),
    [
        pytest.param("killed", flip, marks=pytest.mark.slow),
        pytest.param("whole", cut, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("killed", cut), ("killed", remove), ("whole", flip), ("whole", remove))
        ),
    ],
)
def test_no_damage_is_used(
    request: pytest.FixtureRequest,
    whole: Path,
    tmp_path: Path,
    state: str,
    damage: Callable[..., None],
) -> None:
    start: Path = request.getfixturevalue(state)
    draw, expected, right = np.random.default_rng(7), contents(whole), results(whole)
    files = [path for path in sorted(start.rglob("*")) if path.is_file()]
    cases = [path.relative_to(start) for path in files if path.name not in NOT_READ]
    named = 0
    for file in cases:
        out = tmp_path / "run"
        shutil.copytree(start, out)
        damage(out / file, draw)
        problems = problems_of(out)
        found = outcome(out)
        if isinstance(found, str):
            assert [problem for problem in problems if file.name in problem], (file, problems)
            assert file.name in found, (file, found)
            assert "\n" not in found
            named += 1
        else:  # where nothing is kept: blanks in JSON, log lines that are not committed
            ours = contents(out)
            differing = {name for name in ours if ours[name] != expected.get(name)}
            assert differing <= {str(file)}, (file, differing)
            assert found == right, file
        shutil.rmtree(out)
    assert named > len(cases) * 0.7, named


@pytest.mark.slow
def test_a_damaged_state_of_the_best_round_is_not_taken_from_a_later_one(
    whole: Path, tmp_path: Path
) -> None:
    longer = replace(LONG, rounds=8)
    data, net = digits(), digits_backbone()
    shutil.copytree(whole, tmp_path / "right")
    ft.run(longer, tmp_path / "right", data=data, backbone=net)
    right = results(tmp_path / "right")
    draw = np.random.default_rng(3)
    for case in range(8):
        out = tmp_path / str(case)
        shutil.copytree(whole, out)
        flip(out / PART / "private-best-000003.safetensors", draw)
        said = ""
        try:
            ft.run(longer, out, data=data, backbone=net)
        except ft.InputError as error:
            said = str(error)
        assert "private-best-000003.safetensors is damaged" in said or results(out) == right


def test_an_empty_log_is_named_when_rounds_are_added(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    (tmp_path / "out" / PART / "history.jsonl").write_bytes(b"")
    with pytest.raises(ft.InputError, match=r"history\.jsonl is damaged: it holds 0 bytes"):
        ft.run(replace(LONG, rounds=8), tmp_path / "out", data=digits(), backbone=digits_backbone())


@pytest.mark.parametrize(
    ("other", "own", "message"),
    [
        (
            "methods/a/seed-1",
            "methods/a/seed-0",
            "seed-0/commit.json: it belongs to seed 1, not to",
        ),
        ("methods/b/seed-0", "methods/a/seed-0", "seed-0/commit.json: it belongs to method b, not"),
        (
            "partitions/seed-1",
            "partitions/seed-0",
            "seed-0.json: it belongs to seed 1, not to seed",
        ),
    ],
)
def test_files_of_another_seed_or_method_are_not_taken(
    two: Path, tmp_path: Path, other: str, own: str, message: str
) -> None:
    out, data, net = tmp_path / "run", digits(), digits_backbone()
    shutil.copytree(two, out)
    for path in two.glob(f"{other}*"):
        target = out / str(path.relative_to(two)).replace(other, own)
        for file in [path, *path.rglob("*")]:
            if file.is_file():
                shutil.copyfile(file, target / file.relative_to(path))
    assert [message in problem for problem in problems_of(out)] == [True]
    uses: list[Callable[[], object]] = [
        lambda: read(out),
        lambda: open_trained(out, "a", 0, data=data, backbone=net),
        lambda: ft.run(replace(TWO, rounds=2), out, data=data, backbone=net),
    ]
    for use in uses:
        with pytest.raises(ft.InputError, match=message):
            use()
