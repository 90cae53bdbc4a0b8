"""Format numbers, sizes, times and table cells for pages, and a table of scores for the terminal."""

from typing import Any

from medsilo.check.result import aligned
from medsilo.core.text import duration, plain, size_text
from medsilo.runs.score import MISSING, SUPPRESSED, Interval, Score, interval_text, number_text
from medsilo_lab.report.read import RunResult


def text_table(run: RunResult) -> str:
    """Return the test scores of a run as a plain text table: each site's score, the mean over sites, and the score over
    all cases.
    """
    named = plain(run.label)
    rows = [
        (f"test {plain(run.summary.metric)}", named),
        *((plain(site), str(run.score_at(site))) for site in run.sites),
    ]
    rows += [("mean", str(run.summary.mean_score)), ("pooled", str(run.summary.pooled_score))]
    lines = [f"{named}  FAILED: {plain(run.summary.reason or 'no reason given')}"] if run.failed else aligned(rows)
    if any(map(run.withholds, run.sites)):
        lines += [
            "",
            f"{SUPPRESSED}: too few test patients to disclose the score (min_patients_per_metric in medsilo.yaml)",
        ]
    return "\n".join(lines)


def cell(
    value: float | tuple[float, float] | None,
    text: str | None = None,
    aside: str = "",
    look: str = "",
    missing: str = MISSING,
    n: int | None = None,
) -> dict[str, Any]:
    """Make a table cell with a value, the text of the value, a note beside the text, and a style.

    An integer is written with all digits, and a range with both ends.

    Args:
        missing: text for a missing value
        n: number of cases behind the value, which determines the number of digits
    """
    if isinstance(value, tuple):
        value, text = None, interval_text(value, n)
    if text is None:
        text = missing if value is None else shown(value) if isinstance(value, int) else number_text(value, n)
    return {"value": "" if value is None else value, "text": text, "aside": aside, "look": look}


def score_cell(score: Score, interval: Interval | None = None, look: str = "") -> dict[str, Any]:
    return cell(score.middle, str(score), interval_text(interval, score.n), look)


def shown(value: str | int | None) -> str:
    """Format a value; a missing value becomes a dash. The digits of an integer above 9999 are written in groups of
    three.
    """
    if value is None:
        return MISSING
    return f"{value:,}".replace(",", " ") if isinstance(value, int) and value > 9999 else str(value)


def short(digest: str | None) -> str:
    return MISSING if digest is None else digest[:12]


def moment_of(text: str | None) -> str:
    return MISSING if text is None else text[:19].replace("T", " ")


def seconds_text(value: float | None) -> str:
    return MISSING if value is None else duration(value)


def bytes_text(value: float | None) -> str:
    return MISSING if value is None else size_text(value)
