"""Define the studies of the heart data under differential privacy, store each result in a file, and choose settings
without the test cases.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean

from results.heart_dp.data import Hospital, validation
from results.heart_dp.federation import Outcome, PrivacyGuarantee, Setup, run

SEEDS = (42, 43, 44, 45, 46)
EPSILONS, DELTAS = (50.0, 10.0, 5.0, 1.0, 0.1), (0.001, 0.0001, 0.1, 0.01)
OPEN = PrivacyGuarantee(None, None)
PUBLISHED = (OPEN, *(PrivacyGuarantee(e, d) for d, e in product(DELTAS, EPSILONS)))
BETTER = (PrivacyGuarantee(1.0, 0.001), PrivacyGuarantee(0.1, 0.001))
DRAWS = 5  # repetitions of the comparison of candidates, each with new random validation cases and new noise
FULL = Setup(batch=None, start="zero", weighting="uniform")


@dataclass(frozen=True)
class Cell:
    setup: Setup
    promise: PrivacyGuarantee
    seed: int
    validates: bool = False

    @property
    def file(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16] + ".json"


def result_of(cell: Cell, hospitals: dict[str, Hospital], folder: Path) -> Outcome:
    path = folder / cell.file
    if path.exists():
        return Outcome(**json.loads(path.read_text("utf-8"))["outcome"])
    here = {name: validation(own, cell.seed) for name, own in hospitals.items()} if cell.validates else hospitals
    outcome = run(here, cell.setup, cell.promise, cell.seed)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cell": asdict(cell), "outcome": asdict(outcome)}, indent=1), "utf-8")
    return outcome


def kept(cell: Cell, folder: Path) -> bool:
    return (folder / cell.file).exists()


def published(promise: PrivacyGuarantee) -> list[Cell]:
    return [Cell(Setup(), promise, seed) for seed in SEEDS]


def candidates() -> list[Setup]:
    """Return the compared ways of training, all of which start from zero weights and make few steps, each over all
    cases.
    """
    fedavg = [
        replace(FULL, rounds=rounds, steps=steps, rate=rate, clip=clip, momentum=momentum)
        for (rounds, steps), rate, clip, momentum in product(
            ((5, 1), (5, 4), (10, 4)), (0.5, 1.5), (0.5, 1.0), (0.0, 0.8)
        )
    ]
    own = [replace(setup, method="mr-mtl", pull=pull) for setup in fedavg for pull in (0.1, 0.5)]
    return [*fedavg, *own]


def chosen(promise: PrivacyGuarantee, hospitals: dict[str, Hospital], folder: Path) -> tuple[Setup, float]:
    means = {
        setup: fmean(result_of(Cell(setup, promise, seed, True), hospitals, folder).mean for seed in range(DRAWS))
        for setup in candidates()
    }
    best = max(means, key=lambda setup: means[setup])
    return best, means[best]
