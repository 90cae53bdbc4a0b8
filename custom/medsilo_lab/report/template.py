"""The frame of all pages: one self-contained HTML file without a script, which opens without a network and prints."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from medsilo import __version__
from medsilo.core.files import write_text
from medsilo.core.text import epsilon_text
from medsilo.runs.schema import StudyFacts
from medsilo_lab.report.formats import number
from medsilo_lab.report.glossary import terms_in
from medsilo_lab.report.read import picture_of

HERE = Path(__file__).parent


@cache  # a template is compiled once in a process
def templates_in(*folders: Path) -> Environment:
    """Return what fills templates. Escaping is on for everything: names, reasons and plans come from other machines."""
    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def fill(template: str, title: str, folder: Path = HERE, description: StudyFacts | None = None, **content: Any) -> str:
    """A page as text; it depends on nothing but its content.

    title: the finding. description: the study in its lead's words. folder: where a plug-in's own template lies.
    """
    environment = templates_in(folder, HERE)
    environment.filters |= {"score": number, "epsilon": epsilon_text, "headings": headings}
    environment.filters |= {"picture": picture_of, "terms": terms_in}
    return environment.get_template(template).render(
        title=title,
        description=description or StudyFacts(),
        style=Markup((HERE / "style.html").read_text(encoding="utf-8").strip()),
        version=__version__,
        **content,
    )


def headings(content: str) -> list[tuple[str, Markup]]:
    """Return the anchor and the words of every section's heading, in the page's order."""
    return [(anchor, Markup(words)) for anchor, words in re.findall(r'<h2 id="([\w-]+)">(.*?)</h2>', content)]


def save(page: str, destination: Path) -> Path:
    """Write the page and return where it is. A reader never sees half a page."""
    # A half character in some site's message must not cost the report.
    write_text(destination, page.encode("utf-8", "replace").decode())
    return destination
