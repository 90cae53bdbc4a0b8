"""An audit of private training: many short trainings, with and without a canary, and a guess at which.

The canary is a case whose gradient is longer than the bound. Who guesses knows all that differential privacy gives
away: the weights before each step, all other cases, and the noisy gradient that comes out. The test is the likelihood
ratio, which no test beats. From its two kinds of errors, on trainings that its threshold was not chosen on, follows a
lower bound on ε (Clopper and Pearson's intervals), held against the ε that the account claims for the same steps at the
same δ. It tests the code that clips, adds noise and draws, and not the theory of composition.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from medsilo.extend import (
    Case,
    Charge,
    Compute,
    GradientBounds,
    LossFunction,
    NoiseSource,
    PoissonSample,
    PrivateSteps,
    SampledGaussian,
    SiteSettings,
    batches,
    epsilon,
    generator_for,
)
from medsilo_papers.analysis import FinishedRun, drawn

DELTA = 0.05  # where a thousand trainings can tell most: an account holds for every δ
CONFIDENCE = 0.95
RATE_OF_LEARNING = 0.1
STEPS = 5  # of a training
OTHERS = 3  # cases beside the canary
LOUDER = 20.0  # times the case that the canary is made of
NAME = "audited"
MakesSteps = Callable[[PoissonSample, GradientBounds, float, NoiseSource], PrivateSteps]


@dataclass(frozen=True)
class Audit:
    """The findings of the trainings, beside the claim."""

    trainings: int
    steps: int
    noise: float
    rate: float
    delta: float
    claimed: float  # ε at this δ
    lower: float  # on ε, with the confidence
    estimate: float  # the same from the rates of errors as they are
    false_positives: float  # of those without the canary
    false_negatives: float  # of those with it
    confidence: float = CONFIDENCE

    @property
    def holds(self) -> bool:
        """Return whether nothing speaks against the claim."""
        return self.lower <= self.claimed

    @property
    def verdict(self) -> str:
        """Return what it means, in words."""
        measured = (
            f"at δ = {self.delta:g} at least ε = {self.lower:.3f} leaked (with {self.confidence:.0%} confidence; "
            f"{self.estimate:.3f} by the rates as they are), and ε = {self.claimed:.3f} is claimed"
        )
        if self.holds:
            return f"nothing speaks against the claim: {measured}"
        return f"THE CLAIM IS BROKEN: {measured}; do not use this training"


def audit(
    model: nn.Module,
    loss: LossFunction,
    cases: Case,
    *,
    clip: float = 1.0,
    noise: float | None = None,
    rate: float = 1.0,
    steps: int = STEPS,
    trainings: int = 1000,
    seed: int = 0,
    makes: MakesSteps = PrivateSteps,
) -> Audit:
    """Train so often, half of the time with the canary, and guess.

    cases: the others, and last the one that the canary is made of. noise: over the bound; by default such that the
    steps together are one release with the noise 1.
    """
    noise = math.sqrt(steps) if noise is None else noise
    inputs, targets = cases
    canary = torch.cat([inputs[:-1], LOUDER * inputs[-1:]]), targets
    draws = torch.rand(trainings, generator=generator_for(seed, "audit")) < 0.5
    scores, known = [], _Known(loss, clip)
    for present in draws.tolist():
        own = canary if present else (inputs[:-1], targets[:-1])
        scores.append(_train(deepcopy(model), known, own, canary, clip, noise, rate, steps, makes))
    claimed = epsilon([Charge(what="steps", of=SampledGaussian(noise=noise, rate=rate, steps=steps))], DELTA)
    lower, estimate, false_positives, false_negatives = bound(np.array(scores), draws.numpy(), DELTA)
    return Audit(
        trainings, steps, noise, rate, DELTA, claimed, lower, estimate, false_positives, false_negatives, CONFIDENCE
    )


def audit_of_run(run: FinishedRun, settings: SiteSettings, trainings: int, seed: int, steps: int = STEPS) -> Audit:
    """Audit short trainings by a run's plan: its network, loss and bound, on a few cases of its first site."""
    assert run.plan.privacy
    cases = drawn(run.data(run.sites[0], settings).train, OTHERS + 1, seed, "audit")
    [batch] = batches(cases, OTHERS + 1, Compute())
    network = run.plan.build_networks()[run.plan.private.networks[0]]
    task = run.plan.task
    return audit(network, task.loss, batch, clip=run.plan.privacy.clip, steps=steps, trainings=trainings, seed=seed)


