"""A model of one's own; exports take this file along."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A convolution, batch normalisation, and a head, for 8 x 8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(6 * 9, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(pixel_values)))
        return self.head(torch.relu(self.hidden(self.pool(x).flatten(1))))


def net() -> Net:
    return Net()
