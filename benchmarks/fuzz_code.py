"""Own methods, models and metrics of which one place misbehaves: said in one line that names it."""

from __future__ import annotations

import builtins
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

from fedtailor.errors import DivergedError, InputError

from .mutations import Attempt, Change, Hang, RefusedError

_RAISED = (
    "assert False", "raise StopIteration", "raise SystemExit", "sys.exit('a\\nb')", "1 / 0",
    "raise GeneratorExit", "raise KeyError('x')", "raise OSError(2, 'no')", "raise MemoryError",
    "raise RecursionError", "again = lambda: again()\nagain()", "import no_such", "exec('x =')",
    "raise ExceptionGroup('a', [ValueError('b')])", "raise BaseException('a\\n\\x1b[2J\\ud800')",
    "raise Odd", "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'no')", "raise BrokenPipeError",
    "torch.zeros(2) @ torch.zeros(3)", "raise torch.linalg.LinAlgError", "raise Warning('x')",
    "raise NotImplementedError", "raise TimeoutError", "raise ValueError(10**6 * 'x')",
    "raise asyncio.CancelledError", "raise ft.InputError('mine: a')", "raise EOFError",
    "raise json.JSONDecodeError('a', 'b', 0) from None", "open('/no/such')", "torch.load('/no')",
)  # fmt: skip
_ANY = (
    "None", "3", "'x'", "[value]", "float('nan')", "object()", "lambda: 0", "()", "(value, value)",
    "{'x': value}", "type(value)", "10**400", "b'x'", "torch.zeros(2, 3)", "Bad()",
)  # fmt: skip
_TENSOR = (
    "v.double()", "v.half()", "v.long()", "v[None]", "v[..., :1]", "v.flatten()[:1]", "v.sum()",
    "v * float('nan')", "v + 1e30", "v.to(torch.complex64)", "v.to('meta')", "v.tolist()", "v.T",
    "v.numpy()", "None", "v[..., None]", "v[:0]", "v > 0", "v.repeat(2, *[1] * (v.dim() - 1))",
)  # fmt: skip
_LOST = (
    "{}", "dict(list(s.items())[1:])", "dict(list(s.items())[:-1])", "dict(list(s.items())[:1])",
    "{f'x.{n}': v for n, v in s.items()}", "{i: v for i, v in enumerate(s.values())}",
    "list(s.items())", "s.keys()", "{**s, n: None}", "{n: v.tolist() for n, v in s.items()}",
)  # fmt: skip
_STATE = (
    *_LOST, "{**s, 'x': 1}", "{**s, 3: v}", "{**s, 'x': v}",
    *(f"{{n: {one} for n, v in s.items()}}" for one in _TENSOR),
    *(f"{{**s, n: {one}}}" for one in _TENSOR),
)  # fmt: skip
_MUST_KEEP = ("init_server", "send", "local", "upload", "pack", "unpack", "aggregate", "finetune",
              "inference_params", "global_state")  # fmt: skip
_STATES = (*_MUST_KEEP, "init_client", "precompute", "unchanged", "server_diagnostics")
_OTHERS = ("adapt", "check", "check_settings", "check_batch", "num_trained", "is_private", "paper",
           "client_diagnostics", "__post_init__", "__init_subclass__")  # fmt: skip
_PROPERTIES = ("finetune_passes", "needs_public_labels")
_FIELDS = ("name", "family", "needs_public", "needs_only_mean", "sends_updates", "trains_alone",
           "changing_sizes", "min_batch_size", "optimiser", "robust", "local", "send")  # fmt: skip
_MODULES = (
    "None", "3", "torch.nn.Linear(3, 3)", "torch.nn.Linear(64, 4).half()", "torch.nn.Identity()",
    "torch.nn.LazyLinear(4)", "torch.nn.Linear(64, 4, device='meta')", "torch.nn.Linear(64, 0)",
    "torch.nn.BatchNorm1d(64)", "torch.nn.LSTM(64, 4)", "torch.nn.Linear(64, 4).double()",
)  # fmt: skip
_HEAD = '''"""Mine."""
import asyncio, builtins, json, sys
from dataclasses import dataclass
from typing import ClassVar
import numpy as np, torch
import fedtailor as ft

class Odd(Exception):
    def __str__(self):
        raise ValueError("no text")

class Bad:
    def __getattr__(self, name):
        raise Odd
    __repr__ = __bool__ = __len__ = __iter__ = __eq__ = Odd.__str__
    __hash__ = object.__hash__

'''
_METHOD = """
@dataclass(frozen=True)
class Mine(ft.{base}):
    name: ClassVar[str] = "mine"
{body}
"""
_MODEL = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(64, 4), torch.nn.Linear(4, 10)
{init}
    def forward(self, pixel_values):
        v = value = self.head(self.body(pixel_values.flatten(1)[:, :64]).relu())
{forward}
        return value

