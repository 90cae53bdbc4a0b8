"""Write tables in Markdown."""

from collections.abc import Sequence


def cell(text: str) -> str:
    """Return a text with escapes, so that no character of the text ends a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)]) + "\n"
