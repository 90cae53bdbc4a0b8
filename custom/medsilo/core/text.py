"""Texts from elsewhere, made fit to be shown: no control characters, and no longer than a reader needs."""

import re

MOST = 2048  # letters
ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\)|\x1b.", re.DOTALL)


def printable(text: str) -> str:
    """Return one line with its spaces, but without what steers a terminal or turns the order of letters."""
    return "".join(letter if letter.isprintable() else " " for letter in ESCAPES.sub("", text))


def plain(text: object, most: int = MOST) -> str:
    """Return a text from elsewhere as one line of at most so many letters; what was cut off is marked."""
    given = text if isinstance(text, str) else str(text)
    line = " ".join(printable(given[: 4 * most]).split())
    return line if len(line) <= most and len(given) <= 4 * most else f"{line[: most - 3].rstrip()}..."
