"""The papers' convolutional networks, as chains of named modules with random weights.

Every activation, pooling and normalisation is a separate module, and no forward has a hidden step.
So hooks can reach every step, and a frozen prefix can end between any two modules of the chain.

`cnn` and `lenet` are the networks of pFedGate (Chen et al., ICML 2023, appendix H). The paper names
the kind of layers and the number of parameters; widths and padding here are the usual ones that
give exactly these numbers. `resnet9` is the usual network of that name; FedMerge (Chen et al.)
doesn't describe the one it used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn

from ..errors import InputError

Picture = tuple[int, int, int]
"""Channels, height and width of a model's input."""

Network = Callable[[Picture, int, float], nn.Sequential]
"""A function from the picture, the number of classes and a factor on the widths to a network whose
last module is ``head``. It raises InputError for pictures that are too small."""


class Residual(nn.Module):
    """``x + branch(x)``."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.branch(x)
        return y


def resnet9(picture: Picture, num_classes: int, width: float = 1.0) -> nn.Sequential:
    """Build eight 3 x 3 convolutions of 64 to 512 channels with batch normalisation, and a head.

    It has 6,573,130 parameters with 10 classes on 32 x 32 colour pictures. FedMerge's Table 1 gives
    the sizes of other networks as multiples of its ResNet-9, which therefore has about 4.9 million:
    it is not this network, but more likely a ResNet-18 with one block a stage.

    Sides have at least 8 pixels.

    >>> sum(p.numel() for p in resnet9((3, 32, 32), 10).parameters())
    6573130
    """
    channels, height, wide = picture
    _check_side("resnet9", picture, 8)
    a, b, c, d = _scaled(width, 64, 128, 256, 512)
    return _chain(
        stem=_normalised(channels, a),
        conv1=_normalised(a, b, pool=True),
        residual1=Residual(_chain(conv1=_normalised(b, b), conv2=_normalised(b, b))),
        conv2=_normalised(b, c, pool=True),
        conv3=_normalised(c, d, pool=True),
        residual2=Residual(_chain(conv1=_normalised(d, d), conv2=_normalised(d, d))),
        pool=nn.MaxPool2d((height // 8, wide // 8)),
        flatten=nn.Flatten(),
        head=nn.Linear(d, num_classes),
    )


def cnn(picture: Picture, num_classes: int, width: float = 1.0) -> nn.Sequential:
    """Build pFedGate's network for EMNIST and FEMNIST: two convolutions, one hidden layer of 2,048.

    It has 2,171,786 parameters with 10 classes on 28 x 28 grey pictures, the paper's number (its
    data have 62 classes). With 100 classes on 32 x 32 colour pictures it has 3,537,444, which is
    the paper's number for CIFAR-100, though the paper calls that network "LeNet-based", too.

    >>> sum(p.numel() for p in cnn((1, 28, 28), 10).parameters())
    2171786
    """
    _check_side("cnn", picture, 16)
    a, b, hidden = _scaled(width, 32, 64, 2048)
    return _chain(
        **_two_convolutions(picture[0], a, b),
        flatten=nn.Flatten(),
        hidden=nn.Linear(_flat(picture, b), hidden),
        relu3=nn.ReLU(),
        head=nn.Linear(hidden, num_classes),
    )


def lenet(picture: Picture, num_classes: int, width: float = 1.0) -> nn.Sequential:
    """Build pFedGate's LeNet for CIFAR-10: two convolutions, hidden layers of 120 and 84 units.

    It has 256,830 parameters with 10 classes on 32 x 32 colour pictures, the paper's number.

    >>> sum(p.numel() for p in lenet((3, 32, 32), 10).parameters())
    256830
    """
    _check_side("lenet", picture, 16)
    a, b, first, second = _scaled(width, 32, 64, 120, 84)
    return _chain(
        **_two_convolutions(picture[0], a, b),
        flatten=nn.Flatten(),
        hidden1=nn.Linear(_flat(picture, b), first),
        relu3=nn.ReLU(),
        hidden2=nn.Linear(first, second),
        relu4=nn.ReLU(),
        head=nn.Linear(second, num_classes),
    )


def _chain(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def _normalised(d_in: int, d_out: int, *, pool: bool = False) -> nn.Sequential:
    chain = _chain(
        conv=nn.Conv2d(d_in, d_out, 3, padding=1, bias=False),
        norm=nn.BatchNorm2d(d_out),
        relu=nn.ReLU(),
    )
    if pool:
        chain.add_module("pool", nn.MaxPool2d(2))
    return chain


def _two_convolutions(channels: int, a: int, b: int) -> dict[str, nn.Module]:
    return {
        "conv1": nn.Conv2d(channels, a, 5),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(a, b, 5),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
    }


def _flat(picture: Picture, channels: int) -> int:
    """Return the size of a picture after two unpadded 5 x 5 convolutions, each with a pooling."""
    height, wide = (((side - 4) // 2 - 4) // 2 for side in picture[1:])
    return channels * height * wide


def _scaled(width: float, *sizes: int) -> list[int]:
    return [max(1, round(width * size)) for size in sizes]


def _check_side(name: str, picture: Picture, min_side: int) -> None:
    _, height, wide = picture
    if min(height, wide) < min_side:
        raise InputError(
            f"pictures of {height} x {wide} are too small for {name}; it takes {min_side} x "
            f"{min_side} and more: set model.image_size"
        )
