"""The page of a run that goes on: it is written anew after every round, and a browser loads it again by itself."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from medsilo.report.charts import Series, swatch, validation_chart
from medsilo.report.findings import CHOSEN, Answer
from medsilo.report.table import MISSING, number
from medsilo.report.template import fill, save
from medsilo.study.progress import StudyProgress, duration

REFRESH = 5  # seconds after which a browser looks again
MOST_TOLD = 20  # lines of what sites said, the last ones


def write_live(progress: StudyProgress, destination: Path, title: str, ended: str = "") -> Path:
    """Write the page of a study as it stands. ended: a sentence that says so; a browser does not look again then."""
    return save(render_live(progress, title, ended), destination)


def render_live(progress: StudyProgress, title: str, ended: str = "") -> str:
    """Return the page as text."""
    states, written = progress.now(), datetime.now(UTC)
    headline = ended or f"The study goes on: {progress.done} of {progress.planned} rounds are done."
    return fill(
        "live.html",
        title,
        context=f"{len(states)} sites · written at {written:%H:%M:%S} UTC",
        answer=Answer(headline, _remarks(progress)),
        notices=[],
        checks=[],
        limits=[CHOSEN, "Nothing has been tested yet: the report with test scores takes this page's place at the end."],
        refresh=None if ended else REFRESH,
        metric=progress.metric,
        slow=progress.slow(),
        rows=[_row(progress, site, "–" if ended else now) for site, now in states.items()],
        told=progress.said[-MOST_TOLD:],
        **_curves(progress),
    )


def _remarks(progress: StudyProgress) -> tuple[str, ...]:
    facts = []
    if best := progress.best:
        facts.append(f"Best mean validation {progress.metric} so far: {best[1]:.3f}, after round {best[0] - 1}.")
    if left := progress.seconds_left():
        facts.append(f"About {duration(left)} left.")
    return tuple(facts)


def _row(progress: StudyProgress, site: str, now: str) -> dict[str, Any]:
    own, usual = progress.sites.get(site), progress.usual_seconds(site)
    if own is None:
        return {"site": site, "now": now, "numbers": [MISSING] * 4}
    times = (MISSING if seconds is None else f"{seconds:.1f} s" for seconds in (own.seconds, usual))
    return {"site": site, "now": now, "numbers": [number(own.score), number(own.loss), *times]}


def _curves(progress: StudyProgress) -> dict[str, Any]:
    """Return the validation curves of all sites in one chart, as far as they go."""
    rounds = list(progress.rounds)  # more may come while this is drawn
    sites = [site for line in rounds[:1] for site in line.asked]
    first = rounds[0].round if rounds else 1
    series = []
    for style, site in enumerate(sites):
        values = [line.sites[site].validation if site in line.sites else None for line in rounds]
        if any(value is not None for value in values):
            series.append(Series(site, [*[None] * (first - 1), *values], style))
    chart = validation_chart(series, progress.metric, key="live", last_x=progress.planned)
    return {"chart": chart, "swatches": [{"name": one.name, "swatch": swatch(one.style)} for one in series]}
