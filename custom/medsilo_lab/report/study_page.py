"""The page about a whole study: methods and seeds, with what may be concluded and what may not."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from medsilo.core.text import counted
from medsilo.runs import paths
from medsilo.runs.schema import StudyFacts
from medsilo_lab.report import data_table, deciding, findings, panels
from medsilo_lab.report.charts import Series, band_of, line_chart, styles, swatch, values_of
from medsilo_lab.report.findings import ROUNDED, STANDS_OUT, Notice, learned, provenance
from medsilo_lab.report.formats import between, cell, number
from medsilo_lab.report.gains import finding, first_screen
from medsilo_lab.report.panels import Subject
from medsilo_lab.report.read import RunResult, read
from medsilo_lab.report.template import fill, save
from medsilo_lab.study.verdict_file import REFERENCES, Level, PairedDifference, Verdict, VerdictRow, read_verdict
from medsilo_lab.study.words import points, repetitions

DARKEST = 0.3  # the gain whose cell is darkest
TESTED = (("Mean over sites", "declared"), ("p", "corrected"))  # the question that was declared
EXPLORED = ("Pooled over cases", "Worst site")
FEW = 6  # seeds that are named one by one
Rows = dict[str, list[RunResult]]  # a row's finished runs, by its title


def write_study(folder: Path, destination: Path | None = None, *, template: str = "study.html", **more: Any) -> Path:
    """Read a comparison's folder, write its page and return where it is.

    A page of its own kind gives its template, with what that shows.
    """
    verdict = read_verdict(folder)
    found: Rows = {row.title: [] for row in verdict.rows}
    for one in verdict.runs:
        turn = f", fold {one.fold}" if one.fold else ""
        found[one.row].append(replace(read(folder / one.run), label=f"{one.row}, seed {one.seed}{turn}"))
    return save(render(verdict, found, template, **more), destination or folder / paths.REPORT)


def write_demo(folder: Path, pictured: str) -> Path:
    """Write the demo's page, with a story before the comparison. pictured: the row that keeps the hospitals' images."""
    first = next((one.run for one in read_verdict(folder).runs if one.row == pictured), None)
    found = read(folder / first).pictures if first else {}
    images = {site: [before for before, _ in pairs] for site, pairs in found.items()}
    return write_study(folder, template="demo.html", story=images)


def render(verdict: Verdict, found: Rows, template: str = "study.html", **more: Any) -> str:
    """The page as text; it depends on nothing but these."""
    runs = [run for own in found.values() for run in own]
    about, rows = verdict.about, verdict.rows
    looks = styles([row.method in REFERENCES for row in rows])
    subjects = [Subject(title, own) for title, own in found.items()]
    return fill(
        template,
        finding(verdict),
        description=_description(verdict, runs),
        n=_sample(verdict),
        n_runs=f"n = {counted(len(runs), 'run')}",
        n_validation=f"n = {counted(max((run.cases_in('validation') for run in runs), default=0), 'validation case')}, "
        f"{counted(len(runs), 'run')}",
        about=about,
        verdict=verdict,
        context=_context(verdict),
        tested_sites=_sites(verdict),
        first=first_screen(verdict),
        answer=verdict.headline + learned(subjects),
        between=[*[verdict.between] * bool(verdict.first), *verdict.other_networks],
        notices=_notices(verdict, found),
        scores=[_scores(row, verdict) for row in rows],
        difference_heads=[*TESTED, *((name, "exploratory") for name in EXPLORED), *_sites(verdict, "exploratory")],
        tested=[_differences(row, verdict) for row in _tested(verdict)],
        joining=[(row.title, [_shaded(row.joining[site]) for site in verdict.sites]) for row in _gaining(verdict)],
        holdings=list(data_table.tables(runs)),
        legend_entries=[{"name": row.title, "swatch": swatch(style)} for style, row in zip(looks, rows, strict=True)],
        curve=_curve(found, looks, verdict.metric),
        figures=_figures(found),
        decisions=deciding.section(
            [own[0] for own in found.values() if own],
            [look for look, own in zip(looks, found.values(), strict=True) if own],
        ),
        overlays=panels.overlays(subjects),
        unseen=panels.unseen(subjects),
        costs=panels.costs(subjects),
        provenance=provenance(runs) if runs else None,
        limits=_limits(verdict, runs),
        **more,
    )


def _context(verdict: Verdict) -> str:
    seeds, sites = verdict.seeds, verdict.sites
    parts = [
        verdict.task_title,
        counted(len(sites), "site"),
        *([counted(sum(verdict.patients.values()), "test patient")] if verdict.patients else []),
        counted(len(verdict.rows), "configuration"),
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if len(seeds) <= FEW else f"{len(seeds)} seeds",
        *([f"{verdict.folds} folds"] if verdict.folds else []),
        verdict.network,
    ]
    return " · ".join(parts)


def _description(verdict: Verdict, runs: Sequence[RunResult]) -> StudyFacts:
    """Return the study in its lead's words, with the page's own title where it was given one."""
    told = runs[0].summary.description if runs else StudyFacts()
    return told.changed(title=verdict.about.title or told.title)


def _sample(verdict: Verdict) -> str:
    """Return what the comparison's numbers rest on."""
    seeds = repetitions(len(verdict.seeds))
    if not verdict.patients:
        return f"n = {counted(len(verdict.runs), 'run')}, {seeds}"
    return f"n = {counted(sum(verdict.patients.values()), 'test patient')}, {seeds}"


def _sites(verdict: Verdict, more: str = "") -> list[tuple[str, str]]:
    """Return the sites as a table's heads, each with its test patients."""
    told = {site: counted(number, "test patient") for site, number in verdict.patients.items()}
    return [(site, ", ".join(filter(None, (told.get(site, ""), more)))) for site in verdict.sites]


