"""The texts of a table's cells: numbers, and levels as plans and sites compare them."""

import math
import re
from collections.abc import Sequence

from medsilo.core.errors import DataError
from medsilo.core.text import composed

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(?:([ \u00a0\u2009\u202f'\u2019])\d{3})(?:\1\d{3})*([.,]\d*)?")
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d*)?")


def number(cell: str, decimal: str = ".") -> float | None:
    """Return the number that is written in a cell; None where there is none, or none that is finite."""
    text = as_written(cell, decimal)
    value = float(text) if NUMBER.fullmatch(text) else math.inf
    return value if math.isfinite(value) else None


def level(cell: str) -> str:
    """Return a level as it is compared: a whole number is the same however it is written, as 1 and 1.0."""
    text = composed(str(cell).strip())
    value = number(text)
    return str(int(value)) if value is not None and value == int(value) else text


def without_thousands(name: str, cells: Sequence[str], decimal: str) -> Sequence[str]:
    """Return a column's cells without the points between thousands that go with a decimal comma.

    Raises DataError where a point may be either.

    >>> without_thousands("leukocytes", ["1.365,5", "980,5", "12.400"], ",")
    ['1365,5', '980,5', '12400']
    """
    pointed = [cell for cell in cells if "." in cell and (NUMBER.fullmatch(cell) or THOUSANDS.fullmatch(cell))]
    if decimal == "." or not pointed:
        return cells
    alike = all(map(THOUSANDS.fullmatch, pointed))
    if not alike and all(map(NUMBER.fullmatch, pointed)):  # all decimals
        return cells
    marked = (cell for cell in cells if "," in cell or (cell in pointed and cell.count(".") > 1))
    if not alike or all(number(cell.replace(".", ""), decimal) is None for cell in marked):
        raise DataError(f"column {name!r}: points may stand for thousands or for decimals; write its numbers without")
    return [cell.replace(".", "") if THOUSANDS.fullmatch(cell) else cell for cell in cells]


def as_written(cell: str, decimal: str) -> str:
    """Return a number that a site writes with a comma, or with blanks or apostrophes in thousands, as others do."""
    text = cell.strip()
    if found := GROUPED.fullmatch(text):
        text = text.replace(found[1], "")
    return text.replace(",", ".") if decimal == "," else text
