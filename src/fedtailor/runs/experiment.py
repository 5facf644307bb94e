"""The experiment: what an experiment file says, checked, with every default filled in."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, MinLen

from ..data.config import DataConfig, LocalConfig, SplitConfig
from ..engine.config import CohortConfig, EngineConfig, EvaluateConfig, Plan, ScheduleConfig
from ..engine.faults import FaultConfig
from ..errors import InputError, brief, missing_file, unknown
from ..method import Method
from ..methods import METHODS
from ..models.config import ModelConfig
from ..store.format import check_folder_name
from ..uploads.accounting import PrivacyConfig
from ..uploads.attacks import AttackConfig
from ..uploads.secure.config import SecureAggregationConfig
from ..user_code import Origin, absolute, origin, origin_of, portable
from ..user_code import load as load_object
from . import builtin
from .fields import build
from .settings import Settings, changed, pairs_of, set_dotted, table_of


@dataclass(frozen=True)
class StartConfig:
    """A finished run whose models the methods go on from. A file may name the run alone:
    ``start_from = "runs/mine"``."""

    run: str | None = None  # its directory; None: the pretrained model
    method: str | None = None  # the label in it; None: the method's own
    # in it; None: the method's own, or the run's first
    seed: Annotated[int, Ge(0), Lt(2**63)] | None = None


@dataclass(frozen=True)
class Experiment:
    """One or several methods on the same data, split, cohorts and budget.

    ``methods`` maps a label, free to choose, to a method.
    """

    methods: Mapping[str, Method]
    name: str = "experiment"
    rounds: Annotated[int, Gt(0), Le(1_000_000)] = 10
    seeds: Annotated[tuple[Annotated[int, Ge(0), Lt(2**63)], ...], MinLen(1)] = (0,)
    data: DataConfig = field(default_factory=DataConfig)
    public: DataConfig = field(default_factory=DataConfig)  # without a name or a path: none
    split: SplitConfig = field(default_factory=SplitConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    cohort: CohortConfig = field(default_factory=CohortConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    attack: AttackConfig = field(default_factory=AttackConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    secure_aggregation: SecureAggregationConfig = field(default_factory=SecureAggregationConfig)
    start_from: StartConfig = field(default_factory=StartConfig)

    def __post_init__(self) -> None:
        if not self.methods:
            raise InputError("no methods; name at least one, for example [methods.fedsdg]")
        check_folder_name("name", self.name)
        if len(set(self.seeds)) < len(self.seeds):
            raise InputError(f"seeds = {list(self.seeds)}: each may stand there only once")
        if isinstance(self.start_from, (str, Path)):  # the short form, as in a file
            object.__setattr__(self, "start_from", StartConfig(str(self.start_from)))
        if self.start_from.run is None and self.start_from != StartConfig():
            raise InputError("start_from has no run; name the directory of a finished one")
        if self.privacy.is_active and self.start_from.run is not None:
            raise InputError(
                f"start_from = {self.start_from.run!r} with [privacy]: what that run has spent "
                "would not be counted; leave one of them out"
            )
        if self.has_public:
            own, public = self.data, self.public
            is_same = (own.name, own.path, own.subset) == (public.name, public.path, public.subset)
            if is_same and (own.limit is None or public.skip < own.skip + own.limit):
                raise InputError(
                    "public names the clients' own data: set data.limit, and public.skip no lower"
                )
        elif self.public != DataConfig():
            raise InputError("public names no data; set public.name or public.path")

    @property
    def has_public(self) -> bool:
        """Whether there are public examples beside the clients'."""
        return self.public.name is not None or self.public.path is not None

    @cached_property
    def plan(self) -> Plan:
        """What the engine needs of it."""
        return Plan(**{one.name: getattr(self, one.name) for one in dataclasses.fields(Plan)})

    def as_dict(self, written: Callable[[str], str] = portable) -> dict[str, Any]:
        """For JSON: plain values, methods as a list with their labels and names; the user's own
        code as ``written``, by default without the folders of files."""
        plain: dict[str, Any] = _plain(self)
        del plain["methods"]  # they come last
        own = {k: {"class": o.location, "sha256": o.sha256} for k, o in self.origins.items()}
        plain["methods"] = [
            {"label": label, "name": method.name, **own.get(label, {}), **_plain(method)}
            for label, method in self.methods.items()
        ]
        for code in own_code(plain):
            code.section[code.name] = written(code.reference)
        return plain

    @cached_property
    def sources(self) -> dict[str, Origin]:
        """The user's own code, by its place in a run directory such as ``factory/net.py``; that of
        a package by its module. A metric's or a model's that is not on this machine is left out:
        whoever needs it refuses it, and over Flower metrics are the sites' alone. Raises InputError
        where two files would have the same place."""
        files = ((label, one, one.path) for label, one in self.origins.items())
        found = {f"methods/{k}/{path.name}": one for k, one, path in files if path is not None}
        for code in own_code({**_plain(self), "methods": {}}):
            try:
                own = origin_of(code.reference)
            except InputError:
                continue
            place = source_place(own.reference, code.folder)
            if place in found and found[place].sha256 != own.sha256:
                both = f"{found[place].path} and {own.path}"
                raise InputError(f"{both} differ, and both would be copied to {place}; rename one")
            found[place] = own
        return found

    @cached_property
    def origins(self) -> dict[str, Origin]:
        """Where the methods that are not the package's own are defined, by label."""
        kinds = {label: (type(one), METHODS.get(one.name)) for label, one in self.methods.items()}
        return {label: origin(own) for label, (own, known) in kinds.items() if own is not known}


