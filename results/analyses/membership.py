"""Test before a release whether models reveal the patients of their training set (membership inference).

An attack uses a model's loss on each case to separate a hospital's training cases from the hospital's validation and
test cases. If hospitals have separate models, the attack uses a likelihood ratio: the mean loss of other hospitals'
models minus the attacked model's loss. The report has the area under the ROC curve with its confidence interval (Hanley
and McNeil 1982). The report also has the fraction of members that the attack detects with one false alarm in twenty,
with Clopper and Pearson's confidence interval.
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

CASES = 400  # maximum number of cases in each of the two groups, members and non-members
FALSE = 0.05  # rate of false alarms: fraction of the non-members that the attack classifies as members
CONFIDENCE = 0.95
CLEAR = 0.6  # smallest area under the curve at which the report advises against a release


@dataclass(frozen=True)
class Membership:
    members: int
    others: int
    area: float
    lowest: float  # lower limit of the area's confidence interval
    highest: float
    found: float  # fraction of members that the attack detects at the rate of false alarms `FALSE`
    found_lowest: float

    @property
    def advises_against(self) -> bool:
        """Return True if the attack separates members so well that nobody should release the model."""
        return self.lowest >= CLEAR or self.found_lowest >= 3 * FALSE

    @property
    def verdict(self) -> str:
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
    """Measure how well the scores separate members from non-members; members are expected to have higher scores."""
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
    """For each released model, measure how well an attack separates the model's training cases from other cases.

    The attack includes every expert of a super model, because everybody who has the super model has the experts.
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
    data, compute = run.data(site, settings), settings.compute()
    members = drawn(data.train, CASES, seed, "members", site)
    others = drawn(ConcatDataset([data.validation, data.test]), CASES, seed, "others", site)
    return membership(*(_scores(run, model, references, part, compute) for part in (members, others)))


def _scores(
    run: FinishedRun, model: nn.Module, references: Sequence[nn.Module], cases: Dataset, compute: Compute
) -> np.ndarray:
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
    """Attack each run's models to find out whether they reveal patients of the training set."""
    found = {run.label: check_release(run, asked.settings, asked.seed) for run in runs}
    lines = [f"{run}: {name}: {one.verdict}" for run, models in found.items() for name, one in models.items()]
    told = [
        {"run": run, "models": {name: {**asdict(one), "verdict": one.verdict} for name, one in models.items()}}
        for run, models in found.items()
    ]
    against = any(one.advises_against for models in found.values() for one in models.values())
    return AnalysisResult({"audits": told}, {}, lines, warns=against)
