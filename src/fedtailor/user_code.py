"""Code of the user's own that an experiment names: ``FILE.py:NAME`` or ``package.module:NAME``.

A file is loaded as a module of its own, named after its content, so that a copy of it gives the
same objects. It may import other files of its folder. They are a part of it: its sha256 covers
them, and they are copied with it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from .errors import InputError

FROM_PYTHON = "from Python: "  # begins the name of data or a model that only Python can give
_OF_VALUES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_MODULE = re.compile(r"\w+(\.\w+)*")
_sources: dict[str, bytes] = {}  # by module; a file's bytes as they were when it was first read
_files: set[str] = set()  # the user's own files that have been loaded


@dataclass(frozen=True)
class Origin:
    """Where an object of the user's own is defined.

    ``reference`` names it on every machine: ``file.py:NAME`` or ``package.module:NAME``. ``sha256``
    is that of the ``source``, and of the files ``beside`` it that it imports, by name. ``path`` is
    the file, where it stands by itself and a copy can be loaded. ``sha256`` and ``path`` are None
    for what was defined in a script or a notebook, and ``path`` for a module of a package.
    """

    reference: str
    sha256: str | None = None
    path: Path | None = None
    source: bytes = b""
    beside: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def location(self) -> str:
        """The reference with the file's whole path."""
        name = self.reference.rpartition(":")[2]
        return self.reference if self.path is None else f"{self.path}:{name}"

    def check(self, sha256: str | None) -> None:
        """Raise InputError unless the sha256 is this one; None: any will do."""
        if sha256 not in (None, self.sha256):
            place = _shown(self.location.rpartition(":")[0])
            with_others = f", or one of {', '.join(self.beside)}," if self.beside else ""
            raise InputError(
                f"{place}{with_others} has changed: its sha256 was {str(sha256)[:12]}..., and is "
                f"{str(self.sha256)[:12]}... now; restore it as it was"
            )


def absolute(reference: str, folder: Path) -> str:
    """Return ``reference`` with the whole path of its file, which is relative to ``folder``; as it
    is where it names a module.

    >>> absolute("mine.py:Mine", Path("/here")), absolute("package.mine:Mine", Path("/here"))
    ('/here/mine.py:Mine', 'package.mine:Mine')
    """
    place, _, name = reference.rpartition(":")
    path = (folder / (place if place.endswith(".py") else f"{place}.py")).absolute()
    return f"{path}:{name}" if place.endswith(".py") or path.is_file() else reference


def load(reference: str, sha256: str | None = None) -> Any:
    """Load the object that ``reference`` names; a file is relative to the working directory, and
    ``FILE:NAME`` is one, too, if there is a ``FILE.py``. Raises InputError for no such file, module
    or name, a mistake in the file, or another sha256 than this one, unless it is None.

    >>> load("mine.py:Mine")
    Traceback (most recent call last):
    fedtailor.errors.InputError: no file mine.py; give FILE.py:NAME or package.module:NAME
    """
    place, name = _split(reference)
    own = origin_of(reference)
    own.check(sha256)
    module = _import(place) if own.path is None else _load_file(own, own.path)
    found = vars(module).get(name)
    if found is None and place == "__main__":
        said = f"{name} was defined in a script or a notebook, not in this one"
        raise InputError(f"{said}; put it into a file and name it: FILE.py:{name}")
    if found is None:
        raise InputError(f"{_shown(place)} defines no {name!r}; named by {_shown(reference)!r}")
    return found


@contextmanager
def own_faults(of_values: bool = False) -> Iterator[None]:
    """Raise InputError, with file and line, where code of the user's own has raised anything else,
    `SystemExit` too; with ``of_values``, also where something else fails, since it may have failed
    because of what that code has returned."""
    try:
        yield
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = _own_place(error)
        is_of_values = isinstance(error, _OF_VALUES) and not isinstance(error, RecursionError)
        if place is None and not (of_values and _files and is_of_values):
            raise
        if place is None:
            files = ", ".join(map(_shown, sorted(_files)))
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}, line {frame.lineno}"
            place = f"{files} (or what uses its values: {where})"
        raise InputError(f"{place}: {_text(error)}") from error


