"""An answer as people read it: a page with Table 1, curves and forest plots; CSV of everything; tables for papers."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from medsilo.core.files import write_bytes
from medsilo.report import charts
from medsilo.report.template import fill
from medsilo_statistics.asked_question import Question
from medsilo_statistics.describing import NORMAL
from medsilo_statistics.found import Curves, StatisticsFound, TableCell
from medsilo_statistics.newton import FittedModel

BAR, TABLE_ONE = "\u2588", "Table 1"
RATIO = {"logistic": "Odds ratio", "poisson": "Rate ratio", "cox": "Hazard ratio", "linear": "Coefficient"}
LIMITS = (
    "Sums say what hospitals have, not how they came to it: coding, selection and follow-up may differ.",
    "p-values are of one test each; nothing here corrects for how many were asked.",
    "A quantile is off by half a step of its variable at most, as values are counted at the nearest step.",
)


@dataclass(frozen=True)
class ShownTable:
    """A table of texts."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_csv(self) -> str:
        """Return it as CSV."""
        text = StringIO(newline="")
        csv.writer(text).writerows([self.heads, *self.rows])
        return text.getvalue()

    def as_latex(self) -> str:
        """Return it as a LaTeX table of the package booktabs."""
        lines = [" & ".join(map(_latex, row)) + r" \\" for row in (self.heads, *self.rows)]
        body = [rf"\begin{{tabular}}{{l{'r' * (len(self.heads) - 1)}}}", r"\toprule", lines[0], r"\midrule", *lines[1:]]
        caption = rf"\caption{{{_latex(self.name)}}}"
        return "\n".join([r"\begin{table}", caption, *body, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])

    def cells(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Return its rows as a page shows them."""
        return [(row[0], [{"value": "", "text": own, "aside": "", "look": ""} for own in row[1:]]) for row in self.rows]


def tables(found: StatisticsFound) -> list[ShownTable]:
    """Return Table 1 and a table of each regression and of hospitals' estimates together."""
    question = found.question
    shown = [_table_one(question, found)] if question.rows or question.by else []
    for number, (model, fit) in enumerate(zip(question.models, found.fits, strict=True)):
        heads = ("", "Coefficient", "Standard error", RATIO[model.kind], "95 % interval", "p")
        told = f"{model.kind} regression of {model.outcomes[-1]}, {fit.patients:.6g} patients"
        told += "" if fit.events is None else f", {fit.events:.6g} events"
        shown.append(ShownTable(f"Model {number + 1}: {told}", heads, _model_rows(fit, model.kind != "linear")))
    rows = []
    for one in found.meta:
        term, differing = f"Model {one.model + 1}, {one.term}", f"{one.inconsistency:.0%}"
        for each in one.combined:
            interval = _range(each.low, each.high)
            rows.append((term, each.method, _number(each.estimate), interval, _number(each.tau2), differing))
    if found.meta:
        heads = ("", "Method", "Estimate", "95 % interval", "τ²", "I²")
        shown.append(ShownTable("Hospitals' own estimates together", heads, rows))
    for number, curves in enumerate(found.curves):
        groups = [[own.title or "All", *map(_count, (own.patients, own.events, own.median))] for own in curves.groups]
        test = "" if curves.p is None else f"; log-rank χ² = {curves.statistic:.3g}, {_p(curves.p)}"
        name = f"Survival {number + 1}: {question.curves[number].event}{test}"
        shown.append(ShownTable(name, ("", "Patients", "Events", "Median"), groups))
        marks = next((own.marks for own in curves.groups if own.marks), [])
        risk = [[own.title or "All", *map(_count, own.risk)] for own in curves.groups if own.risk]
        shown.append(ShownTable(f"Survival {number + 1}: at risk", ("", *(f"{mark:g}" for mark in marks)), risk))
    return shown + _histograms(question, found)


def _histograms(question: Question, found: StatisticsFound) -> list[ShownTable]:
    """Return a table for each number: where a bin begins, how many are in it, by group and over all."""
    shown = []
    for name in question.rows:
        variable, columns = question.variables[name], [own for own in found.columns if name in own.cells]
        bins = [own.cells[name].bins for own in columns]
        if not variable.range or not any(bins):
            continue
        starts = [part[0] for part in np.array_split(np.arange(variable.places), len(bins[-1]))]
        most = max((own for own in bins[-1] if own), default=1)
        rows = [
            [_number(variable.range[0] + start * variable.width)]
            + [_count(own[n], "few") for own in bins if own]
            + [BAR * round(20 * (bins[-1][n] or 0) / most)]
            for n, start in enumerate(starts)
        ]
        titles = [own.title for own, each in zip(columns, bins, strict=True) if each]
        shown.append(ShownTable(f"Histogram of {name}", ["from", *titles, ""], rows))
    return shown


def _table_one(question: Question, found: StatisticsFound) -> ShownTable:
    hospitals = [(site, own.columns[-1]) for site, own in found.own.items() if own.columns]
    groups = found.columns if question.by else found.columns[-1:]
    columns = [*((own.title, own) for own in groups), *hospitals]
    few = f"fewer than {found.floor}"
    rows = [["Patients", *(_count(own.patients, few) for _, own in columns), ""]]
    for name in question.rows:
        variable = question.variables[name]
        label = f"{name}, {variable.unit}" if variable.unit else name
        apart = _number(found.apart.get(name), 3)
        cells = [own.cells.get(name, TableCell()) for _, own in columns]
        if variable.levels:
            rows.append([f"{label}, n (%)", *("" for _ in columns), apart])
            for place, level in enumerate(variable.levels):
                rows.append([f"  {level}", *(_share(own, place, few) for own in cells), ""])
        else:
            rows.append([f"{label}, mean (SD)", *(_mean(own) for own in cells), apart])
            if any(own.quarters for own in cells):
                rows.append(["  median [quartiles]", *(_quarters(own) for own in cells), ""])
        if any(own.missing or (own.known is not None and own.missing is None) for own in cells):
            rows.append(["  missing", *(_count(own.missing, few) for own in cells), ""])
    return ShownTable(TABLE_ONE, ["", *(title for title, _ in columns), "SMD"], rows)


def _model_rows(fit: FittedModel, ratio: bool) -> list[list[str]]:
    if fit.why:
        return [[f"not fitted: it {fit.why}", "", "", "", "", ""]]
    rows = []
    for term, own, error in zip(fit.terms, fit.coefficients, fit.errors, strict=True):
        p = math.erfc(abs(own) / error / math.sqrt(2)) if error > 0 else float("nan")
        rows.append([term, _number(own), _number(error), *_told(own, error, ratio), _p(p).removeprefix("p = ")])
    return rows


def _told(own: float, error: float, ratio: bool) -> tuple[str, str]:
    """Return a coefficient, or its ratio, and the 95 % interval."""
    ends = (own, own - NORMAL * error, own + NORMAL * error)
    shown, low, high = (math.exp(min(end, 700.0)) if ratio else end for end in ends)
    return _number(shown, 3), _range(low, high)


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def _count(value: float | None, few: str = "–") -> str:
    return few if value is None else f"{value:.7g}"


def _range(low: float, high: float) -> str:
    return f"{_number(low, 3)} to {_number(high, 3)}"


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _mean(cell: TableCell) -> str:
    return "–" if cell.mean is None else f"{_number(cell.mean)} ({_number(cell.deviation, 3)})"


def _quarters(cell: TableCell) -> str:
    return "–" if len(cell.quarters) < 3 else "{1} [{0}, {2}]".format(*(_number(own) for own in cell.quarters))


def _share(cell: TableCell, place: int, few: str) -> str:
    own = cell.levels[place] if place < len(cell.levels) else None
    return _count(own, few) + (f" ({own / cell.known:.1%})".replace("%", "") if own is not None and cell.known else "")


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "–": "--", "τ²": r"$\tau^2$", "χ²": r"$\chi^2$", "²": "$^2$"}
    special |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {"<": "$<$", ">": "$>$", BAR: r"\rule{2pt}{1ex}", "[": "{[}"}
    return "".join(special.get(sign, sign) for sign in text)


