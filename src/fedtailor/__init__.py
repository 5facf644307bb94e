"""Personalized federated fine-tuning: one pretrained model, fitted to every client."""

from .data import DataConfig, SplitConfig
from .engine import Round, rounds
from .errors import InputError
from .evaluation import EvaluateConfig
from .executors import EngineConfig
from .experiment import Experiment, load
from .federation import Federation, LocalConfig
from .method import Cohort, Method, Paper
from .methods import METHODS
from .methods.fedavg import FedAvg
from .methods.fedavg_ft import FedAvgFT
from .methods.fedhft import FedHFT
from .methods.fedmerge import FedMerge
from .methods.fedprox import FedProx
from .methods.fedsdg import FedSDG
from .methods.fedsq import FedSQ
from .methods.local import Local
from .methods.pfedgate import PFedGate
from .models import ModelConfig, from_module
from .optim import Context, Optimiser, train
from .plan import CohortConfig, Plan, ScheduleConfig
from .report import compare
from .report import write as write_report
from .robust import Robust
from .run import run
from .task import Backbone, Task

__all__ = [
    "METHODS",
    "Backbone",
    "Cohort",
    "CohortConfig",
    "Context",
    "DataConfig",
    "EngineConfig",
    "EvaluateConfig",
    "Experiment",
    "FedAvg",
    "FedAvgFT",
    "FedHFT",
    "FedMerge",
    "FedProx",
    "FedSDG",
    "FedSQ",
    "Federation",
    "InputError",
    "Local",
    "LocalConfig",
    "Method",
    "ModelConfig",
    "Optimiser",
    "PFedGate",
    "Paper",
    "Plan",
    "Robust",
    "Round",
    "ScheduleConfig",
    "SplitConfig",
    "Task",
    "compare",
    "from_module",
    "load",
    "rounds",
    "run",
    "train",
    "write_report",
]