def _own_place(error: BaseException) -> str | None:
    """The user's own file and the line in which an error has its cause; None: there is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SyntaxError) and cause.filename in _files:
            return f"{_shown(cause.filename)}, line {cause.lineno}"
        frames = [f for f in traceback.extract_tb(cause.__traceback__) if f.filename in _files]
        if frames:
            return f"{_shown(frames[-1].filename)}, line {frames[-1].lineno}"
        cause = cause.__cause__ or cause.__context__
    return None


def stored(reference: str, folder: Path, sha256: str | None) -> str:
    """Return ``reference``, as a run directory has it, with the whole path of the copy of its file
    in ``folder``. A copy must have this ``sha256``; a module may have any if that is None. Raises
    InputError where the file is not in the folder itself, or has changed.

    >>> stored("../mine.py:Mine", Path("run/methods/mine"), None)
    Traceback (most recent call last):
    fedtailor.errors.InputError: '../mine.py:Mine' names no file in run/methods/mine, nor a module
    """
    place, _, name = reference.rpartition(":")
    is_file = place.endswith(".py")
    if not (place == Path(place).name if is_file else _MODULE.fullmatch(place)):
        raise InputError(f"{reference!r} names no file in {_shown(folder)}, nor a module")
    if not is_file:
        if sha256 is not None:
            origin_of(reference).check(sha256)
        return reference
    copy = (folder / place).absolute()
    if copy.is_file():
        if sha256 is None:
            raise InputError(f"{_shown(copy)} has no sha256 in experiment.json; it must have one")
        origin_of(f"{copy}:{name}").check(sha256)
    return f"{copy}:{name}"


def file_of(reference: str) -> Path:
    """Return the file in which the object that ``reference`` names is defined. Raises InputError
    where it names no object, or one that is in no file.

    >>> file_of("fedtailor.errors:InputError").name
    'errors.py'
    """
    place, name = _split(reference)
    path = Path(place) if place.endswith(".py") else _path(_import(place))
    if path is None:
        raise InputError(f"{reference!r} is in no file; put it into one: FILE.py:{name}")
    return path


def origin(value: type) -> Origin:
    """Return where a class is defined.

    >>> from .errors import InputError
    >>> origin(InputError).reference
    'fedtailor.errors:InputError'
    """
    module = sys.modules[value.__module__]
    reference, path = f"{module.__name__}:{value.__qualname__}", _path(module)
    if path is None:
        return Origin(reference)
    if "." in module.__name__ or path.name == "__init__.py":
        return Origin(reference, _digest(_source(module)))
    return _of_file(path, _source(module), value.__qualname__)


def origin_of(reference: str) -> Origin:
    """Return where the object that ``reference`` names is defined; a file is read, not run. Raises
    InputError for no such file or module.

    >>> origin_of("fedtailor.errors:InputError").reference
    'fedtailor.errors:InputError'
    """
    place, name = _split(reference)
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise InputError(f"no file {_shown(path)}; give FILE.py:NAME or package.module:NAME")
        return _of_file(path, path.read_bytes(), name)
    module = _import(place)
    source = _source(module)
    return Origin(reference, None if _path(module) is None else _digest(source), None, source)


def _of_file(path: Path, source: bytes, name: str) -> Origin:
    beside = imported_beside(path, source)
    return Origin(f"{path.name}:{name}", _digest(source, beside), path, source, beside)


def imported_beside(path: Path, source: bytes) -> dict[str, bytes]:
    """Return the files of the folder of ``path`` that its ``source`` imports, and those that these
    import, by name; the standard library's names stand for the standard library."""
    found: dict[str, bytes] = {}
    todo = [source]
    while todo:
        for name in _imported(todo.pop()) - sys.stdlib_module_names:
            file = path.with_name(f"{name}.py")
            if file.name not in found and file.is_file():
                found[file.name] = file.read_bytes()
                todo.append(found[file.name])
    return dict(sorted(found.items()))


