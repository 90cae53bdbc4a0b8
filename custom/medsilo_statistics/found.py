"""The answer to a question, typed: Table 1, curves and regressions, with what is too small to be told left out."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from medsilo.runs.messages import Message
from medsilo_statistics.asked_question import MOST_SITES, Curve, Question, Site
from medsilo_statistics.combat import CommonFeatures
from medsilo_statistics.describing import difference_of_shares, log_rank, moments, quantile, survival_curve
from medsilo_statistics.newton import Combined, FittedModel
from medsilo_statistics.patients import Floats
from medsilo_statistics.sums import Sums

QUARTERS, BINS = (0.25, 0.5, 0.75), 20
Told = float | None  # None: fewer than the floor, or not to be had
Line = Annotated[list[float], Field(max_length=20_000)]
Few = Annotated[list[Told], Field(max_length=100)]


class TableCell(Message):
    """A variable in a group."""

    known: Told = None
    missing: Told = None
    mean: Told = None
    deviation: Told = None
    low: Told = None  # of the mean, 95 %
    high: Told = None
    quarters: Few = []
    levels: Few = []
    bins: Few = []  # of the range, in equal parts


class TableColumn(Message):
    """A group of patients, or a hospital."""

    title: str = Field(max_length=300)
    patients: Told = None
    cells: dict[str, TableCell] = Field({}, max_length=100)


class CurveFound(Message):
    """A curve of one group."""

    title: str = Field(max_length=300)
    patients: Told = None
    events: Told = None
    times: Line = []
    share: Line = []
    low: Line = []
    high: Line = []
    marks: Line = []  # times below the curve
    risk: Line = []  # patients at risk at these
    median: Told = None


class Curves(Message):
    """The curves of all groups, and the test between them."""

    groups: list[CurveFound] = Field(max_length=100)
    statistic: Told = None
    p: Told = None


class OwnPart(Message):
    """The part that one hospital tells of itself alone."""

    columns: list[TableColumn] = Field([], max_length=100)
    fits: dict[str, FittedModel] = Field({}, max_length=20)  # by the model's place


class MetaFound(Message):
    """One coefficient of hospitals that each estimated it."""

    model: int
    term: str = Field(max_length=300)
    sites: dict[Site, list[float]] = Field({}, max_length=MOST_SITES)  # estimate and standard error
    combined: list[Combined] = Field([], max_length=3)
    inconsistency: float = 0.0  # I²


class StatisticsFound(Message):
    """The whole answer, as it is written to answers.json."""

    question: Question
    hash: str = Field(pattern="^[0-9a-f]{64}$")
    sites: list[Site] = Field(max_length=MOST_SITES)
    sealed: bool
    floor: int = Field(ge=1)
    deviation: float = Field(0.0, ge=0)  # of the noise on each number of the table, of all hospitals together
    columns: list[TableColumn] = Field(max_length=101)  # the groups; the last is of all
    apart: dict[str, Told] = Field({}, max_length=100)  # standardised differences, the greatest between two groups
    sites_apart: dict[str, Told] = Field({}, max_length=100)  # the same between two hospitals
    wanted: dict[str, Told] = Field({}, max_length=100)  # patients that an interval needs
    curves: list[Curves] = Field([], max_length=20)
    fits: list[FittedModel] = Field([], max_length=20)
    meta: list[MetaFound] = Field([], max_length=2000)
    common: CommonFeatures | None = None  # of ComBat
    own: dict[Site, OwnPart] = Field({}, max_length=MOST_SITES)
    remarks: list[str] = Field([], max_length=1000)


def columns_of(question: Question, sums: Sums, floor: int, noise: float = 0.0, unit: int = 1) -> list[TableColumn]:
    """Return the columns of Table 1. noise: variance of each sum; unit: what counts are told as multiples of."""

    def told(count: float) -> Told:
        if not np.isfinite(count) or (not noise and 0 < count < floor):
            return None
        return max(0.0, round(count / unit) * unit) if unit > 1 or not noise else max(0.0, round(count, 1))

    def cell(name: str, own: Sums) -> TableCell:
        variable, row, patients = question.variables[name], own[f"row {name}"], float(own["patients"])
        if variable.levels:
            known = float(row.sum())
            levels = [told(float(own)) for own in row]
            return TableCell(known=told(known), missing=told(patients - known), levels=levels)
        known, *values = moments(variable, row, noise)
        counts: dict[str, Any] = {"known": told(known), "missing": told(patients - known)}
        if counts["known"] is None:
            return TableCell(**counts)
        named = zip(("mean", "deviation", "low", "high"), values, strict=True)
        shown: dict[str, Any] = {key: value for key, value in named if np.isfinite(value)}
        bins = own[f"histogram {name}"]
        quarters = [quantile(variable, bins, q) for q in QUARTERS] if np.isfinite(bins).all() else []
        parts = [told(float(part.sum())) for part in np.array_split(bins, min(BINS, len(bins)))]
        return TableCell(**counts, **shown, quarters=quarters, bins=parts)

    levels = question.levels_of(question.by) if question.by else ()
    parts = {name: own for name, own in sums.items() if name.startswith(("patients", "row ", "histogram "))}
    found = []
    for place, title in enumerate((*levels, "All")):
        own = {name: each[place] if place < len(levels) else each.sum(0) for name, each in parts.items()}
        patients = told(float(own["patients"]))
        cells = {} if patients is None else {name: cell(name, own) for name in question.rows}
        found.append(TableColumn(title=title, patients=patients, cells=cells))
    return found


def apart(question: Question, columns: Sequence[TableColumn]) -> dict[str, Told]:
    """Return for each variable the greatest standardised difference between two columns."""
    found: dict[str, Told] = {}
    for name in question.rows:
        cells = [own.cells[name] for own in columns if name in own.cells]
        pairs = [(one, other) for place, one in enumerate(cells) for other in cells[:place]]
        values = [own for own in (_apart(*pair) for pair in pairs) if own is not None and np.isfinite(own)]
        found[name] = max(values, default=None)
    return found


def _apart(one: TableCell, other: TableCell) -> Told:
    if one.levels and other.levels:
        if None in (*one.levels, *other.levels):
            return None
        return difference_of_shares(np.array(one.levels, np.float64), np.array(other.levels, np.float64))
    if one.mean is None or one.deviation is None or other.mean is None or other.deviation is None:
        return None
    spread = np.sqrt((one.deviation**2 + other.deviation**2) / 2)
    return float(abs(one.mean - other.mean) / spread) if spread > 0 else None


def curves_of(question: Question, curve: Curve, counts: Floats, floor: int, noise: float = 0.0) -> Curves:
    """Return curves, each as far as enough are at risk. Groups with fewer patients than the floor have none.

    noise: variance of each count. Bands include it; the log-rank test is left out.
    """
    variable, marks = question.variables[curve.time], 6
    groups, shown = [], []
    last = max((int(np.flatnonzero(own.sum(1) > 0.5)[-1]) for own in counts if (own > 0.5).any()), default=1)
    places = np.unique(np.linspace(0, last, marks).astype(int))
    assert variable.range
    times = variable.range[0] + np.arange(variable.places) * variable.width
    for title, told in zip(question.levels_of(curve.by), counts, strict=True):
        own = told if noise else np.maximum(told, 0)
        if not (own.sum() >= max(floor, 1) and np.isfinite(own).all()):
            groups.append(CurveFound(title=title))
            continue
        shown.append(own)
        at, *lines, risk = survival_curve(own, noise)
        seen, events = risk[at] >= floor, float(own[:, 0].sum())
        share, low, high = (line[seen] for line in lines)
        below = np.flatnonzero(share <= 0.5 + 1e-12)  # half have had the event
        groups.append(
            CurveFound(
                title=title,
                patients=float(own.sum()),
                events=events if events >= floor or events == 0 else None,
                times=times[at[seen]].tolist(),
                share=share.tolist(),
                low=low.tolist(),
                high=high.tolist(),
                marks=times[places].tolist(),
                risk=np.where(risk[places] >= floor, risk[places], 0.0).tolist(),
                median=float(times[at[seen][below[0]]]) if len(below) else None,
            )
        )
    if len(shown) < 2 or noise:
        return Curves(groups=groups)
    statistic, p = log_rank(shown)
    return Curves(groups=groups, statistic=statistic, p=p)
