"""Train a few methods for a few rounds, and compare them on validation data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from ..errors import InputError
from ..results import Best, run
from ..runs.experiment import Experiment, configured_method
from ..store.metrics import bare, higher_is_better, unit_of
from ..temporary_folder import temporary_folder
from .advise import BASELINES, MOST, Advice
from .measured import ALONE


def probe(advice: Advice, experiment: Experiment, rounds: int, out: Path | None = None) -> Best:
    """Run the methods that ``advice`` names, the experiment's own, training alone and FedAvg, for
    so many ``rounds`` with the first seed; return the best on validation data, and all scores. The
    run is deleted afterwards, unless it has a place, ``out``."""
    if experiment.split.validation == 0:
        raise InputError("a probe needs validation data: split.validation is 0; set it to 0.2, say")
    labels = dict.fromkeys([*advice.methods, *BASELINES, *experiment.methods])
    own = experiment.methods
    short = replace(
        experiment,
        methods={k: own.get(k) or configured_method(k, advice.settings_of(k)) for k in labels},
        rounds=rounds,
        seeds=experiment.seeds[:1],
        evaluate=replace(experiment.evaluate, every=rounds),
    )
    if out is not None:
        return run(short, out, scores=False).best  # scores are of test examples
    with temporary_folder("fedtailor-probe-") as folder:
        return run(short, folder / "probe", scores=False).best


def lines(
    advice: Advice, best: Best, rounds: int, source: str, changes: Sequence[str] = ()
) -> list[str]:
    """Return a probe as text: all scores on validation data, and the command that compares the best
    methods with training alone for as long as the experiment says; ``source`` and ``changes`` as
    in `Advice.lines`."""
    metric, sign = best.metric, 1 if higher_is_better(best.metric) else -1
    order = sorted(best.scores, key=lambda label: -sign * best.scores[label])
    cells = [[label, bare(metric, best.scores[label])] for label in order]
    header = ["method", f"{metric} on validation data{unit_of(metric)}"]
    after = "1 round" if rounds == 1 else f"{rounds} rounds"
    table = tabulate(cells, headers=header, colalign=("left", "right"), disable_numparse=True)
    said = [f"After {after}, with one seed:", *table.splitlines(), ""]
    said += [f"{label}: {share} never trained so soon." for label, share in best.untrained.items()]
    alone = best.scores.get(ALONE)
    ahead = [k for k in order if alone is None or sign * best.scores[k] > sign * alone]
    if not ahead:
        return [*said, "None was ahead of training alone so soon: give the probe more rounds."]
    said.append("This is a hint. To compare the best of them for all rounds:")
    command = advice.command(source, changes, [*ahead[:MOST], ALONE])
    return said + [f"  {line}" for line in command]
