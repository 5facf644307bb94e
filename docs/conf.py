"""How Sphinx builds the documentation: ``make docs``.

The pages are plain Markdown, which GitHub shows, too. So the navigation stands here, and is added
to the pages as they are read.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import runpy
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

from fedtailor import __version__
from fedtailor.methods import METHODS

HERE = Path(__file__).parent
FAMILIES: dict[str, str] = runpy.run_path(str(HERE / "methods_index.py"))["FAMILIES"]

# Pages of a folder that are not named here come last.
ORDER = [
    "own-csv", "other-tasks", "own-model", "own-instructions", "three-sites", "new-method",
    "from-pfllib", "from-flower", "from-trainer",
]  # fmt: skip


def pages_of(folder: str) -> list[str]:
    """The pages and notebooks of a folder, in order."""
    names = {path.stem for path in (HERE / folder).glob("*.*") if path.suffix in (".md", ".ipynb")}
    ordered = [name for name in ORDER if name in names] + sorted(names.difference(ORDER))
    return [f"{folder}/{name}" for name in ordered]


# A page that stands in none of these lists comes last among the how-to guides.
NAVIGATION = {
    "Tutorials": ["start", *pages_of("tutorials")],
    "Notebooks": pages_of("notebooks"),
    "How-to guides": [
        "experiments", "continue", "tune", "data", "models", "python", "report", "predict", "serve",
        "export", "metrics", "track", "robustness", "privacy",
        "secure-aggregation", "audit", "faults", "torchrun", "deployment", "faq",
    ],
    "Methods": ["when", "methods/index"],
    "Reference": [
        "fields", "run-directory", "reference/commands", "reference/api/index", "glossary",
    ],
    "Results": ["results", "cross", "claims", "attacks", "noise", "evidence", "speed"],
    "Inside": ["architecture", "internals", "flower", "contributing", "changelog"],
}  # fmt: skip
NAMED = {"index", *itertools.chain(*NAVIGATION.values())}
NAVIGATION["How-to guides"] += sorted({path.stem for path in HERE.glob("*.md")} - NAMED)

API = [
    "running", "data", "models", "methods", "method-interface", "testing", "metrics", "rounds",
    "flower",
]  # fmt: skip


def toctree(pages: list[str], caption: str = "") -> str:
    """The directive that puts pages into the navigation, and shows nothing on its own page."""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["\n", "```{toctree}", *options, "", *pages, "```", ""])


# a link to a page of the repository's root: its copy is docs/contributing.md
ROOT_PAGE = re.compile(r"\]\(((?:\.\./)*)\.\./(CONTRIBUTING|CHANGELOG)\.md")


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add the pages below ``docname`` to its text, and set its links right."""
    source[0] = ROOT_PAGE.sub(lambda link: f"]({link[1]}{link[2].lower()}.md", source[0])
    if docname == app.config.root_doc:
        for caption, pages in NAVIGATION.items():
            source[0] += toctree(pages, caption)
    elif docname == "methods/index":
        source[0] += toctree([f"families/{family}" for family in FAMILIES])
    elif docname == "reference/api/index":
        source[0] += toctree(API)
    elif docname.removeprefix("methods/") in METHODS:
        name = METHODS[docname.removeprefix("methods/")].__name__
        source[0] += f"\n\n## In Python\n\n```{{eval-rst}}\n.. autoclass:: fedtailor.{name}\n```\n"


def write_families(app: Sphinx, config: Any) -> None:
    """Write a page for each family of methods, under which the navigation folds them."""
    table_of = runpy.run_path(str(HERE / "methods_index.py"))["table"]
    folder = HERE / "methods/families"
    folder.mkdir(exist_ok=True)
    for family, title in FAMILIES.items():
        names = [f"../{name}" for name in METHODS if METHODS[name].family == family]
        table = table_of(family).replace("](", "](../")
        (folder / f"{family}.md").write_text(f"# {title}\n\n{table}{toctree(names)}")


# KaTeX draws the formulas in the browser; it lies in _static, so that pages work without a network.
def inline_formula(writer: Any, node: nodes.math) -> NoReturn:
    """Write ``$...$``."""
    start = writer.starttag(node, "span", "", CLASS="formula notranslate")
    writer.body.append(f"{start}{writer.encode(node.astext())}</span>")
    raise nodes.SkipNode


def display_formula(writer: Any, node: nodes.math_block) -> NoReturn:
    """Write ``$$...$$``."""
    start = writer.starttag(node, "div", "", CLASS="formula notranslate")
    writer.body.append(f"{start}{writer.encode(node.astext())}</div>\n")
    raise nodes.SkipNode


def field_types(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str, returned: str
) -> tuple[str, str] | None:
    """A dataclass's signature: types without their bounds, ``...`` for what is made anew."""
    if not dataclasses.is_dataclass(thing):
        return None
    types = get_type_hints(thing)
    plain = inspect.signature(thing)
    fields = [field.replace(annotation=types[name]) for name, field in plain.parameters.items()]
    text = stringify_signature(
        plain.replace(parameters=fields), show_return_annotation=False, unqualified_typehints=True
    )
    return re.sub(r"<(factory|function \w+)>", "...", text), returned


def mark_charts(app: Sphinx, document: nodes.document) -> None:
    """Mark charts, which are drawn on white, so that the style can invert them on a dark page."""
    for image in document.findall(nodes.image):
        if "figures/" in image["uri"] or image["uri"] in {"images/when.svg", "images/cross.svg"}:
            image["classes"].append("chart")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("config-inited", write_families)
    app.connect("source-read", add_navigation)
    app.connect("doctree-read", mark_charts)
    app.connect("autodoc-process-signature", field_types)
    app.add_html_math_renderer("katex", (inline_formula, None), (display_formula, None))


project = "fedtailor"
version = release = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_argparse_cli",
    "sphinx_copybutton",
]

myst_enable_extensions = ["dollarmath"]
myst_dmath_double_inline = True
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4  # the anchors that GitHub gives to headings
nb_execution_mode = "off"  # notebooks show their stored results

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
_ALIASES = ["Batch", "Labels", "MetricFunction", "Params", "Probabilities", "Server"]
autodoc_type_aliases = {name: name for name in _ALIASES}
maximum_signature_line_length = 90
python_use_unqualified_type_names = True
add_module_names = False
default_role = "py:obj"
highlight_language = "none"
pygments_dark_style = "github-dark"

html_theme = "furo"
html_title = "fedtailor"
html_favicon = "_static/icon.svg"
html_theme_options = {  # the colours of the report's page
    "light_css_variables": {"color-brand-primary": "#0a5c9e", "color-brand-content": "#0a5c9e"},
    "dark_css_variables": {"color-brand-primary": "#7cc0ee", "color-brand-content": "#7cc0ee"},
}
html_static_path = ["_static"]
html_css_files = ["katex/katex.min.css", "site.css"]
html_js_files = ["katex/katex.min.js", "formulas.js"]
html_math_renderer = "katex"
html_copy_source = False
html_use_index = False
html_domain_indices = False
html_show_sphinx = False
html_show_copyright = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
