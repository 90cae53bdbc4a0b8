"""A page for one hospital that may be mailed to it: its own numbers and the means of all, no other hospital's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError, reading
from medsilo.core.text import is_safe_name
from medsilo.report import by_case, deciding, panels
from medsilo.report.charts import Series, swatch, validation_chart
from medsilo.report.findings import CHOSEN, STANDS_OUT, SYNTHETIC, Answer, Notice
from medsilo.report.formats import between, bytes_text, cell, seconds_text
from medsilo.report.gains import LEAST
from medsilo.report.learned import learned
from medsilo.report.panels import Subject
from medsilo.report.provenance import provenance
from medsilo.report.read import RunResult, last_round, read, spans
from medsilo.report.table import WITHHELD, number, score_text
from medsilo.report.template import fill, save
from medsilo.runs import paths
from medsilo.runs.schema import SiteResult

WITH_NAMES = ("Folder", "Study")  # facts of a run that the lead named


@dataclass(frozen=True)
class Leaving:
    """Words on what left each hospital: groups of tensors with their rounds and bytes, and further lines."""

    groups: Sequence[tuple[str, str, int]]  # name, rounds, bytes a round
    lines: Sequence[str]


def write_hospitals(folder: Path, leaving: Leaving) -> list[Path]:
    """Write a page for each hospital of a run, and return where they are."""
    run = read(folder)
    if odd := [site for site in run.sites if not is_safe_name(site)]:
        raise MedsiloError("the run names a site that can't be a file's name; correct its summary.json", odd[0])
    with reading(f"what run '{run.folder}' tells, in summary.json, rounds.jsonl or test.csv,"):
        pages = {site: render(run, site, leaving) for site in run.sites if run.site(site).contributed is not None}
    return [save(page, folder / paths.HOSPITALS / f"{site}.html") for site, page in pages.items()]


def render(run: RunResult, site: str, leaving: Leaving) -> str:
    """The page as text."""
    told, summary = run.site(site), run.summary
    facts = provenance([run])["shared"]
    return fill(
        "hospital.html",
        f"{site}: results of {run.label}",
        context=_context(run),
        answer=_answer(run, site),
        notices=list(_notices(run, site)),
        checks=[],
        metric=summary.metric,
        results=list(_results(run, site, told)),
        curve=_curve(run, site, told),
        decisions=deciding.of_site(run, site, told),
        by_case=by_case.pictures([_alone(run, site)]),
        part=_part(run, site, told),
        left=_left(told, leaving),
        withheld=told.withheld,
        spent=panels.spent([Subject(run.label, [_alone(run, site)])]),
        provenance={name: value for name, value in facts.items() if name not in WITH_NAMES},
        limits=list(_limits(run, site)),
    )


def _alone(run: RunResult, site: str) -> RunResult:
    """Return a run that knows what one hospital found and spent, and no other."""
    agreed = run.summary.agreed.changed(sites=[site])
    summary = run.summary.changed(sites={site: run.site(site)}, agreed=agreed)
    spent = {name: one for name, one in run.spent.items() if name == site}
    cases = {name: own for name, own in run.cases.items() if name == site}
    return replace(run, summary=summary, spent=spent, cases=cases)


def _score(run: RunResult, told: SiteResult) -> float | None:
    score = None if told.test is None else told.test[run.summary.metric]
    return None if score is None else float(score)


def _telling(run: RunResult, fact: Callable[[SiteResult], Any]) -> list[str]:
    """Return the sites that tell this."""
    return [site for site in run.sites if fact(run.site(site)) is not None]


def _context(run: RunResult) -> str:
    summary, count = run.summary, len(run.sites)
    parts = (summary.task_title or summary.task, run.label, f"{count} hospital{'s' if count != 1 else ''}")
    return " · ".join(part for part in (*parts, f"{summary.rounds.done} rounds", summary.network) if part)


def _answer(run: RunResult, site: str) -> Answer:
    """Return the hospital's score in a sentence, and the mean of all beside it."""
    summary, score = run.summary, run.score(site)
    if run.failed:
        return Answer("The study failed, so there is no result.")
    if score is None:
        why = "has too few test cases to tell its score" if run.withholds(site) else "was not tested"
        return Answer(f"{site} {why}.")
    interval, patients = between(run.intervals.get(site)), run.patients.get(site)
    aside = f" (95 % interval {interval})" if interval else ""
    of = run.tested_in_words(site)
    headline = f"At {site}, the model reaches a test {summary.metric} of {number(score)}{aside} on {of}."
    if patients and not interval:
        headline += " These are too few for an interval."
    headline += learned([Subject(run.label, [_alone(run, site)])])
    telling = _telling(run, lambda one: _score(run, one))
    if len(telling) < LEAST:
        return Answer(headline)
    return Answer(headline, (f"The mean over {len(telling)} hospitals is {number(summary.mean_test)}.",))


