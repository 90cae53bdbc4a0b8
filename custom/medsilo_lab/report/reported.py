"""The results that a report returns to the command line."""

from pathlib import Path
from typing import NamedTuple


class Reported(NamedTuple):
    """A finished run's results for the terminal and for JSON."""

    table: str  # a score table for the terminal
    warnings: list[dict[str, str]]  # each warning's `kind`, `word` and `text`, most serious first
    page: Path
