"""Sections of a page of made-up shifts: each method's gain by the power of the shift that it was made for."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.analyses.figures import panels, save, style
from benchmarks.results.making import Comparison
from benchmarks.results.pages import Shift
from benchmarks.results.tables import difference
from medsilo_lab.study.cells import Row
from medsilo_lab.study.verdict_file import PairedDifference

AVERAGE = "FedAvg"
Gains = dict[str, PairedDifference]  # over each other row, in the mean over sites
By = dict[float, tuple[float, Gains]]  # by power: the method's score and its gains


def kinds(parts: Sequence[Comparison]) -> Iterator[tuple[Shift, Comparison, By]]:
    """Yield each kind of shift, its first part, and what is known by power."""
    shifted = [(part.part.made_up, part) for part in parts if part.part.made_up]
    for _, own in groupby(shifted, lambda pair: pair[0].kind):
        pairs = list(own)
        there = [(shift.power, part) for shift, part in pairs if part.part.against in _titles(part)]
        yield *pairs[0], {power: _gains(part) for power, part in there}


def _titles(comparison: Comparison) -> list[str]:
    """Return the rows that are compared."""
    return list(dict.fromkeys(cell.row.title for cell in comparison.compared()))


def _gains(comparison: Comparison) -> tuple[float, Gains]:
    method, gains, score = comparison.part.against, Gains(), 0.0
    for other in _titles(comparison):
        row = next(row for row in comparison.verdict(other).rows if row.title == method)
        score = row.score.mean if row.score else score
        if row.difference.mean:
            gains[other] = row.difference.mean
    return score, gains


def sections(parts: Sequence[Comparison]) -> Iterator[str]:
    """Yield a table for each kind of shift, and at which powers its method wins."""
    yield from ("", "![Each method's gain by the power of the shift](../pictures/shift.png)")
    yield from (
        "",
        "Differences in points, paired by test case, with 95 % intervals for other patients and other seeds.",
    )
    yield "**Bold**: the interval leaves zero out, and so does the test, corrected for all rows at that power (Holm)."
    for shift, first, by in kinds(parts):
        method, titles = first.part.against, [Row.parse(row).title for row in first.part.rows]
        others = [title for title in titles if title != method]
        heads = [shift.axis, method, *(f"less {other}" for other in others)]
        yield from ("", f"## {first.part.title}", "", textwrap.fill(first.part.why, 120), "")
        yield f"Declared before any run: {method} less {AVERAGE}, and less {shift.control}, in the mean over sites."
        yield from ("", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}")
        for power, (score, gains) in by.items():
            yield f"| {power:g} | {100 * score:.1f} | {' | '.join(difference(gains.get(other)) for other in others)} |"
        yield ""
        yield from (_told(method, other, by) for other in (AVERAGE, shift.control, "local"))


def _told(method: str, other: str, by: By) -> str:
    """Return at which powers the method wins, and at which it loses."""
    sure = {power: gains[other] for power, (_, gains) in by.items() if other in gains and gains[other].sure}
    above, below = ([f"{power:g}" for power, one in sure.items() if (one.mean > 0) is up] for up in (True, False))
    return f"* {method} less {other}: surely above at {_list(above)}, surely below at {_list(below)}."


def _list(powers: Sequence[str]) -> str:
    return ", ".join(powers) or "no power"


def picture(parts: Sequence[Comparison], path: Path) -> Path:
    """Draw the gains over FedAvg and over the control with their intervals."""
    known = list(kinds(parts))
    figure, rows = panels(1, len(known))
    for axes, (shift, first, by) in zip(rows[0], known, strict=True):
        for number, other in enumerate((AVERAGE, shift.control)):
            found = [(power, gains[other]) for power, (_, gains) in by.items() if other in gains]
            reach = [
                [100 * (one.mean - one.low) for _, one in found],
                [100 * (one.high - one.mean) for _, one in found],
            ]
            means = [100 * one.mean for _, one in found]
            axes.errorbar([power for power, _ in found], means, reach, capsize=3, label=other, **style(number))
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set(title=first.part.against, xlabel=shift.axis)
        axes.legend(title="gain over", fontsize=7, title_fontsize=7)
    rows[0][0].set_ylabel("points, 95 % interval")
    return save(figure, path)