def _notices(run: RunResult, site: str) -> Iterator[Notice]:
    told = run.site(site)
    if run.failed:
        yield Notice("failed", "Failed", "The study ended before its last round.")
    by_reason: dict[str, list[int]] = {}
    for absence in run.absences():
        if absence.site == site:
            by_reason.setdefault(absence.text, []).append(absence.round)
    for reason, rounds in by_reason.items():
        yield Notice("missing", "Missing", f"round {spans(rounds)}: {reason}")
    for line in dict.fromkeys(line for lines in told.warnings.values() for line in lines):
        yield Notice("caution", "It said", line)
    for line in run.summary.stands_out.get(site, ()):
        yield Notice("caution", STANDS_OUT, line)
    if run.summary.synthetic:
        yield Notice("synthetic", "Synthetic data", "The data were drawn by the computer.")


def _results(run: RunResult, site: str, told: SiteResult) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield a line for each figure: the hospital's, and over the cases of all where enough tell."""
    metric, summary = run.summary.metric, run.summary
    several = len(_telling(run, lambda one: _score(run, one))) >= LEAST
    own = cell(run.score(site), score_text(run, site), between(run.intervals.get(site)))
    yield (metric, [own, cell(summary.mean_test if several else None), cell(summary.pooled_test if several else None)])
    for name in dict.fromkeys([*told.figures, *summary.pooled]):
        if name == metric:
            continue
        known = name in told.figures or not told.withheld
        here = cell(told.figures.get(name)) if known else cell(None, WITHHELD)
        shown = len(_telling(run, _figure(name))) >= LEAST
        yield name.replace("_", " "), [here, cell(None), cell(summary.pooled.get(name) if shown else None)]


def _figure(name: str) -> Callable[[SiteResult], float | None]:
    return lambda told: told.figures.get(name)


def _curve(run: RunResult, site: str, told: SiteResult) -> dict[str, Any] | None:
    """Return the validation score by round, with the mean of all where there are enough hospitals."""
    series = [Series(site, told.validation, 0, run.summary.selected.rounds.get(site))]
    if len(run.sites) >= LEAST:
        series.append(Series("Mean of all hospitals", run.mean_curve, -1))
    drawn = [one for one in series if any(value is not None for value in one.values)]
    chart = validation_chart(drawn, run.summary.metric, key="curve", last_x=last_round([run]))
    if chart is None:
        return None
    rounds = [
        (str(n), [cell(_at(one.values, n)) for one in drawn]) for n in range(max(len(one.values) for one in drawn))
    ]
    return {
        "chart": chart,
        "legend": [{"name": one.name, "swatch": swatch(one.style)} for one in drawn],
        "heads": [one.name for one in drawn],
        "rows": rounds,
    }


def _at(values: Sequence[float | None], place: int) -> float | None:
    return values[place] if place < len(values) else None


def _part(run: RunResult, site: str, told: SiteResult) -> Mapping[str, str]:
    """Return what the hospital gave and did, as it told it."""
    what = "slices" if run.summary.sliced else "cases"
    cases = {name: "–" if count is None else str(count) for name, count in (told.cases or {}).items()}
    return {
        **{f"{name.capitalize()} {what}": count for name, count in cases.items()},
        "Rounds with it": f"{told.contributed} of {run.summary.rounds.done}",
        "Model of round": str(run.summary.selected.rounds.get(site, "–")),
        "Time": seconds_text(told.seconds),
        "Sent": bytes_text(told.bytes_up),
        "Received": bytes_text(told.bytes_down),
        "Memory": bytes_text(told.memory),
    }


def _left(told: SiteResult, leaving: Leaving) -> dict[str, Any]:
    rows = [(name, [cell(None, rounds), cell(size, bytes_text(size))]) for name, rounds, size in leaving.groups]
    lines = list(leaving.lines)
    if told.decisions and told.decisions.threshold is not None:
        lines.append(f"A threshold that follows from its validation cases: {told.decisions.threshold:g}.")
    return {"rows": rows, "lines": lines}


def _limits(run: RunResult, site: str) -> Iterator[str]:
    if run.summary.synthetic:
        yield SYNTHETIC
    yield "This is one run with one seed. Another seed moves every score, by how much is unknown."
    if run.test_cases(site):
        yield f"Tested on {run.tested_in_words(site)}: chance alone moves each score."
    yield CHOSEN
