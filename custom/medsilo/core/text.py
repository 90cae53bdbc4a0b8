"""Texts from elsewhere, made fit to be shown: one line, no control characters, no longer than a reader needs."""

import math
import re
import unicodedata
from collections.abc import Sequence

LONGEST = 2000  # bytes of one text
SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # name of a folder
BLANK = "\u115f\u1160\u2800\u3164\uffa0"  # letters that Unicode calls visible, and nobody sees
STEERING = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # line breaks, and what else steers a terminal
ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\)|\x1b.", re.DOTALL)

SIMPLE = str.maketrans(
    {"−": "-", "–": "-", "→": "->", "≥": ">=", "≤": "<=", "±": "+-", "×": "x", "…": "...", "ε": "epsilon"}
)


def simplified(error: UnicodeError) -> tuple[str, int]:
    """Return simpler letters for those that a terminal does not know, as a handler of codecs: a minus stays one."""
    assert isinstance(error, UnicodeEncodeError)
    return error.object[error.start : error.end].translate(SIMPLE).encode("ascii", "replace").decode(), error.end


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


def safe_name(text: str) -> str:
    """Return a name of a folder for the name of a hospital's; empty where nothing is left of it.

    >>> safe_name("Süd Klinik"), safe_name("st-anna")
    ('Sued-Klinik', 'st-anna')
    """
    if is_safe_name(text):
        return text
    spelt = text.translate(UMLAUTS)
    letters = unicodedata.normalize("NFKD", spelt).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9_-]+", "-", letters).strip("-_")[:63]


UMLAUTS = str.maketrans(
    {"ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue", "ß": "ss", "ø": "o", "ł": "l"}
)


def aligned(rows: Sequence[Sequence[str | int | float]]) -> list[str]:
    """Rows below a heading, with their cells below each other: text to the left, numbers to the right."""
    columns = []
    for column in zip(*rows, strict=True):
        texts = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in column]
        numeric = len(rows) > 1 and all(isinstance(cell, int | float) for cell in column[1:])
        width = max(map(len, texts))
        columns.append([text.rjust(width) if numeric else text.ljust(width) for text in texts])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