def _imported(source: bytes) -> set[str]:
    """The top-level names of the modules that a source imports; none if it is no Python."""
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError):
        return set()  # loading it says what is wrong
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    return {name.partition(".")[0] for name in names}


def portable(reference: str) -> str:
    """Return ``reference`` as it is on every machine: without the folder of its file.

    >>> portable("/here/mine.py:Mine"), portable("package.mine:Mine")
    ('mine.py:Mine', 'package.mine:Mine')
    """
    place, _, name = reference.rpartition(":")
    return f"{Path(place).name}:{name}" if place.endswith(".py") else reference


def _split(reference: str) -> tuple[str, str]:
    """The whole path of a file, or a module, and the name of an object in it."""
    place, _, name = absolute(reference, Path()).rpartition(":")
    if not place or not name:
        raise InputError(f"{reference!r} names no object; give FILE.py:NAME or package.module:NAME")
    return place, name


def _load_file(own: Origin, path: Path) -> ModuleType:
    name = f"{path.stem}_{str(own.sha256)[:12]}"
    others = _beside.serve(path.parent, own.beside)
    if name in sys.modules:
        sys.modules.update(others)
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while they are made
    _files.add(str(path))
    try:
        with own_faults():
            exec(compile(own.source, str(path), "exec"), vars(module))
        _sources[name] = own.source
    finally:
        if name not in _sources:
            del sys.modules[name]
        sys.modules.update(others)
    return module


class _Beside(MetaPathFinder, Loader):
    """Finds the files that files of the user's own import from their folders, and runs them as they
    were when they were read; no compiled file is written beside them."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[Path, bytes]] = {}

    def serve(self, folder: Path, files: Mapping[str, bytes]) -> dict[str, ModuleType]:
        """Let ``files`` of ``folder`` be what their names import from now on. Returns the modules
        of these names that come from elsewhere, which must be put back afterwards."""
        others = {}
        for file, source in files.items():
            name = file.removesuffix(".py")
            module = sys.modules.get(name)
            if module is not None and _source(module) != source:
                if name not in self._files:
                    others[name] = module
                del sys.modules[name]
            self._files[name] = folder / file, source
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        return others

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._files:
            return None
        return spec_from_file_location(fullname, self._files[fullname][0], loader=self)

    def exec_module(self, module: ModuleType) -> None:
        file, source = self._files[module.__name__]
        _sources[module.__name__] = source
        _files.add(str(file))
        exec(compile(source, str(file), "exec", dont_inherit=True), vars(module))


_beside = _Beside()


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"can't import {name!r}: {_text(error)}; install it, put its folder on PYTHONPATH, or "
            "give a file, FILE.py:NAME"
        ) from error


def _path(module: ModuleType) -> Path | None:
    """The module's file; None for a script and for what has no file."""
    file = getattr(module, "__file__", None)
    is_file = file is not None and Path(file).suffix == ".py" and module.__name__ != "__main__"
    return Path(file).absolute() if is_file and file is not None else None


def _source(module: ModuleType) -> bytes:
    path, name = _path(module), module.__name__
    if path is None:
        return b""
    if name not in _sources:
        _sources[name] = path.read_bytes()
    return _sources[name]


def _digest(source: bytes, beside: Mapping[str, bytes] = MappingProxyType({})) -> str:
    """The sha256 of a source, and of the sources of files by name."""
    digest = hashlib.sha256(source)
    for name, other in beside.items():
        digest.update(f"\0{name}\0{hashlib.sha256(other).hexdigest()}".encode())
    return digest.hexdigest()


def _shown(place: str | Path) -> str:
    """A path without the working directory."""
    return str(place).removeprefix(f"{Path().absolute()}/")


def _text(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except BaseException:  # noqa: BLE001 - the user's own __str__ may raise anything
        text = "an error without a text"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
