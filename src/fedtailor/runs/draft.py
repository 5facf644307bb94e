"""A commented experiment file for a table of one's own."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..data.columns import targets_of
from ..data.config import SplitConfig
from ..data.names import check_names
from ..data.sources import read_columns
from ..data.survey import Roles, Survey
from ..errors import InputError, unknown
from ..method import FineTuning
from ..methods import METHODS
from ..models import BUILTIN, ModelConfig
from ..models.source import locate
from ..objectives import DEFAULT, OBJECTIVES, objective_of
from ..objectives.objective import Targets
from ..store.format import check_folder_name
from ..units import counted
from .experiment import parse

_MIN_EXAMPLES = SplitConfig.min_examples
_FEWEST = 3  # rows of a client: one each to train, to validate and to test
_MANY = 200  # clients, whose evaluation takes most of the time
_CLIENTS, _PER_CLIENT = 20, 50  # as many clients as there are rows for, where no column names them
_COHORT = 20  # clients a round
_ADAM = 'optimiser = {{name = "adam", lr = {lr}, clip = 1.0, eps = 1e-3}}'
_PICTURES = {"local": "optimiser = {lr = 1e-2, clip = 10.0}"}

# chosen on validation data for LoRA on MiniLM (quickstart-rates) and EfficientNet-Lite0 (fedsq);
# but FedAvg and FedPer have half the rate that was best: with that, and more rows, FedAvg does not
# learn
_TEXT = {
    "local": f'trainable = "lora"\n{_ADAM.format(lr="3e-3")}',
    "fedavg": f'trainable = "lora"\n{_ADAM.format(lr="5e-3")}',
    "fedavg-ft": f'trainable = "lora"\nfinetune_lr = 0.3\n{_ADAM.format(lr="5e-3")}',
    "fedper": f'trainable = "lora"\n{_ADAM.format(lr="5e-3")}',
    "fedsdg": "optimiser = {lr = 5e-3, eps = 1e-3}",
}
# chosen on validation data for LoRA on SmolLM2 (fedmerge-lora, preset small)
_LANGUAGE_MODEL = {
    "local": 'trainable = "lora"\noptimiser = {name = "adamw", lr = 1e-3}',
    "fedavg": 'trainable = "lora"\noptimiser = {name = "adamw", lr = 3e-3}',
    "fedsdg": 'optimiser = {name = "adamw", lr = 3e-3}',
}
_TEMPLATE = 32  # tokens of a conversation beside its turns: names, marks, a system prompt
_MEANING = {
    "local": "every client alone: what federation must beat",
    "fedavg": "one model for all clients",
    "fedavg-ft": "one model for all, which every client fine-tunes before use",
    "fedper": "a shared body, and a head of its own for every client",
    "fedsdg": "a shared and a private LoRA for every client, joined by gates",
}


@dataclass(frozen=True)
class Clients:
    """The clients that the file will have, by name, and those that are too small."""

    sizes: Mapping[str, int]  # rows of each; empty: no column names the clients
    too_small: Mapping[str, int]  # left out
    least: int = _MIN_EXAMPLES  # rows of those that are not too small

    @classmethod
    def of(cls, survey: Survey, roles: Roles) -> Clients:
        """Count the clients' rows, but for those without a label, which the run leaves out."""
        column = roles.client
        if column is None:
            return cls({}, {})
        rows = survey.counts(column, next(iter(roles.labels), None))
        counts = {str(name): count for name, count in sorted(rows.items())}
        for least in (_MIN_EXAMPLES, _FEWEST):
            sizes = {name: count for name, count in counts.items() if count >= least}
            if len(sizes) >= 2:
                too_small = {name: n for name, n in counts.items() if name not in sizes}
                return cls(sizes, too_small, least)
        raise InputError(
            f"column {column!r} of {survey.path} has {len(counts)} clients, {len(sizes)} of them "
            f"with {_FEWEST} rows or more; two are needed (or --client none: rows at random)"
        )

    @property
    def rows(self) -> str:
        """The least and the most rows of a client, in words."""
        least, most = min(self.sizes.values()), max(self.sizes.values())
        return f"{least:,} rows" if least == most else f"{least:,} to {most:,} rows"


