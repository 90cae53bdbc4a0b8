"""Choose the studies to run, and store each result in a JSON file, so that a stopped program can continue."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

from medsilo.core.errors import PlanError
from medsilo.core.files import write_json
from medsilo.core.package import ENGINE, facts_of
from medsilo.plan import Plan, parse_plan
from medsilo.runs.outliers import standing_out
from medsilo.runs.rounds import Round
from results.attacks.attackers import ATTACKS, attacks_on
from results.attacks.federation import run


@dataclass(frozen=True)
class Defence:
    mixing: Mapping[str, Any]
    minimum: int = 3


PLAIN = "plain mean"
DEFENCES: Mapping[str, Defence] = {
    PLAIN: Defence({}),
    # if no weight may exceed a quarter, a study needs at least four hospitals
    "share cap": Defence({"max_weight": 0.25}, 4),
    "norm bound": Defence({"robust": {"name": "norm-bound"}}),
    "median": Defence({"robust": {"name": "median"}}),
    "trimmed mean": Defence({"robust": {"name": "trimmed-mean", "bad": 1}}),
    "Multi-Krum": Defence({"robust": {"name": "multi-krum", "bad": 1}}, 5),
}
SITES = tuple(f"hospital-{letter}" for letter in "abcde")
HONEST = "no attack"


@dataclass(frozen=True)
class Setting:
    """A task with a network and training settings, small enough for a study to take seconds."""

    title: str
    task: Mapping[str, Any]
    network: Mapping[str, Any]
    training: Mapping[str, Any]
    without: frozenset[str] = frozenset()  # attacks that this block of the table leaves out


HISTOLOGY = Setting(
    "Histology: classification",
    {"name": "synthetic-histology", "patients": 20, "patches": 8, "size": 32, "shift": 0.3},
    {"name": "small-cnn", "width": 8},
    {"rounds": 8, "local_epochs": 2, "batch_size": 8, "optimizer": "adam", "learning_rate": 0.01},
)
PROSTATE = Setting(
    "Prostate: segmentation",
    {"name": "synthetic-prostate", "similarity": "high", "patients": 8, "slices": 4, "size": 32},
    {"name": "unet", "features": [8, 16, 32], "norm": "instance"},
    {"rounds": 8, "local_epochs": 2, "batch_size": 8, "optimizer": "adam", "learning_rate": 0.01},
    # Backdoors need classes of images, and the attack on statistics needs running statistics.
    without=frozenset({"backdoor", "backdoor, replacing the model", "statistics"}),
)
SKEWED = Setting(
    "Activity with skewed labels: classification",
    {"name": "synthetic-activity", "persons": 16, "windows": 16, "steps": 32, "shift": "label"},
    {"name": "activity-cnn"},
    {"rounds": 8, "local_epochs": 2, "batch_size": 16, "optimizer": "adam", "learning_rate": 0.01},
)
TINY = Setting(
    "Activity: classification",
    {"name": "synthetic-activity", "persons": 10, "windows": 16, "steps": 32, "shift": "none"},
    {"name": "activity-cnn"},
    {"rounds": 3, "local_epochs": 3, "batch_size": 16, "optimizer": "adam", "learning_rate": 0.02},
)


# With `selector_sync: server-adam`, FedSM allows robust aggregation.
NUMBERS: dict[str, dict[str, Any]] = {"fedsm": {"selector_sync": "server-adam"}}


@dataclass(frozen=True)
class Block:
    """A block of the table: each method combined with each applicable attack, each defence and each number of dishonest
    hospitals.
    """

    setting: Setting
    methods: Sequence[str]
    attacks: Sequence[str]
    defences: Sequence[str]
    bad: Sequence[int]
    seeds: int


@dataclass(frozen=True)
class Cell:
    setting: Setting
    method: str
    attack: str
    bad: int
    defence: str
    seed: int

    @property
    def bad_sites(self) -> tuple[str, ...]:
        """Return the dishonest hospitals, which change with the seed because hospitals' data differ."""
        return tuple(sorted(SITES[(self.seed + 2 * place) % len(SITES)] for place in range(self.bad)))

    def plan(self) -> Plan:
        """Return the plan, or raise PlanError if the method does not allow the defence."""
        defence = DEFENCES[self.defence]
        # By default, the server rejects a site that reports nearly all cases; this check is off while defences are
        # measured.
        agreed: dict[str, Any] = {"sites": list(SITES), "minimum": defence.minimum, "max_share": 1.0}
        if defence.minimum < len(SITES):
            agreed["when_missing"] = "continue"
        values = {
            "algorithm": {"name": self.method, **NUMBERS.get(self.method, {})},
            "task": dict(self.setting.task),
            "network": dict(self.setting.network),
            "training": dict(self.setting.training),
            "participation": agreed,
            "seed": self.seed,
        }
        if defence.mixing:
            values["aggregation"] = dict(defence.mixing)
        return parse_plan(values)

    def file(self) -> str:
        """Return the name of the file with the cell's result; the name depends on the plan and the attack."""
        facts = [_values(self.setting), self.method, self.attack, self.bad, asdict(DEFENCES[self.defence]), self.seed]
        told = json.dumps([*facts, ATTACKS[self.attack].version if self.bad else 0], sort_keys=True)
        return f"{self.method}-{self.seed}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"


def _values(setting: Setting) -> dict[str, Any]:
    return {key: value for key, value in asdict(setting).items() if key not in ("title", "without")}


