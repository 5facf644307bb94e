"""Runs a notebook of the documentation in a kernel of its own.

python -m tests.docs.notebooks docs/notebooks/*.ipynb    # run them, and store what they print
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config


def execute(path: Path, folder: Path) -> NotebookNode:
    """The notebook with new outputs, run in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
        config=Config({"KernelManager": {"transport": "ipc", "ip": str(folder / "kernel")}}),
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


def store(notebook: NotebookNode, path: Path, folder: Path) -> None:
    """Write it without times, progress, and the place ``folder`` in which it has run."""
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    }
    text = nbformat.writes(notebook).replace(f"{folder}/", "")
    assert str(Path.home()) not in text, path
    path.write_text(text + "\n")


def main(paths: list[str]) -> None:
    """Run and store them."""
    for path in map(Path, paths):
        with tempfile.TemporaryDirectory() as folder:
            store(execute(path, Path(folder)), path, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
