"""The page of `medsilo init`: what lies in a folder, what was chosen and why, and what a trial of it found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from medsilo.report import panels
from medsilo.report.findings import Answer, learned
from medsilo.report.formats import between, cell, number, shown
from medsilo.report.panels import Subject
from medsilo.report.read import RunResult, read
from medsilo.report.template import fill, save

LIMITS = (
    "A trial shows that data, plan and machine work together. It does not show how good a method is.",
    "The choices fit one folder: hospitals with other devices may need other sizes or scales.",
    "Patients and the meaning of labels are guessed from names: only the hospital knows them.",
)


@dataclass(frozen=True)
class StartFacts:
    """All that the page shows."""

    found: Sequence[str]  # lines
    choices: Sequence[tuple[str, str, str, str]]  # file, key, value, why; those of a file follow each other
    checked: Mapping[str, tuple[str, Sequence[tuple[str, str, str]]]]  # site -> verdict; where, what, what to do
    advice: Sequence[tuple[str, str]]  # what for, and the command
    trial: Path | None = None  # the run of every hospital alone


def write_start_page(started: StartFacts, destination: Path) -> Path:
    """Write the page and return where it is."""
    run = read(started.trial) if started.trial else None
    page = fill(
        "start.html",
        "First look at your data",
        context=started.found[0],
        answer=Answer(_headline(started, run), tuple(started.found[1:])),
        notices=[],
        limits=LIMITS,
        choices=started.choices,
        checked=started.checked,
        advice=started.advice,
        tried=_scores(run) if run else None,
        overlays=panels.overlays_of_runs([run] if run else []),
    )
    return save(page, destination)


def _headline(started: StartFacts, run: RunResult | None) -> str:
    stopped = [site for site, (verdict, _) in started.checked.items() if verdict.startswith("NO-GO")]
    if stopped:
        return f"Solve the problems that the check found before training begins: {', '.join(stopped)}."
    if run is None:
        return "Data, plan and machine fit together; nothing has been trained yet."
    told = [f"{site} {number(run.score(site))}" for site in run.sites if run.score(site) is not None]
    if not told:
        return "Data, plan and machine fit together. No hospital has enough test cases for a score."
    scores = f"After {run.summary.rounds.planned} rounds alone: test {run.summary.metric} {', '.join(told)}."
    return f"Data, plan and machine fit together. {scores}{learned([Subject(run.label, [run])])}"


def _scores(run: RunResult) -> dict[str, object]:
    """Return each hospital's score after the trial, with its interval, its cases and its patients."""
    rows = [
        (
            site,
            [
                cell(run.summary.test_cases(site), shown(run.summary.test_cases(site))),
                cell(run.patients.get(site), shown(run.patients.get(site))),
                cell(run.score(site)),
                cell(None, between(run.intervals.get(site)) or "too few patients"),
            ],
        )
        for site in run.sites
    ]
    cases, score = "test slices" if run.summary.sliced else "test cases", f"test {run.summary.metric}"
    title = f"{run.summary.rounds.planned} rounds alone"
    return {"title": title, "heads": [cases, "patients", score, "95 % interval"], "rows": rows}
