"""One self-contained HTML page about one or many runs: it opens without a network and prints."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from medsilo.core.errors import reading
from medsilo.core.text import counted, epsilon_text
from medsilo.runs import paths
from medsilo.runs.own_files import Spent
from medsilo.runs.schema import SiteResult
from medsilo_lab.report import data_table, deciding, findings, panels
from medsilo_lab.report.charts import Series, line_chart, styles, swatch, ticks
from medsilo_lab.report.findings import learned, provenance
from medsilo_lab.report.formats import SUPPRESSED, between, bytes_text, cell, score_text, seconds_text, text_table
from medsilo_lab.report.panels import Subject
from medsilo_lab.report.read import RunResult, all_sites, last_round, read, read_all, same, sample, spans
from medsilo_lab.report.template import fill, save
from medsilo_lab.study.verdict_file import REFERENCES


def write(runs: Sequence[Path], destination: Path, title: str) -> Path:
    """Read the run folders, write the page and return where it is."""
    every = read_all(runs)
    with reading("what these runs tell, in summary.json, rounds.jsonl or test.csv,"):  # each file may be well by itself
        page = render(every, title)
    return save(page, destination)


def render(runs: Sequence[RunResult], title: str) -> str:
    """The page as text; it depends on nothing but these."""
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
        answer=findings.answer(runs) + learned(subjects),
        notices=findings.notices(runs),
        results=_results(runs),
        figures=_figures(runs),
        decisions=deciding.section(runs, looks),
        overlays=panels.overlays(subjects),
        holdings=list(data_table.tables(runs)),
        curves=_curves(runs),
        harmonised=panels.harmonised(runs),
        similarity=panels.similarity(runs),
        super_models=panels.super_models(runs),
        unseen=panels.unseen(subjects),
        spent=[((run.label, site), _spent(one)) for run in runs for site, one in run.spent.items()],
        participation=[_participation(run) for run in runs if run.summary.method != "central"],
        costs=panels.costs(subjects),
        provenance=provenance(runs),
        limits=findings.limits(runs),
    )


def report_of(folder: Path) -> tuple[str, Path]:
    """Write a finished run's page into its folder; return its scores as a table for the terminal, and the page."""
    return text_table(read(folder)), write([folder], folder / paths.REPORT, folder.name)


def _spent(one: Spent) -> list[dict[str, Any]]:
    """Return what a study and all studies cost a hospital, what is allowed, and at which δ."""
    costs = (one.study, one.all_studies)
    rest = (one.allowed, one.delta)
    return [
        *(cell(cost, epsilon_text(cost)) for cost in costs),
        *(cell(number, "" if number is None else f"{number:g}") for number in rest),
    ]


def _context(runs: Sequence[RunResult], name: str) -> str:
    """Name, task, network and size of the page's runs in one line below the title."""
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


def _results(runs: Sequence[RunResult]) -> dict[str, Any]:
    sites = all_sites(runs)
    rows = [
        {
            "label": run.label,
            "failed": run.failed,
            "bad": "failed" if run.failed else "",
            "reference": run.summary.method in REFERENCES and not run.failed and len(runs) > 1,
            "cells": [
                cell(run.summary.mean_test, look="total"),
                cell(run.summary.pooled_test),
                *(cell(run.score(site), score_text(run, site), between(run.intervals.get(site))) for site in sites),
            ],
        }
        for run in runs
    ]
    done = [run for run in runs if not run.failed] or runs
    heads = [(site, same(done, partial(RunResult.tested_in_words, site=site)) or "") for site in sites]
    metric = same(runs, lambda run: run.summary.metric)
    return {"metric": metric, "heads": heads, "rows": rows, "intervals": any(run.intervals for run in runs)}


def _figures(runs: Sequence[RunResult]) -> dict[str, Any]:
    """All that was measured of each site's test cases; what a site withholds is called so."""
    found = dict.fromkeys(name for run in runs for site in run.sites for name in run.site(site).figures)
    names = [name for name in found if name not in deciding.FIGURES and not deciding.OF_CLASS.fullmatch(name)]
    rows = []
    for run in runs:
        if any(run.site(site).figures for site in run.sites):
            rows += [((run.label, site), [_figure(run.site(site), name) for name in names]) for site in run.sites]
            rows.append(((run.label, "all sites' cases"), [cell(run.summary.pooled.get(name)) for name in names]))
    return {"heads": [name.replace("_", " ") for name in names], "rows": rows}


def _figure(site: SiteResult, name: str) -> dict[str, Any]:
    if name in site.figures or not site.suppressed:
        return cell(site.figures.get(name))
    return cell(None, SUPPRESSED)


def _curves(runs: Sequence[RunResult]) -> dict[str, Any]:
    """One chart per method with its sites, and the numbers behind them."""
    sites = all_sites(runs)
    alike = same(runs, lambda run: run.summary.metric) is not None
    per_run = []
    for position, run in enumerate(runs):
        series = [
            Series(site, run.site(site).validation, style, run.summary.selected.rounds.get(site))
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
    """What each site did for the run, and a list of who is missing and why."""
    everyone = bool(run.rounds) and all({*run.sites} <= {*line.answered} for line in run.rounds)
    rounds: dict[tuple[str, str], list[int]] = {}  # by site and reason: one lost for fifty rounds takes one line
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


def _work(own: SiteResult) -> list[dict[str, Any]]:
    """Return in how many rounds a site took part, how long it worked, and what it sent and received."""
    sent = [cell(value, bytes_text(value)) for value in (own.bytes_up, own.bytes_down)]
    return [cell(own.contributed), cell(own.seconds, seconds_text(own.seconds)), *sent]
