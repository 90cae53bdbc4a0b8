"""Parse the cells of a table as numbers, dates or levels of categories."""

import math
import re
from collections.abc import Sequence
from datetime import date

from medsilo.core.errors import DataError
from medsilo.core.text import composed

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(?:([ \u00a0\u2009\u202f'\u2019])\d{3})(?:\1\d{3})*([.,]\d*)?")
# a comparison sign before a number, as in <0.5 for a value outside the measurable range
LIMIT = re.compile(r"(?:[<>]=?|[≤≥])\s*(?=[\d.,])")
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d*)?")


def number(cell: str, decimal: str = ".") -> float | None:
    """Convert a cell of a table to a number. Return None if the cell contains no finite number.

    Args:
        cell: the cell's text
        decimal: the decimal sign
    """
    text = as_written(cell, decimal)
    value = float(text) if NUMBER.fullmatch(text) else math.inf
    return value if math.isfinite(value) else None


def level(cell: str) -> str:
    """Normalise a category, so that "1" and "1.0" become equal."""
    text = composed(str(cell).strip())
    value = number(text)
    return str(int(value)) if value is not None and value == int(value) else text


DATE = re.compile(r"(\d{1,4})([-./])(\d{1,2})\2(\d{1,4})(?:[T ].*)?")


def days(texts: Sequence[str]) -> list[float]:
    """Convert the dates in a column to day numbers, and each cell without a date to NaN.

    Raises DataError if the column does not show whether the day or the month is first.

    >>> days(["2024-03-01", "2024-02-28", ""]), days(["1.3.2024", "28/2/2024"])
    ([738946.0, 738944.0, nan], [738946.0, 738944.0])
    """
    found = [DATE.fullmatch(text.strip()) for text in texts]
    parts = [match and (int(match[1]), int(match[3]), int(match[4]), match[2]) for match in found]
    behind = [part for part in parts if part and part[0] <= 31]
    months_first = any(own[1] > 12 for own in behind)
    if any(own[3] == "/" for own in behind) and not months_first and all(own[0] <= 12 for own in behind):
        raise DataError("dates do not show whether the day or the month is first; write them as 2024-12-31")
    told = []
    for own in parts:
        year, month, day = own[:3] if own and own[0] > 31 else (own[2], own[1], own[0]) if own else (0, 0, 0)
        if own and own[0] <= 31 and months_first:
            month, day = day, month
        try:
            told.append(float(date(year, month, day).toordinal()))
        except ValueError:
            told.append(math.nan)
    return told


def without_thousands(name: str, cells: Sequence[str], decimal: str) -> Sequence[str]:
    """If the decimal sign is a comma, remove the points between thousands from a column's cells.

    Raises DataError if the points may also be decimal points.

    >>> without_thousands("leukocytes", ["1.365,5", "980,5", "12.400"], ",")
    ['1365,5', '980,5', '12400']
    """
    pointed = [cell for cell in cells if "." in cell and (NUMBER.fullmatch(cell) or THOUSANDS.fullmatch(cell))]
    if decimal == "." or not pointed:
        return cells
    alike = all(map(THOUSANDS.fullmatch, pointed))
    if not alike and all(map(NUMBER.fullmatch, pointed)):  # every point is a decimal point
        return cells
    marked = (cell for cell in cells if "," in cell or (cell in pointed and cell.count(".") > 1))
    if not alike or all(number(cell.replace(".", ""), decimal) is None for cell in marked):
        raise DataError(
            f"column {name!r}: points may stand for thousands or for decimals; write its numbers without "
            "points between thousands"
        )
    return [cell.replace(".", "") if THOUSANDS.fullmatch(cell) else cell for cell in cells]


def as_written(cell: str, decimal: str) -> str:
    """Rewrite a number with a decimal point, and without the blanks or apostrophes that separate thousands."""
    text = cell.strip()
    if found := GROUPED.fullmatch(text):
        text = text.replace(found[1], "")
    return text.replace(",", ".") if decimal == "," else text
