"""Panels of a page with other results than scores.

Some panels show internal values of a method in one run: AdaFed's weights between sites, FedSM's selected models, and
HarmoFL's images. Panels about external hospitals and about costs show all seeds of a configuration.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from medsilo.core.text import counted
from medsilo.runs.score import Score
from medsilo_lab.report.formats import MISSING, bytes_text, cell, score_cell, seconds_text
from medsilo_lab.report.read import OVERLAYS, RunResult, cases_tested

MOST_OVERLAYS = 12_000_000  # maximum number of characters of all overlays of a page together


@dataclass(frozen=True)
class Subject:
    label: str
    runs: Sequence[RunResult]

    @property
    def several(self) -> bool:
        return len(self.runs) > 1


def having(subjects: Sequence[Subject], fact: Callable[[RunResult], Any]) -> Iterator[Subject]:
    """Yield each subject (a run or a configuration) with only those of its runs for which `fact` is true. Subjects
    without such runs are left out.
    """
    for subject in subjects:
        runs = [run for run in subject.runs if fact(run)]
        if runs:
            yield replace(subject, runs=runs)


def similarity(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """For each run that has a matrix W, return this matrix. W contains the weights with which each site averages the
    models of all sites.
    """
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
    if facts is None:
        return "No data were shared: the weights rest on the sites' own batch norm, or on none."
    source = "a file at the server" if facts.get("source") == "file" else str(facts.get("data", MISSING))
    start = " The models started from it, too." if facts.get("start") else ""
    return f"The model that measured the sites' data was trained on: {source}.{start}"


def super_models(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """For each FedSM run, return the selection threshold, and how often each model was selected, as a fraction of each
    site's cases.
    """
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


def _choices(counts: Mapping[str, Mapping[str, int]]) -> str:
    return f"n = {counted(sum(sum(chosen.values()) for chosen in counts.values()), 'choice')}"


def _frequencies(
    counts: Mapping[str, Mapping[str, int]], names: Sequence[str], sites: Sequence[str]
) -> list[tuple[tuple[str, str], list[dict[str, Any]]]]:
    rows = []
    for site, chosen in counts.items():
        whole = sum(chosen.values())
        shares = [chosen.get(name, 0) / whole if whole else None for name in names]
        cells = [cell(share, None if share is None else f"{share:.0%}") for share in shares]
        rows.append(((site, "" if site in sites else "did not train"), cells))
    return rows


def harmonised(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    return [{"label": run.label, "pictures": run.pictures} for run in runs if run.pictures]


def overlays(subjects: Sequence[Subject]) -> dict[str, Any]:
    """For each site, return the overlays in the first run of each subject. Kinds of overlays that would make the page
    too large are left out.
    """
    first = [subject.runs[0] for subject in having(subjects, lambda run: run.overlays)]
    drawn = [one for run in first for several in run.overlays.values() for one in several]
    for kinds in (OVERLAYS, ("median", "worst"), ("median",), ()):
        if sum(len(one.image) for one in drawn if one.which in kinds) <= MOST_OVERLAYS:
            break
    return {"kinds": kinds, "tables": [(run.label, run.overlays) for run in first]}


def unseen(subjects: Sequence[Subject]) -> dict[str, Any]:
    told = list(having(subjects, lambda run: run.summary.evaluation_sites))
    sites = list(
        dict.fromkeys(site for subject in told for run in subject.runs for site in run.summary.evaluation_sites)
    )
    rows = []
    for subject in told:
        scores = [
            [run.summary.score_at(site) for run in subject.runs if site in run.summary.evaluation_sites]
            for site in sites
        ]
        rows.append((subject.label, [_over_seeds(score) for score in scores]))
    tested = [
        cases_tested(run.summary, site) or 0 for subject in told[:1] for run in subject.runs[:1] for site in sites
    ]
    n = f"n = {counted(sum(tested), 'test case')}"
    return {"sites": sites, "rows": rows, "n": n, "several": any(subject.several for subject in told)}


def _over_seeds(scores: Sequence[Score]) -> dict[str, Any]:
    """Return a table cell with the mean score over seeds. If the scores of the seeds differ, add the lowest and the
    highest score.
    """
    ends = [(score.low, score.high) for score in scores if score.low is not None and score.high is not None]
    if not ends:
        return score_cell(scores[0] if scores else Score(kind="missing"))
    known = [one for one in scores if one.known]
    low, high = (statistics.mean(end) for end in zip(*ends, strict=True))
    mean = Score.mean(low, high, known).changed(n=known[0].n)
    lowest, highest = (str(pick(known, key=lambda one: one.middle or 0.0)) for pick in (min, max))
    return score_cell(mean) | {"aside": f"{lowest}–{highest}" if lowest != highest else ""}


def costs(subjects: Sequence[Subject]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the costs of each subject as means over its runs: total time, time per contribution, bytes per
    contribution, and memory. A contribution is the answer of a site in a round.
    """
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
    """Divide the sum of a value over all sites by the sites' total number of contributions. If a value is missing,
    return None.
    """
    total, contributions = 0.0, 0
    for site in run.sites:
        value, rounds = getattr(run.site(site), field), run.site(site).contributed
        if value is None or rounds is None:
            return None
        total, contributions = total + value, contributions + rounds
    return total / contributions if contributions else None


def _most_memory(run: RunResult) -> int | None:
    return max(filter(None, [run.summary.memory, *(run.site(site).memory for site in run.sites)]), default=None)
