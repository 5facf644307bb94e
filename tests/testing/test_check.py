"""The public checks of a method: they pass for a right one, and each fails for a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.method import Cohort, Method
from fedtailor.params import Batch, Params
from fedtailor.stacked import weighted_sum
from fedtailor.task.task import Task
from fedtailor.testing import Case, CheckFailedError, check_method, checks, outcomes, pictures

_drawn = torch.Generator()  # of which no key knows


@dataclass(frozen=True)
class Own(ft.FineTuning):
    name: ClassVar[str] = "own"


@dataclass(frozen=True)
class ForgetsTheAbsent(Own):
    def client_weights(self, cohort: Cohort) -> Tensor:
        return cohort.shares * len(cohort.clients) / cohort.num_clients


@dataclass(frozen=True)
class LooksAtValues(Own):
    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ft.ClientContext
    ) -> tuple[Params, Tensor]:
        state, loss = super().local(task, state, batches, context)
        return (state, loss * 2) if loss.item() > 1 else (state, loss)


@dataclass(frozen=True)
class CountsPadding(Own):
    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ft.ClientContext
    ) -> tuple[Params, Tensor]:
        batches = [{k: v for k, v in batch.items() if k != "weight"} for batch in batches]
        return super().local(task, state, batches, context)


@dataclass(frozen=True)
class TellsSecrets(Own):
    """A bias is private, but its values travel in another tensor."""

    def is_private(self, task: Task, name: str) -> bool:
        return name == "hidden.bias"

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ft.ClientContext
    ) -> tuple[Params, Tensor]:
        trained, loss = super().local(task, state, batches, context)
        head = torch.cat([trained["hidden.bias"][None], trained["head.weight"][1:]])
        return {**trained, "head.weight": head}, loss


@dataclass(frozen=True)
class LosesRows(Own):
    def pack(self, task: Task, upload: Params) -> Params:
        return {name: value.bfloat16() for name, value in upload.items()}

    def unpack(self, task: Task, packed: Params) -> Params:
        return {name: value.float() for name, value in packed.items()}


@dataclass(frozen=True)
class RefusesItsOwn(Own):
    def check_upload(
        self, task: Task, client: int, received: Params, upload: Params, steps: int, lr_scale: float
    ) -> None:
        if not upload["head.bias"].equal(received["head.bias"]):
            raise InputError("head.bias has moved")


@dataclass(frozen=True)
class CountsClients(Own):
    needs_only_mean: ClassVar[bool] = True

    def aggregate(self, task: Task, server: Params, uploads: Params, cohort: Cohort) -> Params:
        mean = weighted_sum(uploads, cohort.shares)
        return {name: value / len(cohort.num_examples) for name, value in mean.items()}


@dataclass(frozen=True)
class ThrowsDice(Own):
    def aggregate(self, task: Task, server: Params, uploads: Params, cohort: Cohort) -> Params:
        noise = 1 + 1e-3 * torch.rand((), generator=_drawn)
        mean = super().aggregate(task, server, uploads, cohort)
        return {name: value * noise for name, value in mean.items()}


@dataclass(frozen=True)
class Grows(Own):
    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Params:
        return {**super().init_server(task, num_clients, key), "more": torch.zeros(0)}

    def send(self, task: Task, server: Params, client: int) -> Params:
        more = torch.zeros(0 if server["head.bias"].equal(task.state["head.bias"]) else 3)
        return {**server, "more": more}


@dataclass(frozen=True)
class LearnsNothing(Own):
    def aggregate(self, task: Task, server: Params, uploads: Params, cohort: Cohort) -> Params:
        return server


@dataclass(frozen=True)
class WritesInPlace(Own):
    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ft.ClientContext
    ) -> tuple[Params, Tensor]:
        state["head.bias"].add_(1)
        return super().local(task, state, batches, context)


@dataclass(frozen=True)
class DependsOnTheBatch(Own):
    """Each call of it gives other logits."""

    def predict(self, task: Task, state: Params, batch: Batch) -> Tensor:
        logits = super().predict(task, state, batch)
        return logits + torch.rand(logits.shape[-1], generator=_drawn)


@pytest.mark.parametrize(
    ("method", "check", "message"),
    [
        (LooksAtValues(), checks.sequential_equals_vectorised, r"\.item\(\)"),
        (CountsPadding(), checks.padding_is_invisible,
         r"with padding, which has batch\['weight'\] = 0, the upload: .* differs by"),
        (TellsSecrets(), checks.nothing_private_is_sent,
         "an upload has the values of hidden.bias, which is private"),
        (LosesRows(), checks.packed_uploads_arrive_whole, "after pack and unpack, an upload: "),
        (RefusesItsOwn(), checks.honest_uploads_are_accepted,
         "check_upload refuses an honest upload of client 0: head.bias has moved"),
        (Grows(), checks.what_is_sent_keeps_its_form, "as before, or changing_sizes must name it"),
        (ForgetsTheAbsent(), checks.the_weights_have_the_sum_one,
         r"client_weights of 2 of \d+ clients have the sum 0\.\d+; it must be 1"),
        (CountsClients(), checks.the_mean_is_enough, "needs_only_mean, but of the uploads' mean"),
        (ThrowsDice(), checks.resumes_exactly, "take all random numbers from keys"),
        (LearnsNothing(), checks.training_lowers_the_loss, "over 8 rounds the training loss goes"),
        (WritesInPlace(), checks.runs, "a run changes head.bias of task.state in place"),
        (DependsOnTheBatch(), checks.clients_are_evaluated_on_their_own_examples,
         "client 2's loss, worked out again"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "",
)  # fmt: skip
def test_a_wrong_method_fails(
    method: Method, check: Callable[[Case], None], message: str, tmp_path: Path
) -> None:
    case = Case(method, pictures(), tmp_path)
    with pytest.raises((CheckFailedError, InputError, RuntimeError), match=message):
        check(case)


@pytest.mark.slow
def test_all_failures_are_in_one_message() -> None:
    with pytest.raises(CheckFailedError) as caught:
        check_method(LearnsNothing(), on=[pictures()])
    title, *lines = str(caught.value).splitlines()
    assert title == "LearnsNothing fails 1 of 18 checks:"
    (line,) = lines
    assert line.startswith("- training lowers the loss, on pictures: over 8 rounds")


def test_a_method_that_cannot_run_fails_once() -> None:
    @dataclass(frozen=True)
    class Crashes(Own):
        def send(self, task: Task, server: Params, client: int) -> Params:
            return {"head.bias": server["haed.bias"]}

    (outcome,) = outcomes(Crashes(), on=[pictures()])
    assert outcome.problem == "KeyError: 'haed.bias'"


def test_a_method_that_refuses_all_models_cannot_be_checked() -> None:
    @dataclass(frozen=True)
    class Refuses(Own):
        def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
            raise InputError("needs a thousand clients")

    with pytest.raises(InputError, match="can't be checked: pictures: own: needs a thousand"):
        check_method(Refuses(), on=[pictures()])
