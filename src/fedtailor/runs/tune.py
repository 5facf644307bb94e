"""Search for hyper-parameters: as many candidates for every method, scored on validation alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Le, Lt

from .. import random
from ..data.config import Few
from ..errors import DivergedError, InputError, unknown
from ..methods import METHODS
from ..store.files import write_atomically
from ..store.format import as_json
from ..store.metrics import higher_is_better, summary
from ..store.read import read as read_run
from ..store.selection import metric_of, validated
from ..user_code import absolute
from . import builtin
from .experiment import Experiment, by_label, parse, read, read_toml
from .fields import build
from .run import run
from .settings import Settings, set_dotted

if TYPE_CHECKING:
    import optuna

_DEFAULT_CANDIDATES = 8  # where some range has no end of values

Values = list[Any] | dict[str, Any]
Bound = Annotated[float, Ge(-1e12), Le(1e12)]


@dataclass(frozen=True)
class TuneConfig:
    """The fields of ``[tune]`` beside ``space``."""

    candidates: Few | None = None  # a method; None: its grid's size, or 8
    sampler: Literal["auto", "grid", "random", "tpe"] = "auto"  # grid for lists, tpe for ranges
    # of the runs and the search; None: the first seed
    seed: Annotated[int, Ge(0), Lt(2**63)] | None = None


_KEYS = ("space", *(field.name for field in fields(TuneConfig)))


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included, whole ones for a field that takes no others;
    ``log``: drawn evenly by magnitude."""

    low: Bound
    high: Bound
    log: bool = False


Space = dict[str, tuple[Any, ...] | Range]  # of one method, by dotted field


@dataclass(frozen=True)
class Outcome:
    """One candidate: its settings, and the best mean over clients of ``metric`` on validation, at
    ``round``; minus it, where less is better. None if it ``diverged``."""

    label: str
    number: int
    settings: Mapping[str, Any]
    score: float | None
    round: int | None
    diverged: str | None = None
    metric: str = ""


@dataclass(frozen=True)
class Tuning:
    """What is to be searched: an experiment, each label's space, and how."""

    experiment: Experiment
    config: TuneConfig
    spaces: Mapping[str, Space]

    @property
    def seed(self) -> int:
        """The seed of every candidate's run, and of the search."""
        return self.experiment.seeds[0] if self.config.seed is None else self.config.seed

    @property
    def candidates(self) -> int:
        """How many candidates every method gets."""
        sizes = map(_grid_size, self.spaces.values())
        grids = (size for size in sizes if size is not None)
        return self.config.candidates or min(grids, default=_DEFAULT_CANDIDATES)


def load(path: str | Path, settings: Settings = (), grid: Path | None = None) -> Tuning:
    """The search that an experiment file's ``[tune]`` asks for; that of ``grid`` goes first.

    ``[tune.space.NAME]`` holds the fields of the methods at that label or of that name, ``all``
    those of every method that has them: a list of values, or ``{low, high, log}``. ``grid``, a file
    or a built-in grid's name, may name methods that the experiment doesn't have. Raises InputError
    where there is nothing to search, for unknown names or fields, values that a field doesn't take,
    a grid with fewer points than candidates, no validation data."""
    content = read(path, settings)
    tune = dict(content.pop("tune", {}))
    experiment = parse(content)
    space = tune.pop("space", {})
    if grid is not None:
        content = read_toml(builtin.find(grid, builtin.grids(), "grid"))
        if set(content) != {"tune"}:
            raise InputError(f"{grid} must hold [tune] and nothing else")
        absent = METHODS.keys() - {method.name for method in experiment.methods.values()}
        absent -= experiment.methods.keys()
        grid_space = dict(content["tune"].pop("space", {}))
        space = {**space, **{key: v for key, v in grid_space.items() if key not in absent}}
        tune |= content["tune"]
    if other := next((key for key in tune if key not in _KEYS), None):
        raise unknown("key", other, _KEYS, where="tune")
    config = build(TuneConfig(), tune, "tune")
    spaces = _spaces(experiment, space)
    if experiment.split.validation == 0:
        raise InputError("split.validation is 0: there is nothing to choose settings by")
    tuning = Tuning(experiment, config, spaces)
    for label, searched in spaces.items():
        size = _grid_size(searched)
        if size is None and config.sampler == "grid":
            raise InputError(f"tune.sampler = 'grid': {label} has a range; name its values")
        if size is not None and size < tuning.candidates:
            raise InputError(
                f"tune.candidates = {tuning.candidates}, but {label} has {size} settings to try; "
                "lower it, or give the method more values: all get as many candidates"
            )
    return tuning


