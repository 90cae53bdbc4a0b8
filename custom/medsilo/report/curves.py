"""Curves of a classification: reliability, ROC, precision by recall, and net benefit by threshold.

All follow from the places of the probability that hospitals tell: in each tenth the cases, and those of the class.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from markupsafe import Markup

from medsilo.report.charts import WIDE, Series, line_chart, swatch, ticks
from medsilo.runs.schema import Place

LOSS = 0.1  # net benefit below which a curve is not drawn
Line = tuple[str, int, list[Place]]  # its name, its style, and the places of the probability
Point = tuple[float, float]
Points = Iterable[Point]


def sum_of(places: Sequence[Place]) -> Place:
    """Return several places together."""
    cases, own, total = zip(*places, strict=True)
    return sum(cases), sum(own), float(sum(total))


def together(several: Sequence[Sequence[Place]]) -> list[Place]:
    """Return the places of all classes together, one against the rest."""
    return [sum_of(places) for places in zip(*several, strict=True)]


def curves(lines: Sequence[Line], whole: Sequence[Line]) -> dict[str, Any]:
    """Return the charts with their captions, and one legend. whole: of each run all sites', for its decision curve."""
    if not lines:
        return {"charts": [], "legend": []}
    diagonal = ((0.0, 0.0), (1.0, 1.0))
    drawn = [
        ("reliability", "Reliability", lines, _reliability, "mean probability", "share of cases", diagonal),
        ("roc", "ROC", lines, _roc, "1 − specificity", "sensitivity", diagonal),
        ("precision", "Precision by recall", lines, _precision, "recall (sensitivity)", "precision", ()),
    ]
    if whole:
        everybody = tuple(_benefit_of_all(whole[0][2]))
        drawn.append(("benefit", "Decision curve", whole, _benefit, "threshold", "net benefit", everybody))
    known = dict.fromkeys((name, style) for name, style, _ in (*lines, *whole))
    return {
        "charts": [
            (caption, _chart(key, _series(own, curve), x, y, guide)) for key, caption, own, curve, x, y, guide in drawn
        ],
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
        width=WIDE,
        unit=f"of {x}",
        guide=guide,
    )


def _series(lines: Sequence[Line], curve: Callable[[list[Place]], Points]) -> list[Series]:
    every = [(name, style, list(curve(places))) for name, style, places in lines]
    return [Series(name, [y for _, y in own], style, places=[x for x, _ in own]) for name, style, own in every]


def _reliability(places: list[Place]) -> Points:
    return ((min(total / cases, 1.0), own / cases) for cases, own, total in places if cases)


def _called(places: list[Place]) -> Iterator[tuple[float, int, int]]:
    """Yield, from the highest threshold down to 0: how many cases count as found, and how many of them rightly."""
    cases = own = 0
    yield 1.0, 0, 0
    for number in reversed(range(len(places))):
        cases, own = cases + places[number][0], own + min(places[number][:2])
        yield number / len(places), cases, own


def _roc(places: list[Place]) -> Points:
    *_, (_, everyone, ill) = _called(places)
    known = 0 < ill < everyone
    return (((cases - own) / (everyone - ill), own / ill) for _, cases, own in _called(places) if known)


def _precision(places: list[Place]) -> Points:
    *_, (_, _, ill) = _called(places)
    return ((own / ill, own / cases) for _, cases, own in _called(places) if ill and cases)


def _benefit(places: list[Place]) -> Points:
    """Return net benefit (Vickers and Elkin 2006): true less false alarms per case, a false one worth t / (1 − t)."""
    return _net(list(_called(places)))


def _benefit_of_all(places: list[Place]) -> Points:
    """Return the same for who counts everybody as found."""
    *_, (_, everyone, ill) = _called(places)
    return _net([(at, everyone, ill) for at, _, _ in _called(places)])


def _net(found: Sequence[tuple[float, int, int]]) -> Points:
    everyone = found[-1][1]
    every = [(at, (own - (cases - own) * at / (1 - at)) / everyone) for at, cases, own in found if everyone and at < 1]
    return [(at, value) for at, value in reversed(every) if value > -LOSS]
