"""The federated methods, one file each."""

from __future__ import annotations

from ..method import Method
from .apfl import APFL
from .ditto import Ditto
from .fedavg import FedAvg
from .fedavg_ft import FedAvgFT
from .fedhft import FedHFT
from .fedmerge import FedMerge
from .fedprox import FedProx
from .fedsdg import FedSDG
from .fedsq import FedSQ
from .local import Local
from .per_fedavg import PerFedAvg
from .pfedgate import PFedGate
from .pfedme import PFedMe

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
    "ditto": Ditto,
    "pfedme": PFedMe,
    "apfl": APFL,
    "per-fedavg": PerFedAvg,
}
