"""Show how a classification decides: confusion, sensitivity and specificity at a threshold, and calibration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medsilo.core.errors import YamlError
from medsilo.core.text import plain
from medsilo.report.curves import Line, curves, sum_of, together
from medsilo.report.formats import cell
from medsilo.report.read import RunResult
from medsilo.report.table import number
from medsilo.runs.schema import Decisions

EVERYONE = "all sites' cases"
FIGURES = ("sensitivity", "specificity", "calibration_error")
Row = tuple[Any, list[dict[str, Any]]]


@dataclass(frozen=True)
class DecisionRow:
    """One row of the tables: whose test cases, what they tell, and the figures that follow from it."""

    name: Any
    told: Decisions
    figures: Mapping[str, float | None]
    several: bool = False  # several sites, each with a threshold of its own


Drawn = tuple[str, int, DecisionRow]  # a line of the chart: its name, its style and whose it is


def of_run(run: RunResult, name: str = "") -> list[DecisionRow]:
    """Return the sites of a run that tell, and all of them together. name: the run's, where there are several."""
    sites = {site: run.site(site) for site in run.sites}
    rows = [
        DecisionRow((name, site) if name else site, told.decisions, told.figures)
        for site, told in sites.items()
        if told.decisions
    ]
    if len(rows) < 2:
        return rows
    together = together_of([row.told for row in rows])
    return [*rows, DecisionRow((name, EVERYONE) if name else EVERYONE, together, run.summary.pooled, several=True)]


def together_of(several: Sequence[Decisions]) -> Decisions:
    """Return the counts of several sites together; what one does not tell is that of the others."""
    cuts = [one.decided for one in several if one.decided]
    curves = [one.reliability for one in several if one.reliability]
    return Decisions(
        confusion=[[sum(column) for column in zip(*rows, strict=True)] for rows in _side_by_side(several)],
        decided=[sum(column) for column in zip(*cuts, strict=True)] or None,
        reliability=[
            [sum_of(places) for places in zip(*of_class, strict=True)] for of_class in zip(*curves, strict=True)
        ]
        or None,
    )


def _side_by_side(several: Sequence[Decisions]) -> list[tuple[list[int], ...]]:
    return list(zip(*(one.confusion for one in several), strict=True))


# ---------------------------------------------------------------------------------------------------- the section
def section(runs: Sequence[RunResult], looks: Sequence[int]) -> dict[str, Any]:
    """Return what the page shows of these runs; nothing where no site tells classes, or they differ."""
    several = len(runs) > 1
    by_run = [(run, of_run(run, run.label if several else "")) for run in runs]
    rows = [row for _, own in by_run for row in own]
    if len({len(row.told.confusion) for row in rows}) != 1:
        return {}
    last = [(run.label, style, own[-1]) for style, (run, own) in zip(looks, by_run, strict=True) if own]
    sites = [(row.name, style, row) for style, row in enumerate(row for row in rows if not row.several)]
    whole = last if several or len(sites) < 2 else [(EVERYONE, len(sites), row) for _, _, row in last]
    return decision_section(rows, last if several else sites, whole, runs)


def decision_section(
    rows: Sequence[DecisionRow], drawn: Sequence[Drawn], whole: Sequence[Drawn], runs: Sequence[RunResult]
) -> dict[str, Any]:
    """Return tables and charts. whole: of each run, that of all its sites."""
    classes = _classes(runs, len(rows[0].told.confusion))
    return {
        "two": len(classes) == 2,
        "second": classes[-1],
        "rule": _rule(runs),
        "at_threshold": [_at_threshold(row) for row in rows] if len(classes) == 2 else [],
        "heads": classes,
        "confusions": [line for row in rows for line in _confusion(row, classes)],
        "one_against_rest": [line for _, _, row in whole for line in _against_rest(row, classes)],
        "calibration": [(row.name, [cell(row.figures.get("calibration_error"))]) for row in rows],
        "curves": curves(_drawn(drawn), _drawn(whole) if len(classes) == 2 else []),
        "places": [line for row in rows if row.told.reliability for line in _places(row)],
    }


