from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from fedtailor.errors import InputError
from fedtailor.layers.lora import (
    LoRALinear,
    adapt_projections,
    branches,
    check_rank,
    fuse,
    initial_factor,
    lora_names,
    pack_rank,
    pack_rows,
    pad_rank,
    truncate_rank,
    unpack_rank,
    unpack_rows,
)
from fedtailor.layers.low_rank import (
    product_gram,
    product_norm,
    product_svd,
    recompress,
    side_by_side,
    with_updates,
)
from fedtailor.layers.parts import projections
from fedtailor.params import Params, decode, encode
from fedtailor.random import key
from fedtailor.task.backbone import LoRAOptions
from tests.lora import truncated
from tests.small import digits_backbone, same_bits
from tests.text import tiny_bert

F64 = NDArray[np.float64]
RNG = np.random.default_rng(0)


def lora(rank: int) -> Params:
    return {
        "b.lora_A.default.weight": torch.rand(rank, 5) + 1,
        "b.lora_B.default.weight": torch.rand(4, rank) + 1,
        "a.lora_A.default.weight": torch.rand(rank, 4) + 1,
        "a.lora_B.default.weight": torch.rand(3, rank) + 1,
        "head.bias": torch.rand(3),
    }


def test_names_are_sorted_and_in_pairs() -> None:
    pairs = lora_names(lora(2))
    assert pairs[0] == ("a.lora_A.default.weight", "a.lora_B.default.weight")
    assert [pair[0][0] for pair in pairs] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (LoRAOptions(), {}),
        (LoRAOptions(rslora=True), {"use_rslora": True}),
        (LoRAOptions(dora=True, rslora=True), {"use_dora": True, "use_rslora": True}),
    ],
)
def test_a_layer_computes_what_pefts_does_under_its_names(
    options: LoRAOptions, words: dict[str, Any]
) -> None:
    ours, pefts = (nn.Sequential(nn.Linear(6, 5)) for _ in range(2))
    pefts.load_state_dict(ours.state_dict())
    ours[0] = LoRALinear(ours[0], 3, 7.0, options)  # type: ignore[arg-type]
    config = LoraConfig(r=3, lora_alpha=7.0, target_modules=["0"], **words)
    inject_adapter_in_model(config, pefts)
    state = {name: torch.randn_like(value) for name, value in ours.state_dict().items()}
    ours.load_state_dict(state)
    pefts.load_state_dict(state)
    x = torch.randn(2, 4, 6)
    torch.testing.assert_close(ours(x), pefts(x), atol=1e-5, rtol=1e-5)
    slopes = []
    for model in (ours, pefts):
        loss = model(x).square().sum()
        names = [n for n in state if ".lora_" in n]
        slopes.append(torch.autograd.grad(loss, [model.get_parameter(n) for n in names]))
    torch.testing.assert_close(*slopes, atol=1e-4, rtol=1e-5)
    half = ours.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), pefts(x), atol=0.3, rtol=0.1)


@given(st.integers(1, 4))
def test_cut_components_come_back_as_zeros(rank: int) -> None:
    whole = lora(4)
    wide = pad_rank(truncate_rank(whole, rank), 4)
    assert wide.keys() == whole.keys()
    for A, B in lora_names(whole):
        assert wide[A][:rank].equal(whole[A][:rank])
        assert wide[B][:, :rank].equal(whole[B][:, :rank])
        assert not wide[A][rank:].any()
        assert not wide[B][:, rank:].any()
    assert wide["head.bias"] is whole["head.bias"]


@given(st.integers(1, 4))
def test_a_packed_upload_arrives_whole(rank: int) -> None:
    upload = {**pad_rank(truncate_rank(lora(4), rank), 4), "rank": torch.tensor(rank)}
    packed = pack_rank(upload)
    assert packed["a.lora_B.default.weight"].shape == (3, rank)
    assert same_bits(unpack_rank(decode(encode(packed)), 4), upload)