def check_rows(survey: Survey) -> None:
    """Raise InputError if a table has too few rows for two clients."""
    if survey.rows < 2 * _MIN_EXAMPLES:
        count = counted(survey.rows, "row")
        raise InputError(f"{survey.path} has {count}; two clients need {2 * _MIN_EXAMPLES}")


def default_methods(survey: Survey, roles: Roles) -> tuple[str, ...]:
    """Return two baselines and what to try beside them: FedAvg + fine-tuning for pictures, FedSDG
    for texts, and for texts with labels FedPer, too, which was among the best in half of the
    measured settings."""
    if survey.column(roles.source).kind == "picture":
        return ("local", "fedavg", "fedavg-ft")
    return ("local", "fedavg", *(["fedper"] if not _writes(roles) else []), "fedsdg")


def _writes(roles: Roles) -> bool:
    """Whether the model is a language model, whose head is no head of a task."""
    return OBJECTIVES[roles.task].generates


def default_model(survey: Survey, roles: Roles) -> str:
    """Return a built-in model for the texts or pictures."""
    if _writes(roles):
        return "smollm2-135m"
    is_text = survey.column(roles.source).kind != "picture"
    model = "minilm" if is_text else "efficientnet-lite0"
    if roles.task not in BUILTIN[model].tasks:
        which = "a folder or owner/model of the hub"
        raise InputError(f"no built-in model is for {roles.task!r}; name one with --model, {which}")
    return model


def draft(survey: Survey, roles: Roles, name: str, model: str, methods: Sequence[str]) -> str:
    """Write an experiment file, TOML that `fedtailor.load` takes, for a table whose columns have
    ``roles``, with a ``model`` and ``methods`` by name."""
    check_folder_name("experiment", name)
    check_names("file", [survey.path])
    for method in methods:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        if METHODS[method].needs_public:
            raise InputError(f"{method} needs public examples; add it to the file by hand")
    _check_model(model, survey, roles)
    if len(set(methods)) < len(methods):
        raise InputError(f"methods {', '.join(methods)}: name each once")
    clients = Clients.of(survey, roles)
    is_text = survey.column(roles.source).kind != "picture"
    usual = _PICTURES if not is_text else _LANGUAGE_MODEL if _writes(roles) else _TEXT
    sections = [
        _head(name),
        "\n".join(_data(survey, roles, is_text)),
        "\n".join(_split(survey, roles, clients)),
        "\n".join(_model(model, is_text, _writes(roles))),
        _LOCAL,
        *_cohort(len(clients.sizes)),
        _SCHEDULE,
        *(_method(method, usual) for method in methods),
    ]
    text = "\n\n".join(sections) + "\n"
    parse(tomllib.loads(text))
    return text


def targets(text: str) -> Targets | None:
    """Read what an experiment file is to predict, as its run does; None: its texts are that."""
    config = parse(tomllib.loads(text)).data
    return targets_of(read_columns(config), objective_of(config.task), config.classes)


def _check_model(name: str, survey: Survey, roles: Roles) -> None:
    modality = "image" if survey.column(roles.source).kind == "picture" else "text"
    builtin = BUILTIN.get(name)
    if builtin is None:
        locate(ModelConfig(name))
    elif builtin.modality != modality:
        kinds = f"{builtin.modality} data, not {modality} data"
        raise InputError(f"model {name!r} is for {kinds}; see fedtailor list models")
    elif roles.task not in builtin.tasks:
        tasks = f"not for {roles.task!r}, but for {', '.join(builtin.tasks)}"
        raise InputError(f"model {name!r} is {tasks}; see fedtailor list models")


_LOCAL = """\
[local]                         # what a client does in a round
batch_size = 10
epochs = 1"""

_SCHEDULE = """\
[schedule]
name = "cosine"                 # learning rates fall from round to round"""