def _rule(runs: Sequence[RunResult]) -> str:
    """Return how the thresholds were chosen, in words; nothing where the runs differ."""
    rules = {_wanted(run) for run in runs}
    if len(rules) > 1:
        return "as its plan says (tracking.sensitivity)"
    wanted = rules.pop()
    if wanted is None:
        return "the one with the greatest sum of sensitivity and specificity (Youden's)"
    return f"the greatest that reaches a sensitivity of {wanted:g}"


def _wanted(run: RunResult) -> float | None:
    wanted = _planned(run, "tracking").get("sensitivity")
    return float(wanted) if isinstance(wanted, int | float) else None


def _classes(runs: Sequence[RunResult], count: int) -> list[str]:
    """Return the classes' numbers, with the names that the plan gives them."""
    numbers = [f"class {label}" for label in range(count)]
    labels = _planned(runs[0], "task").get("labels")
    if not isinstance(labels, list) or len(labels) != count:
        return numbers
    return [f"{number} ({plain(str(label), 40)})" for number, label in zip(numbers, labels, strict=True)]


def _planned(run: RunResult, key: str) -> Mapping[str, Any]:
    """Return a section of a run's plan; nothing where it can't be read."""
    from medsilo.core.files import load_yaml  # brings torch, which a page without classes doesn't need

    try:
        plan = load_yaml(run.plan)
    except YamlError:
        return {}
    found = plan.get(key) if isinstance(plan, dict) else None
    return found if isinstance(found, dict) else {}


def _at_threshold(row: DecisionRow) -> Row:
    sensitivity, specificity, error = (row.figures.get(name) for name in FIGURES)
    if not row.told.decided:
        return row.name, [cell(None), cell(None), cell(None), cell(error)]
    no, false, missed, yes = row.told.decided
    rates = [cell(sensitivity, aside=f"{yes} of {missed + yes}"), cell(specificity, aside=f"{no} of {no + false}")]
    return row.name, [cell(row.told.threshold, "each its own" if row.several else None), *rates, cell(error)]


def _confusion(row: DecisionRow, classes: Sequence[str]) -> list[Row]:
    """Return a line for each class that occurs or was found."""
    name = row.name if isinstance(row.name, str) else ", ".join(row.name)
    table = row.told.confusion
    return [
        (
            (name, classes[label]),
            [cell(count, str(count), look="own" if label == found else "") for found, count in enumerate(counts)],
        )
        for label, counts in enumerate(table)
        if any(counts) or any(line[label] for line in table)
    ]


def _against_rest(row: DecisionRow, classes: Sequence[str]) -> list[Row]:
    """Return sensitivity and specificity of each class, where the most probable class is what was found."""
    table = row.told.confusion
    name = row.name if isinstance(row.name, str) else ", ".join(row.name)
    everyone = sum(map(sum, table))
    rows = []
    for label, counts in enumerate(table):
        own, found = sum(counts), sum(line[label] for line in table)
        if not own:
            continue
        others, false = everyone - own, found - counts[label]
        specificity = (others - false) / others if others else None
        cells = [
            cell(counts[label] / own, aside=f"{counts[label]} of {own}"),
            cell(specificity, aside=f"{others - false} of {others}"),
        ]
        rows.append(((name, classes[label]), cells))
    return rows


def _drawn(several: Sequence[Drawn]) -> list[Line]:
    return [(name, style, together(row.told.reliability)) for name, style, row in several if row.told.reliability]


def _places(row: DecisionRow) -> list[Row]:
    name = row.name if isinstance(row.name, str) else ", ".join(row.name)
    found = together(row.told.reliability or ())
    return [
        (
            (name, f"{place / len(found):.1f} to {(place + 1) / len(found):.1f}"),
            [cell(cases, str(cases)), cell(total / cases, number(total / cases)), cell(own / cases)],
        )
        for place, (cases, own, total) in enumerate(found)
        if cases
    ]
