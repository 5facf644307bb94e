"""``fedtailor report``: draw one or several runs as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import InputError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    what = "default: RUN/report.html; of several runs: report.html in the current folder"
    parser.add_argument("--out", type=Path, metavar="FILE", help=what)
    what = "also write the charts into this folder, each as SVG, PNG and PDF (extra figures)"
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help=what)


def command(options: argparse.Namespace) -> None:
    from ..report import save_figures, write

    if options.out is not None and options.out.suffix != ".html":
        raise InputError(f"--out {options.out}: a page's name ends with .html")
    folder = options.runs[0] if len(options.runs) == 1 else Path()
    print(write(options.runs, options.out or folder / "report.html"))
    for path in save_figures(options.runs, options.figures) if options.figures else ():
        print(path)
