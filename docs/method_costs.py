"""Write the costs in the methods' pages: python docs/method_costs.py [METHOD ...].

Each method has two rounds with three clients. The costs are those of one client in the second
round, when everything that a method exchanges exists. FLOPs are counted by PyTorch, not estimated.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
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

PAGES = Path(__file__).parent / "methods"
BEGIN, END = "<!-- costs: docs/method_costs.py -->\n", "<!-- end of costs -->\n"
CLIENTS, BATCH, PUBLIC = 3, 10, 400


@dataclass(frozen=True, eq=False)
class Setting:
    """A model and data on which a method and FedAvg are compared."""

    text: str  # its description, for the page
    examples: int  # of a client
    data: DataConfig
    model: ModelConfig
    fields: Mapping[str, Any]  # of methods that can train several things


TEXTS = Setting(
    "MiniLM with LoRA of rank 8, 20 classes; posts of at most 32 tokens",
    50,
    DataConfig(name="20newsgroups", max_length=32, limit=200),
    ModelConfig("minilm"),
    {"trainable": "lora"},
)
PICTURES = Setting(
    "`cnn`, the network of pFedGate's paper, 10 classes; pictures of 28 x 28",
    40,
    DataConfig(name="digits", limit=PUBLIC),
    ModelConfig("cnn", pretrained=False, image_size=28),
    {},
)
NORMALISED = Setting(
    "`resnet9`, which has batch normalisation, 10 classes; pictures of 28 x 28",
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
    "fedala": "The FLOPs are those of round 2, in which a client learns the weights in "
    "`start_passes` = 10 passes over its sample; later rounds take one.",
    "fedmd": f"The scores are those of {PUBLIC} public pictures.",
    "fedsq": "The masks are cached; filling the cache is not counted.",
    "heterofl": "The client has r = 0.25.",
    "pfedgate": "What is sent depends on the blocks that the client's batches use.",
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


def table(name: str) -> str:
    """The text between the markers of a method's page."""
    setting = SETTINGS.get(name, TEXTS)
    columns = [_measure(each, setting) for each in dict.fromkeys([name, "fedavg"])]
    unit = columns[-1].flops
    rows = {
        "a client receives in a round": [si(sum(m.costs.down.values()), "B") for m in columns],
        "a client sends in a round": [si(sum(m.costs.up.values()), "B") for m in columns],
        "a client keeps between rounds": [si(m.kept, "B") for m in columns],
        "parameters that a client trains": [si(_trained(name, m.costs)) for m in columns],
        "FLOPs of its training, FedAvg's = 1": [f"{m.flops / unit:.2f}" for m in columns],
    }
    passes = [str(METHODS[each]().finetune_passes) for each in dict.fromkeys([name, "fedavg"])]
    if passes[0] != "0":
        rows["passes over its data before each use"] = passes
    titles = [_title(each) for each in dict.fromkeys([name, "fedavg"])]
    align = ["---", *["--:"] * len(titles)]
    lines = [["", *titles], align, *([row, *rows[row]] for row in rows)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    note = f" {NOTES[name]}" if name in NOTES else ""
    return f"{setting.text} ([how it is measured](index.md#costs)).{note}\n\n{text}\n"


def _trained(name: str, costs: Costs) -> int:
    """A client with a narrow model trains what it sends, and no more."""
    return costs.communicated if name == "heterofl" else costs.trained


def _title(name: str) -> str:
    return (PAGES / f"{name}.md").read_text().partition("\n")[0].removeprefix("# ")


def with_costs(name: str) -> str:
    """The page of the method ``name`` with new costs."""
    page = (PAGES / f"{name}.md").read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(
            f"docs/methods/{name}.md needs the lines {BEGIN.strip()} and {END.strip()}"
        )
    return f"{before}{BEGIN}\n{table(name)}\n{END}{after}"


if __name__ == "__main__":
    for name in sys.argv[1:] or METHODS:
        (PAGES / f"{name}.md").write_text(with_costs(name))
