"""Answers to which method to choose: sixty generated federations, by a yardstick that spares no answer.

    python -m benchmarks.advise

`advise.csv` has, for each federation, the losses of seven methods after half of the rounds and the test scores of eight
and of the first four together, in the mean over hospitals and at the worst one. They were trained by a command that the
project no longer has (docs/evidence.md names the commit); the last twelve were run once, after all rules were fixed.
An answer is right where it is within a point of the best SINGLE method's mean and of the best worst hospital that ANY
answer reaches. "The least loss" is the only answer that looks, and costs one training after seven halves.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from docs.markdown import table

FILE = Path(__file__).with_suffix(".csv")
POINT = 0.01 + 1e-9
LEAST, TOGETHER = "the least loss", "together"
Row = Mapping[str, str]


def rows(held_out: bool = False) -> list[Row]:
    """Return the federations, or those alone that no rule was made from."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if not held_out or row["held out"] == "yes"]


def told(row: Row, what: str) -> dict[str, float]:
    """Return a federation's numbers of one kind ("loss", "mean", "worst") by method."""
    return {name.partition(":")[2]: float(text) for name, text in row.items() if text and name.startswith(f"{what}:")}


def behind(row: Row, answer: str) -> tuple[float, float]:
    """Return how far an answer is behind, in the mean and at the worst hospital."""
    losses, means, worst = (told(row, what) for what in ("loss", "mean", "worst"))
    method = min(losses, key=losses.__getitem__) if answer == LEAST else answer
    best = max(score for name, score in means.items() if name != TOGETHER)
    return best - means[method], max(worst.values()) - worst[method]


def answers(row: Row) -> list[str]:
    """Return what may be answered: the method with the least loss, and always the same."""
    return [LEAST, *sorted(told(row, "mean"))]


def lines(found: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield for each answer how often it is right, and how far it is behind on average."""
    for answer in answers(found[0]):
        away = [behind(row, answer) for row in found]
        right = sum(max(one) <= POINT for one in away)
        in_mean = sum(mean <= POINT for mean, _ in away)
        points = (f"{100 * fmean(own):.1f}" for own in zip(*away, strict=True))
        title = answer if answer == LEAST else f"always {answer}" if answer != TOGETHER else "always four together"
        yield (title, f"{in_mean} of {len(found)}", f"{right} of {len(found)}", *points)


def page() -> str:
    """Return both tables as one."""
    heads = ("answer", "held out: mean", "and worst", "all: mean", "and worst", "behind, mean", "worst hospital")
    both = zip(lines(rows(held_out=True)), lines(rows()), strict=True)
    return table(heads, [(one[0], one[1], one[2], *rest[1:]) for one, rest in both])


if __name__ == "__main__":
    print(page())
