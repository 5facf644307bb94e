"""How much the models of a run tell, with and without a defence: python -m benchmarks.audit.

Twenty clients with 20 digits each train for eight rounds. Each method under each defence is a run,
which is audited as by `fedtailor audit`. In a second table they have nine digits each, and train
until their models know them by heart. The tables go to results/audit-cpu.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fedtailor as ft
from fedtailor.audit.audit import Plan, audit
from fedtailor.audit.finding import Finding
from fedtailor.errors import InputError
from fedtailor.methods import METHODS
from fedtailor.optim import Optimiser
from fedtailor.runs.trained import open_trained

OUT = Path(__file__).parent / "results" / "audit-cpu.md"
AUDITED = ("fedavg", "fedsdg", "fedhft", "fedmerge", "pfedgate", "fedsq")
MEMORISING = ("local", "fedavg", "fedavg-ft", "fedper", "ditto", "fedsdg")
OF_RECORDS = ft.PrivacyConfig(level="record", epsilon=8.0, delta=0.01, clip=1.0)
DEFENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "epsilon 8": {"privacy": ft.PrivacyConfig(epsilon=8.0, clip=0.5)},
    "epsilon 8 of records": {"privacy": OF_RECORDS},
    "secure aggregation": {"secure_aggregation": ft.SecureAggregationConfig(threshold=0.7)},
}
COLUMNS = {
    ("loss", "personal", "AUC"): "personal model: AUC",
    ("loss", "global", "AUC"): "global model: AUC",
    ("inversion", "upload", "error left"): "the server's view of an upload: error left",
    ("inversion", "release", "error left"): "the released mean: error left",
    ("canaries", "release", "epsilon at least"): "epsilon at least",
}


def experiment(label: str, defence: str, *, memorising: bool = False) -> ft.Experiment:
    """One method under one defence; FedSDG averages where the server adds noise."""
    method: Any = METHODS[label]()
    if label == "fedavg" or memorising:
        method = replace(method, optimiser=Optimiser(lr=0.1))
    if label == "fedhft":
        method = replace(method, clusters=2, warmup_rounds=2)
    if label == "fedsdg" and defence == "epsilon 8":
        method = replace(method, aggregation="uniform")
    found = ft.Experiment(
        {label: method},
        rounds=8,
        data=ft.DataConfig(name="digits", limit=800),
        split=ft.SplitConfig(20, scheme="iid", validation=0.2, test=0.3),
        model=ft.ModelConfig(
            "lenet", pretrained=False, image_size=16, width=0.25, targets=("hidden1", "hidden2")
        ),
        local=ft.LocalConfig(batch_size=8, epochs=5),
        evaluate=ft.EvaluateConfig(every=8),
        engine=ft.EngineConfig("vectorised"),
        **DEFENCES[defence],
    )
    if not memorising:
        return found
    return replace(
        found,
        data=ft.DataConfig(name="digits", limit=400),
        split=ft.SplitConfig(20, scheme="iid", validation=0.1, test=0.45),
        local=ft.LocalConfig(batch_size=4, epochs=12),
    )


def cells(chosen: ft.Experiment, folder: Path, plan: Plan) -> list[str]:
    """A row's numbers, or why there are none."""
    (label,) = chosen.methods
    with TemporaryDirectory(dir=folder) as out:
        try:
            ft.run(chosen, Path(out) / "run", summary=False, scores=False)
        except InputError as error:
            return [f"refused: {str(error).partition(': ')[2].partition('. ')[0]}"]
        findings = audit(open_trained(Path(out) / "run", label), plan)
    found = {(one.attack, one.target, one.measure): one for one in findings}
    return [_cell(found.get(column)) for column in COLUMNS]


def _cell(found: Finding | None) -> str:
    if found is None or found.value is None:
        return "-"
    if found.high is None:
        return f"{found.value:.2f}"
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def main() -> None:
    """Print the tables' lines as they are measured, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=2, help="inverted for each row")
    options = parser.parse_args()
    whole = Plan(batches=options.batches, steps=150, canaries=400, minutes=20)
    lines = list[str]()

    def say(*cells: str) -> None:
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)

    with TemporaryDirectory() as folder:
        for memorising in (False, True):
            say("method", "defence", *COLUMNS.values())
            lines.append(f"|{'---|' * (2 + len(COLUMNS))}")
            plan = replace(whole, batches=0, canaries=0) if memorising else whole
            defences = ("none", "epsilon 8 of records") if memorising else DEFENCES
            for defence in defences:
                for label in MEMORISING if memorising else AUDITED:
                    chosen = experiment(label, defence, memorising=memorising)
                    say(label, defence, *cells(chosen, Path(folder), plan))
            lines.append("")
    OUT.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
