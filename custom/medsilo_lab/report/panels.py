"""Show what methods found beside their scores.

Whom AdaFed's sites learn from, whose model FedSM chose, what HarmoFL does to the images: a panel is about one run. What
was found in images, scores elsewhere and costs are also of the seeds of a study's row.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from medsilo.core.text import counted
from medsilo_lab.report.formats import MISSING, bytes_text, cell, number, seconds_text
from medsilo_lab.report.read import OVERLAYS, RunResult, cases_tested

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


def similarity(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return who learns from whom, where the method weighs sites: W."""
    panels = []
    for run in runs:
        if found := run.summary.details.similarity:
            others = (weight for i, own in enumerate(found.weights) for j, weight in enumerate(own) if i != j)
            most = max(others, default=0) or 1
            rows = [
                (site, [_weight(weight, weight / most, kept=i == j) for j, weight in enumerate(own)])
                for i, (site, own) in enumerate(zip(found.sites, found.weights, strict=True))
            ]
            source, n = _pretrained(run.summary.details.pretraining), f"n = {counted(len(found.sites), 'site')}"
            panels.append({"label": run.label, "source": source, "sites": found.sites, "n": n, "rows": rows})
    return panels


def _weight(weight: float, heat: float, kept: bool) -> dict[str, Any]:
    return cell(weight, look="kept") if kept else cell(weight, look="heat") | {"heat": heat}


def _pretrained(facts: dict[str, Any] | None) -> str:
    """On what the weights rest."""
    if facts is None:
        return "No data were shared: the weights rest on the sites' own batch norm, or on none."
    source = "a file at the server" if facts.get("source") == "file" else str(facts.get("data", MISSING))
    start = " The models started from it, too." if facts.get("start") else ""
    return f"The model that measured the sites' data was trained on: {source}.{start}"


def super_models(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """The models that answered for each site's cases, and the threshold that was chosen."""
    panels = []
    for run in runs:
        if found := run.summary.details.super_model:
            names = ["global", *(site for site in found.sites if site in found.agreed)]
            untested = run.summary.task == "script" and run.summary.mean_test is None
            asked = ("Validation cases", "with the chosen γ") if untested else ("Test cases", "")
            tables = [(asked, found.tested)]
            if found.rule == "threshold":
                tables.insert(0, (("Validation cases", "with γ = 0"), found.validated))
            shares = [(title, _frequencies(own, names, found.sites), _choices(own)) for title, own in tables]
            panels.append(
                {
                    "label": run.label,
                    "names": names,
                    "tables": shares,
                    "kept": [site for site in found.sites if site not in found.agreed],
                    "rule": found.rule,
                    "threshold": "" if found.threshold is None else f"{found.threshold:g}",
                }
            )
    return panels


def _choices(told: Mapping[str, Mapping[str, int]]) -> str:
    """Return the number of choices behind a table of frequencies."""
    return f"n = {counted(sum(sum(chosen.values()) for chosen in told.values()), 'choice')}"


def _frequencies(
    told: Mapping[str, Mapping[str, int]], names: Sequence[str], sites: Sequence[str]
) -> list[tuple[tuple[str, str], list[dict[str, Any]]]]:
    """By site, the share of its cases that each model answered for."""
    rows = []
    for site, chosen in told.items():
        whole = sum(chosen.values())
        shares = [chosen.get(name, 0) / whole if whole else None for name in names]
        cells = [cell(share, None if share is None else f"{share:.0%}") for share in shares]
        rows.append(((site, "" if site in sites else "did not train"), cells))
    return rows


def harmonised(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return images before and after, of each run that has some."""
    return [{"label": run.label, "pictures": run.pictures} for run in runs if run.pictures]


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
    tested = [
        cases_tested(run.summary, site) or 0 for subject in told[:1] for run in subject.runs[:1] for site in sites
    ]
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
