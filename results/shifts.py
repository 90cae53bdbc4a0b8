"""Tables of induced shifts: each method's gain by the power of the shift that it was made for."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from medsilo_lab.study.cells import Row
from medsilo_lab.study.verdict_file import PairedDifference
from results.analyses.figures import panels, save, style
from results.making import Comparison
from results.pages import Shift
from results.result_files import LESS, MEAN, Table
from results.tables import difference

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


def tables(parts: Sequence[Comparison]) -> Iterator[Table]:
    """Yield a table for each kind of shift: a method's score by power, and its differences from the other rows.

    They are paired by test case, for other patients and other seeds; p is corrected for all rows at that power.
    """
    for shift, first, by in kinds(parts):
        method = first.part.against
        others = [title for row in first.part.rows if (title := Row.parse(row).title) != method]
        rows = [
            [f"{method}; {shift.axis} {power:g}", f"{100 * score:.1f}", *(difference(gains.get(one)) for one in others)]
            for power, (score, gains) in by.items()
        ]
        heads = ["", MEAN, *(f"{LESS}{title}" for title in others)]
        yield Table(heads, rows, first.part.title, seeds=str(len(first.whole_seeds())))


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
