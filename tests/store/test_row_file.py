import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedtailor.errors import InputError
from fedtailor.store.format import check_tensors
from fedtailor.store.row_file import RowFile

ROW = {
    "h": torch.zeros(3, dtype=torch.bfloat16),
    "w": torch.zeros(2, 2),
    "n": torch.zeros((), dtype=torch.int64),
    "none": torch.zeros(0),
    "b": torch.zeros(3, dtype=torch.bool),
}


def rows(count: int) -> dict[str, torch.Tensor]:
    return {
        "h": torch.arange(3 * count).view(count, 3).to(torch.bfloat16),
        "w": torch.randn(count, 2, 2),
        "n": torch.arange(count) + 7,
        "none": torch.zeros(count, 0),
        "b": torch.tensor([[True, False, True]] * count),
    }


def test_rows_are_where_safetensors_looks_for_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    file, new = RowFile(path, 6, ROW), rows(3)
    file.write(2, new)
    file.sync()
    loaded = load_file(path)
    for name, value in new.items():
        assert loaded[name].dtype == ROW[name].dtype
        assert loaded[name][2:5].equal(value)
        assert not loaded[name][[0, 1, 5]].any()
        assert all(file.read(2 + at)[name].equal(value[at]) for at in range(3))


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path, new = tmp_path / "rows.safetensors", rows(1)
    RowFile(path, 6, ROW).write(4, new)
    again = RowFile(path, 6, ROW)
    again.prefetch(4)
    assert again.read(4)["w"].equal(new["w"][0])


def test_values_are_brought_to_the_type_of_the_file(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.safetensors", 2, {"w": torch.zeros(2)})
    file.write(1, {"w": torch.tensor([[1.5, 2.0]], dtype=torch.float64)})
    assert file.read(1)["w"].equal(torch.tensor([1.5, 2.0]))


def test_a_file_that_was_cut_short_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    file = RowFile(path, 6, ROW)
    file.write(0, rows(6))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(InputError, match=r"rows\.safetensors is damaged: it ends within row 5"):
        file.read(5)
    with pytest.raises(InputError, match="is damaged: it is too short or too long"):
        RowFile(path, 6, ROW)


@pytest.mark.slow
def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    file = RowFile(path, 3, ROW)
    file.write(1, rows(2))
    whole = path.read_bytes()
    never_written = RowFile.open(path).read(0)
    assert not any(value.any() for value in never_written.values())
    assert check_tensors(path)
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(InputError, match=r"rows\.safetensors is damaged"):
            [RowFile(path, 3, ROW).read(row) for row in range(3)]
        with pytest.raises(InputError, match=r"rows\.safetensors is damaged"):
            check_tensors(path)
    path.write_bytes(whole)
    assert RowFile.open(path).read(2)["w"].equal(file.read(2)["w"])


def test_a_file_without_checksums_is_none_of_rows_with_them(tmp_path: Path) -> None:
    path, new = tmp_path / "rows.safetensors", rows(3)
    file = RowFile(path, 3, ROW, checksums=False)
    file.write(0, new)
    assert file.read(1)["h"].equal(new["h"][1])
    assert not check_tensors(path)
    for again in (lambda: RowFile(path, 3, ROW), lambda: RowFile.open(path)):
        with pytest.raises(InputError, match="is damaged: its header is not that of these rows"):
            again()
