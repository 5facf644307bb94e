"""A run whose clients' work is shared by the ranks that torchrun has started.

Every rank loads the same inputs. The first one runs the experiment as one process would, and names
the next trial to the others, which do their share of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

import torch

from ..engine.config import EngineConfig
from ..engine.executors.choose import share_executor
from ..engine.executors.process_group import ProcessGroup
from ..engine.executors.ranks import RankExecutor, follow
from ..engine.executors.work import Work
from ..engine.malloc import keep_freed_memory
from ..engine.prepare import as_trained, client_works
from ..errors import InputError
from ..store.committed import model_seed
from .build import Inputs, device_of
from .manifest import PACKAGES, data_manifest
from .trials import TrialRun


def check_ranks(inputs: Inputs, group: ProcessGroup) -> None:
    """Raise InputError where the ranks differ in what must be the same, or can't work together."""
    if (buffer := inputs.experiment.cohort.buffer) is not None:
        raise InputError(
            f"cohort.buffer = {buffer}: it is simulated in one process, not by torchrun"
        )
    group.check_device(device_of(inputs.experiment.engine))
    group.check_consistent(_fingerprint(inputs))


def begin_trial(group: ProcessGroup, trial: TrialRun) -> None:
    """On the first rank: tell the others which trial is next."""
    seed = model_seed(trial.store.path, trial.seed)
    group.broadcast((trial.seed, trial.label, seed, trial.federation.secret))


def leading_executor(
    group: ProcessGroup, engine: EngineConfig, device: torch.device, works: Mapping[str, Work]
) -> RankExecutor:
    """On the first rank: what shares a trial's work over all ranks."""
    return RankExecutor(group, share_executor(engine, works, device, group.local_size))


def follow_trials(inputs: Inputs, group: ProcessGroup) -> None:
    """On every rank but the first: do a share of each trial, until none is left."""
    plan = inputs.experiment.plan
    while (trial := group.receive()) is not None:
        seed, label, model_seed, secret = trial
        method = inputs.experiment.methods[label]
        federation = replace(inputs.federations[seed], secret=secret)
        task = inputs.task(method, model_seed)
        keep_freed_memory()
        federation = as_trained(method, task, federation, plan)
        works = client_works(method, task, federation, plan, inputs.metrics)
        work = share_executor(plan.engine, works._asdict(), task.device, group.local_size)
        follow(group, work)


def _fingerprint(inputs: Inputs) -> dict[str, Any]:
    weights = blake2b()
    model = inputs.backbone(inputs.experiment.seeds[0]).model
    for value in model.state_dict().values():
        weights.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return {
        "experiment": inputs.experiment.as_dict(),
        "data set or split": [data_manifest(f) for f in inputs.federations.values()],
        "model": weights.hexdigest(),
        "kind of device": "cuda" if torch.cuda.is_available() else "cpu",
        "package version": {name: version(name) for name in PACKAGES},
    }
