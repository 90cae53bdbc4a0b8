"""Write one self-contained HTML page about one or several runs. The page needs no network, and can be printed."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from medsilo.core.errors import reading
from medsilo.core.text import counted, epsilon_text
from medsilo.runs import paths
from medsilo.runs.own_files import Spent, Weighed
from medsilo.runs.schema import SiteResult
from medsilo.runs.score import SUPPRESSED, UNDEFINED, Score, about, interval_text, number_text
from medsilo_lab.report import data_table, decision, findings, panels, subgroup_panels
from medsilo_lab.report.findings import provenance
from medsilo_lab.report.formats import bytes_text, cell, score_cell, seconds_text, text_table
from medsilo_lab.report.panels import Subject
from medsilo_lab.report.read import RunResult, all_sites, last_round, read_all, same, sample, spans
from medsilo_lab.report.reported import Reported
from medsilo_lab.report.run_warnings import of_run, warnings
from medsilo_lab.report.template import fill, save
from medsilo_lab.study.subgroups import of_run as of_run_subgroups
from medsilo_lab.study.verdict_file import REFERENCES
from medsilo_page.charts import Series, Whisker, axis_of, line_chart, shared_axis, styles, swatch, ticks, whisker_chart


def write(runs: Sequence[Path], destination: Path, title: str) -> Path:
    return _write(read_all(runs), destination, title)


def _write(runs: Sequence[RunResult], destination: Path, title: str) -> Path:
    # each file of a run may be valid, although two files contradict each other
    with reading("what these runs tell, in summary.json, rounds.jsonl or test.csv,"):
        page = render(runs, title)
    return save(page, destination)


def render(runs: Sequence[RunResult], title: str) -> str:
    """Return the page as HTML. The page depends only on the arguments."""
    subjects = [Subject(run.label, [run]) for run in runs]
    looks = styles([run.summary.method in REFERENCES for run in runs])
    return fill(
        "page.html",
        findings.finding(runs),
        description=same(runs, lambda run: run.summary.description),
        n=sample(runs),
        n_runs=f"n = {counted(len(runs), 'run')}",
        single=len(runs) == 1,
        context=_context(runs, title),
        answer=findings.answer(runs),
        notices=warnings({run.label: [run] for run in runs}),
        picture=_picture(runs[0]) if len(runs) == 1 else {},
        results=_results(runs),
        figures=_figures(runs),
        decisions=decision.section(runs, looks),
        subgroups=subgroup_panels.section({run.label: of_run_subgroups(run.summary) for run in runs}),
        overlays=panels.overlays(subjects),
        holdings=list(data_table.tables(runs)),
        curves=_curves(runs),
        harmonised=panels.harmonised(runs),
        similarity=panels.similarity(runs),
        super_models=panels.super_models(runs),
        unseen=panels.unseen(subjects),
        spent=[((run.label, site), _spent(one)) for run in runs for site, one in run.spent.items()],
        weighed=[((run.label, site), _weighed(one)) for run in runs for site, one in run.weighed.items()],
        participation=[_participation(run) for run in runs if run.summary.method != "central"],
        costs=panels.costs(subjects),
        provenance=provenance(runs),
        limits=findings.limits(runs),
    )


def report_of(folder: Path) -> Reported:
    """Write the page of a finished run into the run's folder. Return a score table for the terminal, the warnings, and
    the path of the page.
    """
    runs = read_all([folder])
    told = [one.as_json() for one in of_run(runs[0])]
    return Reported(text_table(runs[0]), told, _write(runs, folder / paths.REPORT, folder.name))


def _spent(spent: Spent) -> list[dict[str, Any]]:
    costs = (spent.study, spent.all_studies)
    rest = (spent.allowed, spent.delta)
    return [
        *(cell(cost, epsilon_text(cost)) for cost in costs),
        *(cell(number, "" if number is None else f"{number:g}") for number in rest),
    ]


def _weighed(weighed: Weighed) -> list[dict[str, Any]]:
    """Return table cells with a hospital's number of patients, number of cases and weight. Each cell contains the value
    that the hospital disclosed and the exact value.
    """
    told, exact = (
        (weighed.told_patients, weighed.told_cases, weighed.told_weight),
        (weighed.patients, weighed.cases, weighed.weight),
    )
    pairs = [cell(float(number)) for pair in zip(told, exact, strict=True) for number in pair]
    return [*pairs, cell(weighed.off, f"{weighed.off:.0%}")]


def _context(runs: Sequence[RunResult], name: str) -> str:
    count = len(all_sites(runs))
    parts = [
        name,
        same(runs, lambda run: run.summary.task_title or run.summary.task),
        counted(count, "site"),
        runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        same(runs, lambda run: counted(run.summary.rounds.planned, "round")),
        same(runs, lambda run: run.summary.network),
    ]
    return " · ".join(part for part in parts if part)


def _picture(run: RunResult) -> dict[str, Any]:
    known = [(site, run.score_at(site), run.intervals.get(site)) for site in run.sites]
    drawn = {
        site: Whisker(
            score.middle, interval, 0, f"{score} ({interval_text(interval, score.n)})" if interval else f"{score}"
        )
        for site, score, interval in known
        if score.middle is not None
    }
    if not drawn:
        return {}
    marks = shared_axis(list(drawn.values()), zero=False)
    rows = [
        {
            "name": site,
            "chart": whisker_chart(drawn[site], marks, f"score-{place}", f"{site}: test score", zero=False)
            if site in drawn
            else "",
            "score": str(score),
            "interval": interval_text(interval, score.n) if interval else "",
            "n": run.tested_in_words(site),
        }
        for place, (site, score, interval) in enumerate(known)
    ]
    return {"rows": rows, "axis": axis_of(marks, signed=False), "metric": run.summary.metric}


def _results(runs: Sequence[RunResult]) -> dict[str, Any]:
    sites = all_sites(runs)
    rows = [
        {
            "label": run.label,
            "failed": run.failed,
            "bad": "failed" if run.failed else "",
            "reference": run.summary.method in REFERENCES and not run.failed and len(runs) > 1,
            "cells": [
                score_cell(run.summary.mean_score, look="total"),
                score_cell(run.summary.pooled_score),
                *(score_cell(run.score_at(site), run.intervals.get(site)) for site in sites),
            ],
        }
        for run in runs
    ]
    done = [run for run in runs if not run.failed] or runs
    heads = [(site, same(done, partial(RunResult.tested_in_words, site=site)) or "") for site in sites]
    metric = same(runs, lambda run: run.summary.metric)
    return {"metric": metric, "heads": heads, "rows": rows, "intervals": any(run.intervals for run in runs)}


def _figures(runs: Sequence[RunResult]) -> dict[str, Any]:
    """Return a table of all measures over each site's test cases. If a site suppresses a measure, the cell of the
    measure contains a mark.
    """
    found = dict.fromkeys(name for run in runs for site in run.sites for name in run.site(site).figures)
    names = [name for name in found if name not in decision.FIGURES and not decision.OF_CLASS.fullmatch(name)]
    rows = []
    for run in runs:
        if any(run.site(site).figures for site in run.sites):
            rows += [((run.label, site), [_figure(run, site, name) for name in names]) for site in run.sites]
            rows.append(((run.label, "all sites' cases"), [_pooled(run, name) for name in names]))
    return {"heads": [name.replace("_", " ") for name in names], "rows": rows}


def _figure(run: RunResult, name_of_site: str, name: str) -> dict[str, Any]:
    site, score = run.site(name_of_site), run.score_at(name_of_site)
    if name == run.summary.metric and score.step:
        return score_cell(score)
    if ends := site.figure_ranges.get(name):
        return score_cell(Score.within(ends, score.n))
    if name not in site.figures and site.suppressed:
        return cell(None, SUPPRESSED)
    if name in site.figures and site.figures[name] is None:
        return cell(None, UNDEFINED)
    text = number_text(site.figures.get(name), score.n)
    return cell(site.figures.get(name), about(text) if score.step else text)


def _pooled(run: RunResult, name: str) -> dict[str, Any]:
    whole = run.summary.pooled_score
    if name == run.summary.metric and whole.step:
        return score_cell(whole)
    text = number_text(run.summary.pooled.get(name), whole.n)
    return cell(run.summary.pooled.get(name), about(text) if whole.step else text)


def _curves(runs: Sequence[RunResult]) -> dict[str, Any]:
    sites = all_sites(runs)
    alike = same(runs, lambda run: run.summary.metric) is not None
    per_run = []
    for position, run in enumerate(runs):
        series = [
            _validated(run, site, style)
            for style, site in enumerate(sites)
            if any(value is not None for value in run.site(site).validation)
        ]
        per_run.append(
            {
                "run": run,
                "chart": _chart(f"curve-{position}", run.label, series, runs if alike else [run]) if series else None,
                "n": run.validated_in_words,
            }
        )
    return {
        "site_legend": [{"name": site, "swatch": swatch(style)} for style, site in enumerate(sites)],
        "runs": per_run,
    }


def _validated(run: RunResult, site: str, style: int) -> Series:
    values = run.site(site).validation
    words = [str(run.summary.validated_at(site, rounds)) for rounds in range(len(values))]
    return Series(site, values, style, run.summary.selected.rounds.get(site), words=words)


def _chart(key: str, title: str, series: Sequence[Series], runs: Sequence[RunResult]) -> Markup:
    values = [value for run in runs for site in run.sites for value in run.site(site).validation if value is not None]
    metric = runs[0].summary.metric
    return line_chart(
        series,
        key=key,
        title=f"{title}: validation {metric} by round",
        x_label="rounds",
        y_label=f"validation {metric}",
        y_ticks=ticks(min(values), max(values)),
        last_x=last_round(runs),
    )


def _participation(run: RunResult) -> dict[str, Any]:
    """For each site, return the number of contributions to a run, the time and the traffic. A second table lists the
    rounds that each site missed, with the reasons.
    """
    everyone = bool(run.rounds) and all({*run.sites} <= {*line.answered} for line in run.rounds)
    # (site, reason) → rounds that the site missed for this reason, so that the page lists several rounds in one line
    rounds: dict[tuple[str, str], list[int]] = {}
    for site in run.sites:
        for number, why in run.missed(site).items():
            rounds.setdefault((site, why), []).append(number)
    return {
        "run": run,
        "work": [(site, _work(run.site(site))) for site in run.sites],
        "n": f"n = {counted(len(run.rounds), 'round')} at {counted(len(run.sites), 'site')}",
        "everyone": everyone,
        "absences": [(f"Round{'s' * (len(own) > 1)} {spans(own)}", *whose) for whose, own in rounds.items()],
    }


def _work(result: SiteResult) -> list[dict[str, Any]]:
    sent = [cell(value, bytes_text(value)) for value in (result.bytes_up, result.bytes_down)]
    return [cell(result.contributed), cell(result.seconds, seconds_text(result.seconds)), *sent]
