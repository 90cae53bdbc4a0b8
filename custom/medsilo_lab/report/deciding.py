"""Show how a classification decides: confusion, sensitivity and specificity at a threshold, calibration, curves.

Curves follow from the places of the probability that hospitals tell: in each tenth the cases, and those of the class.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from medsilo.core.text import counted
from medsilo.runs.schema import Decisions, ReliabilityBin
from medsilo_lab.report import class_rates
from medsilo_lab.report.charts import Series, line_chart, swatch, ticks
from medsilo_lab.report.formats import cell
from medsilo_lab.report.read import RunResult, sample

LOSS = 0.1  # net benefit below which a curve is not drawn
Point = tuple[float, float]
Points = Iterable[Point]


def together(several: Sequence[Sequence[ReliabilityBin]]) -> list[ReliabilityBin]:
    """Return the places of several classes, each against the rest, or of several sites together."""
    columns = (zip(*places, strict=True) for places in zip(*several, strict=True))
    return [(sum(cases), sum(own), float(sum(total))) for cases, own, total in columns]


EVERYONE = "all sites' cases"
FIGURES = ("sensitivity", "specificity", "calibration_error")
OF_CLASS = re.compile(r"auroc_\d+")  # the area under the ROC curve of one of several classes
FEW = 10  # cases of a class: with fewer its area describes these cases and compares nothing
Row = tuple[Any, list[dict[str, Any]]]


@dataclass(frozen=True)
class DecisionRow:
    """One row of the tables: whose test cases, what they tell, and the figures that follow from it."""

    name: Any
    decisions: Decisions
    figures: Mapping[str, float | None]
    several: bool = False  # several sites, each with a threshold of its own

    @property
    def places(self) -> list[ReliabilityBin]:
        """Those of the probability, of all classes together."""
        return together(self.decisions.reliability or ())

    @property
    def words(self) -> str:
        return self.name if isinstance(self.name, str) else ", ".join(self.name)

    @property
    def site(self) -> str:
        return self.name if isinstance(self.name, str) else self.name[-1]


Drawn = tuple[str, int, DecisionRow]  # a line of the chart: its name, its style and whose it is


def curves(lines: Sequence[Drawn], whole: Sequence[Drawn]) -> dict[str, Any]:
    """Return the charts with their captions, and one legend. whole: of each run all sites', for its decision curve."""
    lines, whole = ([one for one in own if one[2].decisions.reliability] for own in (lines, whole))
    if not lines:
        return {"charts": [], "legend": []}
    diagonal = ((0.0, 0.0), (1.0, 1.0))
    reliability, roc = _series(lines, _reliability), _series(lines, _roc)
    charts = [
        ("Reliability", _chart("reliability", reliability, "mean probability", "share of cases", diagonal)),
        ("ROC", _chart("roc", roc, "1 − specificity", "sensitivity", diagonal)),
    ]
    if whole:
        everybody = tuple(_benefit(whole[0][2].places, everybody=True))
        benefit = _chart("benefit", _series(whole, _benefit), "threshold", "net benefit", everybody)
        charts.append(("Decision curve", benefit))
    known = dict.fromkeys((name, style) for name, style, _ in (*lines, *whole))
    return {
        "charts": charts,
        "legend": [{"name": name, "swatch": swatch(style)} for name, style in known],
    }


def _chart(key: str, series: Sequence[Series], x: str, y: str, guide: Sequence[Point]) -> Markup:
    """Draw over the whole range of shares; net benefit, which has no range of its own, as far as it goes."""
    known = [value for one in series for value in one.values if value is not None] + [value for _, value in guide]
    return line_chart(
        series,
        key=key,
        title=f"{y.capitalize()} by {x}",
        x_label=x,
        y_label=y,
        y_ticks=ticks(min([0.0, *known]), max([0.0, *known] if key == "benefit" else [1.0])),
        last_x=1.0,
        unit=f"of {x}",
        guide=guide,
    )


def _series(lines: Sequence[Drawn], curve: Callable[[list[ReliabilityBin]], Points]) -> list[Series]:
    every = [(name, style, list(curve(row.places))) for name, style, row in lines]
    return [Series(name, [y for _, y in own], style, places=[x for x, _ in own]) for name, style, own in every]


def _reliability(places: list[ReliabilityBin]) -> Points:
    return ((min(total / cases, 1.0), own / cases) for cases, own, total in places if cases)


def _called(places: list[ReliabilityBin]) -> Iterator[tuple[float, int, int]]:
    """Yield, from the highest threshold down to 0: how many cases count as found, and how many of them rightly."""
    cases = own = 0
    yield 1.0, 0, 0
    for place in reversed(range(len(places))):
        cases, own = cases + places[place][0], own + min(places[place][:2])
        yield place / len(places), cases, own


def _roc(places: list[ReliabilityBin]) -> Points:
    *_, (_, everyone, ill) = _called(places)
    known = 0 < ill < everyone
    return (((cases - own) / (everyone - ill), own / ill) for _, cases, own in _called(places) if known)


