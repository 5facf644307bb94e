"""The federated methods, one file each."""

from __future__ import annotations

from ..method import Method
from .fedala import FedALA
from .fedavg import FedAvg
from .fedavg_ft import FedAvgFT
from .fedbabu import FedBABU
from .fedhft import FedHFT
from .fedmerge import FedMerge
from .fedper import FedPer
from .fedprox import FedProx
from .fedrep import FedRep
from .fedsdg import FedSDG
from .fedsq import FedSQ
from .lg_fedavg import LGFedAvg
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
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "lg-fedavg": LGFedAvg,
    "fedala": FedALA,
}
