"""Personalized federated fine-tuning: one pretrained model, fitted to every client."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .method import Method

# Each public name is imported when it is first used, so that `import fedtailor` takes no time.
# The classes in METHODS are public, too. ``__init__.pyi`` says the same to type checkers.
_ORIGINS = {
    "METHODS": "methods.METHODS",
    "Backbone": "task.backbone.Backbone",
    "ClientContext": "optim.ClientContext",
    "Cohort": "method.Cohort",
    "CohortConfig": "engine.config.CohortConfig",
    "Data": "data.Data",
    "CommittedRound": "runs.callbacks.CommittedRound",
    "DataConfig": "data.config.DataConfig",
    "EarlyStopping": "runs.callbacks.EarlyStopping",
    "EngineConfig": "engine.config.EngineConfig",
    "EvaluateConfig": "engine.config.EvaluateConfig",
    "Experiment": "runs.experiment.Experiment",
    "Federation": "data.federation.Federation",
    "FineTuning": "method.FineTuning",
    "InputError": "errors.InputError",
    "LocalConfig": "data.config.LocalConfig",
    "Method": "method.Method",
    "ModelConfig": "models.config.ModelConfig",
    "Optimiser": "optim.Optimiser",
    "Paper": "method.Paper",
    "Plan": "engine.config.Plan",
    "Robust": "uploads.rules.Robust",
    "Result": "results.Result",
    "Round": "engine.results.Round",
    "STOP": "runs.callbacks.STOP",
    "ScheduleConfig": "engine.config.ScheduleConfig",
    "SplitConfig": "data.config.SplitConfig",
    "StartConfig": "runs.experiment.StartConfig",
    "Task": "task.task.Task",
    "compare": "report.compare",
    "export_model": "export.folder.export_model",
    "from_module": "models.from_module",
    "init_process_group": "engine.executors.process_group.init_process_group",
    "Onboarded": "inference.onboard.Onboarded",
    "PersonalModel": "inference.model.PersonalModel",
    "Prediction": "objectives.classification.Prediction",
    "load": "runs.experiment.load",
    "load_model": "inference.model.load_model",
    "onboard": "inference.onboard.onboard",
    "open_result": "results.open_result",
    "merge": "runs.merge.merge",
    "rollback": "store.rollback.rollback",
    "rounds": "engine.rounds.rounds",
    "run": "results.run",
    "track": "trackers.follow.track",
    "train": "optim.train",
    "write_report": "report.write",
}


def __getattr__(name: str) -> Any:
    value: Any
    if name in _ORIGINS:
        module, _, attribute = _ORIGINS[name].rpartition(".")
        value = getattr(import_module(f".{module}", __name__), attribute)
    elif name == "__version__":
        from importlib.metadata import version

        value = version(__name__)
    elif name == "__all__":
        value = sorted([*_ORIGINS, *_method_classes()])
    elif name[:1].isupper() and name in (classes := _method_classes()):
        value = classes[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


def _method_classes() -> dict[str, type[Method]]:
    from .methods import METHODS

    return {method.__name__: method for method in METHODS.values()}
