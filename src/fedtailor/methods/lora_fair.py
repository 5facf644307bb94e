"""LoRA-FAIR: LoRA whose averaged factors are corrected towards the mean of the clients' products.

LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement. J. Bian,
L. Wang, L. Zhang, J. Xu. ICCV 2025 (arXiv 2411.14961).

    client k:  A_k, B_k <- LoRA training from the received A, B' on its batches
    server:    A = sum_k p_k A_k,  B = sum_k p_k B_k,  W = sum_k p_k B_k A_k,  p_k = n_k / n
               Delta = argmin ||W - (B + Delta) A||^2 + lambda ||Delta||^2                 (8)
               sends A and B' = B + Delta

The product B A of the means is not the mean W of the products. Here

    W - B A = sum_k p_k (B_k - B)(A_k - A),   Delta = (W - B A) A^T (A A^T + lambda I)^-1,

so that nothing larger than a factor is ever formed, and Delta is exactly 0 for a single client.

Differs from the paper:
- The paper compares W with (B + Delta) A by their cosine and lowers (8) by gradient steps on the
  server. Here the squared Frobenius norm stands in its place, which has a closed form. As lambda
  goes to 0, both are minimised by a multiple of the same matrix, the projection of W onto A's rows.
- The task head is averaged as in FedAvg. Delta is worked out in float64.
- The paper's text could not be read here. The number (8), the cosine and lambda = 0.01 are those of
  a detailed account of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le
from torch import Tensor, nn

from ..layers.lora import Alpha, Rank, lora_pairs
from ..layers.trainable import choose_trainable
from ..method import Cohort, Method, Server
from ..optim import Optimiser
from ..params import Params
from ..stacked import weighted_sum
from ..task.backbone import Backbone
from ..task.task import Task


def correction(A: Tensor, B: Tensor, shares: Tensor, lam: float) -> Tensor:
    """Delta, by which the mean of the B_k is moved.

    Args:
        A: the clients' A_k ``[c, r, d_in]``.
        B: the clients' B_k ``[c, d_out, r]``.
        shares: p ``[c]``, of sum 1.
        lam: lambda, positive.

    Returns:
        float64 ``[d_out, r]``.

    >>> A, B = torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]]), torch.tensor([[[0.0]], [[2.0]]])
    >>> correction(A, B, torch.tensor([0.5, 0.5]), 1e-9).round(decimals=6)  # W = 3, B A = 2
    tensor([[0.5000]], dtype=torch.float64)
    """
    p = shares.double().to(A.device)
    A, B = A.double(), B.double()
    mean_A, mean_B = torch.einsum("c,cri->ri", p, A), torch.einsum("c,cor->or", p, B)
    drift = (A - mean_A) @ mean_A.T  # (A_k - A) A^T, [c, r, r]
    residual = torch.einsum("c,cor,crs->os", p, B - mean_B, drift)  # (W - B A) A^T
    gram = mean_A @ mean_A.T + lam * torch.eye(len(mean_A), dtype=p.dtype, device=p.device)
    Delta: Tensor = torch.linalg.solve(gram, residual.T).T
    return Delta


@dataclass(frozen=True)
class LoRAFAIR(Method):
    """LoRA (rank r, scaling alpha / r) and the task head, averaged; ``lam`` is lambda."""

    name: ClassVar[str] = "lora-fair"
    family: ClassVar[str] = "adapter"
    released: ClassVar[str] = "each client's factors, by its rank"

    lam: Annotated[float, Gt(0), Le(1e6)] = 0.01
    rank: Rank = 8
    lora_alpha: Alpha = 16.0
    optimiser: Optimiser = field(default=Optimiser(lr=0.05), kw_only=True)

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(backbone, "lora", self.rank, self.lora_alpha)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        p = cohort.shares
        mean = weighted_sum(uploads, p)
        for path, (A, B) in lora_pairs(uploads).items():
            name = f"{path}.lora_B.default.weight"
            mean[name] = (mean[name] + correction(A, B, p, self.lam)).to(B.dtype)
        return mean