def _head(name: str) -> str:
    return f"""\
# fedtailor run {shlex.quote(name)}.toml      runs it; the table and the report go to runs/{name}
# fedtailor describe METHOD      lists a method's settings; fedtailor list methods lists all methods
{_line("name", name)}
{_line("rounds", 10, "fixed once the run has begun; for more, begin anew with --out")}
{_line("seeds", [0], "[0, 1, 2] shows how much chance matters")}"""


def _data(survey: Survey, roles: Roles, is_text: bool) -> Iterator[str]:
    yield "[data]"
    yield _line("path", survey.path, "from the current folder, or else from this file's")
    yield _line("text" if is_text else "image", roles.source)
    if (side := survey.column(roles.source).side) is not None:
        yield _line("picture_size", side, "all pictures become squares of so many pixels")
    objective = OBJECTIVES[roles.task]
    if roles.pair is not None:
        what = "" if objective.joins_columns else "the second text of each input"
        yield _line("text_pair", roles.pair, what)
    if roles.task == DEFAULT.name:
        yield _line("label", roles.label, f"{len(survey.counts(*roles.labels))} classes")
    else:
        yield _line("task", roles.task, objective.meaning)
        if roles.label is not None:
            yield _line("label", roles.label)
    if roles.client is not None:
        yield _line("client", roles.client, "the column that names the client")
    if is_text:
        read = [roles.source, *([] if roles.pair is None else [roles.pair])]
        joins = objective.joins_columns
        if joins:  # the answer, too
            read += roles.labels
        tokens = survey.tokens(*read, more=_TEMPLATE if joins else 0)
        long = "read in parts" if objective.second_names else "cut"
        yield _line("max_length", tokens, f"tokens; longer texts are {long}")


def _split(survey: Survey, roles: Roles, clients: Clients) -> Iterator[str]:
    yield "[split]"
    if roles.client is not None:
        comment = f"{len(clients.sizes)} clients of {clients.rows}"
        yield _line("scheme", "natural", comment)
        yield _line("min_examples", clients.least, "clients with fewer rows are left out")
    else:
        number = min(_CLIENTS, max(2, survey.rows // _PER_CLIENT))
        scheme = "dirichlet" if OBJECTIVES[roles.task].has_classes else "iid"
        yield _line("scheme", scheme, "no column names the clients: they are drawn")
        if scheme == "dirichlet":
            yield _line("alpha", 0.5, "the smaller, the more the clients' classes differ")
        yield _line("clients", number)
        least = min(_MIN_EXAMPLES, survey.rows // (2 * number))
        yield _line("min_examples", least, "rows that every client gets at least")
    yield _line("validation", 0.2, "of a client's training rows: they choose the reported round")
    yield _line("test", 0.2, "of a client's rows: they are for the report alone")


_LAST_BLOCKS = ["model.layers.2[89].self_attn.o_proj", "model.layers.2[89].mlp.down_proj"]


def _model(model: str, is_text: bool, is_language_model: bool) -> Iterator[str]:
    yield "[model]"
    yield _line("name", model, 'fedtailor list models; or "owner/model" of the hub, or a folder')
    if not is_text:
        yield _line("batch_norm", "frozen", "keep the pretrained running statistics")
    if is_language_model and model == "smollm2-135m":
        yield "# adapters in the last two of 30 blocks; without this line in all, which is slower"
        yield _line("targets", _LAST_BLOCKS)


def _cohort(clients: int) -> Iterator[str]:
    if clients > _COHORT:
        yield "[cohort]\n" + _line("size", _COHORT, f"of {clients} clients take part in a round")
    if clients > _MANY:
        comment = f"rounds: evaluating {clients} clients takes most of the time"
        yield "[evaluate]\n" + _line("every", 5, comment)


def _method(name: str, usual: Mapping[str, str]) -> str:
    meaning = f"  # {_MEANING[name]}" if name in _MEANING else ""
    others = usual["local"] if issubclass(METHODS[name], FineTuning) else ""
    return f"[methods.{name}]{meaning}\n{usual.get(name, others)}".rstrip()


def _line(key: str, value: Any, comment: str = "") -> str:
    text = f"{key} = {json.dumps(value, ensure_ascii=False)}"
    return f"{text:<31} # {comment}" if comment else text
