"""The federated methods, one file each."""

from __future__ import annotations

from ..method import Method
from .fedavg import FedAvg
from .fedavg_ft import FedAvgFT
from .fedhft import FedHFT
from .fedlora import FedLoRA
from .fedmask import FedMask
from .fedmerge import FedMerge
from .fedprox import FedProx
from .fedsdg import FedSDG
from .fedsq import FedSQ
from .ffa_lora import FFALoRA
from .heterofl import HeteroFL
from .local import Local
from .pfedgate import PFedGate

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "fedsdg": FedSDG,
    "fedhft": FedHFT,
    "fedmerge": FedMerge,
    "pfedgate": PFedGate,
    "fedsq": FedSQ,
    "heterofl": HeteroFL,
    "fedmask": FedMask,
    "fedlora": FedLoRA,
    "ffa-lora": FFALoRA,
}
