"""Texts from elsewhere, made fit to be shown: one line, no control characters, no longer than a reader needs."""

import math
import re
import unicodedata

LONGEST = 2000  # bytes of one text
SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # name of a folder
BLANK = "\u115f\u1160\u2800\u3164\uffa0"  # letters that Unicode calls visible, and nobody sees
STEERING = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # line breaks, and what else steers a terminal
ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\)|\x1b.", re.DOTALL)


def composed(text: str) -> str:
    """Return a text in the one of the two ways in which letters with marks are written."""
    return unicodedata.normalize("NFC", text)


def printable(text: str) -> str:
    """Return one line with its spaces, but without what steers a terminal or turns the order of letters."""
    seen = (letter if letter.isprintable() and letter not in BLANK else " " for letter in ESCAPES.sub("", text))
    return "".join(seen)


def plain(text: object, most: int = LONGEST) -> str:
    """Return a text from elsewhere as one line of at most so many bytes; an ellipsis stands for what is left out."""
    given = text if isinstance(text, str) else str(text)
    line = " ".join(printable(given[: 4 * most]).split())  # a text of many megabytes is not looked through
    content = line.encode()
    if len(content) <= most and len(given) <= 4 * most:
        return line
    return content[: most - 3].decode("utf-8", "ignore").rstrip() + "…"


def size_text(size: float) -> str:
    """Return bytes in a unit that fits."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def duration(seconds: float) -> str:
    """Return seconds as people read them."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def epsilon_text(value: float | None) -> str:
    """Return a price in privacy; None, or infinity: no bound holds."""
    return "no bound" if value is None or not math.isfinite(value) else f"{value:.3f}"


def counted(number: int, what: str) -> str:
    """Return a number of things: 1 round, 2 rounds."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def is_safe_name(name: str) -> bool:
    """Return whether a name of a site or a study may become the name of a folder."""
    return SAFE.fullmatch(name) is not None and ".." not in name
