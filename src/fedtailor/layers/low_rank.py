"""Products B A of low rank, worked with through their factors: norms, sums, singular values.

A is ``[r, d_in]`` and B ``[d_out, r]``. The factors of a sum of products stand side by side,
B = [B_1, B_2, ...], and one below the other, A = [A_1; A_2; ...].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import random

_OVERSAMPLE, _POWER_STEPS = 8, 2  # of the randomised SVD

_UPDATES = 16  # whose inner products with all others are worked out at once


def product_norm(B: Tensor, A: Tensor) -> Tensor:
    """||B A||_F, in float64 and without forming B A: ||B A||^2 = <B^T B, A A^T>.

    ``B`` is ``[..., d_out, r]``, ``A`` ``[..., r, d_in]``; returns ``[...]``.

    >>> product_norm(torch.tensor([[1.0], [0.0]]), torch.tensor([[3.0, 4.0]]))
    tensor(5., dtype=torch.float64)
    """
    b, a = B.double(), A.double()
    return ((b.mT @ b) * (a @ a.mT)).sum((-2, -1)).clamp(min=0).sqrt()


def product_gram(Bs: Tensor, As: Tensor) -> Tensor:
    """The inner products <B_j A_j, B_k A_k> = tr((B_j^T B_k)(A_k A_j^T)) of K updates.

    ``Bs`` is ``[K, d_out, r]``, ``As`` ``[K, r, d_in]``; returns float64 ``[K, K]``.

    >>> product_gram(torch.ones(2, 3, 1), torch.tensor([[[1.0, 0.0]], [[1.0, 2.0]]])).tolist()
    [[3.0, 3.0], [3.0, 15.0]]
    """
    K, _, r = Bs.shape
    left = Bs.double().movedim(1, 0).flatten(1)  # [d_out, K r]
    right = As.double().flatten(0, 1)  # [K r, d_in]
    some = _UPDATES * r
    rows = [
        ((B.mT @ left) * (A @ right.mT)).view(-1, r, K, r).sum((1, 3))
        for B, A in zip(torch.split(left, some, 1), torch.split(right, some), strict=True)
    ]
    return torch.cat(rows)


def side_by_side(Bs: Tensor, As: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of sum_k weights[k] B_k A_k, in float64: B ``[d_out, c r]``, A ``[c r, d_in]``.

    ``Bs`` is ``[c, d_out, r]``, ``As`` ``[c, r, d_in]``, ``weights`` ``[c]``.
    """
    weighted = weights.to(Bs.device)[:, None, None] * Bs.double()
    return weighted.movedim(0, 1).flatten(1), As.double().flatten(0, 1)


def with_updates(
    B: Tensor, A: Tensor, Bs: Tensor, As: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The factors of B A + sum_k diag(weights[k]) B_k A_k, ``[d_out, R]`` and ``[R, d_in]``, with
    R = r + c r.

    ``B`` is ``[d_out, r]``, ``A`` ``[r, d_in]``, ``Bs`` ``[c, d_out, r]``, ``As`` ``[c, r, d_in]``,
    and ``weights`` ``[c, d_out]``, one a row.
    """
    update = (weights[..., None] * Bs).movedim(0, 1).flatten(1)  # [d_out, c r]
    return torch.cat([B, update], 1), torch.cat([A, As.flatten(0, 1)])


def product_svd(
    B: Tensor, A: Tensor, rank: int, exact: bool = True, key: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The leading singular vectors and values of B A, in float64 and without forming B A.

    The exact SVD takes the QR decomposition A^T = P R and the eigenvectors of the Gram matrix of
    B R^T, which is half the work of an SVD of B R^T. The randomised one (Halko, Martinsson and
    Tropp, SIAM Review 2011) has an oversampling of 8 and two power steps.

    Args:
        B: ``[d_out, R]``.
        A: ``[R, d_in]``.
        rank: how many singular values are wanted.
        exact: False: the randomised SVD.
        key: of the randomised SVD's sketch; None: always the same.

    Returns:
        U ``[d_out, l]``, the values ``[l]`` and V ``[l, d_in]``; l is the least of ``rank``, R,
        d_in and d_out. The largest entry of every row of V is positive.

    >>> U, values, V = product_svd(torch.eye(3), torch.diag(torch.tensor([3.0, 2.0, 1.0])), rank=2)
    >>> values.round(decimals=4).tolist()
    [3.0, 2.0]
    """
    b, a = B.double(), A.double()
    if exact:
        P, right = torch.linalg.qr(a.mT)  # [d_in, l], [l, R]
        C = b @ right.mT  # [d_out, l]; B A = C P^T
        v = torch.linalg.eigh(C.mT @ C).eigenvectors.flip(1)[:, : min(rank, len(C))]
        U, upper = torch.linalg.qr(C @ v)  # orthogonal columns: upper is diagonal
        values = upper.diagonal().abs()
        U, V = torch.where(upper.diagonal() < 0, -U, U), (P @ v).mT
    else:
        width = min(rank + _OVERSAMPLE, len(b), a.shape[1])
        key = random.key(0, "recompress") if key is None else key
        sketch = random.normal(key, (a.shape[1], width)).to(a)
        for _ in range(1 + _POWER_STEPS):
            Q = torch.linalg.qr(b @ (a @ sketch)).Q  # [d_out, width]
            sketch = a.mT @ (b.mT @ Q)  # [d_in, width], (Q^T B A)^T
        u, values, v = torch.linalg.svd(sketch.mT, full_matrices=False)
        U, values, V = (Q @ u)[:, :rank], values[:rank], v[:rank]
    extreme = V.gather(1, V.abs().argmax(1, keepdim=True))  # [l, 1]
    sign = torch.where(extreme < 0, -1.0, 1.0)[:, 0]
    return U * sign, values, sign[:, None] * V


def recompress(
    B: Tensor, A: Tensor, rank: int, exact: bool = False, key: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The best approximation of B A of rank ``rank``, as factors, by `product_svd`.

    The randomised SVD is exact for products of rank at most ``rank`` + 8.

    Args:
        B: ``[d_out, R]``.
        A: ``[R, d_in]``.
        rank: of the result; it is padded with zeros where B A has a lower rank.
        exact, key: as in `product_svd`.

    Returns:
        B' ``[d_out, rank]`` and A' ``[rank, d_in]``, each with the square roots of the singular
        values, worked out in float64.

    >>> B, A = recompress(torch.eye(3), torch.diag(torch.tensor([3.0, 2.0, 1.0])), rank=2)
    >>> (B @ A).diagonal().round(decimals=4).tolist()
    [3.0, 2.0, 0.0]
    """
    U, values, V = product_svd(B, A, rank, exact, key)
    # a value that is only rounding would become noise, and its root larger noise
    root = torch.where(values > torch.finfo(B.dtype).eps * values[0], values, 0.0).sqrt()
    missing = rank - len(values)
    new_B = F.pad(U * root, (0, missing))
    new_A = F.pad(root[:, None] * V, (0, 0, 0, missing))
    return new_B.to(B.dtype), new_A.to(A.dtype)
