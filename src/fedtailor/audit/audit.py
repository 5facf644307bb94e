"""All attacks on one method of a finished run, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import InputError
from ..runs.trained import TrainedMethod
from ..store.read import read
from .canaries import by_canaries
from .finding import Finding
from .inversion import by_inversion
from .likelihood import by_likelihood, check_shadows
from .membership import Attacked, by_loss


@dataclass(frozen=True)
class Plan:
    """How much of each attack there is: ``shadows`` runs (0: none), ``batches`` of ``batch_size``
    rows that are inverted in ``steps``, and ``canaries`` in all repeated runs; ``minutes`` bound
    them together."""

    shadows: int = 0
    batches: int = 4
    batch_size: int = 1
    steps: int = 300
    canaries: int = 400
    minutes: float = 10.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("shadows", 0, 10_000), ("batches", 0, 1000), ("batch_size", 1, 1000),
            ("steps", 1, 1_000_000), ("canaries", 0, 1_000_000), ("minutes", 0, 1e6),
        ):  # fmt: skip
            value = getattr(self, name)
            if not least <= value <= most:
                flag = name.replace("_", "-")
                raise InputError(f"--{flag} {value:g}; allowed: {least:g} to {most:g}")


def audit(
    trained: TrainedMethod, plan: Plan | None = None, say: Callable[[str], object] = lambda _: None
) -> list[Finding]:
    """What the attacks find out, one `Finding` for each number; ``say`` gets a line before each
    that takes long. Raises InputError where there are no rows to tell apart, or the run can't have
    shadows."""
    plan = plan or Plan()
    experiment = trained.experiment
    if experiment.engine.device != "cpu":  # the models are opened there
        engine = replace(experiment.engine, device="cpu")
        trained = replace(trained, experiment=replace(experiment, engine=engine))
    models = Attacked.of(trained)
    if plan.shadows:
        check_shadows(trained, plan.shadows)
    deadline = time.monotonic() + 60 * plan.minutes  # no attack begins with anything new after it
    rows = models["personal"].rows
    say(f"{len(rows.is_member)} rows of {len(rows.rows)} clients; at most {plan.minutes:g} minutes")
    findings = by_loss(trained, models)
    if plan.shadows:
        trial = read(trained.run, only=(trained.label, trained.seed)).trials[0]
        seconds = sum(sum(one.seconds.values()) for one in trial.timings)
        say(f"{plan.shadows} shadow runs, {seconds:.0f} s each as the run itself took")
        findings += by_likelihood(trained, models, plan.shadows, deadline)
    if plan.canaries:
        runs = -(-plan.canaries // trained.federation.num_clients)
        findings += by_canaries(trained, runs, deadline, say)
    if plan.batches:
        each = plan.batch_size, plan.batches, plan.steps
        findings += by_inversion(trained, *each, deadline, say)
    return findings
