"""The documentation site: `pip install '.[docs]'`, then `sphinx-build -W docs site`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

sys.path.insert(0, str(Path(__file__).parent.parent))

from collectives import __version__ as release  # noqa: F401

project = "ddp-runtime"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = project
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
highlight_language = "none"  # of fences that name none
myst_heading_anchors = 4
default_role = "code"
autodoc_default_options = {"members": True, "imported-members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# Links from a page to a source file work in the repository; the site has no copy of them.
suppress_warnings = ["myst.xref_missing"]


def plain_text(app: Any, what: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Makes reStructuredText of a docstring, which is plain text: nothing in it but `code` is markup.

    Indented paragraphs are shown as they are; where one describes arguments (`name: what it is`), its lines stay lines.
    """
    shown: list[str] = []
    for paragraph in "\n".join(lines).split("\n\n"):
        text = [line for line in paragraph.splitlines() if line]
        if text and all(line.startswith("  ") for line in text):
            shown += ["::", "", *text, ""]
            continue
        mark = "| " if any(re.match(r"[\w*, ]+: ", line) for line in text) else ""
        for line in text:
            parts = line.split("`")
            parts[::2] = [re.sub(r"([*|_\\])", r"\\\1", part) for part in parts[::2]]
            shown.append(mark + "`".join(parts) if mark or not line.startswith(" ") else "  " + "`".join(parts).strip())
        shown.append("")
    lines[:] = shown


def link_pictures(app: Any, doctree: Any) -> None:
    """Gives pictures a width: Sphinx links those that have one to their full size."""
    for image in doctree.findall(nodes.image):
        image.setdefault("width", "100%")


def setup(app: Any) -> None:
    app.connect("doctree-read", link_pictures)
    app.connect("autodoc-process-docstring", plain_text)
