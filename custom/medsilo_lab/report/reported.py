"""The results that a report returns to the command line."""

from pathlib import Path
from typing import NamedTuple


class Reported(NamedTuple):
    table: str
    warnings: list[dict[str, str]]  # the `kind`, `word` and `text` of each warning, most serious warnings first
    page: Path
