"""Outcomes of a federation, as a table: each method's loss after the measuring rounds, and its scores at the end."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.advise.federations import plan_of
from benchmarks.advise.making import Trial
from medsilo.study.adviser import measuring_rounds, ranked, rule_of
from medsilo.study.adviser_rules import Rule, standings
from medsilo.study.measurement import PROBES, read_measured

HERE = Path(__file__).resolve().parent
TABLES = {"made": HERE / "made.csv", "held_out": HERE / "held_out.csv"}
POINT = 0.01
LOSS, MEAN, WORST = "loss:", "mean:", "worst:"
Pick = Callable[["Outcome"], str]


@dataclass(frozen=True)
class Score:
    """A method's test score: the mean over hospitals, and that of the worst; each a mean over seeds."""

    mean: float
    worst: float


@dataclass(frozen=True)
class Outcome:
    """One federation: its name, cases and shifts in words, measured losses, and the score of each method."""

    name: str
    cases: str
    shifts: str
    seeds: int  # of training, over which scores are means; the data are the same
    losses: Mapping[str, float | None]
    scores: Mapping[str, Score]

    @classmethod
    def of(cls, trial: Trial) -> "Outcome | None":
        """Return what came out of a trial; None while a run of its first seed is missing."""
        by_seed = {seed: [cell for cell in trial.cells if cell.seed == seed] for seed in trial.seeds}
        whole = {seed: own for seed, own in by_seed.items() if all(cell.summary() for cell in own)}
        if min(trial.seeds) not in whole:
            return None
        probes = [cell.folder for cell in whole[min(trial.seeds)] if cell.row.title in PROBES]
        own = trial.federation
        measured = read_measured(probes, measuring_rounds(plan_of(own)))
        return cls(
            own.name,
            " ".join(map(str, own.cases)),
            own.words,
            len(whole),
            standings(measured),
            {method: _score(trial, method, whole) for method in trial.methods},
        )

    @property
    def rule(self) -> Rule | None:
        """The rule that answers."""
        return rule_of(self.advised) if self.advised else None

    @property
    def advised(self) -> str | None:
        """The method that the adviser names first."""
        return next(iter(ranked(self.losses)), None)

    @property
    def best(self) -> str:
        """The method with the highest mean over hospitals."""
        return max(self.scores, key=lambda method: self.scores[method].mean)

    def behind(self, method: str) -> Score:
        """Return how far a method is behind the best one: in the mean, and at the worst hospital."""
        best, own = self.scores[self.best], self.scores[method]
        return Score(best.mean - own.mean, best.worst - own.worst)

    def right(self, method: str | None) -> bool:
        """Return whether a method is within a point of the best one, the worst hospital included."""
        if method is None:
            return False
        behind = self.behind(method)
        return max(behind.mean, behind.worst) <= POINT


def _score(trial: Trial, method: str, whole: Mapping[int, Sequence]) -> Score:
    means, worst = [], []
    for cells in whole.values():
        (summary,) = [cell.summary() for cell in cells if cell.row.title == method]
        told = [score for score, _ in summary.told().values()]
        means.append(fmean(told))
        worst.append(min(told))
    return Score(round(fmean(means), 4), round(fmean(worst), 4))


# ------------------------------------------------------------------------------------------------ the table
def write_outcomes(outcomes: Iterable[Outcome], path: Path) -> None:
    """Write a line for each federation."""
    rows = [
        {"federation": one.name, "cases": one.cases, "shifts": one.shifts, "seeds": one.seeds}
        | {LOSS + method: "" if loss is None else f"{loss:.6g}" for method, loss in one.losses.items()}
        | {MEAN + method: score.mean for method, score in one.scores.items()}
        | {WORST + method: score.worst for method, score in one.scores.items()}
        for one in outcomes
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_outcomes(path: Path) -> list[Outcome]:
    """Read what `write_outcomes` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_outcome(row) for row in csv.DictReader(file)]


def _outcome(row: Mapping[str, str]) -> Outcome:
    losses = {name.removeprefix(LOSS): float(text) if text else None for name, text in row.items() if LOSS in name}
    methods = [name.removeprefix(MEAN) for name, text in row.items() if name.startswith(MEAN) and text]
    scores = {method: Score(float(row[MEAN + method]), float(row[WORST + method])) for method in methods}
    return Outcome(row["federation"], row["cases"], row["shifts"], int(row["seeds"]), losses, scores)
