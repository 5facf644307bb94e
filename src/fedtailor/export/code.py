"""The code that goes with an export: files of this package whose imports become plain ones, and the
architecture's, where a stranger could not have it."""

from __future__ import annotations

import copy
import inspect
import re
import shutil
from importlib.resources import files
from pathlib import Path

import torch

from ..disk_cache import package_folder
from ..errors import InputError
from ..objectives.exported import ExportedModel
from ..user_code import file_of, imported_beside
from .network import Network, own_place

_PACKAGE = files(__package__.rpartition(".")[0])
_ERROR = re.compile(r"^from \.+errors import InputError$", re.MULTILINE)
_NEEDED = re.compile(r"^from (\.+)((?:\w+\.)*\w+) import", re.MULTILINE)
_RELATIVE = re.compile(r"^( *)from \.+(?:\w+\.)*(\w+) import", re.MULTILINE)
_ANSWERS = '''"""What the model says."""

from __future__ import annotations

from abc import ABC, abstractmethod
'''
_LIBRARY = re.compile(r"^(?:import|from) fedtailor\b", re.MULTILINE)
_EFFICIENTNET = "efficientnet_lite_pytorch"


def write_code(network: Network, form: str, out: Path) -> None:
    """Write ``model.py``, ``use.py`` and what they import into the folder ``out``; ``form`` is the
    forward pass, a file in ``templates``. Raises InputError where the code of a module of one's own
    is missing, or needs this library."""
    _copy(f"export/templates/{form}.py", out / "model.py")
    exported = network.backbone.objective.exported
    classes = "\n\n".join(inspect.getsource(one) for one in (ExportedModel, exported))
    (out / "answers.py").write_text(f"{_ANSWERS}\n\n{classes}")
    use = (_PACKAGE / "export/templates/use.py").read_text()
    (out / "use.py").write_text(use.replace("from .plain import", "from model import"))
    kind = network.about(None, False)["kind"]
    if kind == "built-in":
        _copy("models/cnn.py", out / "cnn.py")
    elif kind == "efficientnet":
        package, ignore = package_folder(_EFFICIENTNET), shutil.ignore_patterns("__pycache__")
        assert package is not None
        shutil.copytree(package, out / _EFFICIENTNET, ignore=ignore)
    elif network.config.factory is not None:
        file, target = file_of(network.config.factory), out / network.factory_place
        _copy_own(file, target)
        for name in imported_beside(file, file.read_bytes()):
            _copy_own(file.with_name(name), target.with_name(name))
    elif kind == "pickled":
        for module, file in network.own_code.items():
            _copy_own(file, out / own_place(module))
        structure = copy.deepcopy(network.model).to("meta")  # without values
        torch.save(structure, out / "network.pt")


def _copy(source: str, target: Path) -> None:
    """Copy a file of this package and those that it needs, as plain modules of one folder."""
    text = _ERROR.sub("InputError = ValueError", (_PACKAGE / source).read_text())
    for dots, path in _NEEDED.findall(text):
        if path == "answers":
            continue  # that of the kind of task
        folder, name = Path(source).parents[len(dots) - 1], path.rpartition(".")[2]
        _copy(f"{folder}/{path.replace('.', '/')}.py", target.with_name(f"{name}.py"))
    target.write_text(_RELATIVE.sub(r"\1from \2 import", text))


def _copy_own(file: Path, target: Path) -> None:
    if _LIBRARY.search(file.read_text()):
        raise InputError(
            f"{file} imports fedtailor, and an export is used without it; let the file define the "
            f"nn.Module alone, and give head and targets in the experiment's [model]"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)