def _benefit(places: list[ReliabilityBin], everybody: bool = False) -> Points:
    """Return net benefit (Vickers and Elkin 2006): true less false alarms per case, a false one worth t / (1 − t).

    everybody: of who counts everybody as found.
    """
    called, net = list(_called(places)), []
    everyone, ill = called[-1][1:]
    for at, cases, own in called:
        if everybody:
            cases, own = everyone, ill
        if everyone and at < 1:
            net.append((at, (own - (cases - own) * at / (1 - at)) / everyone))
    return [(at, value) for at, value in reversed(net) if value > -LOSS]


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
    together = together_of([row.decisions for row in rows])
    return [*rows, DecisionRow((name, EVERYONE) if name else EVERYONE, together, run.summary.pooled, several=True)]


def together_of(several: Sequence[Decisions]) -> Decisions:
    """Return the counts of several sites together; what one does not tell is that of the others."""
    cuts = [one.decided for one in several if one.decided]
    curves = [one.reliability for one in several if one.reliability]
    tables = [one.confusion for one in several]
    return Decisions(
        confusion=[[sum(column) for column in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)],
        decided=[sum(column) for column in zip(*cuts, strict=True)] or None,
        reliability=[together(of_class) for of_class in zip(*curves, strict=True)] or None,
    )


# ---------------------------------------------------------------------------------------------------- the section
def section(runs: Sequence[RunResult], looks: Sequence[int]) -> dict[str, Any]:
    """Return what the page shows of these runs; nothing where no site tells classes, or they differ."""
    several = len(runs) > 1
    by_run = [(run, of_run(run, run.label if several else "")) for run in runs]
    rows = [row for _, own in by_run for row in own]
    if len({len(row.decisions.confusion) for row in rows}) != 1:
        return {}
    last = [(run.label, style, own[-1]) for style, (run, own) in zip(looks, by_run, strict=True) if own]
    sites = [(row.name, style, row) for style, row in enumerate(row for row in rows if not row.several)]
    whole = last if several or len(sites) < 2 else [(EVERYONE, len(sites), row) for _, _, row in last]
    classes = runs[0].class_names(len(rows[0].decisions.confusion))
    everyone = {sum(map(sum, own.decisions.confusion)) for _, _, own in last}
    last_rows = [row for _, _, row in whole]
    return {
        "n": f"n = {counted(everyone.pop(), 'test case')}" if len(everyone) == 1 else sample(runs),
        "two": len(classes) == 2,
        "second": classes[-1],
        "at_threshold": [_at_threshold(row) for row in rows] if len(classes) == 2 else [],
        "heads": classes,
        "confusions": [line for row in rows for line in _confusion(row, classes)],
        "one_against_rest": [line for row in (last_rows if several else rows) for line in against_rest(row, classes)],
        "few": list(
            dict.fromkeys(
                f"{row.site} {few}" for row in rows if not row.several for few in few_cases(row.decisions, classes)
            )
        ),
        "calibration": [(row.name, [cell(row.figures.get("calibration_error"))]) for row in rows],
        "curves": curves(last if several else sites, whole if len(classes) == 2 else []),
    }


def _at_threshold(row: DecisionRow) -> Row:
    sensitivity, specificity, error = (row.figures.get(name) for name in FIGURES)
    if not row.decisions.decided:
        return row.name, [cell(None), cell(None), cell(None), cell(error)]
    no, false, missed, yes = row.decisions.decided
    rates = [cell(sensitivity, aside=f"{yes} of {missed + yes}"), cell(specificity, aside=f"{no} of {no + false}")]
    return row.name, [cell(row.decisions.threshold, "each its own" if row.several else None), *rates, cell(error)]


def _confusion(row: DecisionRow, classes: Sequence[str]) -> list[Row]:
    """Return a line for each class that occurs or was found."""
    table = row.decisions.confusion
    return [
        (
            (row.words, classes[label]),
            [cell(count, str(count), look="own" if label == found else "") for found, count in enumerate(counts)],
        )
        for label, counts in enumerate(table)
        if any(counts) or any(line[label] for line in table)
    ]


def against_rest(row: DecisionRow, classes: Sequence[str]) -> Iterator[Row]:
    """Yield sensitivity, specificity and area of each class, where the most probable class is what was found."""
    for label, name in enumerate(classes):
        own, right, others, rejected = class_rates.against_rest(row.decisions, label)
        area = row.figures.get("auroc" if len(classes) == 2 else f"auroc_{label}")
        yield (row.words, name), [_share(right, own), _share(rejected, others), cell(area)]


def few_cases(told: Decisions, classes: Sequence[str]) -> Iterator[str]:
    """Yield the classes of which there are few test cases, with their number."""
    for name, counts in zip(classes, told.confusion, strict=True):
        if sum(counts) < FEW:
            yield f"{sum(counts)} of {name}"


def _share(part: int, whole: int) -> dict[str, Any]:
    return cell(part / whole if whole else None, aside=f"{part} of {whole}")
