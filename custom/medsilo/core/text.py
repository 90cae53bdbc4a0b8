"""Text from other machines: on one line, without control characters, and no longer than a reader wants."""

LONGEST = 2000  # bytes of one text


def one_line(text: str) -> str:
    """Return the text on one line, without characters that could steer a terminal."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def cut(text: str, most: int = LONGEST) -> str:
    """Return the text on one line and in at most so many bytes; an ellipsis stands for what is left out."""
    line = one_line(text[: 4 * most])  # a text of many megabytes is not looked through
    content = line.encode("utf-8", "replace")
    if len(content) <= most and len(text) <= 4 * most:
        return line
    return content[: most - 3].decode("utf-8", "ignore") + "…"
