"""Train a network and data of your own with three methods, and print one table.

The network is any ``torch.nn.Module``, and the data are NumPy arrays. Run it with
``python examples/own_model.py``; it takes a few seconds.
"""

import tempfile

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedtailor as ft


class Net(nn.Module):
    """Two linear layers for pictures of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(pixel_values.flatten(1)).relu())
        return logits


def main() -> None:
    digits = load_digits()  # 1,797 pictures, 8 x 8, values 0 to 16
    pictures = (digits.images * 15).astype(np.uint8)  # [N, H, W]
    data = ft.Data.from_arrays(pictures, digits.target)
    adam = ft.Optimiser("adam", lr=3e-3)
    experiment = ft.Experiment(
        methods={
            "fedavg": ft.FedAvg(optimiser=adam),
            "fedsdg": ft.FedSDG(rank=4, optimiser=adam),
            "local": ft.Local(optimiser=adam),
        },
        split=ft.SplitConfig(clients=10, scheme="dirichlet", alpha=0.3),
        rounds=10,
    )
    torch.manual_seed(0)  # the network draws its first weights by itself
    backbone = ft.from_module(Net(), head=["head"], targets=["body"])  # targets: for LoRA
    with tempfile.TemporaryDirectory() as out:
        print(ft.run(experiment, out, data=data, backbone=backbone))


if __name__ == "__main__":
    main()
