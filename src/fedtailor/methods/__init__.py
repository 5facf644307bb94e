"""The federated methods, one file each.

A class is imported ``as`` itself, so that type checkers know it as ``fedtailor.FedAvg``, too.
"""

from __future__ import annotations

from ..method import Method
from .apfl import APFL as APFL
from .ditto import Ditto as Ditto
from .fedala import FedALA as FedALA
from .fedalt import FedALT as FedALT
from .fedavg import FedAvg as FedAvg
from .fedavg_ft import FedAvgFT as FedAvgFT
from .fedavgm import FedAvgM as FedAvgM
from .fedbabu import FedBABU as FedBABU
from .fedbn import FedBN as FedBN
from .feddpa import FedDPA as FedDPA
from .fedem import FedEM as FedEM
from .fedhft import FedHFT as FedHFT
from .fedlora import FedLoRA as FedLoRA
from .fedmask import FedMask as FedMask
from .fedmd import FedMD as FedMD
from .fedmerge import FedMerge as FedMerge
from .fedopt import FedAdagrad as FedAdagrad
from .fedopt import FedAdam as FedAdam
from .fedopt import FedYogi as FedYogi
from .fedper import FedPer as FedPer
from .fedprox import FedProx as FedProx
from .fedrep import FedRep as FedRep
from .fedsa_lora import FedSALoRA as FedSALoRA
from .fedsdg import FedSDG as FedSDG
from .fedsq import FedSQ as FedSQ
from .ffa_lora import FFALoRA as FFALoRA
from .flexlora import FlexLoRA as FlexLoRA
from .flora import FLoRA as FLoRA
from .heterofl import HeteroFL as HeteroFL
from .hetlora import HetLoRA as HetLoRA
from .ifca import IFCA as IFCA
from .lg_fedavg import LGFedAvg as LGFedAvg
from .local import Local as Local
from .lora_fair import LoRAFAIR as LoRAFAIR
from .per_fedavg import PerFedAvg as PerFedAvg
from .pfedgate import PFedGate as PFedGate
from .pfedme import PFedMe as PFedMe
from .pfedmoe import PFedMoE as PFedMoE
from .scaffold import Scaffold as Scaffold

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
    "fedsa-lora": FedSALoRA,
    "flora": FLoRA,
    "flexlora": FlexLoRA,
    "hetlora": HetLoRA,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "scaffold": Scaffold,
    "fedbn": FedBN,
    "lora-fair": LoRAFAIR,
    "feddpa": FedDPA,
    "fedalt": FedALT,
    "ditto": Ditto,
    "pfedme": PFedMe,
    "apfl": APFL,
    "per-fedavg": PerFedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "lg-fedavg": LGFedAvg,
    "fedala": FedALA,
    "ifca": IFCA,
    "fedem": FedEM,
    "pfedmoe": PFedMoE,
    "fedmd": FedMD,
    "heterofl": HeteroFL,
    "fedmask": FedMask,
    "fedlora": FedLoRA,
    "ffa-lora": FFALoRA,
}
"""The class of each method, by the name that it has in experiment files."""
