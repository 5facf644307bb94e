"""The command line, one file a command: its docstring is the command's help, `add` gives a parser
its options, and `command` runs it. What takes long to import, a command imports itself."""

from .main import main

__all__ = ["main"]
