"""Show what methods found beside their scores.

Whom AdaFed's sites learn from, whose model FedSM chose, what HarmoFL does to the images, and what was found in them. A
panel is about one run, or about the seeds of a study's row.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from medsilo.core.text import counted
from medsilo_lab.report.formats import MISSING, bytes_text, cell, number, seconds_text
from medsilo_lab.report.read import OVERLAYS, RunResult, same

MOST_OVERLAYS = 12_000_000  # characters that the overlays of one page may take


@dataclass(frozen=True)
class Subject:
    """The subject of a panel: one run, or a study's row with the runs of those of its seeds that finished."""

    label: str
    runs: Sequence[RunResult]

    @property
    def several(self) -> bool:
        return len(self.runs) > 1


def having(subjects: Sequence[Subject], fact: Callable[[RunResult], Any]) -> Iterator[Subject]:
    """The subjects of which a run tells this, each with those runs."""
    for subject in subjects:
        runs = [run for run in subject.runs if fact(run)]
        if runs:
            yield replace(subject, runs=runs)


def similarity(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Return who learns from whom, where the method weighs sites: W, its mean over seeds."""
    panels = []
    for subject in having(subjects, lambda run: run.summary.details.similarity):
        found = [one for run in subject.runs if (one := run.summary.details.similarity)]
        by_site = zip(*(one.weights for one in found), strict=True)
        rows = [[_over_seeds(values, number) for values in zip(*rows, strict=True)] for rows in by_site]
        most = max((one["value"] for i, row in enumerate(rows) for j, one in enumerate(row) if i != j), default=0) or 1
        for i, row in enumerate(rows):
            for j, weight in enumerate(row):
                weight |= {"look": "kept"} if i == j else {"look": "heat", "heat": weight["value"] / most}
        panels.append(
            {
                "subject": subject,
                "source": same(subject.runs, lambda run: _pretrained(run.summary.details.pretraining)),
                "sites": found[0].sites,
                "n": f"n = {counted(len(found[0].sites), 'site')}, {counted(len(found), 'run')}",
                "rows": list(zip(found[0].sites, rows, strict=True)),
            }
        )
    return panels


def _pretrained(facts: dict[str, Any] | None) -> str:
    """On what the weights rest."""
    if facts is None:
        return "No data were shared: the weights rest on the sites' own batch norm, or on none."
    source = "a file at the server" if facts.get("source") == "file" else str(facts.get("data", MISSING))
    start = " The models started from it, too." if facts.get("start") else ""
    return f"The model that measured the sites' data was trained on: {source}.{start}"


def super_models(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """The models that answered for each site's cases, and the thresholds that were chosen."""
    panels = []
    for subject in having(subjects, lambda run: run.summary.details.super_model):
        facts = [one for run in subject.runs if (one := run.summary.details.super_model)]
        sites, rule = facts[0].sites, facts[0].rule
        names = ["global", *(site for site in sites if any(site in one.agreed for one in facts))]
        untested = all(run.summary.task == "script" and run.summary.mean_test is None for run in subject.runs)
        tested = ("Validation cases", "with the chosen γ") if untested else ("Test cases", "")  # those that it asked of
        tables = [(tested, [one.tested for one in facts])]
        if rule == "threshold":
            tables.insert(0, (("Validation cases", "with γ = 0"), [one.validated for one in facts]))
        panels.append(
            {
                "subject": subject,
                "names": names,
                "tables": [(title, _frequencies(told, names, sites), _counted_of(told)) for title, told in tables],
                "kept": [site for site in sites if not all(site in one.agreed for one in facts)],
                "rule": rule,
                "thresholds": [f"{one.threshold:g}" for one in facts if one.threshold is not None],
            }
        )
    return panels


def _counted_of(told: Sequence[dict[str, dict[str, int]]]) -> str:
    """Return the number of choices behind a table of frequencies."""
    return f"n = {counted(sum(sum(chosen.values()) for one in told for chosen in one.values()), 'choice')}"


def _frequencies(
    told: Sequence[dict[str, dict[str, int]]], names: Sequence[str], sites: Sequence[str]
) -> list[tuple[tuple[str, str], list[dict[str, Any]]]]:
    """By site, the share of its cases that each model answered for."""
    rows = []
    for site in dict.fromkeys(site for one in told for site in one):
        known = [chosen for one in told if (chosen := one.get(site)) and sum(chosen.values())]
        shares = [[chosen.get(name, 0) / sum(chosen.values()) for chosen in known] for name in names]
        cells = [_over_seeds(values, "{:.0%}".format) for values in shares]
        rows.append(((site, "" if site in sites else "did not train"), cells))
    return rows


def harmonised(subjects: Sequence[Subject], most: int | None = None) -> list[dict[str, Any]]:
    """Return images before and after, of each subject's first run that has some, and at most so many a site."""
    first = [(subject, subject.runs[0]) for subject in having(subjects, lambda run: run.pictures)]
    return [
        {"subject": subject, "pictures": {site: pairs[:most] for site, pairs in run.pictures.items()}, "first": run}
        for subject, run in first
    ]


def overlays(subjects: Sequence[Subject]) -> dict[str, Any]:
    """A table for each subject's first run, a line for each site. What makes the page too large is left out."""
    first = [subject.runs[0] for subject in having(subjects, lambda run: run.overlays)]
    drawn = [one for run in first for own in run.overlays.values() for one in own]
    for kinds in (OVERLAYS, ("median", "worst"), ("median",), ()):
        if sum(len(one.image) for one in drawn if one.which in kinds) <= MOST_OVERLAYS:
            break
    return {"kinds": kinds, "tables": [(run.label, run.overlays) for run in first]}


def unseen(subjects: Sequence[Subject]) -> dict[str, Any]:
    """The scores at hospitals that did not train."""
    told = list(having(subjects, lambda run: run.summary.evaluation_sites))
    sites = list(
        dict.fromkeys(site for subject in told for run in subject.runs for site in run.summary.evaluation_sites)
    )
    rows = []
    for subject in told:
        scores = [
            [run.summary.score(site) for run in subject.runs if site in run.summary.evaluation_sites] for site in sites
        ]
        rows.append((subject.label, [_over_seeds([one for one in own if one is not None], number) for own in scores]))
    tested = [run.summary.test_cases(site) or 0 for subject in told[:1] for run in subject.runs[:1] for site in sites]
    n = f"n = {counted(sum(tested), 'test case')}"
    return {"sites": sites, "rows": rows, "n": n, "several": any(subject.several for subject in told)}


def _over_seeds(values: Sequence[float], form: Callable[[float], str]) -> dict[str, Any]:
    """The mean, and below it the lowest and the highest where they differ."""
    if not values:
        return cell(None)
    mean, low, high = statistics.mean(values), form(min(values)), form(max(values))
    return cell(mean, form(mean), f"{low}–{high}" if low != high else "")


def costs(subjects: Sequence[Subject]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return what a run of each subject costs, the mean over several: in all, and for a site and round."""
    forms: dict[Callable[[RunResult], float | None], Callable[[float | None], str]] = {
        lambda run: run.summary.seconds: seconds_text,
        partial(_per_contribution, "seconds"): seconds_text,
        partial(_per_contribution, "bytes_up"): bytes_text,
        partial(_per_contribution, "bytes_down"): bytes_text,
        _most_memory: bytes_text,
    }
    rows = []
    for subject in subjects:
        known = [[fact(run) for run in subject.runs] for fact in forms]
        means = [statistics.mean(own) if own and None not in own else None for own in known]  # type: ignore[type-var]
        rows.append((subject.label, [cell(mean, form(mean)) for mean, form in zip(means, forms.values(), strict=True)]))
    return rows


def _per_contribution(field: str, run: RunResult) -> float | None:
    """Total over sites divided by all contributions; one site's missing value makes the average missing too."""
    total, contributions = 0.0, 0
    for site in run.sites:
        value, rounds = getattr(run.site(site), field), run.site(site).contributed
        if value is None or rounds is None:
            return None
        total, contributions = total + value, contributions + rounds
    return total / contributions if contributions else None


def _most_memory(run: RunResult) -> int | None:
    """The most that a process held."""
    return max(filter(None, [run.summary.memory, *(run.site(site).memory for site in run.sites)]), default=None)
