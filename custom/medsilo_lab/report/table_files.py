"""A page's tables as CSV files within the page: with all digits, and with no name that a spreadsheet would run."""

import base64
import csv
import re
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Any

from markupsafe import Markup

Name = str | tuple[str, ...]  # of a row or column: words, or words and what qualifies them
Cell = dict[str, Any]
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what spreadsheets take for the beginning of one
LINK = '<p class="data screen"><a download="{}.csv" href="data:text/csv;charset=utf-8;base64,{}">{} (CSV)</a></p>'


def csv_link(name: str, head: Name, heads: Sequence[Name], rows: Iterable[tuple[Name, Sequence[Cell]]]) -> Markup:
    """Return a link that holds a table's values; what is beside a value has a column of its own."""
    rows = list(rows)
    beside = [any(cells[n]["aside"] for _, cells in rows) for n in range(len(heads))]

    def line(own: Name, pairs: Iterable[tuple[object, str]]) -> list[object]:
        told = zip(pairs, beside, strict=True)
        return [_words(own), *(part for pair, more in told for part in pair[: 1 + more])]

    lines = [line(head, ((_words(each), f"{_words(each)}, beside") for each in heads))]
    lines += [line(own, ((_value(each), each["aside"]) for each in cells)) for own, cells in rows]
    return link_of(name, lines)


def link_of(name: str, lines: Iterable[Sequence[object]]) -> Markup:
    """Return a link that holds these lines."""
    text = StringIO(newline="")
    csv.writer(text).writerows([_harmless(value) for value in line] for line in lines)
    content = base64.b64encode(text.getvalue().encode(errors="replace")).decode()
    return Markup(LINK).format(re.sub(r"\W+", "-", name.lower()).strip("-"), content, name)


def _words(name: Name) -> str:
    return name if isinstance(name, str) else " ".join(filter(None, name))


def _value(cell: Cell) -> object:
    """Return a cell's value, or its words where it has none."""
    return cell["value"] if cell["value"] != "" else cell["text"]


def _harmless(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
