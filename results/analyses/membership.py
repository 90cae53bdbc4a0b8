"""A membership test of models before they go to others: do they tell who was in their training set?

Each training case of a hospital is told apart from its validation and test cases by the model's loss on it, less what
other hospitals' models lose on it where each has its own (a likelihood ratio whose models are as they are). What is
reported is the area under the curve with its interval (Hanley and McNeil 1982) and the rate of members that are found
while one in twenty others is taken for one (Clopper and Pearson's interval).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from scipy.stats import beta, norm, rankdata
from torch import nn
from torch.utils.data import ConcatDataset, Dataset

from medsilo.learning.compute import Compute
from medsilo.learning.loop import batches
from medsilo.site.settings import SiteSettings
from results.analyses.analysis import AnalysisResult, Question
from results.analyses.finished import FinishedRun, drawn

CASES = 400  # of each kind, at most
FALSE = 0.05  # of the others, which may be taken for members
CONFIDENCE = 0.95
CLEAR = 0.6  # area under the curve from where on a release is advised against


@dataclass(frozen=True)
class Membership:
    """The success of a test that tells the members of a training set from others."""

    members: int
    others: int
    area: float
    lowest: float  # of the area's interval
    highest: float
    found: float  # members, while one in twenty others is taken for one
    found_lowest: float

    @property
    def advises_against(self) -> bool:
        """Return whether members are told so well that the model should stay."""
        return self.lowest >= CLEAR or self.found_lowest >= 3 * FALSE

    @property
    def verdict(self) -> str:
        """Return what it means, in words."""
        told = (
            f"area under the curve {self.area:.3f} ({self.lowest:.3f} to {self.highest:.3f}; 0.5 is chance), "
            f"{self.found:.0%} of members found at {FALSE:.0%} false alarms"
        )
        if self.advises_against:
            return f"DO NOT RELEASE: who was in the training set can be told; {told}"
        if self.lowest > 0.5 or self.found_lowest > FALSE:
            return f"release with care: something of who was in the training set shows; {told}"
        return f"nothing found by this test, which is no proof; {told}"


def membership(members: np.ndarray, others: np.ndarray) -> Membership:
    """Return how well scores tell them apart; members are expected to have the higher ones."""
    n, m = len(members), len(others)
    ranks = rankdata(np.concatenate([members, others]))
    area = float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (n - 1) * (first - area**2) + (m - 1) * (second - area**2)
    wide = float(norm.ppf(0.5 + CONFIDENCE / 2)) * math.sqrt(max(variance, 0.0) / (n * m))
    threshold = np.sort(others)[-(int(FALSE * m) + 1)]
    found = int((members > threshold).sum())
    lowest = float(beta.ppf((1 - CONFIDENCE) / 2, found, n - found + 1)) if found else 0.0
    return Membership(n, m, area, max(0.0, area - wide), min(1.0, area + wide), found / n, lowest)


def check_release(run: FinishedRun, settings: SiteSettings, seed: int = 0) -> dict[str, Membership]:
    """Return, for each model that others get, how well its training cases are told, by what it is.

    Each site's tested model, and each expert of a super model by itself: whoever has the super model has them all.
    """
    compute = settings.compute()
    tested = {site: run.model(site, compute.device) for site in run.sites}
    found = {}
    for kind, models in (("model", tested), ("expert", run.experts(compute.device))):
        own = _differ(list(models.values()))
        for site, model in models.items():
            references = [other for name, other in models.items() if name != site] if own else []
            found[f"{kind} of {site}"] = _of_site(run, settings, site, model, references, seed)
    return found


def _of_site(
    run: FinishedRun, settings: SiteSettings, site: str, model: nn.Module, references: Sequence[nn.Module], seed: int
) -> Membership:
    """Return how well a model tells a site's training cases from its others."""
    data, compute = run.data(site, settings), settings.compute()
    members = drawn(data.train, CASES, seed, "members", site)
    others = drawn(ConcatDataset([data.validation, data.test]), CASES, seed, "others", site)
    return membership(*(_scores(run, model, references, part, compute) for part in (members, others)))


def _scores(
    run: FinishedRun, model: nn.Module, references: Sequence[nn.Module], cases: Dataset, compute: Compute
) -> np.ndarray:
    """Return for each case how much less it costs this model than the others."""
    own = _losses(run, model, cases, compute)
    if not references:
        return -own
    return np.mean([_losses(run, other, cases, compute) for other in references], axis=0) - own


@torch.no_grad()
def _losses(run: FinishedRun, model: nn.Module, cases: Dataset, compute: Compute) -> np.ndarray:
    task, found = run.plan.task, []
    for inputs, targets in batches(cases, task.evaluation_batch, compute):
        output = task.infer(model, inputs).float()
        found += [float(task.goal.loss(output[n : n + 1], targets[n : n + 1])) for n in range(len(output))]
    return np.nan_to_num(np.array(found), nan=0.0, posinf=1e9)


def _differ(models: Sequence[nn.Module]) -> bool:
    if len(models) < 2:
        return False
    first = models[0].state_dict()
    return any(not tensor.equal(first[name]) for other in models[1:] for name, tensor in other.state_dict().items())


def audits(runs: Sequence[FinishedRun], asked: Question) -> AnalysisResult:
    """Attack each run: do its models tell who was in the training set? A line for each model."""
    found = {run.label: check_release(run, asked.settings, asked.seed) for run in runs}
    lines = [f"{run}: {name}: {one.verdict}" for run, models in found.items() for name, one in models.items()]
    told = [
        {"run": run, "models": {name: {**asdict(one), "verdict": one.verdict} for name, one in models.items()}}
        for run, models in found.items()
    ]
    against = any(one.advises_against for models in found.values() for one in models.values())
    return AnalysisResult({"audits": told}, {}, lines, warns=against)
