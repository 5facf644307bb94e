"""The parser, and what becomes of an error."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import fedtailor

from ..errors import InputError, announce, one_line, unknown
from ..user_code import own_faults

_COMMANDS = (  # each in a file of its own
    "new", "advise", "run", "watch", "merge", "rollback", "compare", "report", "list",
    "describe", "check-method", "layers", "tune", "predict", "serve", "audit", "onboard",
    "export", "track", "deploy", "doctor", "check",
)  # fmt: skip
_GO_ON = ("run", "tune", "deploy")  # commands that keep what they have done


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code: 0, 2 on bad input, 130 when interrupted."""
    command = ""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        command = options.command.__module__.rpartition(".")[2]
        with own_faults(of_values=True):
            options.command(options)
        sys.stdout.flush()
    except InputError as error:
        announce(one_line(error))
        return 2
    except RecursionError:
        announce("tables or lists stand too deep within one another")
        return 2
    except BrokenPipeError:  # whoever read stdout has enough, as `head` has after ten lines
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        problem = f"{error.filename or 'i/o'}: {error.strerror or error}"
        announce(one_line(problem))
        return 2
    except KeyboardInterrupt:
        more = "; the same command goes on from here" if command in _GO_ON else ""
        announce(f"interrupted{more}")
        return 130
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"fedtailor: {message}; see {self.prog} --help\n")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _COMMANDS:
        raise unknown("command", arguments[0], _COMMANDS)
    if found := next((word for word in arguments if re.fullmatch("--[a-z-]+=--", word)), None):
        raise InputError(f"{found}: -- can't be an option's value; give a client by its number")
    options, unrecognised = _parser().parse_known_args(arguments or ["--help"])
    if unrecognised:
        options.parser.error(f"unrecognized arguments: {' '.join(unrecognised)}")
    return options


def _parser() -> argparse.ArgumentParser:
    whole = _Parser(prog="fedtailor", description=fedtailor.__doc__)
    whole.add_argument("--version", action="version", version=f"fedtailor {fedtailor.__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for name in _COMMANDS:
        module = import_module(f".{name.replace('-', '_')}", __package__)
        doc = module.__doc__ or f": {name}"  # -OO leaves docstrings out
        what = doc.rstrip(".").partition(": ")[2]
        command = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        module.add(command)
        command.set_defaults(parser=command, command=module.command)
    return whole
