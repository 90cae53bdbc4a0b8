"""Run a privacy audit in one run (Steinke, Nasr and Jagielski 2023), with canaries in a hospital's folder.

    python -m tests.one_run [--canaries 600]

Canaries are synthetic patients; a coin toss for each canary decides whether the hospital's folder contains the canary.
The study runs medsilo's code, from the files to the released model.

The guesser knows all other patients, all canaries and the initial weights. The number of right guesses gives a lower
bound on ε, which must stay below medsilo's claimed ε.
"""

import argparse
import csv
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.stats import binom

from medsilo.core.files import load_tensors, write_text
from medsilo.federation.private_site import units_of
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import training_site
from medsilo.learning.private import ClippedSum, gradients_of_cases
from medsilo.plan import Plan, parse_plan
from medsilo.privacy.noise import NoiseSource
from medsilo.runs.paths import GLOBAL, LAST, site_folder
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.tasks.splits import part_alone
from tests import inprocess
from tests.hospital import KEY, split_of, write_pixels

CONFIDENCE, DELTA, EPSILON = 0.95, 1e-4, 2.0
HOPED = 0.1  # the guesser is optimised for this fraction of the charged noise
OTHERS = 20
SHARES, SPLIT = (0.6, 0.2, 0.2), split_of(KEY)
# number of signals in a recording (also the number of classes), and number of values of each signal
SIGNALS, WINDOW = 8, 32
SIDE = 8  # width and height of a photograph in pixels
Write = Callable[[Path, list[str], int], None]


@dataclass(frozen=True)
class Kind:
    write: Write
    task: dict[str, Any]
    network: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)


