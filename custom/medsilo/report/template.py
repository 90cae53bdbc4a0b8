"""The frame of all pages: one self-contained HTML file that opens without a network, sorts, and prints."""

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from medsilo import __version__
from medsilo.report.table import number

HERE = Path(__file__).parent


def fill(template: str, title: str, **content: Any) -> str:
    """A page as text; it depends on nothing but its content."""
    # Escaping is on for everything: site names, reasons and plans come from other machines.
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["score"] = number
    script = (HERE / "sort.html").read_text(encoding="utf-8").strip()
    return environment.get_template(template).render(
        title=title,
        style=Markup((HERE / "style.html").read_text(encoding="utf-8").strip()),
        script=Markup(script),
        script_hash=script_hash(script),
        version=__version__,
        **content,
    )


def script_hash(script: str) -> str:
    """The page's policy allows this one script by its hash, so nothing that slipped into the page could run."""
    code = script.removeprefix("<script>").removesuffix("</script>")
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def save(page: str, destination: Path) -> Path:
    """Write the page and return where it is. A reader never sees half a page."""
    destination = Path(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    draft = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    try:
        # A half character in some site's message must not cost the report.
        draft.write_text(page, encoding="utf-8", errors="replace")
        draft.replace(destination)
    finally:
        draft.unlink(missing_ok=True)
    return destination
