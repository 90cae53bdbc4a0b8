"""What is raised here, and texts of others made fit for a log."""

LONGEST = 2000  # letters of a text


class Rejected(Exception):
    """Content of another party that is not taken. Its text may be sent to anybody; `private` may not."""

    def __init__(self, message: str, private: str = "") -> None:
        super().__init__(one_line(message))
        self.private = private


class TryAgain(Exception):
    """Something that may go well when it is tried again."""


def one_line(text: object, most: int = LONGEST) -> str:
    """Return a text of another party as one line of at most so many printable letters."""
    letters = (letter if letter.isprintable() else " " for letter in str(text)[:most])
    return " ".join("".join(letters).split())


def size_text(size: int) -> str:
    """Return bytes in a unit that fits a message."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
