"""The text that the command line prints after a report was written."""

from pathlib import Path
from typing import NamedTuple


class Reported(NamedTuple):
    table: str
    # for each warning, its `kind`, `word` and `text`; the most serious warning comes first
    warnings: list[dict[str, str]]
    page: Path