def source_place(reference: str, folder: str) -> str:
    """The place in a run directory of the code that a portable ``reference`` names.

    >>> source_place("net.py:net", "factory"), source_place("package.net:net", "factory")
    ('factory/net.py', 'package.net')
    """
    place = reference.rpartition(":")[0]
    return f"{folder}/{place}" if place.endswith(".py") else place


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


_PROTECTING = {"privacy": "a clip, and noise or epsilon", "secure_aggregation": "a threshold"}


def load(path: str | Path, settings: Settings = ()) -> Experiment:
    """The experiment of a file; see `read`. Its ``[tune]`` is for `fedtailor tune`."""
    return parse({key: value for key, value in read(path, settings).items() if key != "tune"})


def read(path: str | Path, settings: Settings = ()) -> dict[str, Any]:
    """Read an experiment file (TOML) and change it by settings; plain values.

    The ``path`` is that of a file, or the name of a built-in experiment; a file that exists goes
    before it. Other files that it names under ``class`` are relative to its folder. ``settings``
    are ``key=value``, one or several, the value TOML or a bare word; or a mapping from keys to
    values. Keys are dotted (``methods.fedsdg.lr_gate``). ``preset`` applies the file's
    ``[presets.NAME]`` first (``A,B``: one after the other); ``methods`` keeps those of a list.
    Raises InputError for no such file, not TOML, unknown keys, values out of range."""
    path = builtin.find(Path(path), builtin.experiments())
    content = read_toml(path)
    for name, needed in _PROTECTING.items():
        if content.get(name) == {}:
            raise InputError(
                f"[{name}] of {path} is empty, so nothing is protected: give {needed}, or omit it"
            )
    content.setdefault("name", path.stem)
    content = changed(content, settings)
    _resolve_files(content, path.parent)
    return content


@dataclass(frozen=True)
class OwnCode:
    """Code of the user's own that the plain values of an experiment name: ``key`` does, which is
    ``name`` in ``section``. A copy of its file stands in ``folder`` of a run directory."""

    key: str
    section: Any
    name: str | int
    folder: str

    @property
    def reference(self) -> str:
        """``FILE.py:NAME`` or ``package.module:NAME``."""
        return str(self.section[self.name])


def own_code(content: Mapping[str, Any]) -> Iterator[OwnCode]:
    """The user's own code that an experiment's plain values name: as in a file, or with a list of
    methods. Values that are none are passed over."""
    methods = content.get("methods", {})
    if isinstance(methods, list):
        methods = {method["label"]: method for method in methods}
    every = [OwnCode(f"methods.{k}", one, "class", f"methods/{k}") for k, one in methods.items()]
    every.append(OwnCode("model.factory", content.get("model"), "factory", "factory"))
    for code in every:
        if isinstance(code.section, dict) and isinstance(code.section.get(code.name), str):
            yield code
    evaluate = content.get("evaluate")
    metrics = evaluate.get("metrics") if isinstance(evaluate, dict) else None
    for at, metric in enumerate(metrics if isinstance(metrics, list) else ()):
        if isinstance(metric, str) and ":" in metric:
            yield OwnCode("evaluate.metrics", metrics, at, "metrics")


