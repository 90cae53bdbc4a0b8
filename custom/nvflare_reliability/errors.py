"""Define the errors of this package, and make texts from other parties safe for logs."""

LONGEST = 2000  # default maximum number of characters of a text in one line


class Rejected(Exception):
    """Raised to reject data from another party.

    The error's message may be sent to anybody, but the text in `private` must not be sent.
    """

    def __init__(self, message: str, private: str = "") -> None:
        super().__init__(one_line(message))
        self.private = private


class TryAgain(Exception):
    """Raised by an action that may succeed if the action is repeated."""


def one_line(text: object, most: int = LONGEST) -> str:
    letters = (letter if letter.isprintable() else " " for letter in str(text)[:most])
    return " ".join("".join(letters).split())


def size_text(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