def mine():
    v = value = Net()
{build}
    return value
{load}
"""
_METRIC = (
    "\ndef mine(labels, probabilities):\n    v = value = torch.zeros(3)\n{}\n    return value\n"
)
_EXPERIMENT = """
rounds = {rounds}
data = {{name = "digits", limit = 40}}
split = {{clients = 2}}
local.steps = 1
engine.executor = "{executor}"
{rest}
"""
_CNN = "model = {name = 'cnn', pretrained = false, width = 0.1, image_size = 16}\n"
_MINE = _CNN + 'methods.mine.class = "mine.py:Mine"'


def own_code(folder: Path) -> Attempt:
    """Run experiments with own code. A place that raises must be named in one line; so must one
    that loses tensors. Other values may be right somewhere: those accepted are counted."""
    import fedtailor as ft
    from fedtailor.runs.experiment import load
    from fedtailor.user_code import own_faults

    def run(source: str, rest: str, rounds: int, executor: str) -> None:
        (folder / "mine.py").write_text(_HEAD + source)
        text = _EXPERIMENT.format(rounds=rounds, executor=executor, rest=rest)
        (folder / "mine.toml").write_text(text)
        shutil.rmtree(folder / "run", ignore_errors=True)
        with own_faults(of_values=True):
            ft.run(load(folder / "mine.toml"), folder / "run", summary=False)

    def attempt(rng: random.Random) -> Change:
        kind = rng.choices([_method, _model, _metric], [6, 2, 1])[0]
        source, rest, place, fault = kind(rng)
        builtins.fuzz_called = False  # type: ignore[attr-defined]
        try:
            run(source, rest, rng.randint(1, 2), rng.choice(["sequential", "vectorised"]))
        except InputError as error:
            if isinstance(error.__cause__, Hang):
                raise error.__cause__ from None
            is_named = "mine" in str(error) or isinstance(error, DivergedError)
            if "\n" in str(error) or not is_named:
                raise AssertionError(f"{place}: {fault}: {error}") from error
            raise RefusedError from None
        called = builtins.fuzz_called  # type: ignore[attr-defined]
        is_lost = fault in _LOST and place.partition(".")[2] in _MUST_KEEP
        if called and (fault in _RAISED or is_lost):
            raise AssertionError(f"{place}: {fault}: not said")
        return Change(f"{place}: {fault}", "right -> wrong" if called else "")

    for executor in ("sequential", "vectorised"):  # so that no mutation waits for imports
        run(_METHOD.format(base="FedPer", body=""), _MINE, 1, executor)
    return attempt


def _fault(rng: random.Random, values: Sequence[str]) -> str:
    return rng.choice(_RAISED) if rng.random() < 0.3 else rng.choice(values)


def _body(fault: str, name: str, depth: int, when: str = "True") -> str:
    """Statements that mark that they ran, and raise or change ``value``."""
    line = fault if fault in _RAISED else f"{name} = {fault}"
    return indent(f"builtins.fuzz_called = {when}\n{line}", 4 * depth * " ")


def _method(rng: random.Random) -> tuple[str, str, str, str]:
    base = rng.choice(["FedAvg", "FedPer", "FedAvgFT"])
    hook = rng.choice([*_STATES, *_STATES, *_OTHERS, *_PROPERTIES, "local", "local",
                       "predict", "client_weights", "class", "field", "field"])  # fmt: skip
    if hook in ("class", "field"):
        name = "value" if hook == "class" else rng.choice(_FIELDS)
        fault = rng.choice(_RAISED if hook == "class" else (*_ANY, "''", "['x']", "-1", "1.5"))
        body = "    value = None\n" + _body(fault, f"{name}: ClassVar", 1)
        return _METHOD.format(base=base, body=body), _MINE, f"{base}.{name}", fault
    before, name, after, when = "v = value", "value", "", "True"
    if hook in _STATES:
        which = rng.choice(["s", "s", "loss"]) if hook == "local" else "s"
        fault = _fault(rng, [*_ANY, *_TENSOR] if which == "loss" else [*_STATE, *_STATE, *_ANY])
        before = "s, loss = value" if hook == "local" else "s = value"
        before += "\nv = loss" if which == "loss" else "\nn = max(s, default='x')\nv = s.get(n)"
        if fault not in (*_ANY, *_RAISED):
            name, when = which, "len(s) > 1"
            after = "value = s, loss" if hook == "local" else "value = s"
    elif hook in ("predict", "client_weights"):
        fault = _fault(rng, (*_ANY, *_TENSOR))
    elif hook.startswith(("check", "__")):
        fault = rng.choice(_RAISED)
    else:
        fault = _fault(rng, (*_ANY, "True", "False", "-1", "1.5", "{}"))
    call = "" if hook in _PROPERTIES else "(*arguments)"
    start = "value = None" if hook.startswith("__") else f"value = super().{hook}{call}"
    lines = "\n".join([start, before, _body(fault, name, 0, when), after, "return value"])
    kind = "@property" if hook in _PROPERTIES else ""
    kind = "@classmethod" if hook in ("paper", "__init_subclass__") else kind
    body = f"    {kind}\n    def {hook}(self, *arguments):\n{indent(lines, 8 * ' ')}"
    return _METHOD.format(base=base, body=body), _MINE, f"{base}.{hook}", fault


def _model(rng: random.Random) -> tuple[str, str, str, str]:
    parts = {"init": "", "forward": "", "build": "", "load": ""}
    place = rng.choice([*parts])
    values = _MODULES if place == "init" else (*_ANY, *_TENSOR, "v[..., :3]")
    fault = rng.choice(_RAISED) if place == "load" else _fault(rng, values)
    depth = {"build": 1, "load": 0}.get(place, 2)
    parts[place] = _body(fault, "self.body" if place == "init" else "value", depth)
    rest = 'model.factory = "mine.py:mine"\n[methods.fedavg]'
    return _MODEL.format(**parts), rest, f"model {place}", fault


def _metric(rng: random.Random) -> tuple[str, str, str, str]:
    fault = _fault(rng, (*_ANY, *_TENSOR, "True", "1j", "labels", "labels.__setitem__(0, 1)"))
    rest = _CNN + 'evaluate.metrics = ["mine.py:mine"]\n[methods.fedavg]'
    return _METRIC.format(_body(fault, "value", 1)), rest, "metric", fault