def _spaces(experiment: Experiment, content: Any) -> dict[str, Space]:
    tables = content.values() if isinstance(content, Mapping) else [content]
    if not all(isinstance(one, Mapping) for one in tables):
        raise InputError("tune.space must hold a table a method, or all")
    names = {method.name for method in experiment.methods.values()}
    for key in content:
        if key not in {"all", *names, *experiment.methods}:
            raise unknown("method", key, {"all", *names, *experiment.methods}, where="tune.space")
    spaces: dict[str, Space] = {}
    for label, method in experiment.methods.items():
        field_names = {f.name for f in fields(method)}
        of_all = _searched(content.get("all", {}))
        common = {k: v for k, v in of_all if k.split(".")[0] in field_names}
        searched = common | dict(_searched(content.get(method.name, {})))
        searched |= dict(_searched(content.get(label, {})))
        if searched:
            where = f"tune.space.{label}"
            spaces[label] = {key: _values(f"{where}.{key}", v) for key, v in searched.items()}
            for key, tried in spaces[label].items():  # each must be one that the field takes
                for value in (tried.low, tried.high) if isinstance(tried, Range) else tried:
                    _with(experiment, label, {key: value})
    used = {key for space in spaces.values() for key in space}
    for key in (key for key, _ in _searched(content.get("all", {})) if key not in used):
        raise InputError(f"tune.space.all.{key}: none of the experiment's methods has this field")
    if not spaces:
        raise InputError(
            "tune.space names no field of the experiment's methods; for example: [tune.space.all] "
            "with optimiser.lr = [0.01, 0.1]"
        )
    return spaces


