"""Numbers, bytes, moments and table cells as the pages show them."""

from datetime import UTC, datetime
from typing import Any

from medsilo.core.text import size_text
from medsilo.report.table import MISSING, number


def cell(value: float | None, text: str | None = None, aside: str = "", look: str = "") -> dict[str, Any]:
    """A table cell: what is shown, what it is sorted by, what is beside it, and how it looks."""
    shown = number(value) if text is None else text
    return {"value": "" if value is None else value, "text": shown, "aside": aside, "look": look}


def between(interval: tuple[float, float] | None, digits: int = 3) -> str:
    """An interval, or nothing."""
    return "" if interval is None else f"{interval[0]:.{digits}f}–{interval[1]:.{digits}f}"


def shown(value: str | int | None) -> str:
    """A fact, or a dash; large numbers in groups of three."""
    if value is None:
        return MISSING
    return f"{value:,}".replace(",", " ") if isinstance(value, int) and value > 9999 else str(value)


def short(digest: str | None) -> str:
    """The beginning of a hash."""
    return MISSING if digest is None else digest[:12]


def moment_of(text: str | None) -> str:
    """A time of day as people write it."""
    if text is None:
        return MISSING
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M:%S}"
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def seconds_text(value: float | None) -> str:
    """Seconds, minutes or hours."""
    if value is None:
        return MISSING
    if value < 600:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def bytes_text(value: float | None) -> str:
    """Bytes in a unit that fits."""
    return MISSING if value is None else size_text(value)
