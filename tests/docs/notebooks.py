"""Runs a notebook of the documentation in a kernel of its own.

python -m tests.docs.notebooks docs/notebooks/*.ipynb    # run them, and store what they print
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

_ABSOLUTE = re.compile(r"(/[\w.-]+){2,}/(?=[\w.-]+)")


def execute(path: Path, folder: Path) -> NotebookNode:
    """The notebook with new outputs, run in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
        config=Config({"KernelManager": {"transport": "ipc"}}),  # no port that others can reach
    )  # fmt: skip
    return client.execute()


def kinds(notebook: NotebookNode) -> list[set[str]]:
    """What each cell of code shows, such as a table or a picture; without standard error."""
    return [
        {kind for output in cell.outputs for kind in output.get("data", {output.get("name"): ""})}
        - {"stderr"}
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def store(notebook: NotebookNode, path: Path) -> None:
    """Write it without times, progress and the places of this machine."""
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(notebook, path)
    assert not _ABSOLUTE.search(re.sub(r"https?://\S+|</?\w+", "", shown(notebook))), path


def shown(notebook: NotebookNode) -> str:
    """All text that its outputs hold."""
    parts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            parts += [str(output.get("text", "")), str(output.get("data", {}).get("text/plain"))]
            parts.append(str(output.get("data", {}).get("text/html", "")))
    return "\n".join(parts)


def main(paths: list[str]) -> None:
    """Run and store them."""
    for path in map(Path, paths):
        with tempfile.TemporaryDirectory() as folder:
            store(execute(path, Path(folder)), path)


if __name__ == "__main__":
    main(sys.argv[1:])