def _train(
    model: nn.Module,
    known: "_Known",
    cases: Case,
    canary: Case,
    clip: float,
    noise: float,
    rate: float,
    steps: int,
    makes: MakesSteps,
) -> float:
    """Train once by the package's own private steps; return the log of the canary's likelihood ratio."""
    secret = NoiseSource()
    sample = PoissonSample(None, len(cases[0]), rate * len(cases[0]), secret)
    private = makes(sample, GradientBounds([NAME], clip), noise, secret)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    model.train()
    score = 0.0
    for inputs, targets in sample.batches(TensorDataset(*cases), steps, Compute()):
        others, own = known.gradients(model, weights, canary)
        private.gradient(NAME, model, known.loss, inputs, targets)
        seen = torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None]).double()
        rest = seen * sample.expected - rate * others
        ratio = float((2 * rest @ own - own @ own) / (2 * (noise * clip) ** 2))
        score += ratio if rate == 1 else float(np.logaddexp(math.log1p(-rate), math.log(rate) + ratio))
        with torch.no_grad():
            for weight in weights:
                assert weight.grad is not None
                weight.sub_(RATE_OF_LEARNING * weight.grad)
    return score


class _Known:
    """The knowledge of the guesser: the cut gradients of the others together, and that of the canary."""

    def __init__(self, loss: LossFunction, clip: float) -> None:
        self.loss, self.clip = loss, clip
        self._first: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # all trainings begin with the same weights

    def gradients(self, model: nn.Module, weights: Sequence[Tensor], canary: Case) -> tuple[Tensor, Tensor]:
        """Return both as vectors."""
        here = torch.cat([weight.detach().flatten() for weight in weights])
        if self._first and torch.equal(here, self._first[0]):
            return self._first[1]
        found = [self._cut(model, weights, canary[0][n : n + 1], canary[1][n : n + 1]) for n in range(len(canary[0]))]
        both = torch.stack(found[:-1]).sum(0), found[-1]
        self._first = self._first or (here.clone(), both)
        return both

    def _cut(self, model: nn.Module, weights: Sequence[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        own = torch.autograd.grad(self.loss(model(inputs), targets), list(weights))
        whole = torch.cat([part.flatten() for part in own]).double()
        return whole * min(1.0, self.clip / max(float(whole.norm()), 1e-12))


# ---------------------------------------------------------------------------------------------------- the bound
def bound(
    scores: np.ndarray, present: np.ndarray, delta: float, confidence: float = CONFIDENCE
) -> tuple[float, float, float, float]:
    """Return a lower bound on ε at δ, its estimate, and the rates of false positives and negatives that it rests on.

    The threshold is chosen on the first half, and the rates are counted on the second.
    """
    half = len(scores) // 2
    threshold, above = _threshold(scores[:half], present[:half], delta)
    guesses, truth = scores[half:] > threshold, present[half:]
    wrong_out, out = int((guesses & ~truth).sum()), int((~truth).sum())
    wrong_in, inside = int((~guesses & truth).sum()), int(truth.sum())
    worst = [_most(wrong_out, out, confidence), _most(wrong_in, inside, confidence)]
    rates = [wrong_out / max(out, 1), wrong_in / max(inside, 1)]
    order = (0, 1) if above else (1, 0)
    lower = _epsilon(worst[order[0]], worst[order[1]], delta)
    estimate = _epsilon(max(rates[order[0]], 1 / max(half, 1)), rates[order[1]], delta)
    return lower, estimate, rates[0], rates[1]


def _threshold(scores: np.ndarray, present: np.ndarray, delta: float) -> tuple[float, bool]:
    """Return the threshold that tells most, and whether rare false positives (or else negatives) are what tells."""
    best, found = -1.0, (0.0, True)
    members, others = scores[present], scores[~present]
    for threshold in np.quantile(scores, np.linspace(0.02, 0.98, 97)):
        out, inside = int((others > threshold).sum()), int((members <= threshold).sum())
        wrong = [_most(out, len(others), CONFIDENCE), _most(inside, len(members), CONFIDENCE)]
        for above in (True, False):
            value = _epsilon(wrong[0], wrong[1], delta) if above else _epsilon(wrong[1], wrong[0], delta)
            if value > best:
                best, found = value, (float(threshold), above)
    return found


def _epsilon(rare: float, other: float, delta: float) -> float:
    """Return the ε under which errors as rare as this go with others no rarer than that."""
    return max(0.0, math.log(max(1 - delta - other, 1e-12) / max(rare, 1e-12)))


def _most(wrong: int, trials: int, confidence: float) -> float:
    """Return Clopper and Pearson's upper bound on a rate; two rates are bounded, so each with half of what is left."""
    return 1.0 if wrong >= trials else float(beta.ppf(1 - (1 - confidence) / 2, wrong + 1, trials - wrong))