def survival_chart(number: int, curves: Curves, label: str) -> Markup | None:
    """Draw curves with their 95 % bands."""
    series = []
    for style, own in enumerate(curves.groups):
        if not own.times:
            continue
        times = [time for time in own.times for _ in "||"]
        first = min(own.marks[0], times[0])
        steps = [[1.0, 1.0, *(value for value in line for _ in "||")][:-1] for line in (own.share, own.low, own.high)]
        band = list(zip(*steps[1:], strict=True))
        series.append(charts.Series(own.title or "All", steps[0], style, None, [first, *times], band))
    if not series:
        return None
    title = f"Survival by {label}, with bands of 95 %"
    last = max(place for one in series for place in one.places or ())
    about = {"x_label": label, "y_label": "share", "y_ticks": [0, 0.25, 0.5, 0.75, 1], "last_x": last, "unit": label}
    return charts.line_chart(series, key=f"survival-{number}", title=title, **about)  # type: ignore[arg-type]


def forest(key: str, title: str, rows: Sequence[tuple[str, float, float]], ratio: bool) -> Markup | None:
    """Draw estimates with intervals of 95 %: names, estimates, standard errors; ratios on a logarithmic axis."""
    unit = math.log(10) if ratio else 1.0
    dots = [
        charts.Dot(name, own / unit, 0, ((own - NORMAL * error) / unit, (own + NORMAL * error) / unit), told)
        for name, own, error in rows
        if math.isfinite(own) and error > 0
        for told in ["{} ({})".format(*_told(own, error, ratio))]
    ]
    marks, room = charts.dot_ticks(dots, [0.0]), (150, 234, 150)

    def label(mark: float) -> str:
        return f"{10 ** min(mark, 300.0) if ratio else mark:.3g}"

    return charts.dot_chart(dots, marks, key=key, title=title, guide=(0, ""), label=label, room=room) if dots else None


