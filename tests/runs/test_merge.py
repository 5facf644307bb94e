"""The parts of a grid that several machines ran, put together."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.runs.merge import copy_sparse, merge
from fedtailor.runs.trials import chosen
from tests.forked import contents
from tests.small import digits, digits_backbone, without_checksum

GRID = ft.Experiment(
    methods={"fedsdg": ft.FedSDG(rank=2), "local": ft.Local(), "fedavg": ft.FedAvg()},
    rounds=1,
    seeds=(0, 1),
    split=ft.SplitConfig(3, "dirichlet", alpha=1.0, max_examples=12),
    local=ft.LocalConfig(steps=1),
)


def run(out: Path, part: str | None = None, experiment: ft.Experiment = GRID) -> Path:
    return ft.run(experiment, out, data=digits(), backbone=digits_backbone(), part=part).path


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("machines")
    return [run(folder / str(k), f"{k}/2") for k in (1, 2)]


@pytest.mark.slow
def test_a_merged_grid_has_the_bytes_of_one_machines_run(
    machines: list[Path], tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole")
    out = merge(machines, tmp_path / "out")
    assert contents(out) == contents(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    assert out.stat().st_mode == whole.stat().st_mode
    before = contents(out)
    run(out)  # nothing is left to run
    assert contents(out) == before


@pytest.mark.parametrize(("methods", "seeds", "n"), [(3, 2, 2), (4, 3, 5), (2, 5, 4), (1, 3, 3)])
def test_portions_are_balanced_and_share_every_method(methods: int, seeds: int, n: int) -> None:
    labels, numbers = [f"m{k}" for k in range(methods)], range(seeds)
    portions = [chosen(numbers, labels, f"{k}/{n}") for k in range(1, n + 1)]
    assert sorted(part for portion in portions for part in portion) == sorted(
        chosen(numbers, labels)
    )
    sizes = [len(portion) for portion in portions]
    assert max(sizes) - min(sizes) <= 1
    for label in labels:
        counts = [sum(label == other for _, other in portion) for portion in portions]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "a/b", "7/7"])
def test_a_portion_that_does_not_exist_is_refused(part: str, tmp_path: Path) -> None:
    with pytest.raises(ft.InputError, match=f"part '{part}'"):
        run(tmp_path / "out", part)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_missing_and_double_parts_are_named(machines: list[Path], tmp_path: Path) -> None:
    first, second = machines
    with pytest.raises(ft.InputError) as error:
        merge([first], tmp_path / "out")
    assert str(error.value) == "missing: fedsdg with seed 1, local with seed 1, fedavg with seed 1"
    with pytest.raises(ft.InputError) as error:
        merge([first, second, second], tmp_path / "out")
    assert f"twice: fedsdg with seed 1 (in {second} and {second}), " in str(error.value)
    unfinished = shutil.copytree(first, tmp_path / "first")
    commit = without_checksum(unfinished / "methods/fedavg/seed-0/commit.json")
    text = commit.read_text().replace('"round": 1', '"round": 0', 1)
    commit.write_text(text.replace('"finished": true', '"finished": false'))
    with pytest.raises(ft.InputError, match=r"unfinished: fedavg with seed 0 \(round 0 of 1 in"):
        merge([unfinished, second], tmp_path / "out")
    commit.write_text(text.replace('"round": 0', '"round": 1', 1))  # killed before its end
    commit.write_text(commit.read_text().replace('"finished": true', '"finished": false'))
    with pytest.raises(ft.InputError) as error:
        merge([unfinished, second], tmp_path / "out")
    assert str(error.value) == (
        f"unfinished: fedavg with seed 0 (round 1 of 1 in {unfinished}; to finish it, run it there "
        "again with the same --part)"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_part_may_have_had_another_bound_on_norms(machines: list[Path], tmp_path: Path) -> None:
    changed = replace(GRID, cohort=replace(GRID.cohort, max_norm=50.0))
    out = merge([machines[0], run(tmp_path / "second", "2/2", changed)], tmp_path / "out")
    assert "cohort.max_norm was none (" in " ".join(ft.compare([out]).split())


@pytest.mark.slow
def test_parts_of_other_experiments_or_data_are_refused_by_name(
    machines: list[Path], tmp_path: Path
) -> None:
    first, second = machines
    other = run(tmp_path / "a", "2/2", replace(GRID, local=ft.LocalConfig(steps=2), rounds=2))
    with pytest.raises(ft.InputError) as error:
        merge([first, other], tmp_path / "out")
    assert f"local.steps is 1 in {first} and 2 in {other}; rounds is 1 in " in str(error.value)
    changed = shutil.copytree(second, tmp_path / "b")
    manifest = without_checksum(changed / "partitions/seed-1.json")
    manifest.write_text(manifest.read_text().replace('"digest": "', '"digest": "0'))
    with pytest.raises(ft.InputError, match=r"clients can't be merged: .*seed-1\.json, "):
        merge([first, changed], tmp_path / "out")
    with pytest.raises(ft.InputError, match="is not an empty directory"):
        merge(machines, first)


@pytest.mark.parametrize("label", ["../../victim", ".."])
def test_a_label_that_leads_out_of_the_directory_is_refused(
    label: str, machines: list[Path], tmp_path: Path
) -> None:
    run = shutil.copytree(machines[0], tmp_path / "runs/run")
    file = without_checksum(run / "experiment.json")
    file.write_text(file.read_text().replace('"label": "fedavg"', f'"label": "{label}"'))
    shutil.copytree(run / "methods/fedavg", run / "methods" / label, dirs_exist_ok=True)
    with pytest.raises(ft.InputError) as error:
        merge([run, machines[1]], tmp_path / "new/out")
    assert str(error.value).startswith(f"{file}: method label {label!r} can't name a folder")
    assert not (tmp_path / "new").exists()


def test_only_the_new_directory_is_touched(
    machines: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "out.merging/mine"
    mine.parent.mkdir()
    mine.write_text("mine")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert merge(machines, tmp_path / "link") == tmp_path / "link"
    assert contents(tmp_path / "real").keys() == contents(merge(machines, tmp_path / "out")).keys()
    assert mine.read_text() == "mine"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ft.InputError, match=r"--out \. is the working directory; name a new one"):
        merge(machines, ".")
    with pytest.raises(ft.InputError, match="no run directories to merge"):
        merge([], tmp_path / "none")


def test_holes_stay_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    with source.open("wb") as file:
        file.seek(1 << 24)
        file.write(b"middle")
        file.truncate(1 << 26)
    source.chmod(0o600)  # as that of a secret is
    copy_sparse(str(source), str(target))
    assert target.stat().st_size == 1 << 26
    assert target.stat().st_mode & 0o777 == 0o600
    assert target.stat().st_blocks * 512 < 1 << 20
    assert target.read_bytes() == source.read_bytes()
