"""What the choice of gamma costs: the middle of the plateau of best scores against its edges.

    python benchmarks/gamma.py

FedSM is trained in small generated federations, whose few validation images leave many gammas equal. Regret is how many
points of the mean test score the best of the gammas that are tried would have been better, had it been known: on the
hospitals' test images, and on the same ones darker, as from another machine, of which the selector is less sure.
Studies in which one gamma alone was best are left out, as there is nothing to choose.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medsilo.deploy.model import GLOBAL
from medsilo.deploy.supermodel import SuperModel
from medsilo.deploy.tuning import THRESHOLDS
from medsilo.federation import inprocess
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import SiteSettings

SITES = ["hospital-a", "hospital-b", "hospital-c"]
TASKS = {
    "synthetic-histology": {"size": 32, "patients": 8, "patches": 4},
    "synthetic-prostate": {"size": 32, "patients": 8, "slices": 4, "similarity": "low"},
    "synthetic-activity": {"persons": 10, "windows": 6, "steps": 32, "shift": "feature"},
}
SYNCS = ("closed-form", "server-adam")
SEEDS = range(4)
LIGHT = {"of the same kind": 1.0, "darker": 0.7}
CHOICES = ("upper edge", "lower edge", "middle")
Tested = tuple[Tensor, Tensor, Tensor]  # of every image: confidence, the chosen expert's score, the global model's


def make_plan(task: str, sync: str, seed: int, rounds: int) -> Plan:
    """Return the plan of one study; the selector is used however often it errs."""
    values = {
        "algorithm": {"name": "fedsm", "selector_sync": sync, "selector_least": 0.0},
        "task": {"name": task, **TASKS[task]},
        "training": {"rounds": rounds, "batch_size": 8, "learning_rate": 0.05, "momentum": 0.9},
        "participation": {"sites": SITES},
        "seed": seed,
    }
    return parse_plan(values)


@torch.no_grad()
def tested(model: SuperModel, plan: Plan, light: float) -> Tested:
    """Return how all hospitals' test images do, in another light."""
    model.threshold = 0.0
    found = []
    for site in SITES:
        inputs, targets = plan.task.load(site, SITES, plan.seed, None).test.tensors  # type: ignore[attr-defined]
        output, _, confidence = model.answer(inputs * light)
        outputs = (output, model.expert(GLOBAL)(inputs * light))
        found.append((confidence.double(), *(plan.task.case_scores(one, targets).double() for one in outputs)))
    confidence, own, common = (torch.cat(parts) for parts in zip(*found, strict=True))
    return confidence, own, common


def score(images: Tested, gamma: float) -> float:
    """Return the mean score with this gamma, which need not be one that was tried."""
    confidence, own, common = images
    return float(torch.where(confidence > gamma, own, common).mean())


def regrets(tasks: Sequence[str], seeds: Sequence[int], rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Return the regret of each choice in points, for each study and kind of images."""
    for task, sync, seed in ((task, sync, seed) for task in tasks for sync in SYNCS for seed in seeds):
        plan = make_plan(task, sync, seed, rounds)
        with tempfile.TemporaryDirectory() as place:
            inprocess.run(plan, folder=Path(place) / "run", settings=SiteSettings(device="cpu"))
            model = SuperModel.load(Path(place) / "run" / "supermodel")
        assert model.origin and model.origin.tuning
        low, high = model.origin.tuning.plateau
        if low == high:
            continue
        for kind, light in LIGHT.items():
            images = tested(model, plan, light)
            best = max(score(images, gamma) for gamma in THRESHOLDS)
            chosen = zip(CHOICES, (high, low, model.origin.tuning.threshold), strict=True)
            yield kind, {name: 100 * (best - score(images, gamma)) for name, gamma in chosen}


def main(tasks: Sequence[str] = tuple(TASKS), seeds: Sequence[int] = SEEDS, rounds: int = 8) -> None:
    """Print the table of docs/supermodel.md."""
    found = list(regrets(tasks, seeds, rounds))
    print(f"| images | studies | {' | '.join(CHOICES)} |\n|{'---|' * (2 + len(CHOICES))}")
    for kind in LIGHT:
        rows = [lost for own, lost in found if own == kind]
        means = (np.mean([lost[name] for lost in rows]) if rows else float("nan") for name in CHOICES)
        print(f"| {kind} | {len(rows)} | {' | '.join(f'{mean:.2f}' for mean in means)} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
