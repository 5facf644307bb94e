"""Write the tables of docs/methods/index.md from the methods' pages: python docs/methods_index.py.

Below its title a page has a paragraph that says what the method is for, then a line
``**Sent:** ... **Kept by the client:** ...``.
"""

from __future__ import annotations

import re
from pathlib import Path

from fedtailor.methods import METHODS

PAGES = Path(__file__).parent / "methods"
INDEX = PAGES / "index.md"
BEGIN, END = "<!-- tables: docs/methods_index.py -->\n", "<!-- end of tables -->\n"
FAMILIES = {
    "global": "One model for all",
    "regularised": "Training held near a shared model",
    "split": "Split between client and server",
    "mixture": "Mixtures of models or of predictions",
    "cluster": "Clusters of clients",
    "sparse": "Sparse and small models",
    "adapter": "LoRA",
    "local": "No federation",
}
OPENING = re.compile(
    r"# .+\n\n(?![*|#])(?:.+\n)+\n\*\*Sent:\*\* (.+)\. \*\*Kept by the client:\*\* (.+)\.\n\n"
)


def tables() -> str:
    """A table for each family, a row for each method."""
    unknown = {method.family for method in METHODS.values()} - FAMILIES.keys()
    if unknown:
        raise SystemExit(f"no title for the families {sorted(unknown)}; known: {list(FAMILIES)}")
    return "\n".join(f"## {title}\n\n{table(family)}" for family, title in FAMILIES.items())


def table(family: str) -> str:
    """A row for each method of a family."""
    names = [name for name in METHODS if METHODS[name].family == family]
    rows = "\n".join(_row(name) for name in names)
    return f"| method | sent | kept by the client |\n|---|---|---|\n{rows}\n"


def _row(name: str) -> str:
    opening = OPENING.match((PAGES / f"{name}.md").read_text())
    if opening is None:
        raise SystemExit(
            f"docs/methods/{name}.md must begin with its title, a paragraph that says what the "
            "method is for, and a line '**Sent:** TEXT. **Kept by the client:** TEXT.'"
        )
    sent, kept = opening.groups()
    return f"| [`{name}`]({name}.md) | {sent} | {kept} |"


def with_tables(index: str) -> str:
    """``index``, a page's text, with new tables."""
    before, _, rest = index.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    INDEX.write_text(with_tables(INDEX.read_text()))
