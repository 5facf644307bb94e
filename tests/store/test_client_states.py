import contextlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedtailor.engine.private_states import MemoryStates
from fedtailor.params import Params
from fedtailor.store.client_states import SEEN, FileStates, best_path
from fedtailor.store.committed import Commit, CommittedStates

NAME = "private.safetensors"


def initial(client: int) -> Params:
    return {
        "w": torch.full((2, 3), float(client)),
        "n": torch.tensor(client),
        "b": torch.ones(3, dtype=torch.bool),
    }


def opened(folder: Path | None) -> FileStates | MemoryStates:
    return MemoryStates(initial) if folder is None else FileStates(5, initial, folder / NAME)


@pytest.mark.parametrize("on_disk", [False, True])
def test_reads_what_was_written_and_the_initial_state_otherwise(
    tmp_path: Path, on_disk: bool
) -> None:
    folder = tmp_path if on_disk else None
    store = opened(folder)
    new = {"w": torch.randn(2, 3), "n": torch.tensor(77), "b": torch.zeros(3, dtype=torch.bool)}
    store.begin(1)
    store.stage(3, new)
    assert store.read(3)["w"].equal(new["w"])
    again = store
    if isinstance(store, FileStates):
        assert opened(folder).read(3)["n"] == 3  # staged only
        store.commit()
        again = opened(folder)
    assert all(again.read(3)[name].equal(new[name]) for name in new)
    assert all(again.read(4)[name].equal(initial(4)[name]) for name in new)


def test_the_file_is_safetensors_and_sparse(tmp_path: Path) -> None:
    path = tmp_path / "private.safetensors"
    store = FileStates(100_000, lambda k: {"w": torch.full((1000,), float(k))}, path)
    store.begin(1)
    store.stage(99_999, {"w": torch.full((1000,), 5.0)})
    store.commit()
    assert path.stat().st_size > 400_000_000
    assert path.stat().st_blocks * 512 < 2_000_000
    small = tmp_path / "small.safetensors"
    store = FileStates(3, initial, small)
    store.begin(1)
    store.stage(1, initial(9))
    store.commit()
    loaded = load_file(small)
    assert loaded["w"].shape == (3, 2, 3)
    assert loaded["w"][1].equal(initial(9)["w"])
    assert loaded[SEEN].tolist() == [0, 1, 0]


def test_a_read_copy_does_not_reach_the_store() -> None:
    store = MemoryStates(initial)
    store.begin(1)
    store.stage(0, initial(1))
    store.begin(2)
    store.read(0)["w"].zero_()
    assert store.read(0)["w"].equal(initial(1)["w"])


def test_a_method_without_private_state_makes_no_file(tmp_path: Path) -> None:
    store = FileStates(3, lambda k: {}, tmp_path / "private.safetensors")
    store.begin(1)
    store.stage(1, {})
    store.commit()
    assert store.read(1) == {}
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_had_staged_is_taken_up_again(tmp_path: Path) -> None:
    path = tmp_path / "private.safetensors"
    store = FileStates(5, initial, path)
    store.begin(7)
    store.stage(3, initial(30))
    store.stage(1, initial(10))
    assert store.staged == (1, 3)
    assert store.read(3)["n"] == 30
    assert {p.name for p in tmp_path.iterdir()} == {path.name, "private-000007.safetensors"}
    store.sync()

    again = FileStates(5, initial, path)
    again.adopt(7, [1, 3])
    again.commit()
    assert [int(again.read(k)["n"]) for k in range(5)] == [0, 10, 2, 30, 4]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    again.adopt(7, [1, 3])  # a kill after the commit: nothing is left to be done
    again.commit()
    assert int(again.read(3)["n"]) == 30


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_discarded_does_not_count(tmp_path: Path, on_disk: bool) -> None:
    store = opened(tmp_path if on_disk else None)
    for _ in range(2):
        store.begin(2)
        store.stage(3, initial(30))
        store.discard()
        assert store.read(3)["n"] == 3


def test_no_round_begins_before_the_last_one_is_committed(tmp_path: Path) -> None:
    store = FileStates(5, initial, tmp_path / NAME)
    store.begin(1)
    store.stage(3, initial(30))
    with pytest.raises(RuntimeError, match="round 1 is not committed, and round 2 begins"):
        store.begin(2)
    store.discard()
    store.begin(2)


def trained(round_: int, client: int) -> Params:
    return initial(100 * round_ + client)


def one_round(store: FileStates, round_: int, clients: list[int]) -> None:
    store.begin(round_)
    for client in clients:
        store.stage(client, trained(round_, client))
    store.commit()


def kept(folder: Path, round_: int) -> list[int]:
    """By client, of five: its number in the state after ``round_``; -1 if it had not trained."""
    states = CommittedStates(folder, round_, Commit(round_, round_, True, {}))
    rows = [states.read(client) for client in range(5)]
    return [int(row["n"]) if row else -1 for row in rows]


def test_states_of_the_best_round_are_kept_where_they_have_changed_since(tmp_path: Path) -> None:
    path = tmp_path / "private.safetensors"
    store = FileStates(5, initial, path)
    one_round(store, 1, [0, 1])
    store.begin(2)
    store.stage(1, trained(2, 1))
    store.keep(2)
    store.commit()
    assert not best_path(path, 2).exists()
    one_round(store, 3, [1, 2])
    one_round(store, 4, [2, 3])
    assert kept(tmp_path, 2) == [100, 201, -1, -1, -1]
    assert kept(tmp_path, 4) == [100, 301, 402, 403, -1]
    again = FileStates(5, initial, path)
    again.keep(2)
    one_round(again, 5, [0, 1])
    assert kept(tmp_path, 2) == [100, 201, -1, -1, -1]
    again.keep(5)
    one_round(again, 6, [4, 0])
    assert kept(tmp_path, 5) == [500, 501, 402, 403, -1]
    assert kept(tmp_path, 6) == [600, 501, 402, 403, 604]


@pytest.mark.parametrize("step", range(15))
def test_a_commit_that_is_repeated_saves_no_new_row_as_an_old_one(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at the ``step``-th tensor that is written, or not at all."""
    path = tmp_path / "private.safetensors"
    store = FileStates(5, initial, path)
    one_round(store, 1, [0, 1])
    store.keep(1)
    store.begin(2)
    store.stage(1, trained(2, 1))
    store.stage(2, trained(2, 2))
    write, left = os.pwrite, step

    def stopped(descriptor: int, data: memoryview, place: int) -> int:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return write(descriptor, data, place)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(os, "pwrite", stopped)
        store.commit()
    again = FileStates(5, initial, path)
    again.keep(1)
    again.adopt(2, [1, 2])
    again.commit()
    assert kept(tmp_path, 1) == [100, 101, -1, -1, -1]
    assert kept(tmp_path, 2) == [100, 201, 202, -1, -1]