def _notices(verdict: Verdict, found: Rows) -> list[Notice]:
    """Return the notices of the first screen: failed runs, missing sites, cautions, synthetic data."""
    of_runs = findings.notices([run for own in found.values() for run in own])
    notices = [Notice("failed", "Failed", failure) for failure in verdict.about.failures]
    notices += [notice for notice in of_runs if notice.kind == "missing"]
    told = {f"{title}: {line}" for title, own in found.items() for run in own for line in run.summary.details.warnings}
    notices += [Notice("caution", "Caution", text) for text in sorted(told)]
    notices += [notice for notice in of_runs if notice.word in (STANDS_OUT, ROUNDED)]
    return notices + [notice for notice in of_runs if notice.kind == "synthetic"]


def _score(found: Level | None, look: str = "") -> dict[str, Any]:
    if found is None:
        return cell(None, look=look)
    spread = "" if found.sd is None else f" ± {found.sd:.3f}"
    return cell(found.mean, number(found.mean) + spread, between((found.low, found.high)), look)


def _scores(row: VerdictRow, verdict: Verdict) -> dict[str, Any]:
    missing = len(verdict.seeds) - len(row.seeds)
    return {
        "label": row.title,
        "failed": False,
        "bad": f"{missing} seed{'s' if missing > 1 else ''} missing" if missing else "",
        "reference": row.method in REFERENCES,
        "cells": [_score(row.score, "total"), *map(_score, (row.pooled, *map(row.sites.get, verdict.sites)))],
    }


def _difference(found: PairedDifference | None) -> dict[str, Any]:
    if found is None:
        return cell(None)
    look = ("higher" if found.mean > 0 else "lower") if found.sure else ""
    low, high = found.interval
    return cell(100 * found.mean, points(found.mean), f"{points(low)} to {points(high)}", look)


def _differences(row: VerdictRow, verdict: Verdict) -> tuple[tuple[str, str], list[dict[str, Any]]]:
    found = row.difference
    p = cell(None)
    if found.mean:
        p = cell(found.mean.adjusted, "< 0.001" if found.mean.adjusted < 0.001 else None)
    rest = (_difference(one) for one in (found.pooled, found.worst, *map(found.sites.get, verdict.sites)))
    against = "" if row.against == verdict.against else f"against {row.against}"
    return (row.title, against), [_difference(found.mean), p, *rest]


def _gaining(verdict: Verdict) -> list[VerdictRow]:
    """Return the rows with a gain over training alone; none where the first screen has all of them."""
    rows = [row for row in verdict.rows if any(row.joining.values())]
    return [] if [row.title for row in rows] == [verdict.declared] else rows


def _tested(verdict: Verdict) -> list[VerdictRow]:
    """Return the rows that were held against another; none where that is training alone, as on the first screen."""
    rows = [row for row in verdict.rows if row.against]
    return [] if verdict.first and all(row.method == "local" for row in rows) else rows


def _shaded(found: PairedDifference | None) -> dict[str, Any]:
    """A cell that is the darker, the larger the gain or the loss."""
    if found is None:
        return cell(None)
    look = f"{'gain' if found.mean > 0 else 'loss'}{' sure' if found.sure else ''}"
    low, high = found.interval
    told = cell(100 * found.mean, points(found.mean), f"{points(low)} to {points(high)}", look)
    return told | {"heat": min(abs(found.mean) / DARKEST, 1)}


def _curve(found: Rows, looks: Sequence[int], metric: str) -> Markup | None:
    """Validation, mean over sites and seeds, by round."""
    lines = []
    for style, (title, runs) in zip(looks, found.items(), strict=True):
        curves = [run.mean_curve for run in runs]
        means = [_mean(column) for column in zip(*curves, strict=False)]
        lines.append(Series(title, means, style, band=band_of(curves)))
    if not values_of(lines):
        return None
    title, label = f"Validation {metric} by round", f"validation {metric}"
    return line_chart(lines, key="curve-rounds", title=title, x_label="rounds", y_label=label)


def _mean(values: Sequence[float | None]) -> float | None:
    """No value where one of them is missing."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


def _figures(found: Rows) -> dict[str, Any]:
    """Return the measures over all sites' cases together, as means over seeds."""
    known = dict.fromkeys(name for runs in found.values() for run in runs for name in run.summary.pooled)
    names = [name for name in known if not deciding.OF_CLASS.fullmatch(name)]
    rows = [
        (title, [cell(_mean([run.summary.pooled.get(name) for run in runs])) for name in names])
        for title, runs in found.items()
    ]
    return {"heads": [name.replace("_", " ") for name in names], "rows": rows}


def _limits(verdict: Verdict, runs: Sequence[RunResult]) -> Iterator[str]:
    seeds = len(verdict.seeds)
    if verdict.synthetic:
        yield findings.SYNTHETIC
    if seeds < 2:
        yield "There is one training: intervals are for other patients only, and there is no verdict."
    else:
        yield (
            f"Intervals are for {verdict.holds_for}. There are {repetitions(seeds)}; few make intervals wide "
            "where they differ. Intervals are not for other hospitals."
        )
    if seeds > 1 and verdict.folds:
        yield (
            f"Patients took turns in the test part, in {verdict.folds} folds of every seed. Each counts once per "
            "seed; the folds of a seed are not taken for independent studies."
        )
    yield (
        "An interval that includes zero does not mean that two methods are equal; it means that these runs do not "
        "distinguish them. Settings were the same for all configurations unless one says otherwise, which may suit one "
        "method better than another."
    )
    yield from findings.limits_of_all(runs)
