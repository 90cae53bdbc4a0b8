"""The texts of a table's cells: numbers, and levels as plans and sites compare them."""

import math
import re

from medsilo.core.text import composed

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")


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


def as_written(cell: str, decimal: str) -> str:
    """Return a number that a site writes with a comma as others write it."""
    return cell.strip().replace(",", ".") if decimal == "," else cell.strip()
