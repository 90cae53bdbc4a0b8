"""Write the page about a comparison: results, the conclusions that they support, and limitations."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from medsilo.core.text import counted
from medsilo.runs import paths
from medsilo.runs.schema import StudyFacts
from medsilo.runs.score import about, interval_text, number_text
from medsilo_lab.report import data_table, decision, findings, panels, subgroup_panels
from medsilo_lab.report.differences import finding, first_screen
from medsilo_lab.report.findings import provenance
from medsilo_lab.report.formats import cell
from medsilo_lab.report.panels import Subject
from medsilo_lab.report.read import RunResult, read
from medsilo_lab.report.run_warnings import runs_of, warnings
from medsilo_lab.report.template import fill, save
from medsilo_lab.study.verdict_file import REFERENCES, Level, PairedDifference, Verdict, VerdictRow, read_verdict
from medsilo_lab.study.words import interval_in_points, points, repetitions
from medsilo_page.charts import GREY, Series, band_of, line_chart, styles, swatch, values_of

DARKEST = 0.3  # the table cell of a difference of this size or more has the darkest colour
# table headers, each with a remark: "declared" means declared before the study, and "corrected" means corrected for
# multiple comparisons
TESTED = (("Mean over sites", "declared"), ("p", "corrected"))
EXPLORED = ("Pooled over cases", "Worst site")
FEW_CURVES = 3
FEW = 6  # the page lists at most this number of seeds; instead of a longer list, the page has only their number
Rows = dict[str, list[RunResult]]


def write_study(folder: Path, destination: Path | None = None, *, template: str = "study.html", **more: Any) -> Path:
    verdict = read_verdict(folder)
    found = runs_of(folder, verdict, whole=True)
    return save(render(verdict, found, template, **more), destination or folder / paths.REPORT)


def write_demo(folder: Path, pictured: str) -> Path:
    """Write the demo's page, which explains the example and then shows the comparison. `pictured` is the title of the
    configuration whose images the page shows.
    """
    first = next((run.run for run in read_verdict(folder).runs if run.row == pictured), None)
    found = read(folder / first).pictures if first else {}
    images = {site: [before for before, _ in pairs] for site, pairs in found.items()}
    return write_study(folder, template="demo.html", story=images)


def render(verdict: Verdict, found: Rows, template: str = "study.html", **more: Any) -> str:
    """Return the page as HTML, which depends only on the arguments."""
    runs = [run for own in found.values() for run in own]
    about, rows = verdict.about, verdict.rows
    looks = _looks(verdict)
    others = [row.title for look, row in zip(looks, rows, strict=True) if look == GREY]
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
        answer=verdict.headline,
        between=[*[verdict.between] * bool(verdict.first), *verdict.other_networks],
        notices=verdict.warnings or warnings(found, about.failures),
        scores=[_scores(row, verdict) for row in rows],
        difference_heads=[*TESTED, *((name, "exploratory") for name in EXPLORED), *_sites(verdict, "exploratory")],
        tested=[_differences(row, verdict) for row in _tested(verdict)],
        single_site=[
            (row.title, [_shaded(row.from_single_site[site]) for site in verdict.sites]) for row in _gaining(verdict)
        ],
        holdings=list(data_table.tables(runs)),
        legend_entries=[
            *(
                {"name": row.title, "swatch": swatch(look)}
                for look, row in zip(looks, rows, strict=True)
                if look != GREY
            ),
            *([{"name": "the others", "swatch": swatch(GREY)}] if others else []),
        ],
        others=others,
        curve=_curve(found, looks, verdict.metric),
        figures=_figures(found),
        decisions=decision.section(
            [own[0] for own in found.values() if own],
            [look for look, own in zip(looks, found.values(), strict=True) if own],
        ),
        subgroups=subgroup_panels.section({verdict.subgroups[0].row: verdict.subgroups} if verdict.subgroups else {}),
        overlays=panels.overlays(subjects),
        unseen=panels.unseen(subjects),
        costs=panels.costs(subjects),
        provenance=provenance(runs) if runs else None,
        limits=_limits(verdict, runs),
        **more,
    )


def _looks(verdict: Verdict) -> list[int]:
    """Return the line style of each configuration in a chart. The declared federation and single-site training have
    separate styles, and all other configurations are grey. If there is no declared federation and no baseline, each
    configuration of a small comparison has a separate style.
    """
    asked = verdict.declared or verdict.baseline
    if asked is None and len(verdict.rows) <= FEW_CURVES:
        return styles([row.method in REFERENCES for row in verdict.rows])
    return [0 if row.title == asked else -1 if row.method == "local" else GREY for row in verdict.rows]


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
    """Return the lead's description of the study. If the comparison has a title, it replaces the study's title."""
    told = runs[0].summary.description if runs else StudyFacts()
    return told.changed(title=verdict.about.title or told.title)


def _sample(verdict: Verdict) -> str:
    seeds = repetitions(len(verdict.seeds))
    if not verdict.patients:
        return f"n = {counted(len(verdict.runs), 'run')}, {seeds}"
    return f"n = {counted(sum(verdict.patients.values()), 'test patient')}, {seeds}"


def _sites(verdict: Verdict, more: str = "") -> list[tuple[str, str]]:
    told = {site: counted(number, "test patient") for site, number in verdict.patients.items()}
    return [(site, ", ".join(filter(None, (told.get(site, ""), more)))) for site in verdict.sites]


def _score(level: Level | None, look: str = "") -> dict[str, Any]:
    if level is None:
        return cell(None, look=look)
    spread = "" if level.sd is None else f" ± {number_text(level.sd, level.n)}"
    return cell(level.mean, f"{level}{spread}", interval_text((level.low, level.high), level.n), look)


def _scores(row: VerdictRow, verdict: Verdict) -> dict[str, Any]:
    missing = len(verdict.seeds) - len(row.seeds)
    return {
        "label": row.title,
        "failed": False,
        "bad": f"{missing} seed{'s' if missing > 1 else ''} missing" if missing else "",
        "reference": row.method in REFERENCES,
        "cells": [_score(row.score, "total"), *map(_score, (row.pooled, *map(row.sites.get, verdict.sites)))],
    }


def _difference(difference: PairedDifference | None) -> dict[str, Any]:
    if difference is None:
        return cell(None)
    look = ("higher" if difference.mean > 0 else "lower") if difference.sure else ""
    return cell(100 * difference.mean, points(difference.mean), interval_in_points(difference), look)


def _differences(row: VerdictRow, verdict: Verdict) -> tuple[tuple[str, str], list[dict[str, Any]]]:
    found = row.difference
    p = cell(None)
    if found.mean:
        p = cell(found.mean.adjusted, "< 0.001" if found.mean.adjusted < 0.001 else None)
    rest = (_difference(one) for one in (found.pooled, found.worst, *map(found.sites.get, verdict.sites)))
    beside = "" if row.baseline == verdict.baseline else f"against {row.baseline}"
    return (row.title, beside), [_difference(found.mean), p, *rest]


def _gaining(verdict: Verdict) -> list[VerdictRow]:
    """Return the configurations whose difference from single-site training is known. If the top of the page already
    shows all differences from single-site training, return an empty list.
    """
    rows = [row for row in verdict.rows if any(row.from_single_site.values())]
    return [] if [row.title for row in rows] == [verdict.declared] else rows


def _tested(verdict: Verdict) -> list[VerdictRow]:
    """Return the configurations that are compared with a baseline. If only single-site training is compared with the
    baseline, return an empty list, because the top of the page already shows the difference.
    """
    rows = [row for row in verdict.rows if row.baseline]
    return [] if verdict.first and all(row.method == "local" for row in rows) else rows


def _shaded(difference: PairedDifference | None) -> dict[str, Any]:
    if difference is None:
        return cell(None)
    look = f"{'higher' if difference.mean > 0 else 'lower'}{' sure' if difference.sure else ''}"
    told = cell(100 * difference.mean, points(difference.mean), interval_in_points(difference), look)
    return told | {"heat": min(abs(difference.mean) / DARKEST, 1)}


def _curve(rows: Rows, looks: Sequence[int], metric: str) -> Markup | None:
    """For each configuration, draw the mean validation score over sites and seeds as a curve over rounds."""
    lines = []
    for style, (title, runs) in zip(looks, rows.items(), strict=True):
        curves = [run.mean_curve for run in runs]
        means = [_mean(column) for column in zip(*curves, strict=False)]
        coarse = any(run.step(site, "validation") for run in runs for site in run.sites)
        words = [about(number_text(mean)) if coarse else number_text(mean) for mean in means]
        lines.append(Series(title, means, style, band=band_of(curves), words=words))
    if not values_of(lines):
        return None
    title, label = f"Validation {metric} by round", f"validation {metric}"
    return line_chart(lines, key="curve-rounds", title=title, x_label="rounds", y_label=label)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


def _figures(found: Rows) -> dict[str, Any]:
    known = dict.fromkeys(name for runs in found.values() for run in runs for name in run.summary.pooled)
    names = [name for name in known if not decision.OF_CLASS.fullmatch(name)]
    rows = [(title, [_over_runs(runs, name) for name in names]) for title, runs in found.items()]
    return {"heads": [name.replace("_", " ") for name in names], "rows": rows}


def _over_runs(runs: Sequence[RunResult], name: str) -> dict[str, Any]:
    scores = [run.summary.pooled_score for run in runs]
    mean = _mean([run.summary.pooled.get(name) for run in runs])
    text = number_text(mean, min((score.n for score in scores if score.n), default=None))
    return cell(mean, about(text) if any(score.step for score in scores) else text)


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
