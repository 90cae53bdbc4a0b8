"""The frame of all pages: one self-contained HTML file that opens without a network, sorts, and prints."""

import base64
import csv
import hashlib
import re
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from medsilo import __version__
from medsilo.core.files import write_text
from medsilo.report.formats import epsilon, number
from medsilo.report.read import picture_of

HERE = Path(__file__).parent
Name = str | tuple[str, ...]  # of a row or column: words, or words and what qualifies them
Cell = dict[str, Any]


def templates_in(*folders: Path) -> Environment:
    """Return what fills templates. Escaping is on for everything: names, reasons and plans come from other machines."""
    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def fill(template: str, title: str, folder: Path = HERE, **content: Any) -> str:
    """A page as text; it depends on nothing but its content. folder: where a plug-in's own template lies."""
    environment = templates_in(folder, HERE)
    environment.filters |= {"score": number, "epsilon": epsilon, "headings": headings, "csv": csv_link, "zip": zip}
    environment.filters["picture"] = picture_of
    script = (HERE / "sort.html").read_text(encoding="utf-8").strip()
    return environment.get_template(template).render(
        title=title,
        style=Markup((HERE / "style.html").read_text(encoding="utf-8").strip()),
        script=Markup(script),
        script_hash=script_hash(script),
        version=__version__,
        **content,
    )


def headings(content: str) -> list[tuple[str, Markup]]:
    """Return the anchor and the words of every section's heading, in the page's order."""
    return [(anchor, Markup(words)) for anchor, words in re.findall(r'<h2 id="([\w-]+)">(.*?)</h2>', content)]


def csv_link(name: str, head: Name, heads: Sequence[Name], rows: Iterable[tuple[Name, Sequence[Cell]]]) -> Markup:
    """Return a link that holds a table's values as a CSV file; what is beside a value has a column of its own."""
    rows = list(rows)
    beside = [any(cells[n]["aside"] for _, cells in rows) for n in range(len(heads))]

    def line(name: Name, pairs: Iterable[tuple[object, str]]) -> list[object]:
        told = zip(pairs, beside, strict=True)
        return [_words(name), *(part for pair, more in told for part in pair[: 1 + more])]

    text = StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(line(head, ((_words(each), "") for each in heads)))
    writer.writerows(line(name, map(_parts, cells)) for name, cells in rows)
    content = base64.b64encode(text.getvalue().encode(errors="replace")).decode()
    file = re.sub(r"\W+", "-", name.lower()).strip("-")
    link = '<p class="data screen"><a download="{}.csv" href="data:text/csv;charset=utf-8;base64,{}">{} (CSV)</a></p>'
    return Markup(link).format(file, content, name)


def _words(name: Name) -> str:
    return name if isinstance(name, str) else " ".join(filter(None, name))


def _parts(cell: Cell) -> tuple[object, str]:
    """Return a cell's value, or its words where it has none, and what is beside it."""
    return (cell["value"] if cell["value"] != "" else cell["text"]), cell["aside"]


def script_hash(script: str) -> str:
    """The page's policy allows this one script by its hash, so nothing that slipped into the page could run."""
    code = script.removeprefix("<script>").removesuffix("</script>")
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def save(page: str, destination: Path) -> Path:
    """Write the page and return where it is. A reader never sees half a page."""
    # A half character in some site's message must not cost the report.
    write_text(destination, page.encode("utf-8", "replace").decode())
    return destination
