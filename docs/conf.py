"""The documentation site: `pip install '.[docs]'`, then `sphinx-build -W docs site`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import docstrings
import reference
import result_tables

from collectives import __version__ as release

project = "ddp-runtime"
extensions = [
    "myst_nb",  # which is myst_parser, and shows notebooks as they are stored
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"{project} {release}"
html_favicon = "_static/favicon.svg"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
highlight_language = "none"  # of fences that name none
myst_heading_anchors = 4
nb_execution_mode = "off"
default_role = "code"
autodoc_default_options = {"members": True}
copybutton_prompt_text = "$ "
autosummary_generate = False  # docs/reference.py makes the pages
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# Links from a page to a source file work in the repository; the site has no copy of them.
suppress_warnings = ["myst.xref_missing"]


def make_pages(app: Any, config: Any) -> None:
    """Makes those pages that are made from other files: the reference, and the notebook among the examples."""
    reference.write(Path(app.srcdir, "api"))
    stored = Path(app.srcdir).parent / "examples/notebook.ipynb"
    page = Path(app.srcdir, "notebook.ipynb")
    if not page.exists() or page.read_bytes() != stored.read_bytes():  # else Sphinx would read it again
        page.write_bytes(stored.read_bytes())


def docstring_to_rst(app: Any, what: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    try:
        parameters = list(inspect.signature(member).parameters)
    except (TypeError, ValueError):  # no callable, or one written in C
        parameters = []
    lines[:] = docstrings.plain_text("\n".join(lines), parameters, inspect.isclass(member)).split("\n")


def add_results(app: Any, page: str, source: list[str]) -> None:
    """Ends the page on benchmarks with tables of every committed result."""
    if page == "benchmarks":
        source[0] += "\n" + result_tables.markdown()


def link_pictures(app: Any, doctree: Any) -> None:
    """Gives pictures a width: Sphinx links those that have one to their full size."""
    for image in doctree.findall(nodes.image):
        image.setdefault("width", "100%")


def setup(app: Any) -> None:
    app.connect("doctree-read", link_pictures)
    app.connect("source-read", add_results)
    app.connect("config-inited", make_pages)
    app.connect("autodoc-process-docstring", docstring_to_rst)
