"""The audit stays below a claim that holds, and finds training that is broken."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

from medsilo.learning.loop import LossFunction
from medsilo.learning.private import ClippedSum, PrivateSteps
from medsilo_papers.privacy_audit import Audit, audit, bound
from medsilo_papers.release import membership


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2))


def audited(seed: int, trainings: int = 600, **given: object) -> Audit:
    generator = torch.Generator().manual_seed(5)
    cases = torch.randn(4, 1, 4, 4, generator=generator), torch.tensor([0, 1, 0, 1])
    return audit(network(), nn.functional.cross_entropy, cases, trainings=trainings, seed=seed, **given)


def takes(times: int) -> type[PrivateSteps]:
    """Every batch counts so often in the sum."""

    class Takes(PrivateSteps):
        def gradient(self, name: str, model: nn.Module, loss: LossFunction, inputs: Tensor, targets: Tensor) -> Tensor:
            self.sample.owners = torch.arange(times * len(inputs))
            return super().gradient(name, model, loss, inputs.repeat(times, 1, 1, 1), targets.repeat(times))

    return Takes


def without_noise(*given: object) -> PrivateSteps:
    steps = PrivateSteps(*given)
    steps.noise = 1e-6
    return steps


def test_training_that_keeps_its_claim_is_not_accused() -> None:
    found = audited(0, 300, steps=1)
    assert found.holds and found.estimate > 0.1 and "nothing speaks against" in found.verdict


@pytest.mark.slow
def test_sampled_training_that_keeps_its_claim() -> None:
    """Its claim is a third of what the same noise costs without sampling, so batches of all cases would exceed it."""
    found = audited(0, 1000, rate=0.5)
    assert found.holds and found.claimed < 0.4 * audited(0, 4).claimed


@pytest.mark.slow
def test_whole_trainings_of_several_steps_that_keep_their_claim() -> None:
    found = audited(1, 300)
    assert found.steps == 5 and found.holds and found.estimate > 0.1
    assert found.claimed == pytest.approx(audited(1, 4, steps=1).claimed, abs=1e-3)  # the noise of all together is 1


class ForgetsNoise(PrivateSteps):
    """The first step alone has noise, as after a restart that lost the accountant."""

    def gradient(self, name: str, model: nn.Module, loss: LossFunction, inputs: Tensor, targets: Tensor) -> Tensor:
        found = super().gradient(name, model, loss, inputs, targets)
        self.noise = 1e-6
        return found


@pytest.mark.slow
def test_noise_that_is_missing_after_the_first_step_is_found() -> None:
    assert not audited(0, 600, steps=10, makes=ForgetsNoise).holds


def test_missing_noise_is_found() -> None:
    found = audited(0, 200, steps=1, makes=without_noise)
    assert not found.holds and "THE CLAIM IS BROKEN" in found.verdict


def test_broken_clipping_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = ClippedSum.__init__

    def loose(self: ClippedSum, weights: list[Tensor], limit: float) -> None:
        cut(self, weights, 1e9)

    monkeypatch.setattr(ClippedSum, "__init__", loose)
    assert not audited(0, 200, steps=1).holds


@pytest.mark.parametrize(("times", "trainings"), [(6, 200), pytest.param(2, 3000, marks=pytest.mark.long)])
def test_a_batch_that_is_taken_several_times_is_found(times: int, trainings: int) -> None:
    """The noise is never the same, so that fewer trainings would find the second only most of the time."""
    assert not audited(0, trainings, steps=1, makes=takes(times)).holds


@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 5])
def test_forty_trainings_that_keep_their_claim(steps: int) -> None:
    found = [audited(seed, trainings=400, steps=steps) for seed in range(40)]
    lowest, highest = min(one.lower for one in found), max(one.lower for one in found)
    print(f"claimed {found[0].claimed:.3f}; lower bounds {lowest:.3f} to {highest:.3f}")
    assert all(one.holds for one in found)


def test_the_bound_of_a_known_test_is_near_the_truth_and_below_it() -> None:
    generator = np.random.default_rng(0)
    present = generator.random(40_000) < 0.5
    scores = generator.normal(size=40_000) + 1.0 * present
    lower, estimate, false_positives, false_negatives = bound(scores, present, 0.05)

    def delta_at(epsilon: float) -> float:
        return norm.cdf(-epsilon + 0.5) - math.exp(epsilon) * norm.cdf(-epsilon - 0.5)

    assert delta_at(lower) > 0.05 > delta_at(lower + 0.35)
    assert lower < estimate < lower + 0.3
    assert min(false_positives, false_negatives) < 0.2 < max(false_positives, false_negatives)


@pytest.mark.parametrize(
    "shift, verdict, against", [(0.0, "nothing found", False), (0.35, "with care", False), (2.0, "DO NOT", True)]
)
def test_a_release_is_judged_by_how_well_members_are_told(shift: float, verdict: str, against: bool) -> None:
    generator = np.random.default_rng(3)
    found = membership(generator.normal(size=400) + shift, generator.normal(size=400))
    assert verdict in found.verdict and found.advises_against == against
    assert found.lowest < norm.cdf(shift / math.sqrt(2)) < found.highest


def test_guessing_tells_nothing() -> None:
    generator = np.random.default_rng(1)
    assert bound(generator.normal(size=2000), generator.random(2000) < 0.5, 0.05)[0] == 0
