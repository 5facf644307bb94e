"""Write the costs of the methods into their index: python docs/method_costs.py [METHOD ...].

Each method has two rounds with three clients. The costs are those of one client in the second
round, when everything that a method exchanges exists. FLOPs are counted by PyTorch, not estimated.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from fedtailor.data import DataConfig, SplitConfig, load_data, partition
from fedtailor.data.config import LocalConfig
from fedtailor.data.federation import Federation
from fedtailor.engine.config import EvaluateConfig, Plan
from fedtailor.engine.costs import Costs
from fedtailor.engine.executors.work import ClientRequest, Work
from fedtailor.engine.rounds import rounds
from fedtailor.method import FineTuning
from fedtailor.methods import METHODS
from fedtailor.models import ModelConfig, load_model, load_tokenizer
from fedtailor.params import Params
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from fedtailor.units import si

INDEX = Path(__file__).parent / "methods/index.md"
BEGIN, END = "<!-- costs: docs/method_costs.py -->\n", "<!-- end of costs -->\n"
HEADER = "| method | receives | sends | keeps | trains | FLOPs |\n|---|--:|--:|--:|--:|--:|"
CLIENTS, BATCH, PUBLIC = 3, 10, 400


@dataclass(frozen=True, eq=False)
class Setting:
    """A model and data on which a method and FedAvg are compared."""

    text: str  # its description, for the index
    examples: int  # of a client
    data: DataConfig
    model: ModelConfig
    fields: Mapping[str, Any]  # of methods that can train several things


TEXTS = Setting(
    "MiniLM with LoRA of rank 8, 20 classes; a client has 50 posts of at most 32 tokens",
    50,
    DataConfig(name="20newsgroups", max_length=32, limit=200),
    ModelConfig("minilm"),
    {"trainable": "lora"},
)
PICTURES = Setting(
    "`cnn`, pFedGate's network, all of it, 10 classes; a client has 40 pictures of 28 x 28",
    40,
    DataConfig(name="digits", limit=PUBLIC),
    ModelConfig("cnn", pretrained=False, image_size=28),
    {},
)
NORMALISED = Setting(
    "`resnet9`, which has batch normalisation, all of it, 10 classes; 40 pictures of 28 x 28",
    40,
    DataConfig(name="digits", limit=PUBLIC),
    ModelConfig("resnet9", pretrained=False, image_size=28),
    {},
)
SETTINGS = {
    **dict.fromkeys(["fedsq", "pfedgate", "heterofl", "fedmask", "fedmd"], PICTURES),
    "fedbn": NORMALISED,
}  # all others: TEXTS
CLIENT = {"heterofl": 2}  # the client that is measured; all others: client 0
NOTES = {
    "fedala": "FedALA's FLOPs are those of round 2, with its `start_passes`.",
    "fedmd": f"FedMD's scores are those of {PUBLIC} public pictures.",
    "heterofl": "HeteroFL's client has r = 0.25.",
    "pfedgate": "What pFedGate sends depends on the blocks that the client's batches use.",
}


@dataclass(frozen=True)
class Measured:
    """The costs of one client in the second round, and the FLOPs of its training."""

    costs: Costs
    kept: int  # bytes
    flops: int


class _Counting:
    """An executor that runs clients one by one, and measures ``client`` in round 2."""

    name, processes, concurrency = "sequential", 1, 1

    def __init__(self, client: int) -> None:
        self.client = client
        self.measured: Measured | None = None

    def over(self, works: Mapping[str, Work]) -> _Counting:
        self.works = works
        return self

    def map(
        self, name: str, server: Params, items: Iterable[ClientRequest]
    ) -> Iterator[tuple[ClientRequest, Any]]:
        for item in items:
            if item.round == 2 and item.client != self.client:
                continue  # nobody looks at what comes of it
            if item.round == 1:
                result = self.works[name].one(server, item)
            else:
                with FlopCounterMode(display=False) as counter:
                    result = self.works[name].one(server, item)
                kept = sum(v.numel() * v.element_size() for v in result.private.values())
                self.measured = Measured(result.costs, kept, counter.get_total_flops())
            yield item, result

    def close(self) -> None:
        pass


@cache
def _inputs(setting: Setting) -> tuple[Federation, Backbone]:
    """The setting's clients and model."""
    dataset = load_data(setting.data, load_tokenizer(setting.model))
    split = SplitConfig(CLIENTS, max_examples=setting.examples, validation=0.0, test=0.0)
    federation = Federation(dataset, partition(dataset, split, seed=0), public=dataset)
    backbone = load_model(
        setting.model, dataset.task, dataset.num_classes, 0, dataset.modality,
        picture=dataset.picture,
    )  # fmt: skip
    return federation, backbone


@cache
def _measure(name: str, setting: Setting) -> Measured:
    cls = METHODS[name]
    method = cls(**setting.fields) if issubclass(cls, FineTuning) else cls()
    federation, backbone = _inputs(setting)
    task = Task(backbone, method.adapt)
    plan = Plan(10, LocalConfig(BATCH), evaluate=EvaluateConfig(every=10))
    executor = _Counting(CLIENT.get(name, 0))
    done = rounds(method, task, federation, plan, make_executor=executor.over, quorum=1 / CLIENTS)
    for _ in itertools.islice(done, 2):
        pass
    assert executor.measured is not None
    return executor.measured


def row(name: str) -> str:
    """A method's costs, as a row of its setting's table."""
    return _row(name, SETTINGS.get(name, TEXTS))


def _row(name: str, setting: Setting) -> str:
    measured, unit = _measure(name, setting), _measure("fedavg", setting).flops
    costs = measured.costs
    cells = [
        f"[`{name}`]({name}.md)",
        si(sum(costs.down.values()), "B"),
        si(sum(costs.up.values()), "B"),
        si(measured.kept, "B"),
        si(_trained(name, costs)),
        f"{measured.flops / unit:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _trained(name: str, costs: Costs) -> int:
    """A client with a narrow model trains what it sends, and no more."""
    return costs.communicated if name == "heterofl" else costs.trained


def with_costs(index: str, names: Collection[str]) -> str:
    """``index``, the page's text, with new costs of these methods."""
    before, begin, rest = index.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{INDEX} needs the lines {BEGIN.strip()} and {END.strip()}")
    kept = {name: line for line, name in re.findall(r"^(\| \[`([\w-]+)`\].+)$", old, re.M)}
    parts = []
    for setting in (TEXTS, PICTURES, NORMALISED):
        of = [name for name in METHODS if SETTINGS.get(name, TEXTS) is setting and name != "fedavg"]
        rows = [row(name) if name in names else kept.get(name, "") for name in of]
        unit = _row("fedavg", setting)
        like_it = unit.partition(") |")[2]
        rows = [unit, *(each for each in rows if each and each.partition(") |")[2] != like_it)]
        notes = [NOTES[name] for name in of if name in NOTES]
        parts += [f"{setting.text}. {' '.join(notes)}".strip(), "\n".join([HEADER, *rows])]
    text = "\n\n".join(parts)
    return f"{before}{BEGIN}\n{text}\n\n{END}{after}"


if __name__ == "__main__":
    INDEX.write_text(with_costs(INDEX.read_text(), sys.argv[1:] or METHODS))
