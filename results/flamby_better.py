"""Compare ways of training that might score higher than the best federated row of FLamby's tables; no choice depends on
test cases.

    python -m results.flamby_better --data DATA [--cells DIR] [--draws N]

For each data set, every candidate trains on three quarters of each hospital's training cases and is scored on the other
quarter. The trial is repeated N times with a new random quarter each time; a region with only two deaths takes no
part. The candidate with the best mean score then trains on all training cases with FLamby's five seeds. The program
tests the chosen candidate once, and also trains and tests the best published row again. The tables also have a row that
follows FLamby's code for Cyclic. In this row, each hospital trains a copy of the model, and the first hospital's copy
is tested.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy import stats
from sklearn.model_selection import train_test_split

from results.flamby import HEART, POOLED, TABLES, Benchmark, Lines, Work, published, shown, write_tables
from tests import inprocess
from tests.patients import write_hearts

SEEDS = (42, 43, 44, 45, 46)
RAREST = 3  # minimum number of cases of each outcome; hospitals with fewer cases take no part in comparisons
HELD = 0.25  # fraction of each hospital's training cases that is held out for comparing candidates
BEST = {"heart_uci": "cyclic", "tcga_brca": "fedadam"}  # best of the published federated rows


@dataclass(frozen=True)
class Candidate:
    method: str
    rate: float
    changes: tuple[str, ...] = ()
    # True: the mean and deviation over all hospitals' training cases standardise all columns, in training and in the
    # test
    one_scale: bool = False

    def __str__(self) -> str:
        scale = ["one scale"] if self.one_scale else []
        return " ".join([self.method, f"rate={self.rate:g}", *self.changes, *scale])


def candidates(benchmark: Benchmark) -> Iterator[Candidate]:
    """Yield the ways of training to compare: those of the published rows, and others with settings that the publication
    does not test.
    """
    for method in benchmark.rates:
        yield Candidate(method, benchmark.rates[method])
    rates = (0.003, 0.01, 0.03, 0.1)
    for method, rate in product(("fedavg", "fedprox", "scaffold", "cyclic"), rates):
        yield Candidate(method, rate)
    more = (
        ("algorithm.weighting=uniform",),
        ("training.momentum=0.9",),
        ("training.weight_decay=0.01",),
        ("training.weight_decay=0.1",),
        ("algorithm.perturbation={}",),
        ("training.local_steps=20",),
        (f"training.rounds={4 * benchmark.rounds}", "training.local_steps=25"),
        ("training.batch_size=32",),
        ("network.name=mlp", "network.hidden=[16]", "network.norm=none"),
    )
    for changes, rate in product(more, rates):
        yield Candidate("fedavg", rate, changes)
    # FLamby's federated models train on columns that each hospital standardises, and are tested on columns that all
    # hospitals together standardise.
    for changes, rate in product(((), more[1], more[4]), rates):
        yield Candidate("fedavg", rate, changes, one_scale=True)
    for method, rate in product(("scaffold", "cyclic"), rates):
        yield Candidate(method, rate, one_scale=True)


def held_out(lines: Lines, seed: int) -> Lines:
    """Return only each hospital's training cases, a quarter of which become the hospital's test cases.

    A hospital with very few cases of one outcome is left out, because its held-out cases could not be scored.
    """
    found: Lines = {}
    for site, own in lines.items():
        trained = [line for line in own if line["part"] == "train"]
        outcomes = [str(line.get("outcome", line.get("E"))) for line in trained]
        if min(outcomes.count(one) for one in set(outcomes)) < RAREST:
            continue
        drawn = train_test_split(range(len(trained)), test_size=HELD, random_state=seed, stratify=outcomes)
        held = set(drawn[1])
        found[site] = [line | {"part": "test" if place in held else "train"} for place, line in enumerate(trained)]
    return found


def first_alone(work: Work, seed: int) -> float:
    """Return the first hospital's score after single-site training with its number of rounds in a cyclic study."""
    own, first = work.benchmark, work.sites[0]
    turns = math.ceil(own.rounds / len(work.sites))
    plan = work.plan("local", [first], turns, {**own.training, "learning_rate": own.rates["cyclic"]}, seed)
    return work.score(plan, inprocess.run(plan, settings=work.settings).models[first], POOLED)


