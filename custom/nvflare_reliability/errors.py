"""Define this package's errors, and clean other parties' texts for logs."""

LONGEST = 2000  # maximum number of characters in a text


class Rejected(Exception):
    """Raised when something from another party is rejected. The message may be sent to anybody, but
    `private` may not.
    """

    def __init__(self, message: str, private: str = "") -> None:
        super().__init__(one_line(message))
        self.private = private


class TryAgain(Exception):
    """Raised for an error that may not occur again when the action is repeated."""


def one_line(text: object, most: int = LONGEST) -> str:
    """Return another party's text as one line of at most `most` printable characters."""
    letters = (letter if letter.isprintable() else " " for letter in str(text)[:most])
    return " ".join("".join(letters).split())


def size_text(size: int) -> str:
    """Format a number of bytes with its unit."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
