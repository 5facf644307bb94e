"""The federated methods, one file each."""

from __future__ import annotations

from ..method import Method
from .fedavg import FedAvg
from .fedavg_ft import FedAvgFT
from .fedem import FedEM
from .fedhft import FedHFT
from .fedmd import FedMD
from .fedmerge import FedMerge
from .fedprox import FedProx
from .fedsdg import FedSDG
from .fedsq import FedSQ
from .ifca import IFCA
from .local import Local
from .pfedgate import PFedGate
from .pfedmoe import PFedMoE

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
    "ifca": IFCA,
    "fedem": FedEM,
    "pfedmoe": PFedMoE,
    "fedmd": FedMD,
}