def _scaled(columns: Sequence[str], lines: Lines) -> Iterator[dict[str, Any]]:
    trained = [line for own in lines.values() for line in own if line["part"] == "train"]
    for name in columns:
        values = [float(line[name]) for line in trained]
        yield {"name": name, "mean": fmean(values), "deviation": stdev(values) or 1.0}


class Trials:
    """Scores of candidates on one set, stored in a file so that a stopped run can continue."""

    def __init__(self, benchmark: Benchmark, lines: Lines, place: Path, name: str, cells: Path) -> None:
        self.work = Work(benchmark, write_tables(lines, place / name), tuple(lines), place / name)
        self.name, self.file = name, cells / f"{benchmark.folder}.json"
        self.scale = json.dumps(list(_scaled(self.work.columns, lines)))

    def score(self, candidate: Candidate, seed: int) -> float:
        known = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        key = f"{self.name} {seed} {candidate}"
        if key not in known:
            scale = ("task.standardise=plan", f"task.columns={self.scale}") if candidate.one_scale else ()
            plan = self.work.federated(candidate.method, candidate.rate, seed)
            plan = plan.with_changes([*candidate.changes, *scale])
            study = inprocess.run(plan, settings=self.work.settings)
            known[key] = self.work.score(plan, study.models[self.work.sites[0]], POOLED)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(known, indent=1), "utf-8")
        return float(known[key])


def chosen(trials: Sequence[Trials], among: Sequence[Candidate]) -> tuple[Candidate, dict[Candidate, float]]:
    means = {one: fmean(trial.score(one, seed) for seed, trial in enumerate(trials)) for one in among}
    return max(means, key=lambda one: means[one]), means


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean difference between two lists of scores of the same seeds."""
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    reach = stats.t.ppf(0.975, len(differences) - 1) * stdev(differences) / len(differences) ** 0.5
    return fmean(differences) - reach, fmean(differences) + reach


def report(
    benchmark: Benchmark,
    data: Path,
    cells: Path,
    draws: int,
    among: Sequence[Candidate] = (),
    seeds: Sequence[int] = SEEDS,
) -> None:
    lines = benchmark.read(data / benchmark.folder)
    with tempfile.TemporaryDirectory(prefix="medsilo-") as place:
        trials = [Trials(benchmark, held_out(lines, n), Path(place), f"draw {n}", cells) for n in range(draws)]
        best, means = chosen(trials, among or list(candidates(benchmark)))
        print(f"{benchmark.name}: {len(means)} candidates, {draws} draws of validation cases")
        for one in sorted(means, key=lambda one: -means[one])[:5]:
            print(f"  validation {means[one]:.4f}  {one}")
        whole = Trials(benchmark, lines, Path(place), "test", cells)
        row = BEST[benchmark.folder]
        ours = [whole.score(best, seed) for seed in seeds]
        alone = [first_alone(whole.work, seed) for seed in seeds]
        again = [whole.score(Candidate(row, benchmark.rates[row]), seed) for seed in seeds]
    told = published()[benchmark.folder, row]
    low, high = paired(ours, again)
    print(f"  test, chosen: {shown(ours)}  ({best})")
    print(f"  test, {row} here: {shown(again)}; published {shown(told)}")
    told = published()[benchmark.folder, "cyclic"]
    print(f"  test, a copy of the first hospital's own: {shown(alone)}; published as cyclic {shown(told)}")
    print(f"  chosen - {row} here, paired by seed: {low:+.4f} to {high:+.4f} (95 %)", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.flamby_better", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder with heart_uci and tcga_brca")
    parser.add_argument("--cells", type=Path, default=Path("runs/flamby_better"), help="folder for scores")
    parser.add_argument(
        "--draws", type=int, default=3, help="number of times that the validation cases are drawn at random"
    )
    parser.add_argument("--quick", action="store_true", help="only test on synthetic patients that the program runs")
    asked = parser.parse_args(arguments)
    if asked.quick:
        with tempfile.TemporaryDirectory(prefix="medsilo-") as place:
            write_hearts(Path(place, HEART.folder))
            report(replace(HEART, rounds=1), Path(place), Path(place), 1, [*candidates(HEART)][:2], SEEDS[:2])
        return 0
    there = [one for one in TABLES if not one.lacking(asked.data)]
    for benchmark in there:
        report(benchmark, asked.data, asked.cells, asked.draws)
    for benchmark in TABLES:
        if wish := benchmark.wish(asked.data):
            print(wish, file=sys.stderr)
    return 0 if there else 1


if __name__ == "__main__":
    sys.exit(main())
