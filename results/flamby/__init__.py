"""Repeat FLamby's published tables of two sets of patients' data (du Terrail et al. 2022).

The protocol (docs/research/reproduce.md) follows FLamby's code; published.csv holds the published scores of each seed.
Medsilo deviates from FLamby's code in three ways. Each round starts a new pass over a site's data. SCAFFOLD gives all
hospitals the same weight. The survival loss handles tied survival times by Breslow's method.
"""

import csv
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from medsilo.core.errors import MedsiloError
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import SiteSettings, make_settings
from tests import inprocess

ERRORS = 2.0  # a cell agrees with the published cell if the difference is at most this number of standard errors
POOLED, PERSONAL = "pooled", "personal"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
# Numbers that describe the heart data: columns to read, the column of the disease, columns that become dummies, and
# columns whose value is never truly 0.
READ, DISEASE, DUMMIES, NEVER_ZERO = 10, 13, (2, 6), {"hungarian": (3, 4, 7)}
REGIONS = 6
Lines = dict[str, list[dict[str, Any]]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Benchmark:
    name: str
    folder: str
    files: tuple[str, ...]
    origin: str
    read: Callable[[Path], Lines]
    task: Mapping[str, Any]
    training: Mapping[str, Any]  # settings of a federated round
    rounds: int
    alone: Mapping[str, Any]  # settings of pooled and single-site training
    rates: Mapping[str, float]  # learning rates at the hospitals, by method
    numbers: Mapping[str, Mapping[str, Any]]
    personal: Mapping[str, float]  # learning rates of the methods whose model is tested at each hospital separately

    def lacking(self, data: Path) -> list[str]:
        return [name for name in self.files if not (data / self.folder / name).exists()]

    def wish(self, data: Path) -> str:
        lacking = ", ".join(self.lacking(data))
        return f"{self.name}: put {lacking} ({self.origin}) into {data / self.folder}" if lacking else ""

    def ready(self, data: Path, place: Path) -> "Work":
        lines = self.read(data / self.folder)
        return Work(self, write_tables(lines, place), tuple(lines), place)


@dataclass(frozen=True)
class PublishedCell:
    set: str
    method: str
    test: str
    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def error(self) -> float:
        return math.sqrt(sum(spread(own) ** 2 / len(own) for own in (self.ours, self.theirs)))

    @property
    def judged(self) -> bool:
        """Return True if both results have a standard deviation, which needs more than one seed."""
        return min(len(self.ours), len(self.theirs)) > 1

    @property
    def agrees(self) -> bool:
        """Return True if the two means differ by at most two standard errors of the difference."""
        return abs(fmean(self.ours) - fmean(self.theirs)) <= ERRORS * self.error

    def row(self) -> list[str]:
        away = fmean(self.ours) - fmean(self.theirs)
        if not self.judged:
            return [self.set, self.method, self.test, shown(self.theirs), shown(self.ours), "–", "not judged"]
        told = f"{away / self.error:+.1f}" if self.error else f"{away:+.3f}"
        verdict = "agrees" if self.agrees else "DIFFERS"
        return [self.set, self.method, self.test, shown(self.theirs), shown(self.ours), told, verdict]


HEADS = ("set", "method", "tested on", "published", "here", "standard errors apart", "verdict")


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation, or 0 for a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def shown(values: Sequence[float]) -> str:
    return f"{values[0]:.3f}" if len(values) == 1 else f"{fmean(values):.3f} ± {spread(values):.3f}"


# ------------------------------------------------------------------------------------------------------ the data
def read_heart(folder: Path) -> Lines:
    """Return UCI's four hospitals, without lines that lack a value in the first ten columns; two of these columns
    become dummies.
    """
    known = {name: list(_heart_lines(folder / f"processed.{name}.data", name)) for name in HOSPITALS}
    levels = {place: sorted({line[place] for own in known.values() for line in own})[1:] for place in DUMMIES}
    return {name: _split(_with_dummies(own, levels)) for name, own in known.items()}


def _heart_lines(path: Path, name: str) -> Iterator[list[float]]:
    """For each line, yield the first ten values, and True if the patient has the disease."""
    with path.open(encoding="utf-8", newline="") as file:
        for cells in csv.reader(file):
            if len(cells) <= DISEASE or "?" in cells[:READ]:
                continue
            line = [*map(float, cells[:READ]), float(float(cells[DISEASE]) > 0)]
            if all(line[place] for place in NEVER_ZERO.get(name, (3, 7))):
                yield line


def _with_dummies(lines: Sequence[Sequence[float]], levels: Mapping[int, Sequence[float]]) -> list[dict[str, Any]]:
    return [
        {f"f{place}": line[place] for place in range(READ) if place not in levels}
        | {f"f{place}_{level:g}": int(line[place] == level) for place, own in levels.items() for level in own}
        | {"outcome": int(line[-1])}
        for line in lines
    ]


def _split(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Assign each line to training or test: scikit-learn samples 66 % at random for training, stratified by disease if
    both labels occur at least three times.
    """
    from sklearn.model_selection import train_test_split

    labels = [line["outcome"] for line in lines]
    stratify = labels if min(labels.count(0), labels.count(1)) > 2 else None
    places = list(range(len(lines)))
    train, _ = train_test_split(places, train_size=0.66, test_size=0.34, random_state=43, stratify=stratify)
    chosen = set(train)
    return [line | {"part": "train" if place in chosen else "test"} for place, line in enumerate(lines)]


def read_brca(folder: Path) -> Lines:
    with (folder / "train_test_split.csv").open(encoding="utf-8", newline="") as file:
        places = {row["pid"]: row["fold2"].split("_") for row in csv.DictReader(file)}
    found: Lines = {f"region-{number}": [] for number in range(REGIONS)}
    with (folder / "brca.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if place := places.get(row.pop("pid")):
                found[f"region-{place[1]}"].append({**row, "part": place[0]})
    return found


def write_tables(lines: Lines, folder: Path) -> tuple[str, ...]:
    """Write a table for each hospital and a table of all hospitals, and return a network's input columns.

    The published protocol has no validation cases, so training cases stand in for them; nothing is chosen by their
    scores.
    """
    together = {**lines, POOLED: [line for own in lines.values() for line in own]}
    validated = any(line["part"] == "validation" for line in together[POOLED])
    for name, own in together.items():
        (folder / name).mkdir(parents=True)
        trained = [line | {"part": "validation"} for line in own if line["part"] == "train" and not validated]
        rows = [{"patient": number, **line} for number, line in enumerate([*own, *trained])]
        with (folder / name / "cases.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return tuple(name for name in together[POOLED][0] if name not in ("outcome", "E", "T", "part"))


# ------------------------------------------------------------------------------------------------------ the studies
DRAWN = {"order": "drawn"}
FED_OPT = ("fedadam", "fedyogi", "fedadagrad")
YOGI = {"server_betas": [0.9, 0.999], "tau": 1e-8}
HEART = Benchmark(
    "Fed-Heart-Disease",
    "heart_uci",
    tuple(f"processed.{name}.data" for name in HOSPITALS),
    "the UCI Machine Learning Repository, data set Heart Disease",
    read_heart,
    {"name": "table", "kind": "classification", "standardise": "site"},
    {"local_steps": 100, "batch_size": 4},
    15,
    {"local_epochs": 50, "batch_size": 4, "optimizer": "adam", "learning_rate": 0.001},
    {
        "fedavg": 0.001,
        "fedprox": 0.001,
        "scaffold": 0.001,
        "fedadam": 0.01,
        "fedyogi": 0.003162,
        "fedadagrad": 0.003162,
        "cyclic": 0.01,
    },
    {
        "fedprox": {"mu": 0.01},
        "fedadam": {"server_lr": 0.01, **YOGI},
        "fedyogi": {"server_lr": 0.01, **YOGI},
        "fedadagrad": {"server_lr": 0.316228, "server_beta": 0.9, "tau": 1e-8},
        "cyclic": DRAWN,
        "fine-tuning": {"steps": 100},
    },
    {"fedavg": 0.00316227, "fine-tuning": 0.00316227},
)
BRCA = Benchmark(
    "Fed-TCGA-BRCA",
    "tcga_brca",
    ("brca.csv", "train_test_split.csv"),
    "the repository owkin/FLamby",
    read_brca,
    {"name": "table", "kind": "survival", "time": "T", "event": "E", "standardise": "none"},
    {"local_steps": 100, "batch_size": 8},
    5,
    {"local_epochs": 30, "batch_size": 8, "optimizer": "adam", "learning_rate": 0.1},
    {"fedavg": 0.1, "fedprox": 0.1, **dict.fromkeys(("scaffold", *FED_OPT, "cyclic"), 0.01)},
    {
        "fedprox": {"mu": 0.1},
        "fedadam": {"server_lr": 0.1, **YOGI},
        "fedyogi": {"server_lr": 0.1, **YOGI},
        "fedadagrad": {"server_lr": 1.0, "server_beta": 0.9, "tau": 1e-8},
        "cyclic": DRAWN,
    },
    {},
)
TABLES = (HEART, BRCA)


def published() -> dict[tuple[str, str], list[float]]:
    text = Path(__file__).with_name("published.csv").read_text("utf-8")
    found: dict[tuple[str, str], list[float]] = {}
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        found.setdefault((row["set"], row["method"]), []).append(float(row["score"]))
    return found


def compare(
    data: Path, seeds: Sequence[int], say: Say, benchmarks: Sequence[Benchmark] | None = None
) -> Iterator[PublishedCell]:
    every = TABLES if benchmarks is None else benchmarks
    there = [one for one in every if not one.lacking(data)]
    for one in every:
        if wish := one.wish(data):
            say(wish)
    if not there:
        raise MedsiloError("no data set was found; put the files named above into their folders, or give --data")
    theirs = published()
    for benchmark in there:
        with tempfile.TemporaryDirectory(prefix="medsilo-") as place:
            work = benchmark.ready(data, Path(place))
            for method in (*benchmark.rates, POOLED):
                told = theirs[benchmark.folder, method]
                ours = [work.on_all(method, seed) for seed in seeds]
                yield PublishedCell(benchmark.name, method, "all hospitals", ours, told)
            for method in benchmark.personal:
                ours = [work.at_home(method, seed) for seed in seeds]
                told = theirs[benchmark.folder, f"{PERSONAL} {method}"]
                yield PublishedCell(benchmark.name, method, "each hospital, mean", ours, told)
            for number, site in enumerate(work.sites):
                ours = [work.alone(site, seed) for seed in seeds]
                yield PublishedCell(benchmark.name, "single", site, ours, theirs[benchmark.folder, f"single {number}"])


@dataclass(frozen=True)
class Work:
    benchmark: Benchmark
    columns: tuple[str, ...]
    sites: tuple[str, ...]
    folder: Path

    @property
    def settings(self) -> SiteSettings:
        own = {"device": "cpu", "threads": 1}
        return make_settings({"data": str(self.folder), "public_data": True, **own}, "the benchmark")

    def plan(self, method: str, sites: Sequence[str], rounds: int, training: Mapping[str, Any], seed: int) -> Plan:
        own = self.benchmark
        return parse_plan(
            {
                "algorithm": {"name": method, **own.numbers.get(method, {})},
                "task": {**own.task, "columns": list(self.columns)},
                "network": {"name": "linear"},
                "training": {"rounds": rounds, **training},
                "participation": {"sites": list(sites)},
                "model_selection": {"keep": "last", "validate_every": rounds},
                "seed": seed,
            }
        )

    def on_all(self, method: str, seed: int) -> float:
        """Return the score of one model on the test cases of all hospitals, with columns scaled by the hospitals'
        training cases.
        """
        if method == POOLED:
            return self.alone(POOLED, seed)
        plan = self.federated(method, self.benchmark.rates[method], seed)
        return self.score(plan, inprocess.run(plan, settings=self.settings).models[self.sites[0]], POOLED)

    def at_home(self, method: str, seed: int) -> float:
        """Return the mean of the scores that the hospitals' final models have at their own hospitals."""
        plan = self.federated(method, self.benchmark.personal[method], seed)
        models = inprocess.run(plan, settings=self.settings).models
        return fmean(self.score(plan, models[site], site) for site in self.sites)

    def federated(self, method: str, rate: float, seed: int) -> Plan:
        own = self.benchmark
        return self.plan(method, self.sites, own.rounds, {**own.training, "learning_rate": rate}, seed)

    def alone(self, site: str, seed: int) -> float:
        plan = self.plan("local", [site], 1, self.benchmark.alone, seed)
        return self.score(plan, inprocess.run(plan, settings=self.settings).models[site], site)

    @torch.no_grad()
    def score(self, plan: Plan, model: nn.Module, site: str) -> float:
        cases: Any = plan.task.site_data(site, [site], plan.seed, self.settings.data).test
        found: Tensor = plan.task.goal.case_scores(model.eval()(cases.inputs), cases.targets)
        return float(found.double().mean())