@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_the_norm_is_that_of_the_product(d_out: int, r: int, d_in: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    Bs, As = rng.normal(size=(2, d_out, r)), rng.normal(size=(2, r, d_in))
    got = product_norm(torch.tensor(Bs), torch.tensor(As))
    want = np.linalg.norm(Bs @ As, axis=(1, 2))
    scale = np.linalg.norm(Bs, axis=(1, 2)) * np.linalg.norm(As, axis=(1, 2))
    error = (got.numpy() ** 2 - want**2) / scale**2  # terms of B A may cancel each other
    np.testing.assert_allclose(error, 0, atol=1e-13)


def test_side_by_side_is_the_sum() -> None:
    Bs, As, p = RNG.normal(size=(3, 4, 2)), RNG.normal(size=(3, 2, 5)), np.array([0.2, 0.3, 0.5])
    B, A = side_by_side(torch.tensor(Bs), torch.tensor(As), torch.tensor(p))
    assert (B.shape, A.shape) == ((4, 6), (6, 5))
    np.testing.assert_allclose(B @ A, np.einsum("k,kor,kri->oi", p, Bs, As), atol=1e-12)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(12, 5, 9), (6, 40, 7)])
def test_the_svd_is_that_of_the_product(shape: tuple[int, int, int], exact: bool) -> None:
    d_out, R, d_in = shape
    B, A = RNG.normal(size=(d_out, R)), RNG.normal(size=(R, d_in))
    u, s, v = np.linalg.svd(B @ A, full_matrices=False)
    for rank in (1, 3):
        U, S, V = product_svd(torch.tensor(B), torch.tensor(A), rank, exact)
        np.testing.assert_allclose(S, s[:rank], atol=1e-9)
        np.testing.assert_allclose((U * S) @ V, (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-9)
        assert (V.gather(1, V.abs().argmax(1, keepdim=True)) > 0).all()


def test_a_product_of_lower_rank_still_has_orthonormal_vectors() -> None:
    B, A = torch.zeros(4, 3), torch.rand(3, 5)
    U, S, V = product_svd(B, A, 2)
    assert not S.any()
    torch.testing.assert_close(V @ V.T, torch.eye(2).double())
    assert U.isfinite().all()


def tensor(value: F64) -> torch.Tensor:
    return torch.tensor(value).float()


def random_product(d_out: int, R: int, d_in: int, seed: int = 0) -> tuple[F64, F64]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(d_out, R)), rng.normal(size=(R, d_in))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(12, 5, 9), (9, 20, 12), (6, 40, 7)])
def test_recompression_is_the_best_approximation(shape: tuple[int, int, int], exact: bool) -> None:
    B, A = random_product(*shape)
    for rank in (1, 3, 6):
        new_B, new_A = recompress(torch.tensor(B), torch.tensor(A), rank, exact)
        assert (new_B.shape, new_A.shape) == ((shape[0], rank), (rank, shape[2]))
        np.testing.assert_allclose((new_B @ new_A).numpy(), truncated(B @ A, rank), atol=1e-9)
        np.testing.assert_allclose(new_B.norm(dim=0), new_A.norm(dim=1), atol=1e-9)


def test_randomised_recompression_of_a_large_product_is_nearly_the_best() -> None:
    B, A = random_product(120, 60, 150)
    B = B * 0.9 ** np.arange(60)
    best = np.linalg.norm(B @ A - truncated(B @ A, 6))
    errors = []
    for seed in (0, 1):
        new_B, new_A = recompress(tensor(B), tensor(A), 6, key=key(seed))
        errors.append(np.linalg.norm(B @ A - (new_B @ new_A).numpy()) / best)
    assert errors[0] != errors[1]  # the key counts
    assert min(errors) >= 1
    assert max(errors) < 1.01
    new_B, new_A = recompress(tensor(B), tensor(A), 6, exact=True)
    assert np.linalg.norm(B @ A - (new_B @ new_A).numpy()) / best == pytest.approx(1, abs=1e-5)


def test_recompression_of_a_product_of_lower_rank_pads_with_zeros() -> None:
    B, A = random_product(6, 2, 5)
    for exact in (False, True):
        new_B, new_A = recompress(tensor(B), tensor(A), 4, exact)
        np.testing.assert_allclose((new_B @ new_A).numpy(), B @ A, atol=1e-5)
        assert not new_B[:, 2:].any()
        assert not new_A[2:].any()
        zero_B, zero_A = recompress(torch.zeros(6, 2), tensor(A), 4, exact)
        assert not zero_B.any()
        assert not zero_A.any()


