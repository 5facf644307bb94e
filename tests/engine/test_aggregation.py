"""A cohort's uploads, in memory and on disk, and their mean."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fedtailor.engine.aggregation import UploadMean, UploadStack, next_state
from fedtailor.method import Cohort, Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.methods.hetlora import HetLoRA
from fedtailor.params import Params, stack
from fedtailor.random import key
from fedtailor.robustness.rules import Robust
from fedtailor.stacked import GROUP, weighted_sum
from fedtailor.task.task import Task
from tests.small import digits_backbone


def filled(folder: Path, limit: float) -> UploadStack:
    stack = UploadStack(4, limit, folder)
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
    assert not list(tmp_path.iterdir())  # nothing that a kill could leave


@pytest.mark.parametrize("limit", [1e9, 0.0])
def test_rows_are_left_out_in_place(tmp_path: Path, limit: float) -> None:
    stack = filled(tmp_path, limit)
    start = stack.params["w"].data_ptr()
    stack.keep([1, 3])
    assert stack.params["w"][:, 0, 0].tolist() == [1, 3]
    assert stack.params["n"].tolist() == [1, 3]
    assert stack.params["w"].data_ptr() == start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_the_mean_is_the_weighted_sum(dtype: torch.dtype) -> None:
    size = 2 * GROUP + 3
    draws = torch.Generator().manual_seed(0)
    given: list[Params] = [
        {
            "w": (100 * torch.randn(3, 4, generator=draws)).to(dtype),
            "one": torch.tensor(k).to(dtype),
        }
        for k in range(size)
    ]
    shares = torch.rand(size, generator=draws, dtype=torch.float64)
    shares /= shares.sum()
    mean = UploadMean(range(size), shares)
    for position, upload in enumerate(given):
        mean.put(position, upload)
    expected = weighted_sum(stack(given), shares)
    for name, value in mean.params.items():
        assert value.shape == (1, *expected[name].shape)
        assert value.dtype == dtype
        rtol, atol = {
            torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 0.1), torch.float64: (1e-12, 1e-12)
        }.get(dtype, (0, 1))  # integers: the fraction is cut  # fmt: skip
        torch.testing.assert_close(value[0], expected[name], rtol=rtol, atol=atol)


def test_the_mean_is_the_same_bits_in_whatever_order_uploads_arrive() -> None:
    draws = torch.Generator().manual_seed(0)
    given: list[Params] = [{"w": torch.randn(50, generator=draws)} for _ in range(7)]
    order = [3, 0, 6, 1, 2, 5, 4]
    found = []
    for arrival in (order, range(7), reversed(range(7))):
        mean, passing = UploadMean(order, torch.full((7,), 1 / 7)), torch.zeros(50)
        for position in arrival:
            passing.copy_(given[position]["w"])  # valid until the next one
            mean.put(position, {"w": passing})
        found.append(mean.params["w"])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("present", [[0, 2, 3], [1], [0, 1, 2, 3]])
def test_the_mean_of_those_who_answer_has_their_weights(present: list[int]) -> None:
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    uploads: list[Params] = [{"w": torch.tensor([float(k), 1.0])} for k in range(4)]
    mean = UploadMean([2, 0, 3, 1])  # position 2 comes first, whether it answers or not
    for position in present:
        mean.put(position, uploads[position])
    shares = weights[present] / weights[present].sum()
    mean.weigh(present, shares)
    expected = weighted_sum(stack([uploads[k] for k in present]), shares)["w"]
    torch.testing.assert_close(mean.params["w"][0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("examples", "max_share", "expected"),
    [
        ([1e9, 30, 10], None, [1e9, 30, 10]),
        ([1e9, 30, 10], 0.5, [40, 30, 10]),  # 40 of 80
        ([1e9, 1e6, 10, 10], 0.4, [40, 40, 10, 10]),
        ([30, 30, 40], 0.5, [30, 30, 40]),
        ([1e9, 30, 10], 0.2, [1, 1, 1]),  # as equal as can be
    ],
)
def test_no_client_weighs_more_than_its_share(
    examples: list[float], max_share: float | None, expected: list[float]
) -> None:
    numbers = torch.tensor(examples, dtype=torch.float64)
    cohort = Cohort(tuple(range(len(examples))), numbers, 1, torch.zeros(2))
    assert cohort.with_max_share(max_share).num_examples.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.9, 0.05, 0.03, 0.02], [0.4, 0.3, 0.18, 0.12]),
        ([2.0, 0.0, 0.0, 0.0], [0.8, 0.4, 0.4, 0.4]),  # others have none: they get the rest
        ([0.4, 0.4, 0.2, 0.0], [0.4, 0.4, 0.2, 0.0]),
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        ([math.nan, 0.1, 0.1, 0.1], [math.nan, 0.1, 0.1, 0.1]),  # the round is taken again
        ([math.inf, 0.1, 0.1, 0.1], [math.inf, 0.1, 0.1, 0.1]),
    ],
)
def test_weights_of_a_methods_own_have_the_limit(
    weights: list[float], expected: list[float]
) -> None:
    n = torch.ones(4, dtype=torch.float64)
    cohort = Cohort((0, 1, 2, 3), n, 1, key(0)).with_max_share(0.4)
    own = torch.tensor(weights, dtype=torch.float64)
    assert cohort.limited(own).tolist() == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("method", [FedSDG(rank=2), HetLoRA(rank=2)])
def test_a_long_upload_has_no_more_than_the_limit(method: Method) -> None:
    task = Task(digits_backbone(), method.adapt)
    server = method.init_server(task, 4, key(0))
    sent = {name: torch.zeros_like(server[name]) for name in server if name in task.state}
    if isinstance(method, HetLoRA):
        sent["rank"] = torch.tensor(2)
    rows = [dict(sent) for _ in range(4)]
    factors = [name for name in sent if name.endswith((".A", ".B", "default.weight"))]
    for at, row in enumerate(rows):
        row |= {name: torch.full_like(row[name], -1e-3 if at else 1e3) for name in factors}
    cohort = Cohort((0, 1, 2, 3), torch.ones(4).double(), 1, key(0)).with_max_share(0.25)
    new = method.aggregate(task, server, stack(rows), cohort)
    for name in factors:
        before = server[name] if method.sends_updates else 0
        assert (new[name] - before).max() == pytest.approx(250, rel=1e-3)


def test_a_state_above_all_measure_is_not_committed() -> None:
    server = {"w": torch.zeros(2)}
    uploads = UploadStack(3, 1e9)
    for place, value in enumerate((1.0, -4e18, 2.0)):
        uploads.put(place, {"w": torch.full((2,), value)})
    cohort = Cohort((0, 1, 2), torch.ones(3).double(), 1, key(0), num_clients=3)
    found = next_state(
        FedAvg(), Task(digits_backbone()), server, uploads, cohort, (0, 1, 2), least=2
    )
    assert found.present == (0, 2)
    assert found.left_out == {
        1: "with its upload, w of the server's next state has values above 1e+18"
    }
    assert found.server["w"].tolist() == [1.5, 1.5]


@dataclass(frozen=True)
class Divides(Method):
    """Its aggregate divides by a number of each upload."""

    name: ClassVar[str] = "divides"

    def aggregate(self, task: Task, server: Params, uploads: Params, cohort: Cohort) -> Params:
        return {"w": (uploads["w"] / uploads["by"][:, None]).mean(0)}


def test_the_upload_that_spoils_the_state_is_left_out_though_its_values_are_small() -> None:
    uploads = UploadStack(3, 1e9)
    for place, by in enumerate((1.0, 0.0, 1e-25)):
        uploads.put(place, {"w": torch.full((2,), 3.0 - place), "by": torch.tensor(by)})
    cohort = Cohort((0, 1, 2), torch.ones(3).double(), 1, key(0), num_clients=3)
    task = Task(digits_backbone())
    found = next_state(Divides(), task, {"w": torch.zeros(2)}, uploads, cohort, (0, 1, 2), least=1)
    assert found.present == (0,)
    assert found.server["w"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("robust", [Robust(before=("bucketing",)), Robust("trimmed-mean")])
def test_a_round_is_taken_again_where_one_upload_is_made_of_all(robust: Robust) -> None:
    uploads = UploadStack(5, 1e9)
    for place, value in enumerate((1.0, 1e30, 2.0, 3.0, 2.0)):
        uploads.put(place, {"w": torch.full((2,), value)})
    cohort = Cohort((0, 1, 2, 3, 4), torch.ones(5).double(), 1, key(0), num_clients=5)
    task, server = Task(digits_backbone()), {"w": torch.zeros(2)}
    method = FedAvg(robust=robust)
    found = next_state(method, task, server, uploads, cohort, (0, 1, 2, 3, 4), least=2)
    assert found.present == (0, 2, 3, 4)
    assert found.server["w"].tolist() == [2.0, 2.0]
