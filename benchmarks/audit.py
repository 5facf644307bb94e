"""How much the models of six methods tell, with and without a defence: python -m benchmarks.audit.

Twenty clients with 20 digits each train for eight rounds. Each
method under each defence is a run, which is audited as by `fedtailor audit`. The table goes to
results/audit-cpu.md.
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
DEFENCES = {
    "none": ft.PrivacyConfig(),
    "epsilon 8": ft.PrivacyConfig(epsilon=8.0, clip=0.5),
}
COLUMNS = {
    ("loss", "personal", "AUC"): "personal model: AUC",
    ("loss", "global", "AUC"): "global model: AUC",
    ("inversion", "upload", "error left"): "the server's view of an upload: error left",
    ("inversion", "release", "error left"): "the released mean: error left",
    ("canaries", "release", "epsilon at least"): "epsilon at least",
}


def experiment(label: str, privacy: ft.PrivacyConfig) -> ft.Experiment:
    """One method under one defence; FedSDG averages where there is noise."""
    method: Any = METHODS[label]()
    if label == "fedavg":
        method = replace(method, optimiser=Optimiser(lr=0.1))
    if label == "fedhft":
        method = replace(method, clusters=2, warmup_rounds=2)
    if label == "fedsdg" and privacy.is_active:
        method = replace(method, aggregation="uniform")
    return ft.Experiment(
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
        privacy=privacy,
    )


def cells(label: str, privacy: ft.PrivacyConfig, folder: Path, batches: int) -> list[str]:
    """A row's numbers, or why there are none."""
    out = folder / f"{label}-{privacy.epsilon}"
    try:
        ft.run(experiment(label, privacy), out, summary=False, scores=False)
    except InputError as error:
        return [f"refused: {str(error).partition(': ')[2].partition('. ')[0]}"]
    plan = Plan(batches=batches, steps=150, canaries=400, minutes=20)
    found = {(f.attack, f.target, f.measure): f for f in audit(open_trained(out, label), plan)}
    return [_cell(found.get(column)) for column in COLUMNS]


def _cell(found: Finding | None) -> str:
    if found is None or found.value is None:
        return "-"
    if found.high is None:
        return f"{found.value:.2f}"
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def main() -> None:
    """Print the table's lines as they are measured, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=2, help="inverted for each row")
    parser.add_argument("--methods", nargs="+", default=AUDITED)
    options = parser.parse_args()
    header = ["method", "defence", *COLUMNS.values()]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    print("\n".join(lines), flush=True)
    with TemporaryDirectory() as folder:
        for name, privacy in DEFENCES.items():
            for label in options.methods:
                row = [label, name, *cells(label, privacy, Path(folder), options.batches)]
                lines.append(f"| {' | '.join(row)} |")
                print(lines[-1], flush=True)
    OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
