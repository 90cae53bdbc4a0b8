"""Show the results of a classification: confusion matrix, sensitivity, specificity, calibration and curves.

The curves are calculated from ten bins of the predicted probability of a class. For each bin, a hospital discloses the
number of cases, and how many of the bin's cases belong to the class.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from medsilo.core.text import counted
from medsilo.runs.schema import Decisions, ReliabilityBin
from medsilo.runs.score import Interval, interval_text
from medsilo_lab.report.class_rates import AT_RATE, interval_of_f1, of_class, wilson
from medsilo_lab.report.class_rates import against_rest as against_rest_of
from medsilo_lab.report.formats import cell
from medsilo_lab.report.read import RunResult, same, sample
from medsilo_page.charts import GREY, Series, line_chart, swatch, ticks

LOSS = 0.1  # a point of a decision curve is not drawn if its net benefit is -LOSS or less
Point = tuple[float, float]
Points = Iterable[Point]


def together(several: Sequence[Sequence[ReliabilityBin]]) -> list[ReliabilityBin]:
    columns = (zip(*places, strict=True) for places in zip(*several, strict=True))
    return [(sum(cases), sum(own), float(sum(total))) for cases, own, total in columns]


EVERYONE = "all sites' cases"
# numbers of a test that the section about decisions shows
FIGURES = ("sensitivity", "specificity", "precision", "f1", "calibration_error")
OF_CLASS = re.compile(r"(auroc|pr_auc|sensitivity_at_90_specificity|specificity_at_90_sensitivity)_\d+")
# heads of the table with the rates of each class
RATES = (
    *("Sensitivity (recall)", "Specificity", "Precision", "F1", "AUROC", "PR-AUC"),
    *("Sensitivity at 90 % specificity", "Specificity at 90 % sensitivity"),
)
FEW = 10  # if a class has less than this number of test cases, hospitals must not be compared by the AUROC of the class
Row = tuple[Any, list[dict[str, Any]]]


@dataclass(frozen=True)
class DecisionRow:
    """A table row: a site, the counts that the site disclosed, and rates that are calculated from these counts."""

    name: Any
    decisions: Decisions
    figures: Mapping[str, float | None]
    # true for the row of all sites, which shows no threshold, because each site has its own threshold
    several: bool = False

    @property
    def places(self) -> list[ReliabilityBin]:
        """The bins of the predicted probability; the counts of a bin are sums over all classes."""
        return together(self.decisions.reliability or ())

    @property
    def words(self) -> str:
        return self.name if isinstance(self.name, str) else ", ".join(self.name)

    @property
    def site(self) -> str:
        return self.name if isinstance(self.name, str) else self.name[-1]


Drawn = tuple[str, int, DecisionRow]


def curves(lines: Sequence[Drawn], whole: Sequence[Drawn]) -> dict[str, Any]:
    """Return the charts with captions and a common legend.

    Args:
        lines: the data of the reliability curves and the ROC curves
        whole: the data of the decision curves, which are the rows over all sites, one row per run
    """
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
        "legend": [{"name": name, "swatch": swatch(style)} for name, style in known if style != GREY]
        + [{"name": "the others", "swatch": swatch(GREY)}] * any(style == GREY for _, style in known),
    }


def _chart(key: str, series: Sequence[Series], x: str, y: str, guide: Sequence[Point]) -> Markup:
    """Draw a chart. Both axes run from 0 to 1, but an axis of the net benefit covers the range of the net benefit."""
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


def _reliability(bins: list[ReliabilityBin]) -> Points:
    return ((min(total / cases, 1.0), own / cases) for cases, own, total in bins if cases)


def _called(bins: list[ReliabilityBin]) -> Iterator[tuple[float, int, int]]:
    """For each threshold from 1 down to 0, yield the threshold, the number of positive decisions and the number of true
    positives.
    """
    cases = own = 0
    yield 1.0, 0, 0
    for place in reversed(range(len(bins))):
        cases, own = cases + bins[place][0], own + min(bins[place][:2])
        yield place / len(bins), cases, own


def _roc(bins: list[ReliabilityBin]) -> Points:
    *_, (_, everyone, ill) = _called(bins)
    known = 0 < ill < everyone
    return (((cases - own) / (everyone - ill), own / ill) for _, cases, own in _called(bins) if known)


def _benefit(bins: list[ReliabilityBin], everybody: bool = False) -> Points:
    """For each threshold t, return t and the net benefit per case (Vickers and Elkin 2006).

    The net benefit of all cases together is TP − t / (1 − t) × FP, with TP true positives and FP false positives.

    Args:
        everybody: True for the net benefit of deciding that every case is positive
    """
    called, net = list(_called(bins)), []
    everyone, ill = called[-1][1:]
    for at, cases, own in called:
        if everybody:
            cases, own = everyone, ill
        if everyone and at < 1:
            net.append((at, (own - (cases - own) * at / (1 - at)) / everyone))
    return [(at, value) for at, value in reversed(net) if value > -LOSS]


def of_run(run: RunResult, name: str = "") -> list[DecisionRow]:
    """Return a table row for each site that discloses decisions, and a row with the sums over these sites.

    Args:
        name: the label of the run, if the page shows more than one run
    """
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
    """Return the section of the page about decisions. If no site discloses decisions, or if the runs have different
    numbers of classes, the section is empty.
    """
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
        "n": _sample(runs, everyone.pop()) if len(everyone) == 1 else sample(runs),
        "two": len(classes) == 2,
        "second": classes[-1],
        "at_threshold": [_at_threshold(row) for row in rows] if len(classes) == 2 else [],
        "heads": classes,
        "confusions": [line for row in rows for line in _confusion(row, classes)],
        "rates": RATES,
        "one_against_rest": [line for row in (last_rows if several else rows) for line in against_rest(row, classes)],
        "few": list(
            dict.fromkeys(
                f"{row.site} {few}" for row in rows if not row.several for few in few_cases(row.decisions, classes)
            )
        ),
        "calibration": [(row.name, [cell(row.figures.get("calibration_error"))]) for row in rows],
        "curves": curves(last if several else sites, whole if len(classes) == 2 else []),
    }


def _sample(runs: Sequence[RunResult], cases: int) -> str:
    patients = same(runs, lambda run: sum(run.patients.values()))
    whole = patients and all(set(run.sites) <= set(run.patients) for run in runs)
    return f"n = {counted(cases, 'test case')}" + (f" of {counted(patients, 'patient')}" if patients and whole else "")


def _at_threshold(row: DecisionRow) -> Row:
    error = cell(row.figures.get("calibration_error"), n=sum(map(sum, row.decisions.confusion)))
    if not row.decisions.decided:
        return row.name, [*[cell(None)] * 5, error]
    no, false, missed, yes = row.decisions.decided
    either = missed + yes + false
    f1 = cell(None)
    if either:
        f1 = _with_interval(2 * yes / (yes + either), either, interval_of_f1(yes, either))
    rates = [_share(yes, missed + yes), _share(no, no + false), _share(yes, yes + false), f1]
    threshold = cell(row.decisions.threshold, "each its own" if row.several else None)
    return row.name, [threshold, *rates, error]


def _confusion(row: DecisionRow, classes: Sequence[str]) -> list[Row]:
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
    """Yield a table row for each class with the rates `RATES` of the class, and their confidence intervals. The
    predicted class is the most probable class.
    """
    for label, name in enumerate(classes):
        own, right, others, rejected = against_rest_of(row.decisions, label)
        found = of_class(row.decisions, row.figures, label, name, len(classes) == 2)
        wrong, whole = others - rejected, own + others
        shares = [_share(right, own), _share(rejected, others), _share(right, right + wrong)]
        sizes = {"f1": own + wrong, "auroc": whole, "pr_auc": whole, AT_RATE[0]: own, AT_RATE[1]: others}
        rates = [_with_interval(getattr(found, of), size, found.intervals.get(of)) for of, size in sizes.items()]
        yield (row.words, name), [*shares, *rates]


def few_cases(decisions: Decisions, classes: Sequence[str]) -> Iterator[str]:
    for name, counts in zip(classes, decisions.confusion, strict=True):
        if sum(counts) < FEW:
            yield f"{sum(counts)} of {name}"


def _share(part: int, whole: int) -> dict[str, Any]:
    if not whole:
        return cell(None, aside=f"{part} of {whole}")
    return cell(part / whole, aside=f"{part} of {whole}, {interval_text(wilson(part, whole), whole)}", n=whole)


def _with_interval(value: float | None, whole: int, interval: Interval | None) -> dict[str, Any]:
    return cell(value, aside=interval_text(interval, whole), n=whole)
