"""Make tables of simulated shifts: for each method, the differences from other rows at each strength of the shift for
which the method was designed.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from medsilo_lab.study.cells import Row
from medsilo_lab.study.verdict_file import PairedDifference
from results.making import Comparison
from results.pages import Shift
from results.result_files import LESS, MEAN, Table
from results.tables import difference

# for each other row's title, the mean over sites of the method's score minus that row's score
Differences = dict[str, PairedDifference]
By = dict[float, tuple[float, Differences]]  # maps each strength of the shift to the method's score and differences


def kinds(parts: Sequence[Comparison]) -> Iterator[tuple[Shift, Comparison, By]]:
    shifted = [(part.part.made_up, part) for part in parts if part.part.made_up]
    for _, own in groupby(shifted, lambda pair: pair[0].kind):
        pairs = list(own)
        there = [(shift.power, part) for shift, part in pairs if part.part.baseline in _titles(part)]
        yield *pairs[0], {power: _differences(part) for power, part in there}


def _titles(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(cell.row.title for cell in comparison.compared()))


def _differences(comparison: Comparison) -> tuple[float, Differences]:
    method, differences, score = comparison.part.baseline, Differences(), 0.0
    for other in _titles(comparison):
        row = next(row for row in comparison.verdict(other).rows if row.title == method)
        score = row.score.mean if row.score else score
        if row.difference.mean:
            differences[other] = row.difference.mean
    return score, differences


def tables(parts: Sequence[Comparison]) -> Iterator[Table]:
    """Yield a table for each kind of shift: for each strength, a method's score and its differences from the other
    rows.

    The differences are paired by test case; their confidence intervals also apply to further patients and further
    seeds. The p-values are corrected for all rows that have the same strength.
    """
    for shift, first, by in kinds(parts):
        method = first.part.baseline
        others = [title for row in first.part.rows if (title := Row.parse(row).title) != method]
        rows = [
            [f"{method}; {shift.axis} {power:g}", f"{100 * score:.1f}", *(difference(own.get(one)) for one in others)]
            for power, (score, own) in by.items()
        ]
        heads = ["", MEAN, *(f"{LESS}{title}" for title in others)]
        yield Table(heads, rows, first.part.title, seeds=str(len(first.whole_seeds())))
