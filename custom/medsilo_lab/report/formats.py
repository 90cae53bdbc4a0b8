"""Numbers, bytes, moments and table cells as the pages show them; the result as plain text for the terminal."""

from typing import Any

from medsilo.check.result import aligned
from medsilo.core.text import duration, plain, size_text
from medsilo_lab.report.read import RunResult, spans

MISSING, SUPPRESSED = "–", "suppressed"


def number(value: float | None) -> str:
    """Three decimals, or a dash for what is missing."""
    return MISSING if value is None else f"{value:.3f}"


def score_text(run: RunResult, site: str) -> str:
    """A site's test score; a word where the site does not tell it, so that it isn't taken for a score of nothing."""
    return SUPPRESSED if run.withholds(site) else number(run.score(site))


def text_table(run: RunResult) -> str:
    """A run's test scores: at every site, their mean and pooled over cases; below them whatever went missing."""
    named, missed = plain(run.label), {site: rounds for site in run.sites if (rounds := run.missed(site))}
    rows = [(f"test {plain(run.summary.metric)}", named), *((plain(site), score_text(run, site)) for site in run.sites)]
    rows += [("mean", number(run.summary.mean_test)), ("pooled", number(run.summary.pooled_test))]
    lines = [f"{named}  FAILED: {plain(run.summary.reason or 'no reason given')}"] if run.failed else aligned(rows)
    if any(map(run.withholds, run.sites)):
        lines += [
            "",
            f"{SUPPRESSED}: too few test patients to disclose the score (min_patients_per_metric in medsilo.yaml)",
        ]
    lines += [f"\n{line}" for line in run.rounding]
    lines += [""] * bool(missed)  # a score without its missing rounds would look like a full one
    return "\n".join(lines + [f"{plain(site)} missing in round {spans(own)}" for site, own in missed.items()])


def cell(
    value: float | tuple[float, float] | None,
    text: str | None = None,
    aside: str = "",
    look: str = "",
    missing: str = MISSING,
) -> dict[str, Any]:
    """A table cell: its value, what is shown, what is beside it, and how it looks.

    Of a number three decimals are shown, of a whole number all of it, of an interval its ends. missing: what is shown
    where there is nothing.
    """
    if isinstance(value, tuple):
        value, text = None, between(value)
    if text is None:
        text = missing if value is None else shown(value) if isinstance(value, int) else number(value)
    return {"value": "" if value is None else value, "text": text, "aside": aside, "look": look}


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
    """A time of day, without parts of a second."""
    return MISSING if text is None else text[:19].replace("T", " ")


def seconds_text(value: float | None) -> str:
    """Seconds, minutes or hours."""
    return MISSING if value is None else duration(value)


def bytes_text(value: float | None) -> str:
    """Bytes in a unit that fits."""
    return MISSING if value is None else size_text(value)
