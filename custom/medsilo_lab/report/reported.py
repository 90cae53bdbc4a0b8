"""The results of writing a report, which the command line prints."""

from pathlib import Path
from typing import NamedTuple


class Reported(NamedTuple):
    table: str
    # for each warning, its `kind`, `word` and `text`; the most serious warning comes first
    warnings: list[dict[str, str]]
    page: Path