def drawn(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


def table(folder: Path, people: list[str], canaries: int) -> None:
    lines = []
    for person in people:
        values = np.zeros(canaries)
        place = int(person[1:])
        values[place % canaries] = 1.0 if person[0] == "c" else 0.1
        lines.append([person, *values, place % 2])
    write_csv(folder / "cases.csv", ["patient", *(f"x{n}" for n in range(canaries)), "outcome"], lines)


def recordings(folder: Path, people: list[str], canaries: int) -> None:
    for person in people:
        values, label = drawn(person).normal(0, 1, (WINDOW, SIGNALS)), int(person[1:]) % SIGNALS
        lines = [[n / 10, *own, label] for n, own in enumerate(values)]
        write_csv(folder / f"{person}_0.csv", ["t", *(f"x{n}" for n in range(SIGNALS)), "doing"], lines)


def photographs(folder: Path, people: list[str], canaries: int) -> None:
    for person in people:
        pixels = drawn(person).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
        write_pixels(folder / f"images/{person}.png", pixels)
    lines = [[f"images/{person}.png", int(person[1:]) % SIGNALS, person] for person in people]
    write_csv(folder / "classes.csv", ["image", "label", "patient"], lines)


def write_csv(path: Path, head: list[str], lines: list[list[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *lines])


def kinds(canaries: int) -> dict[str, Kind]:
    columns = [{"name": f"x{n}", "mean": 0.0, "deviation": 1.0} for n in range(canaries)]
    recorded = {"patient": "^(.*)_", "recording_columns": {"time": "t", "label": "doing"}}
    signals = [{"name": f"x{n}", "mean": 0.0, "deviation": 1.0} for n in range(SIGNALS)]
    series = {"name": "series-folder", "signals": signals, "labels": [str(n) for n in range(SIGNALS)]}
    series |= {"rate": 10, "window": WINDOW, "standardise": "plan"}
    photos = {"name": "image-folder", "kind": "classification", "size": [SIDE, SIDE]}
    photos["labels"] = series["labels"]
    cnn = {"name": "small-cnn", "width": 32, "norm": "group"}
    return {
        "table": Kind(table, {"name": "table", "columns": columns, "standardise": "plan"}, {"name": "linear"}),
        "series": Kind(recordings, series, {"name": "activity-cnn", "norm": "group"}, recorded),
        "image": Kind(photographs, photos, cnn, {"table": "classes.csv"}),
    }


# ---------------------------------------------------------------------------------------------------- the run
@dataclass(frozen=True)
class Found:
    canaries: int
    guesses: int
    right: int
    claimed: float

    @property
    def lower(self) -> float:
        return lower_bound(self.canaries, self.guesses, self.right, DELTA)

    def __str__(self) -> str:
        told = f"{self.right} of {self.guesses} guesses right over {self.canaries} canaries"
        return f"{told}: at least ε = {self.lower:.2f}, and ε = {self.claimed:g} is claimed at δ = {DELTA:g}"


def audit(kind: Kind, root: Path, canaries: int, noise: float = 1.0, seed: int | None = None) -> Found:
    """Run a study with about half of the canaries, and guess which canaries the study included.

    The study adds `noise` times the noise that the ledger charges; values below 1 break the privacy guarantee. `seed`
    determines the coin tosses and the noise, so that a test always gives the same result.
    """
    coins = np.random.default_rng(seed).random(canaries) < 0.5
    others, every = trained("p", OTHERS), trained("c", canaries)
    present = [name for name, coin in zip(every, coins, strict=True) if coin]
    outside = [f"o{n}" for n in range(400) if part_alone(f"o{n}", SHARES, SPLIT) != "train"][:16]
    kind.write(root / "data/a", [*others, *outside, *present], canaries)
    kind.write(root / "all/a", [*others, *outside, *every], canaries)
    plan = planned(kind, len(others) + canaries)
    with mock.patch.object(NoiseSource, "with_normal", _weaker(noise, seed)):
        assert inprocess.run(plan, folder=root / "study", settings=settings(root, "data", kind)).summary.finished
    left = load_tensors(root / "study" / GLOBAL / LAST)[0]
    model = plan.build_networks()["model"]
    update = torch.cat([(left[name] - own).flatten() for name, own in model.named_parameters()]).detach().double()
    known, gradients, deviation = _gradients(plan, root, kind, every)
    summed = -update * (plan.training.batch_size - canaries + len(present)) / plan.training.learning_rate - known
    # The most likely set of canaries, if the folder contains each canary with probability one half.
    spread = (HOPED * deviation / 0.5) ** 2 * torch.eye(canaries, dtype=torch.float64)
    scores = torch.linalg.solve(gradients @ gradients.T + spread, gradients @ summed + spread.sum(1) / 2).numpy()
    guesses = canaries * 3 // 10
    order = np.argsort(scores)
    right = int(coins[order[-(guesses // 2) :]].sum() + (~coins[order[: guesses // 2]]).sum())
    return Found(canaries, guesses // 2 * 2, right, EPSILON)


def trained(letter: str, count: int) -> list[str]:
    found = (f"{letter}{n}" for n in range(20 * count + 200))
    return [name for name in found if part_alone(name, SHARES, SPLIT) == "train"][:count]


def planned(kind: Kind, patients: int) -> Plan:
    offer = {"epsilon": EPSILON, "delta": DELTA, "unit": "patient"}
    training = {"rounds": 1, "batch_size": patients, "learning_rate": 0.1, "local_epochs": 1}
    sites = {"sites": ["a"]}
    return parse_plan(
        {"algorithm": {"name": "fedavg"}, "task": kind.task, "network": kind.network, "training": training}
        | {"participation": sites, "privacy": offer}
    )


def settings(root: Path, data: str, kind: Kind) -> SiteSettings:
    described: dict[str, Any] = {"folder": str(root / data), **kind.data}
    write_text(root / data / "records/a/key", KEY)
    demands = {"epsilon": 100.0, "delta": DELTA, "public": {"counts": "an audit"}}
    if kind.task["name"] == "table":
        described["outcome"] = [kind.task.get("target", "outcome")]
    own = {"device": "cpu", "state_dir": str(root / data / "records"), "data": described, "privacy": demands}
    return make_settings({**own, "min_patients_per_metric": 1}, "an audit")


def _weaker(times: float, seed: int | None) -> Callable[..., torch.Tensor]:
    add = NoiseSource.with_normal

    def added(source: NoiseSource, exact: torch.Tensor, deviation: float) -> torch.Tensor:
        return add(source if seed is None else NoiseSource.from_seed(seed, "audit"), exact, deviation * times)

    return added


def _gradients(plan: Plan, root: Path, kind: Kind, every: list[str]) -> tuple[torch.Tensor, torch.Tensor, float]:
    place = SiteContext(plan, "a", ["a"], settings(root, "all", kind), site_folder(root / "known", "a"))
    participant = training_site(place).participant
    private = participant.trainer.private
    assert private
    sample = private.sample(NoiseSource())
    names = list(dict.fromkeys(units_of(participant.data.train, private.numbers.promise.unit) or ()))
    model = plan.build_networks()["model"].train()
    weights = list(model.parameters())
    found: dict[str, torch.Tensor] = {}
    for name, own in zip(names, sample.members, strict=True):
        cases = [participant.data.train[case] for case in own]  # type: ignore[index]
        inputs, targets = (torch.stack([torch.as_tensor(case[n]) for case in cases]) for n in (0, 1))
        clipped = ClippedSum(weights, 1.0)
        _, gradients = gradients_of_cases(model, plan.task.goal.loss, inputs, targets)
        clipped.add(gradients, torch.zeros(len(own), dtype=torch.int64))
        clipped.finish()
        found[name] = torch.cat([part.flatten() for part in clipped.total]).detach()
    known = torch.stack([own for name, own in found.items() if name not in every]).sum(0)
    return known, torch.stack([found[name] for name in every]), private.noise


# ---------------------------------------------------------------------------------------------------- the bound
def lower_bound(canaries: int, guesses: int, right: int, delta: float) -> float:
    """Return the largest ε that this number of right guesses rules out (Theorem 5.2 of the paper)."""
    low, high = 0.0, 20.0
    if _chance(canaries, guesses, right, 0.0, delta) >= 1 - CONFIDENCE:
        return 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _chance(canaries, guesses, right, middle, delta) < 1 - CONFIDENCE else (low, middle)
        )
    return low


def _chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the greatest possible probability of this number of right guesses under (ε, δ)-differential privacy."""
    each = 1 / (1 + math.exp(-epsilon))
    steps = np.arange(1, right + 1)
    sums = np.cumsum(binom.pmf(right - steps, guesses, each))
    worst = float((sums / steps).max(initial=0.0))
    return min(1.0, float(binom.sf(right - 1, guesses, each)) + 2 * canaries * delta * worst)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--canaries", type=int, default=600)
    canaries = parser.parse_args().canaries
    for name, kind in kinds(canaries).items():
        for noise in (1.0, 0.1):
            with tempfile.TemporaryDirectory() as folder:
                found = audit(kind, Path(folder), canaries, noise=noise)
            print(f"{name}, {noise:g} times the noise: {found}{'' if found.lower <= EPSILON else ' -- BROKEN'}")


if __name__ == "__main__":
    main()