@dataclass(frozen=True)
class Result:
    score: float | None = None  # mean test score of the honest hospitals
    sites: Mapping[str, float] | None = None
    patched: float | None = None
    refused: int = 0
    reason: str | None = None
    no_plan: bool = False
    # the outliers that the study recorded in each round; only studies with the plain mean record outliers
    record: Sequence[Mapping[str, Any]] | None = None
    rounds: int = 0
    seconds: float = 0.0  # processor time
    package: str = ""

    @property
    def stood_out(self) -> set[str] | None:
        return None if self.record is None else set(standing_out([Round(**line) for line in self.record]))


COMMON = (
    "sign flip x10",
    "scaling x100",
    "random weights, lying counts",
    "label flip",
    "backdoor, replacing the model",
    "a little is enough",
    "inner product, large ε",
    "statistics",
    "amplitude",
    "expert and selector",
)
WHERE_LABELS_DIFFER = (
    "sign flip x10",
    "scaling x100",
    "random weights, lying counts",
    "label flip",
    "a little is enough",
    "inner product, large ε",
)
FEW = (PLAIN, "norm bound", "median", "Multi-Krum")
EVERY_DEFENCE = tuple(DEFENCES)
EVERY_ATTACK = tuple(ATTACKS)
OTHERS = ("fedprox", "fedbn", "fedadam", "harmofl", "adafed")
TABLE = (
    Block(HISTOLOGY, ("fedavg",), EVERY_ATTACK, EVERY_DEFENCE, (0, 1), 3),
    Block(SKEWED, ("fedavg",), WHERE_LABELS_DIFFER, EVERY_DEFENCE, (0, 1), 2),
    Block(PROSTATE, ("fedavg",), COMMON, FEW, (0, 1), 2),
    Block(HISTOLOGY, ("fedavg",), EVERY_ATTACK, EVERY_DEFENCE, (2,), 2),
    Block(HISTOLOGY, OTHERS, COMMON, FEW, (0, 1), 2),
    Block(HISTOLOGY, ("fedsm",), COMMON, (PLAIN, "norm bound", "Multi-Krum"), (0, 1), 1),
    # This block has eight seeds, because two seeds could not decide whether a defence meets the goal.
    Block(HISTOLOGY, ("fedadam",), ("statistics",), (PLAIN, "norm bound", "Multi-Krum"), (0, 1), 8),
    Block(HISTOLOGY, OTHERS, COMMON, FEW, (2,), 1),
    Block(HISTOLOGY, ("fedsm",), COMMON, (PLAIN, "norm bound", "Multi-Krum"), (2,), 1),
)
WIDE = (
    Block(HISTOLOGY, ("fedavg", *OTHERS, "fedsm"), EVERY_ATTACK, EVERY_DEFENCE, (0, 1, 2), 3),
    Block(PROSTATE, ("fedavg", "fedsm"), EVERY_ATTACK, EVERY_DEFENCE, (0, 1, 2), 3),
)
SMALLEST = (
    Block(TINY, ("fedavg",), ("sign flip x10",), (PLAIN, "median"), (0, 1), 1),
    Block(TINY, ("adafed",), (), (PLAIN, "median"), (0,), 1),
)


def cells(blocks: Sequence[Block]) -> Iterator[Cell]:
    """Yield each cell of the table once. All cells of a seed come before those of the next seed, so that even
    unfinished results make a table.
    """
    seen = set()
    for seed in range(max(block.seeds for block in blocks)):
        for block in blocks:
            for cell in _of(block, seed) if seed < block.seeds else ():
                if (key := cell.file()) not in seen:
                    seen.add(key)
                    yield cell


def _of(block: Block, seed: int) -> Iterator[Cell]:
    for method in block.methods:
        for bad in block.bad:
            possible = [name for name in attacks_on(method) if name not in block.setting.without]
            for attack in [name for name in block.attacks if name in possible] if bad else [HONEST]:
                for defence in block.defences:
                    yield Cell(block.setting, method, attack, bad, defence, seed)


def result_of(cell: Cell, folder: Path) -> Result:
    known = kept(cell, folder)
    if known:
        return known
    result = measured(cell)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / cell.file(), asdict(result))
    return result


def kept(cell: Cell, folder: Path) -> Result | None:
    file = folder / cell.file()
    return Result(**json.loads(file.read_text("utf-8"))) if file.exists() else None


def measured(cell: Cell) -> Result:
    package = facts_of(ENGINE)["hash"]
    try:
        plan = cell.plan()
    except PlanError as error:
        return Result(reason=str(error), no_plan=True, package=package)
    started = process_time()
    attack = ATTACKS[cell.attack]() if cell.bad else None
    outcome = run(plan, attack, cell.bad_sites)
    return Result(
        score=outcome.score,
        sites=outcome.sites,
        patched=outcome.patched,
        refused=outcome.refused,
        reason=outcome.reason,
        record=[_seen(line) for line in outcome.rounds] if cell.defence == PLAIN else None,
        rounds=len(outcome.rounds),
        seconds=process_time() - started,
        package=package,
    )


def _seen(line: Round) -> dict[str, Any]:
    told = line.as_json()["sites"]
    return {
        "round": line.round,
        "sites": {site: {key: own[key] for key in ("updates", "share") if key in own} for site, own in told.items()},
    }