def _resolve_files(content: dict[str, Any], folder: Path) -> None:
    """Give the whole paths of the user's own files, and of data not in the current folder."""
    table_of(content.get("methods", {}), "methods")
    for code in own_code(content):
        code.section[code.name] = absolute(code.reference, folder)
    for section in (content.get("data"), content.get("public")):
        for key in ("path", "test_path"):
            if isinstance(section, dict) and isinstance(name := section.get(key), str):
                beside = folder / name
                if beside.exists() and not Path(name).expanduser().exists():
                    section[key] = str(beside)


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises InputError where there is none, or no TOML."""
    if not path.is_file():
        raise missing_file(path, what="experiment file")
    if path.suffix in (".csv", ".tsv", ".jsonl", ".parquet", ".arrow"):
        new = f"fedtailor new {shlex.quote(str(path))}"
        raise InputError(f"{path} is a table; write an experiment file for it: {new}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no TOML, no UTF-8, or a number of too many digits
        raise InputError(f"{path} is not TOML: {error}{_comma_hint(path, error)}") from None


def _comma_hint(path: Path, error: ValueError) -> str:
    """What to write where a number has a decimal comma; empty elsewhere."""
    found = re.search(r"at line (\d+)", str(error))
    if found is None or isinstance(error, UnicodeError):
        return ""
    line = path.read_text(encoding="utf-8").splitlines()[int(found[1]) - 1]
    number = re.search(r"=\s*(-?\d+),(\d+)", line)
    return f"; a number has a point: {number[1]}.{number[2]}" if number else ""


def parse(content: Mapping[str, Any]) -> Experiment:
    """An experiment from plain values; ``methods`` maps labels to fields and ``name``."""
    methods = content.get("methods")
    if isinstance(methods, list):
        methods = by_label(methods)
    methods = table_of(methods or {}, "methods")
    if isinstance(start := content.get("start_from"), str):
        content = {**content, "start_from": {"run": start}}
    attack = content.get("attack")
    if isinstance(attack, Mapping) and attack.get("clients") == [] and "fraction" not in attack:
        raise InputError("attack.clients = []: name a client, or set attack.fraction")
    built = {label: _method(label, fields) for label, fields in methods.items()}
    return build(Experiment(built), {k: v for k, v in content.items() if k != "methods"}, "")


def checked(experiment: Experiment) -> Experiment:
    """An experiment that was made in Python, with every value checked as in an experiment file."""
    for label in experiment.methods:
        check_folder_name("method label", label)
    methods = {
        label: build(method, _plain(method), f"methods.{label}")
        for label, method in experiment.methods.items()
    }
    others = {name: value for name, value in _plain(experiment).items() if name != "methods"}
    return build(dataclasses.replace(experiment, methods=methods), others, "")


def by_label(methods: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """The methods as a table, from the list that `Experiment.as_dict` writes."""
    if not all(isinstance(m, Mapping) and isinstance(m.get("label"), str) for m in methods):
        raise InputError("methods must be a table, or a list of tables that have a label, a text")
    labels = [m["label"] for m in methods]
    if len(set(labels)) < len(labels):
        raise InputError(f"methods: the labels {', '.join(map(brief, labels))} must differ")
    return {m["label"]: {k: v for k, v in m.items() if k != "label"} for m in methods}


def _method(label: str, fields: Any) -> Method:
    check_folder_name("method label", label)
    fields = table_of(fields, f"methods.{label}")
    about = ("name", "class", "sha256") if "class" in fields else ("name",)
    changes = {k: v for k, v in fields.items() if k not in about}
    if "class" in fields:
        method = _own_method(str(fields["class"]), fields.get("sha256"), f"methods.{label}: ")
        if fields.get("name", method.name) != method.name:
            said = f"methods.{label}.name = {fields['name']!r}, but the class is called"
            raise InputError(f"{said} {method.name!r}; leave name out")
    else:
        name = str(fields.get("name", label))
        if name not in METHODS:
            raise unknown("method", name, METHODS)
        method = METHODS[name]()
    return build(method, changes, f"methods.{label}")


def _own_method(reference: str, sha256: str | None, where: str) -> Method:
    """A method of the user's own with its defaults; messages begin with ``where``."""
    try:
        kind = load_object(reference, sha256)
    except InputError as error:
        raise InputError(f"{where}{error}") from error
    name = reference.rpartition(":")[2]
    if not isinstance(kind, type) or not issubclass(kind, Method):
        raise InputError(f"{where}{name} is not a class that derives from fedtailor.Method")
    if "__dataclass_params__" not in vars(kind) or not vars(kind)["__dataclass_params__"].frozen:
        raise InputError(f"{where}{name} must be a frozen dataclass: @dataclass(frozen=True)")
    if not isinstance(getattr(kind, "name", None), str):
        raise InputError(f'{where}{name} has no name; write name: ClassVar[str] = "mine"')
    none, fields = dataclasses.MISSING, dataclasses.fields(kind)
    without = [f.name for f in fields if f.init and f.default is none and f.default_factory is none]
    if without:
        raise InputError(f"{where}{name} needs a default for {', '.join(without)}")
    method = kind()
    hints = {n: h for n, h in vars(Method)["__annotations__"].items() if h.startswith("ClassVar")}
    for setting, value in ((n, getattr(Method, n)) for n in hints if hasattr(Method, n)):
        if type(mine := getattr(method, setting)) is not type(value):
            must = f"it must be as {value!r}, a {type(value).__name__}"
            raise InputError(f"{where}{name}.{setting} = {brief(mine)}: {must}")
    return method


def configured_method(name: str, settings: Settings = ()) -> Method:
    """A method by its name, or as ``FILE.py:CLASS`` or ``package.module:CLASS``, with some fields
    set. Raises InputError for no such method or field, or a value that the field doesn't take.

    >>> configured_method("fedprox", ["mu=0.5"]).mu
    0.5
    """
    fields: dict[str, Any] = {}
    for key, value in pairs_of(settings).items():
        set_dotted(fields, key.split("."), value)
    label, kind = ("method", "class") if ":" in name else (name, "name")
    return _method(label, {kind: name, **fields})
