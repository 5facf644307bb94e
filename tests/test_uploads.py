"""A cohort's uploads, in memory and on disk."""

from pathlib import Path

import pytest
import torch

from fedtailor.params import Params
from fedtailor.uploads import UploadStack


def filled(folder: Path, limit: float) -> UploadStack:
    stack = UploadStack(4, limit, str(folder))
    for client in (2, 0, 3, 1):
        upload: Params = {"w": torch.full((2, 3), float(client)), "n": torch.tensor(client)}
        stack.put(client, upload)
    return stack


@pytest.mark.parametrize("limit", [1e9, 0.0])
def test_a_row_a_client_whatever_the_order(tmp_path: Path, limit: float) -> None:
    stack = filled(tmp_path, limit)
    assert stack.params["w"].shape == (4, 2, 3)
    assert stack.params["w"][:, 1, 2].tolist() == [0, 1, 2, 3]
    assert stack.params["n"].tolist() == [0, 1, 2, 3]
    assert len(list(tmp_path.glob("*.bin"))) == (2 if limit == 0 else 0)


@pytest.mark.parametrize("limit", [1e9, 0.0])
def test_rows_are_left_out_in_place(tmp_path: Path, limit: float) -> None:
    stack = filled(tmp_path, limit)
    start = stack.params["w"].data_ptr()
    stack.keep(torch.tensor([1, 3]))
    assert stack.params["w"][:, 0, 0].tolist() == [1, 3]
    assert stack.params["n"].tolist() == [1, 3]
    assert stack.params["w"].data_ptr() == start
