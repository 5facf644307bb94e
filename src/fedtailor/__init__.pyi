"""The public names, for type checkers; ``__init__.py`` imports each when it is first used."""

from .data import Data as Data
from .data.config import DataConfig as DataConfig
from .data.config import LocalConfig as LocalConfig
from .data.config import SplitConfig as SplitConfig
from .data.federation import Federation as Federation
from .engine.config import CohortConfig as CohortConfig
from .engine.config import EngineConfig as EngineConfig
from .engine.config import EvaluateConfig as EvaluateConfig
from .engine.config import GenerateConfig as GenerateConfig
from .engine.config import Plan as Plan
from .engine.config import ScheduleConfig as ScheduleConfig
from .engine.executors.process_group import init_process_group as init_process_group
from .engine.results import Round as Round
from .engine.rounds import rounds as rounds
from .errors import InputError as InputError
from .export.folder import export_model as export_model
from .inference.model import PersonalModel as PersonalModel
from .inference.model import load_model as load_model
from .inference.onboard import Onboarded as Onboarded
from .inference.onboard import onboard as onboard
from .method import Cohort as Cohort
from .method import FineTuning as FineTuning
from .method import Method as Method
from .method import Paper as Paper
from .methods import *  # noqa: F403
from .methods import METHODS as METHODS
from .models import from_module as from_module
from .models.config import ModelConfig as ModelConfig
from .objectives.classification import Prediction as Prediction
from .optim import ClientContext as ClientContext
from .optim import Optimiser as Optimiser
from .optim import train as train
from .report import compare as compare
from .report import write
from .results import Result as Result
from .results import open_result as open_result
from .results import run as run
from .runs.callbacks import STOP as STOP
from .runs.callbacks import CommittedRound as CommittedRound
from .runs.callbacks import EarlyStopping as EarlyStopping
from .runs.experiment import Experiment as Experiment
from .runs.experiment import StartConfig as StartConfig
from .runs.experiment import load as load
from .runs.merge import merge as merge
from .store.rollback import rollback as rollback
from .task.backbone import Backbone as Backbone
from .task.task import Task as Task
from .trackers.follow import track as track
from .uploads.accounting import PrivacyConfig as PrivacyConfig
from .uploads.rules import Robust as Robust
from .uploads.secure.config import SecureAggregationConfig as SecureAggregationConfig

write_report = write
__version__: str
