"""Lines of a file that grows; the lock that tells whether a run goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fedtailor.store.files import write_atomically
from fedtailor.store.run_directory import locked
from fedtailor.watch.files import Lines, is_written


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = Lines(path)
    assert lines.new() == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert lines.new() == [b"one"]
        assert lines.new() == []
        file.write(b"o\nthree\n")
        assert lines.new() == [b"two", b"three"]
    assert Lines(path, tail=8).new() == [b"three"]
    assert Lines(path, tail=9).new() == [b"three"]


def test_a_file_that_is_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    lines = Lines(path)
    assert (lines.new(), lines.begins_anew) == ([b"one", b"two"], False)
    write_atomically(path, b"one\n" + b"three\n")
    assert (lines.new(), lines.begins_anew) == ([b"one", b"three"], True)
    assert (lines.new(), lines.begins_anew) == ([], False)


@pytest.mark.slow
def test_a_run_starts_while_others_look_at_its_lock(tmp_path: Path) -> None:
    assert not is_written(tmp_path)
    with locked(tmp_path):
        assert is_written(tmp_path)
    assert not is_written(tmp_path)
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(1e-4):
            is_written(tmp_path)

    others = [threading.Thread(target=look) for _ in range(2)]
    for one in others:
        one.start()
    for _ in range(300):
        with locked(tmp_path):
            pass
    is_over.set()
    for one in others:
        one.join()
