"""What a hostile client may not send: values that no client of its budget, rank or width sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.layers.gating import gated_blocks
from fedtailor.method import Method
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.params import Params
from fedtailor.testing import Case, pictures

A, B = "hidden.lora_A.default.weight", "hidden.lora_B.default.weight"

Change = Callable[[Params], Params]


def with_ones(name: str, *place: int | slice) -> Change:
    """The same upload with ones at a place of a tensor."""

    def change(upload: Params) -> Params:
        value = upload[name].clone()
        value[place] = 1
        return {**upload, name: value}

    return change


def with_(name: str, value: float) -> Change:
    """The same upload with one value in all places of a tensor."""
    return lambda upload: {**upload, name: torch.full_like(upload[name], value)}


def shuffled(name: str) -> Change:
    """The same upload with the values of a tensor in another order."""

    def change(upload: Params) -> Params:
        value = upload[name]
        return {**upload, name: value.flatten().sort().values.view(value.shape)}

    return change


def many_rows(upload: Params) -> Params:
    """All rows are sent, where some were masked."""
    return with_("hidden.kept", True)(upload)


def other_rows(upload: Params) -> Params:
    """A row's values are there that the mask leaves out."""
    return with_ones("hidden.B", int((~upload["hidden.kept"]).nonzero()[0]), slice(0, 2))(upload)


def scarce(number: int) -> Change:
    """Another choice about a block."""

    def change(upload: Params) -> Params:
        touched = upload["touched"].clone()
        touched[number] = not touched[number]
        return {**upload, "touched": touched}

    return change


def outside(upload: Params) -> Params:
    """Values of a block that was not sent."""
    blocks = gated_blocks(ft_task(PFEDGATE))
    number = next(n for n in range(len(blocks.W)) if not upload["touched"][n] and blocks.W[n])
    name, place = blocks.places[number]
    value = upload[name].clone()
    value.view(-1)[place] = 1
    return {**upload, name: value}


def check(case: Case, upload: Params, lr_scale: float = 1.0) -> None:
    """Check an upload of client 0's first round."""
    received, steps = case.first_round(0).received, len(case.batches(0))
    case.method.check_upload(case.task(), 0, received, upload, steps, lr_scale)


def ft_task(method: Method) -> ft.Task:
    return ft.Task(pictures().backbone, method.adapt)


PFEDGATE = ft.PFedGate(sparsity=(0.1, 1.0))
FEDHFT = ft.FedHFT(rank=(2, 4), mask_ratio=(0.5, 0.25), clusters=1)
RANKS = (2, 4)


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        (PFEDGATE, with_("touched", True), r"its upload has block \d+ .* its sparsity 0.1 of"),
        (PFEDGATE, scarce(0), "its upload lacks block 0 of conv.weight, which every batch keeps"),
        (PFEDGATE, outside, "holds values outside the blocks that were sent"),
        (FEDHFT, with_("hidden.kept", False), r"hidden.kept keeps 0 of 16 rows; .* must keep 8"),
        (FEDHFT, many_rows, "hidden.kept keeps 16 of 16 rows; with the client's mask_ratio 0.5"),
        (FEDHFT, other_rows, "hidden.B holds values in rows that hidden.kept masks"),
        (FEDHFT, with_ones("hidden.A", 2), "LoRA of hidden holds values beyond rank 2"),
        *(
            case
            for method in (ft.FLoRA(rank=RANKS), ft.FlexLoRA(rank=RANKS), ft.HetLoRA(rank=RANKS))
            for case in (
                (method, with_ones(A, 2), "LoRA of hidden holds values beyond rank [12]"),
                (method, with_ones(B, slice(None), 3), "hidden holds values beyond rank [12]"),
                (method, with_("rank", 4), "has rank 4; allowed for this client: (1 or )?2"),
                (method, with_("rank", 0), "has rank 0; allowed for this client: (1 or )?2"),
            )
        ),
        *(
            (ft.Scaffold(), with_("scaffold.path", value), r"scaffold.path is .* rate: 0\.0")
            for value in (1e-12, 0.0, -0.05, 1e3)
        ),
        (ft.FedMask(), with_("retained.hidden", True), r"retained.hidden keeps \d+ of \d+ weights"),
        (ft.FedMask(), with_("retained.hidden", False), "retained.hidden keeps 0 of"),
        (ft.FedMask(), shuffled("retained.hidden"), "retained.hidden keeps parts of inputs"),
        (HeteroFL(widths=(0.5, 1.0)), with_ones("head.weight", 0, -1),
         "head.weight holds values beyond the client's width"),
        (HeteroFL(widths=(0.5, 1.0)), with_("kept units", 6), "with its width 0.5 it must have"),
    ],
)  # fmt: skip
def test_a_client_sends_what_its_settings_allow(
    method: Method, change: Change, message: str, tmp_path: Path
) -> None:
    case = Case(method, pictures(), tmp_path)
    upload = case.first_round(0).upload
    check(case, upload)
    with pytest.raises(InputError, match=message):
        check(case, change(upload))


def test_a_client_without_a_training_step_sends_no_block_of_pfedgate(tmp_path: Path) -> None:
    case = Case(PFEDGATE, pictures(), tmp_path)
    one = case.first_round(0)
    blank = {name: torch.zeros_like(value) for name, value in one.upload.items()}
    check(case, blank)


@pytest.mark.parametrize("averaging", ["models", "gradients"])
def test_variances_of_ifcas_models_stay_above_0(averaging: str, tmp_path: Path) -> None:
    method = ft.IFCA(averaging=averaging)  # type: ignore[arg-type]
    case = Case(method, pictures(), tmp_path)
    upload = case.first_round(0).upload
    check(case, upload)
    with pytest.raises(InputError, match=r"norm\.running_var holds variances below 0"):
        check(case, with_("norm.running_var", -1.5)(upload))


def test_the_path_of_scaffold_follows_the_rounds_rate(tmp_path: Path) -> None:
    case = Case(ft.Scaffold(), pictures(), tmp_path)
    upload = case.first_round(0).upload
    half = {**upload, "scaffold.path": upload["scaffold.path"] / 2}
    check(case, half, lr_scale=0.5)
    with pytest.raises(InputError, match=r"scaffold\.path is"):
        check(case, upload, lr_scale=0.5)
