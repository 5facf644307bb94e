"""``fedtailor completion``: a script with which a shell completes fedtailor's commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError

_SHELLS = ("bash", "zsh", "tcsh")
_EXPERIMENTS = "_fedtailor_experiments"


def add(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the command's options."""
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(command=_completion)


def _completion(options: argparse.Namespace) -> None:
    try:
        import shtab
    except ImportError:
        raise InputError("fedtailor completion needs shtab: pip install shtab") from None
    from ..methods import METHODS
    from ..runs import builtin

    names = " ".join(builtin.experiments())
    for action in _actions(options.whole):
        _complete(action, METHODS, shtab.FILE)
    print(shtab.complete(options.whole, options.shell, preamble=_preamble(options.shell, names)))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _complete(action: Any, methods: Iterable[str], file: Mapping[str, Any]) -> None:
    """Say what stands for an argument: files for paths, names for methods and experiments."""
    if action.dest == "experiment":
        action.complete = {**file, "bash": _EXPERIMENTS, "zsh": _EXPERIMENTS}
    elif action.type is Path:
        action.complete = file
    elif action.dest == "method" and action.choices is None:
        action.choices = sorted(methods)


def _preamble(shell: str, names: str) -> str:
    """The shell's function that completes an experiment: a built-in name, or a file."""
    if shell == "bash":
        body = f'compgen -W "{names}" -- "$1"; _shtab_compgen_files "$1"'
    elif shell == "zsh":
        body = f"compadd {names}; _files"
    else:
        return ""
    return f"{_EXPERIMENTS}() {{ {body}; }}"
