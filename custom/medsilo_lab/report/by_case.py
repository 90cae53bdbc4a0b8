"""Pictures of single cases, of sites whose test cases' scores lie on this machine: survival, and sizes found."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import mean, median, stdev
from typing import Any

from medsilo.core.text import counted
from medsilo_lab.report.charts import Series, line_chart, swatch, ticks
from medsilo_lab.report.formats import cell
from medsilo_lab.report.read import RunResult

LEAST = 5  # patients of a group or a picture; of fewer it would show chance alone
SPREAD = 1.96  # standard deviations on either side in which 95 of 100 differences are expected
SIZE = re.compile(r"(ml|voxels)_there_?(.*)")  # a structure's size as it was drawn; tasks/segmentation.py writes it
GROUPS = ("Lower risk", "Higher risk")
NEEDED = ("time", "event", "risk")  # of a case
Case = Mapping[str, float]
Seen = tuple[float, bool]  # a time, and whether the event came then
Point = tuple[float, float]


def pictures(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return each run's pictures: survival by risk group, and for each structure the sizes drawn and found."""
    drawn = [(run, [*_survival(run, f"survival-{n}"), *_sizes(run, f"sizes-{n}")]) for n, run in enumerate(runs)]
    return [{"label": run.label, "pictures": own} for run, own in drawn if own]


def _picture(caption: str, note: str, patients: int, series: Sequence[Series], **how: Any) -> dict[str, Any]:
    legend = [{"name": one.name, "swatch": swatch(one.style, one.joined)} for one in series]
    chart = line_chart(series, title=caption, **how)
    return {
        "caption": caption,
        "note": note,
        "n": f"n = {counted(patients, 'patient')}",
        "chart": chart,
        "legend": legend,
        "heads": [],
        "rows": [],
    }


# ---------------------------------------------------------------------------------------------------- survival
def _survival(run: RunResult, key: str) -> Iterator[dict[str, Any]]:
    groups: tuple[list[Seen], list[Seen]] = ([], [])
    for cases in run.cases.values():
        known = [case for case in cases if all(math.isfinite(case.get(name, math.nan)) for name in NEEDED)]
        middle = median(case["risk"] for case in known) if known else 0.0  # each site's: models may differ in scale
        for case in known:
            groups[case["risk"] > middle].append((max(case["time"], 0.0), case["event"] == 1))
    if min(map(len, groups)) < LEAST:
        return
    last = max(time for group in groups for time, _ in group)
    named = list(zip(GROUPS, groups, strict=True))
    marks = [mark for mark in ticks(0, last, most=6) if mark <= last]
    lines = [(name, survival_curve(group)) for name, group in named]
    yield _picture(
        "Survival by risk group",
        "Share of test cases without the event by time (Kaplan and Meier's estimate), in two halves: at the median of "
        "the risk that the model gives a site's cases. To the right it rests on few patients; the table counts them.",
        sum(map(len, groups)),
        [Series(name, [y for _, y in own], n, places=[x for x, _ in own]) for n, (name, own) in enumerate(lines)],
        key=key,
        x_label="time, in the data's unit",
        y_label="share without the event",
        y_ticks=ticks(0, 1),
        last_x=last,
        unit="of time",
    ) | {
        "heads": [f"{mark:g}" for mark in marks],
        "rows": [
            (name, [cell(left := sum(time >= mark for time, _ in group), str(left)) for mark in marks])
            for name, group in named
        ],
    }


def survival_curve(group: Sequence[Seen]) -> list[Point]:
    """Return Kaplan and Meier's estimate as the corners of its steps: (time, share without the event).

    >>> survival_curve([(1.0, True), (2.0, False), (3.0, True), (4.0, False)])
    [(0.0, 1.0), (1.0, 1.0), (1.0, 0.75), (3.0, 0.75), (3.0, 0.375), (4.0, 0.375)]
    """
    corners, share, left = [(0.0, 1.0)], 1.0, len(group)
    for time, here in groupby(sorted(group), key=lambda seen: seen[0]):
        events = [event for _, event in here]
        if any(events):
            corners.append((time, share))
            share *= 1 - sum(events) / left
            corners.append((time, share))
        left -= len(events)
    last = max(time for time, _ in group)
    return corners if corners[-1][0] == last else [*corners, (last, share)]


# ---------------------------------------------------------------------------------------------------- sizes
def _sizes(run: RunResult, key: str) -> Iterator[dict[str, Any]]:
    """Yield Bland and Altman's picture of every structure: of each patient the difference, by the mean of both."""
    columns = dict.fromkeys(name for cases in run.cases.values() for name in cases[0])
    for number, told in enumerate(filter(None, map(SIZE.fullmatch, columns))):
        (unit, structure), found = told.groups(), told[0].replace("_there", "_found", 1)
        by_site = {site: sizes_of(cases, told[0], found) for site, cases in run.cases.items()}
        every = [y - x for pairs in by_site.values() for x, y in pairs]
        if len(every) < LEAST:
            continue
        middle, wide = mean(every), SPREAD * stdev(every)
        last = max((x + y) / 2 for pairs in by_site.values() for x, y in pairs)
        known = {"Mean difference": middle, "Lower limit": middle - wide, "Upper limit": middle + wide}
        lines = [
            Series(f"{name} {at:.3g} {unit}", (at, at), -1 - (at != middle), places=(0.0, last))
            for name, at in known.items()
        ]
        dots = [
            Series(site, [y - x for x, y in pairs], n, places=[(x + y) / 2 for x, y in pairs], joined=False)
            for n, (site, pairs) in enumerate(by_site.items())
        ]
        yield _picture(
            f"Found minus drawn{f': {structure}' if structure else ''}",
            "Each point is a patient: what was found minus what was drawn, by the mean of both (Bland and Altman). "
            "Between the limits 95 of 100 differences are expected, if they scatter normally.",
            len(every),
            [*lines, *dots],
            key=f"{key}-{number}",
            x_label=f"mean of both, {unit}",
            y_label=f"found minus drawn, {unit}",
            y_ticks=ticks(min([0.0, middle - wide, *every]), max([0.0, middle + wide, *every])),
            last_x=last,
            unit=unit,
            words=f"Of {len(every)} patients the mean difference is {middle:.3g} {unit}, the limits of agreement are "
            f"{middle - wide:.3g} and {middle + wide:.3g} {unit}.",
        )


def sizes_of(cases: Sequence[Case], there: str, found: str) -> list[Point]:
    """Return of each patient what was drawn and what was found, all its cases together; nothing of who lacks one."""
    totals: dict[float, Point] = {}
    for case in cases:
        x, y = totals.get(case["patient"], (0.0, 0.0))
        totals[case["patient"]] = x + case.get(there, math.nan), y + case.get(found, math.nan)
    return [pair for pair in totals.values() if all(map(math.isfinite, pair))]
