"""Write the table of docs/security.md, who sees what by method: python docs/method_privacy.py.

It follows from two rounds of three clients with the method's defaults. What a client keeps belongs
to its model if its predictions change with it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.engine.prepare import memory_states
from fedtailor.engine.rounds import rounds
from fedtailor.method import Server
from fedtailor.methods import METHODS
from fedtailor.params import Params, same_tensors
from fedtailor.runs.build import Inputs

# The server can work out what these clients keep, or sees something else than their model.
_SEEN = {
    "ifca": "all: the upload tells which model the client chose",
    "fedmask": "all: the upload tells the whole mask",
    "fedmd": "its class scores on the public examples",
}
PAGE = Path(__file__).parent / "security.md"
BEGIN, END = "<!-- methods: docs/method_privacy.py -->\n", "<!-- end of methods -->\n"
CLIENTS = 3


def table() -> str:
    """A row for the methods of which the same is true."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name in METHODS:
        alike.setdefault(_measured(name), []).append(f"[`{name}`](methods/{name}.md)")
    rows = [f"| {' | '.join([*what, ', '.join(names)])} |\n" for what, names in alike.items()]
    return (
        "| the server sees of the client's model | it needs | other clients receive | methods |\n"
        f"|---|---|---|---|\n{''.join(rows)}"
    )


def _measured(name: str) -> tuple[str, str, str]:
    """What the server holds of a client's own model, what it needs, and what others receive."""
    inputs, server, private, sends = _after_two_rounds(name)
    if not sends:
        return "nothing", "nothing", "nothing"
    method = inputs.experiment.methods[name]
    task = inputs.task(method, 0)
    received = [method.send(task, server, client) for client in range(CLIENTS)]
    held = "all before its fine-tuning" if method.finetune_passes else "all"
    logits = [
        method.predict(task, {**received[0], **kept}, inputs.dataset.batch(np.arange(8)))
        for kept in (private, {name: _other(value) for name, value in private.items()})
    ]
    if not logits[0].equal(logits[1]) or (private and method.finetune_passes):
        held = "all but its private part"
    alike = all(same_tensors(one, received[0]) for one in received)
    return (
        _SEEN.get(name, held),
        "the mean" if method.needs_only_mean else "each upload",
        "the same" if alike else "its own",
    )


def _other(value: Tensor) -> Tensor:
    """Other values of a private tensor; numbers of models are 0 or 1."""
    noise = torch.linspace(0.1, 1, max(1, value.numel()))[: value.numel()].view(value.shape)
    if value.is_floating_point():
        return value + noise
    return torch.where((value == 0) | (value == 1), value == 0, value).to(value.dtype)


def _after_two_rounds(name: str) -> tuple[Inputs, Server, Params, bool]:
    """The experiment's inputs; the server's state, what client 0 keeps, and whether it sends
    anything."""
    method = METHODS[name]()
    network = "resnet9" if name == "fedbn" else "lenet"  # which has normalisations
    layers = () if name == "fedbn" else ("hidden1", "hidden2")
    data = ft.DataConfig(name="digits", limit=150)
    experiment = ft.Experiment(
        {name: method},
        rounds=10,
        data=data,
        split=ft.SplitConfig(CLIENTS),
        public=replace(data, skip=150, limit=20) if method.needs_public else ft.DataConfig(),
        model=ft.ModelConfig(network, pretrained=False, image_size=16, width=0.2, targets=layers),
        local=ft.LocalConfig(batch_size=8, steps=1),
        engine=ft.EngineConfig(executor="sequential"),
    )
    inputs = Inputs.load(experiment, None, None)
    federation, task = inputs.federations[0], inputs.task(method, 0)
    store = memory_states(method, task, federation)
    *_, last = itertools.islice(rounds(method, task, federation, experiment.plan, store=store), 2)
    return inputs, last.server, store.read(0), last.bytes_up > 0


def with_table(page: str) -> str:
    """``page``, its text, with a new table."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} needs the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
