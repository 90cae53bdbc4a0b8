"""Outcomes of a federation, as a table: each method's loss after the measuring rounds, and its scores at the end."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.advise.federations import plan_of
from benchmarks.advise.making import Trial
from medsilo.study.adviser import chosen, measuring_rounds, ranked
from medsilo.study.adviser_rules import TOGETHER, Rule, standings
from medsilo.study.cells import Cell
from medsilo.study.measurement import PROBES, read_measured

HERE = Path(__file__).resolve().parent
TABLES = {"made": HERE / "made.csv", "held_out": HERE / "held_out.csv"}
POINT = 0.01
LOSS, MEAN, WORST = "loss:", "mean:", "worst:"
COMMITTEE = "together"  # what stands for the methods that were measured best and answer together
Pick = Callable[["Outcome"], str]


@dataclass(frozen=True)
class Score:
    """A method's test score: the mean over hospitals, and that of the worst; each a mean over seeds."""

    mean: float
    worst: float


@dataclass(frozen=True)
class Outcome:
    """One federation: its name, cases and shifts in words, what was measured, and the scores of methods."""

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
        losses = standings(measured)
        together = [trial.together(ranked(losses)[:TOGETHER], seed) for seed in whole]
        scores = {method: _score([_told(whole[seed], method) for seed in whole]) for method in trial.methods}
        return cls(
            own.name,
            " ".join(map(str, own.cases)),
            own.words,
            len(whole),
            losses,
            scores | {COMMITTEE: _score(together)},
        )

    @property
    def rule(self) -> Rule:
        """The rule that answers."""
        return chosen(self.losses)[0]

    @property
    def first(self) -> str:
        """The method that the adviser names first."""
        return ranked(self.losses)[0]

    @property
    def advised(self) -> str:
        """The adviser's answer: the first method, or that several answer together."""
        return self.members[0] if len(self.members) == 1 else COMMITTEE

    @property
    def members(self) -> tuple[str, ...]:
        """The methods that the adviser would train."""
        return chosen(self.losses)[1]

    @property
    def best(self) -> str:
        """The method with the highest mean over hospitals, or several together."""
        return max(self.scores, key=lambda method: self.scores[method].mean)

    def behind(self, method: str) -> Score:
        """Return how far a method is behind the best one: in the mean, and at the worst hospital."""
        best, own = self.scores[self.best], self.scores[method]
        return Score(best.mean - own.mean, best.worst - own.worst)

    def right(self, method: str) -> bool:
        """Return whether a method is within a point of the best one, the worst hospital included."""
        behind = self.behind(method)
        return max(behind.mean, behind.worst) <= POINT


def _told(cells: Sequence[Cell], method: str) -> list[float]:
    (summary,) = [cell.summary() for cell in cells if cell.row.title == method]
    assert summary
    return [score for score, _ in summary.told().values()]


def _score(by_seed: Sequence[Sequence[float]]) -> Score:
    """Return the means over seeds of hospitals' mean score and of their lowest."""
    return Score(round(fmean(map(fmean, by_seed)), 4), round(fmean(map(min, by_seed)), 4))


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
