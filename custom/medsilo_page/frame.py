"""Fill templates that have a common style, for the hospital's web page and for the lab's reports."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

STYLE = Path(__file__).parent / "style.html"


@cache  # because of the cache, Jinja compiles each template only once in a process
def templates_in(*folders: Path) -> Environment:
    """Return the Jinja environment for templates in the given folders.

    Escaping is always on, because names, reasons and plans come from other machines.
    """
    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
