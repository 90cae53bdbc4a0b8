"""Turn text from other parties into one short line without control characters, which is safe to display."""

import math
import re
import unicodedata
from collections.abc import Iterable

LONGEST = 2000  # default limit on the bytes of a line
SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # names that a folder can safely have
BLANK = "\u115f\u1160\u2800\u3164\uffa0"  # invisible characters that Unicode classifies as printable
# letters that Unicode's normalisation does not decompose, with ASCII spellings
WHOLE = str.maketrans({"ß": "ss", "ı": "i", "ł": "l", "Ł": "L", "ø": "o"})
UMLAUTS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue"})
STEERING = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # line breaks and other control characters
ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\)|\x1b.", re.DOTALL)


def composed(text: str) -> str:
    """Return a text in Unicode's form NFC, in which a letter with an accent is one character."""
    return unicodedata.normalize("NFC", text)


def printable(text: str) -> str:
    """Remove a terminal's control sequences from a text, and replace the text's control characters and invisible
    characters by spaces.
    """
    seen = (letter if letter.isprintable() and letter not in BLANK else " " for letter in ESCAPES.sub("", text))
    return "".join(seen)


def plain(text: object, most: int = LONGEST) -> str:
    """Return a text as one printable line.

    Args:
        most: The most bytes of the line; an ellipsis replaces the end of a longer text.
    """
    given = text if isinstance(text, str) else str(text)
    # The text is truncated before its characters are checked, because checking a huge text would take long.
    line = " ".join(printable(given[: 4 * most]).split())
    content = line.encode()
    if len(content) <= most and len(given) <= 4 * most:
        return line
    return content[: most - 3].decode("utf-8", "ignore").rstrip() + "…"


def size_text(size: float) -> str:
    """Return a number of bytes as text in B, kB, MB or GB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def duration(seconds: float) -> str:
    """Return a duration as text in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def epsilon_text(value: float | None) -> str:
    """Return a value of ε as text; None and infinity give "no bound"."""
    return "no bound" if value is None or not math.isfinite(value) else f"{value:.3f}"


def enumerated(words: Iterable[str]) -> str:
    """Join words to a list in a sentence.

    >>> enumerated(["score", "loss", "counts"])
    'score, loss and counts'
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def counted(number: int, noun: str) -> str:
    """Return a number and a noun in the singular or plural, such as "1 round" or "2 rounds"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def latin(text: str, also: str = "._+ -") -> str:
    """Return a text in which each character is an ASCII letter, a digit or a character of `also`.

    By default, `also` contains the punctuation that the labels of a plan may have.

    >>> latin("Süd Klinik", "_-"), latin("bösartig (G3)")
    ('Sued-Klinik', 'boesartig -G3')
    """
    spelt = unicodedata.normalize("NFC", text).translate(UMLAUTS).translate(WHOLE)
    letters = unicodedata.normalize("NFKD", spelt).encode("ascii", "ignore").decode()
    return re.sub(f"[^A-Za-z0-9{also}]+", "-", letters).strip(also)[:63]


def safe_name(text: str) -> str:
    """Turn a hospital's name into a valid name for a site and the site's folder; "" if no character of the name is
    valid.

    >>> safe_name("Süd Klinik"), safe_name("st-anna")
    ('Sued-Klinik', 'st-anna')
    """
    return text if is_safe_name(text) else latin(text, "_-")


def is_safe_name(name: str) -> bool:
    """True if a folder can safely have this name of a site or study."""
    return SAFE.fullmatch(name) is not None and ".." not in name