def _forests(question: Question, found: StatisticsFound) -> list[tuple[str, Markup]]:
    drawn = []
    for number, (model, fit) in enumerate(zip(question.models, found.fits, strict=True)):
        rows = list(zip(fit.terms, fit.coefficients, fit.errors, strict=False))[int(model.kind != "cox") :]
        title = f"Model {number + 1}"
        chart = forest(f"model-{number}", title, rows, model.kind != "linear")
        drawn.append((f"{title}: {RATIO[model.kind]}", chart))
    for one in found.meta:
        kind = question.models[one.model].kind
        estimates = [(site, own[0], own[1]) for site, own in one.sites.items()]
        estimates += [(own.method, own.estimate, (own.high - own.low) / 2 / NORMAL) for own in one.combined]
        title = f"Model {one.model + 1} by hospital, {one.term}"
        drawn.append((title, forest(f"meta-{len(drawn)}", title, estimates, kind != "linear")))
    return [(title, chart) for title, chart in drawn if chart]


def needed(found: StatisticsFound) -> list[str]:
    """Return how many patients the intervals need that were wanted, a line each."""
    halves = found.question.wanted
    counts = {name: count for name, count in found.wanted.items() if count}
    return [f"{name}: {count:.7g} patients for an interval of ± {halves[name]:g}" for name, count in counts.items()]


# ---------------------------------------------------------------------------------------------------- files
def page(found: StatisticsFound) -> str:
    """Return the page."""
    question = found.question
    kind = "sealed: sums alone were read" if found.sealed else "in clear"
    asked = [f"who: {question.where or 'everybody'}", f"hospitals: {', '.join(found.sites)} ({kind})"]
    if found.deviation:
        asked[-1] += f"; noise of standard deviation {found.deviation:.3g} on each number of the table"
    asked += needed(found)
    apart = ", ".join(f"{name} {_number(own, 3)}" for name, own in found.sites_apart.items() if own is not None)
    asked += [f"greatest standardised difference between hospitals: {apart}"] if apart else []
    asked += [f"what left each hospital, {line}" for line in question.leaves()]
    drawn = []
    for number, (curve, own) in enumerate(zip(question.curves, found.curves, strict=True)):
        legend = [(charts.swatch(n), group.title or "All") for n, group in enumerate(own.groups)]
        drawn.append((f"{curve.event} by {curve.time}", survival_chart(number, own, curve.time), legend))
    everybody = _count(found.columns[-1].patients, f"fewer than {found.floor}")
    return fill(
        "statistics.html",
        question.title,
        folder=Path(__file__).parent,
        context=f"{len(found.sites)} hospitals · question {found.hash[:12]}",
        answer=f"{everybody} patients in {len(found.sites)} hospitals.",
        remarks=asked,
        notices=[{"kind": "caution", "word": "Not told", "text": remark} for remark in found.remarks],
        limits=LIMITS,
        tables=tables(found),
        curves=[one for one in drawn if one[1]],
        forests=_forests(question, found),
        asked=question.in_yaml(),
    )


def write_all(found: StatisticsFound, folder: Path) -> list[Path]:
    """Write the page, the answer, CSV and LaTeX of all tables, and the curves."""
    shown = tables(found)
    texts = {"report.html": page(found), "answers.json": found.model_dump_json(indent=1)}
    texts |= {"combat.json": found.common.model_dump_json(indent=1)} if found.common else {}
    texts |= {f"table-{number}.csv": own.as_csv() for number, own in enumerate(shown, 1)}
    texts["tables.tex"] = "\n".join(own.as_latex() for own in shown)
    for number, curves in enumerate(found.curves, 1):
        lines = [(own.title, zip(own.times, own.share, own.low, own.high, strict=True)) for own in curves.groups]
        points = [(title, *map(repr, at)) for title, line in lines for at in line]
        texts[f"curve-{number}.csv"] = ShownTable("", ("group", "time", "share", "low", "high"), points).as_csv()
    for name, text in texts.items():
        write_bytes(folder / name, text.encode("utf-8", "replace"))
    return [folder / name for name in texts]