def test_the_gram_of_updates_is_that_of_their_products() -> None:
    Bs, As = RNG.normal(size=(20, 6, 2)), RNG.normal(size=(20, 2, 5))
    updates = np.stack([(B @ A).ravel() for B, A in zip(Bs, As, strict=True)])
    got = product_gram(torch.tensor(Bs), torch.tensor(As))
    np.testing.assert_allclose(got.numpy(), updates @ updates.T, atol=1e-12)
    rotation = np.linalg.qr(RNG.normal(size=(2, 2)))[0]  # other factors, the same products
    same = product_gram(torch.tensor(Bs @ rotation), torch.tensor(rotation.T @ As))
    torch.testing.assert_close(same, got)


def test_a_rank_too_large_names_the_layer_and_the_limit() -> None:
    with pytest.raises(InputError, match=r"rank 17 .*hidden \(16 x 54\); allowed: 1 to 16"):
        check_rank(digits_backbone(), 17)


@pytest.mark.parametrize("weights", ["numbers", "scalars", "by input"])
def test_branches_are_a_weighted_sum_of_products(weights: str) -> None:
    x, terms, expected = RNG.normal(size=(3, 4, 5)), [], np.zeros((3, 4, 6))
    for rank in (2, 3):
        B, A = random_product(6, rank, 5, rank)
        w = RNG.normal(size=(3, 4, 1) if weights == "by input" else ())
        weight = float(w) if weights == "numbers" else torch.tensor(w)
        terms.append((torch.tensor(A), torch.tensor(B), weight))
        expected += 1.5 * w * (x @ A.T @ B.T)
    got = branches(torch.tensor(x), *terms, scaling=1.5)
    np.testing.assert_allclose(got, expected, atol=1e-12)
    A, B, components = (part.numpy() for part in fuse(*terms))
    np.testing.assert_allclose(1.5 * (components * (x @ A.T)) @ B.T, expected, atol=1e-12)


def test_an_initial_factor_has_zeros_beyond_its_rank() -> None:
    like = torch.zeros(5, 400)
    A = initial_factor(key(0), like, torch.tensor(4))
    assert not A[4:].any()
    assert A[:4].std().item() == pytest.approx(0.5, rel=0.1)
    assert initial_factor(key(0), like, torch.tensor(2))[:2].allclose(A[:2] * 2**0.5)


@given(st.integers(1, 4), st.integers(0, 99))
def test_rows_that_are_masked_do_not_travel(rank: int, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    kept = torch.rand(6, generator=drawn) > 0.5
    A, B = torch.rand(4, 5, generator=drawn) + 1, torch.rand(6, 4, generator=drawn)
    A[rank:], B[:, rank:], B[~kept] = 0, 0, 0
    upload = {"x.A": A, "x.B": B, "x.kept": kept, "head": torch.ones(2)}
    packed = pack_rows(upload)
    assert packed["x.A"].shape == (rank, 5)
    assert packed["x.B"].shape == (kept.sum(), rank)
    assert packed["x.kept"].shape == (1,)
    assert same_bits(unpack_rows(packed, {"x.B": torch.zeros(6, 4)}), upload)


def test_weighted_rows_are_added_to_a_product() -> None:
    B, A = random_product(6, 2, 5)
    Bs, As, w = RNG.normal(size=(3, 6, 2)), RNG.normal(size=(3, 2, 5)), RNG.random((3, 6))
    new_B, new_A = with_updates(*(torch.tensor(x) for x in (B, A, Bs, As, w)))
    assert (new_B.shape, new_A.shape) == ((6, 8), (8, 5))
    expected = B @ A + sum(w[k][:, None] * (Bs[k] @ As[k]) for k in range(3))
    np.testing.assert_allclose(new_B @ new_A, expected, atol=1e-12)


def test_projections_are_replaced_with_their_blocks_number() -> None:
    backbone, blocks = tiny_bert(), []

    def adapted(base: nn.Linear, block: int) -> nn.Module:
        blocks.append(block)
        return nn.Sequential(base)

    adapt_projections(backbone, 2, adapted)
    assert blocks == [n for n, block in enumerate(backbone.blocks) for _ in block]
    replaced = [backbone.model.get_submodule(path) for path in projections(backbone)]
    assert all(isinstance(module, nn.Sequential) for module in replaced)
    with pytest.raises(InputError, match="rank 17 is larger"):
        adapt_projections(digits_backbone(), 17, adapted)