def _searched(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Values]]:
    """(dotted field, values) of a table; a table with ``low`` is a range."""
    for key, value in table.items():
        if isinstance(value, Mapping) and "low" not in value:
            yield from _searched(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _values(where: str, content: Any) -> tuple[Any, ...] | Range:
    if isinstance(content, Mapping):
        if "high" not in content:
            raise InputError(f"{where} = {dict(content)}: a range needs low and high")
        made = build(Range(0.0, 1.0), content, where)
        if not made.low < made.high or (made.log and made.low <= 0):
            given = f"low = {made.low}, high = {made.high}"
            raise InputError(f"{where}: {given}: low must be below high; above 0 with log")
        return made
    if not isinstance(content, list) or not content:
        raise InputError(f"{where} = {content!r}: must be a list of values, or {{low, high, log}}")
    if twice := [one for number, one in enumerate(content) if one in content[:number]]:
        raise InputError(f"{where} = {content!r}: {twice[0]!r} stands twice; name it once")
    return tuple(content)


def _with(experiment: Experiment, label: str, settings: Mapping[str, Any]) -> Experiment:
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        set_dotted(nested, key.split("."), value)
    method = build(experiment.methods[label], nested, f"methods.{label}")
    return replace(experiment, methods={label: method})


def _is_whole(experiment: Experiment, label: str, key: str, values: Range) -> bool:
    between = values.low + min(0.5, (values.high - values.low) / 2)
    try:
        _with(experiment, label, {key: between})
    except InputError:
        return True
    return False


def _grid_size(space: Space) -> int | None:
    """None if a range has no end of values."""
    sizes = [len(values) for values in space.values() if not isinstance(values, Range)]
    return math.prod(sizes) if len(sizes) == len(space) else None


def search(tuning: Tuning, out: Path) -> Iterator[Outcome]:
    """Run every candidate into ``out``; what is there is not run again. In the end
    ``candidates.jsonl`` holds all outcomes, and ``best.toml`` the experiment with the best settings
    of each method, without those of which all have diverged."""
    outcomes: list[Outcome] = []
    for label in tuning.spaces:
        for outcome in _search_one(tuning, label, out):
            outcomes.append(outcome)
            yield outcome
    found = {label: best(outcomes, label) for label in tuning.spaces}
    chosen = {label: one for label, one in found.items() if one is not None}
    lines = [as_json({**o.__dict__, "chosen": o is found[o.label]}) + "\n" for o in outcomes]
    write_atomically(out / "candidates.jsonl", "".join(lines).encode())
    if chosen:
        write_atomically(out / "best.toml", _best_file(tuning, chosen).encode())


def best(outcomes: Sequence[Outcome], label: str) -> Outcome | None:
    """The outcome of the highest score, the earliest of equals; None where all diverged."""
    finite = [o for o in outcomes if o.label == label and o.score is not None]
    return max(finite, key=lambda o: (o.score, -o.number), default=None)


def _search_one(tuning: Tuning, label: str, out: Path) -> Iterator[Outcome]:
    space = tuning.spaces[label]
    study = _study(tuning, label, space)
    ranges = {key: values for key, values in space.items() if isinstance(values, Range)}
    whole = {k for k, v in ranges.items() if _is_whole(tuning.experiment, label, k, v)}
    done: list[Outcome] = []

    def objective(trial: optuna.Trial) -> float:
        settings = {key: _suggest(trial, key, of, key in whole) for key, of in space.items()}
        folder = out / "candidates" / label / f"{trial.number:03d}"
        outcome = _evaluate(tuning, label, trial.number, settings, folder)
        done.append(outcome)
        return math.nan if outcome.score is None else outcome.score  # Optuna's word for failed

    for _ in range(tuning.candidates):
        study.optimize(objective, n_trials=1)
        yield done[-1]


def _study(tuning: Tuning, label: str, space: Space) -> optuna.Study:
    try:
        import optuna
    except ImportError:
        raise InputError("fedtailor tune needs Optuna: pip install 'fedtailor[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seed = int(random.generator(tuning.seed, "tune", label).integers(2**31))
    grids = {key: range(len(v)) for key, v in space.items() if not isinstance(v, Range)}
    sampler: optuna.samplers.BaseSampler
    if len(grids) == len(space) and tuning.config.sampler != "tpe":
        sampler = optuna.samplers.GridSampler(grids, seed=seed)  # shuffled, and no point twice
    elif tuning.config.sampler == "random":
        sampler = optuna.samplers.RandomSampler(seed=seed)
    else:
        sampler = optuna.samplers.TPESampler(seed=seed)
    return optuna.create_study(direction="maximize", sampler=sampler)


def _suggest(trial: optuna.Trial, key: str, values: tuple[Any, ...] | Range, whole: bool) -> Any:
    if isinstance(values, Range):
        if whole:
            return trial.suggest_int(key, int(values.low), int(values.high), log=values.log)
        return trial.suggest_float(key, values.low, values.high, log=values.log)
    return values[trial.suggest_categorical(key, range(len(values)))]


def _evaluate(
    tuning: Tuning, label: str, number: int, settings: Mapping[str, Any], folder: Path
) -> Outcome:
    experiment = replace(_with(tuning.experiment, label, settings), seeds=(tuning.seed,))
    try:
        run(experiment, folder, summary=False)
    except DivergedError as error:
        return Outcome(label, number, settings, None, None, str(error))
    done = read_run(folder, only=(label, tuning.seed))  # others were added to it
    metric = metric_of([done])
    chosen = validated(done.trials[0], "personal", metric)
    assert chosen is not None  # there are validation data
    round_, evaluation = chosen
    mean = summary(evaluation, metric).mean
    if math.isnan(mean):
        return Outcome(label, number, settings, None, None, f"{metric} on validation is nan")
    score = mean if higher_is_better(metric) else -mean
    return Outcome(label, number, settings, score, round_, metric=metric)


def _best_file(tuning: Tuning, chosen: Mapping[str, Outcome]) -> str:
    lost = tuning.spaces.keys() - chosen.keys()
    methods = {k: one for k, one in tuning.experiment.methods.items() if k not in lost}
    for label, outcome in chosen.items():
        methods |= _with(tuning.experiment, label, outcome.settings).methods
    name = f"{tuning.experiment.name}-tuned"  # else it would go on with the first experiment's run
    experiment = replace(tuning.experiment, name=name, methods=methods)
    plain = experiment.as_dict(lambda reference: absolute(reference, Path()))
    plain["methods"] = by_label(plain["methods"])
    for label in experiment.origins:
        del plain["methods"][label]["sha256"]  # the file may change
    return tomli_w.dumps(_for_toml(plain))


def _for_toml(value: Any) -> Any:
    """None as the word that stands for it in experiment files."""
    if isinstance(value, dict):
        return {key: _for_toml(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_for_toml(inner) for inner in value]
    return "none" if value is None else value
