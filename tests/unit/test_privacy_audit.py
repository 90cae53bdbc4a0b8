"""The audit stays below a claim that holds, and finds training that is broken."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

from medsilo.analyses.privacy_audit import Audit, audit, bound
from medsilo.learning.loop import LossFunction
from medsilo.learning.private import Clipped, PrivateSteps


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2))


def audited(seed: int, trainings: int = 600, **given: object) -> Audit:
    generator = torch.Generator().manual_seed(5)
    cases = torch.randn(4, 1, 4, 4, generator=generator), torch.tensor([0, 1, 0, 1])
    return audit(network(), nn.functional.cross_entropy, cases, trainings=trainings, seed=seed, **given)


class TakesTwice(PrivateSteps):
    """Every batch counts twice in the sum."""

    def gradient(self, name: str, model: nn.Module, loss: LossFunction, inputs: Tensor, targets: Tensor) -> Tensor:
        self.sample.owners = torch.arange(2 * len(inputs))
        return super().gradient(name, model, loss, inputs.repeat(2, 1, 1, 1), targets.repeat(2))


def without_noise(*given: object) -> PrivateSteps:
    steps = PrivateSteps(*given)
    steps.noise = 1e-6
    return steps


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_training_that_keeps_its_claim_is_not_accused(rate: float) -> None:
    found = audited(0, rate=rate)
    assert found.holds and found.lower > 0.1 and "nothing speaks against" in found.verdict


def test_missing_noise_is_found() -> None:
    found = audited(0, makes=without_noise)
    assert not found.holds and "THE CLAIM IS BROKEN" in found.verdict


def test_broken_clipping_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Clipped.__init__

    def loose(self: Clipped, weights: list[Tensor], limit: float) -> None:
        cut(self, weights, 1e9)

    monkeypatch.setattr(Clipped, "__init__", loose)
    assert not audited(0).holds


def test_a_batch_that_is_taken_twice_is_found() -> None:
    assert not audited(0, makes=TakesTwice).holds


@pytest.mark.slow
def test_forty_trainings_that_keep_their_claim() -> None:
    found = [audited(seed, trainings=400) for seed in range(40)]
    print(
        f"claimed {found[0].claimed:.3f}; lower bounds {min(f.lower for f in found):.3f} to {max(f.lower for f in found):.3f}"
    )
    assert all(one.holds for one in found)


def test_the_bound_of_a_known_test_is_near_the_truth_and_below_it() -> None:
    generator = np.random.default_rng(0)
    present = generator.random(40_000) < 0.5
    scores = generator.normal(size=40_000) + 1.0 * present
    lower, estimate, false_positives, false_negatives = bound(scores, present, 0.05)

    def delta_at(epsilon: float) -> float:
        return norm.cdf(-epsilon + 0.5) - math.exp(epsilon) * norm.cdf(-epsilon - 0.5)

    assert delta_at(lower) > 0.05 > delta_at(lower + 0.2)
    assert lower < estimate < lower + 0.15
    assert 0 < false_positives < 0.5 < false_negatives + 0.5


def test_guessing_tells_nothing() -> None:
    generator = np.random.default_rng(1)
    assert bound(generator.normal(size=2000), generator.random(2000) < 0.5, 0.05)[0] == 0
