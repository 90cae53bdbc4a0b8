"""The computed privacy cost is never below the cost that dp-accounting computes.

The distribution of the noise is the declared distribution.
"""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from dp_accounting import dp_event, get_epsilon_gaussian
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from pydantic import ValidationError

from medsilo.core.errors import MedsiloError
from medsilo.core.section import checked
from medsilo.privacy.accounting import epsilon, noise_for
from medsilo.privacy.guarantees import PrivacyGuarantee
from medsilo.privacy.mechanisms import Charge, Gaussian, Geometric, Mechanism, Public, SampledGaussian
from medsilo.privacy.noise import NoiseSource
from medsilo.site.settings import PrivacyRequirements
from tests.conftest import slow_but

# noise, sampling rate, number of steps, and delta
SAMPLED = [(0.7, 0.01, 1000, 1e-3), (1.0, 0.3, 40, 1e-5), (3.0, 0.01, 1000, 1e-5)]


def charge(of: Mechanism) -> Charge:
    return Charge(what="x", of=of)


def theirs(delta: float, *events: dp_event.DpEvent) -> float:
    accountant = PLDAccountant()
    for event in events:
        accountant.compose(event)
    return accountant.get_epsilon(delta)


def sampled_event(noise: float, rate: float, steps: int) -> dp_event.DpEvent:
    return dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise)), steps)


# ---------------------------------------------------------------------------------------------------- ε
@pytest.mark.long
@pytest.mark.parametrize("noise, rate, steps, delta", SAMPLED)
def test_sampled_steps_cost_what_dp_accounting_says(noise: float, rate: float, steps: int, delta: float) -> None:
    ours = epsilon([charge(SampledGaussian(noise=noise, rate=rate, steps=steps))], delta)
    assert ours == pytest.approx(theirs(delta, sampled_event(noise, rate, steps)), abs=1e-3)


@pytest.mark.parametrize("noise, count, delta", [(0.5, 1, 1e-5), (4.0, 3, 1e-3), (30.0, 200, 1e-6)])
def test_gaussian_releases_cost_what_the_closed_form_says(noise: float, count: int, delta: float) -> None:
    exact = get_epsilon_gaussian(noise / math.sqrt(count), delta)
    ours = epsilon([charge(Gaussian(noise=noise, count=count))], delta)
    assert exact - 1e-9 <= ours <= exact + 1e-3


def test_steps_that_lose_little_are_counted_on_a_finer_grid() -> None:
    """If steps have a small privacy loss, medsilo computes ε on a finer grid.

    The default grid of dp-accounting is five times coarser, and gives ε = 0.061 instead of 0.060.
    """
    accountant = PLDAccountant(value_discretization_interval=2e-5)
    accountant.compose(sampled_event(5.0, 0.001, 10_000))
    ours = epsilon([charge(SampledGaussian(noise=5.0, rate=0.001, steps=10_000))], 1e-5)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), abs=5e-4)


def test_steps_over_all_units_are_releases() -> None:
    """A training step over all patients counts as a release with Gaussian noise.

    A closed formula gives the privacy cost of several releases with Gaussian noise.
    """
    steps = charge(SampledGaussian(noise=4.0, rate=1.0, steps=3))
    assert epsilon([steps], 1e-5) == pytest.approx(get_epsilon_gaussian(4.0 / math.sqrt(3), 1e-5), rel=1e-12)
    both = epsilon([steps, charge(Gaussian(noise=2.0, count=3))], 1e-5)
    assert both == pytest.approx(get_epsilon_gaussian(1 / math.sqrt(3 / 16 + 3 / 4), 1e-5), rel=1e-12)


@pytest.mark.slow
def test_different_mechanisms_together() -> None:
    mixed = [
        charge(SampledGaussian(noise=1.2, rate=0.05, steps=200)),
        charge(SampledGaussian(noise=2.0, rate=0.1, steps=50)),
        charge(Gaussian(noise=5.0)),
        charge(Geometric(scale=8.0, count=4)),
    ]
    own = theirs(
        1e-4,
        sampled_event(1.2, 0.05, 200),
        sampled_event(2.0, 0.1, 50),
        dp_event.GaussianDpEvent(5.0),
        dp_event.SelfComposedDpEvent(dp_event.DiscreteLaplaceDpEvent(1 / 8.0, 1), 4),
    )
    assert epsilon(mixed, 1e-4) == pytest.approx(own, abs=1e-3)
    assert epsilon(reversed(mixed), 1e-4) == epsilon(mixed, 1e-4)


def test_of_two_kinds_neither_is_free() -> None:
    kinds = [
        charge(Gaussian(noise=5.0)),
        charge(Geometric(scale=8.0)),
        charge(SampledGaussian(noise=2, rate=0.1, steps=50)),
    ]
    for one, other in combinations(kinds, 2):
        assert epsilon([one, other], 1e-4) > max(epsilon([one], 1e-4), epsilon([other], 1e-4)) + 0.01


def test_steps_that_are_entered_round_by_round_cost_what_they_cost_at_once() -> None:
    once = [charge(SampledGaussian(noise=1.0, rate=0.1, steps=60))]
    rounds = [charge(SampledGaussian(noise=1.0, rate=0.1, steps=20))] * 3
    assert epsilon(rounds, 1e-5) == epsilon(once, 1e-5)


def test_what_is_public_costs_nothing() -> None:
    assert epsilon([], 1e-5) == 0 == epsilon([charge(Public(reason="annual report"))], 1e-5)


def test_what_cannot_be_counted_is_infinite_and_at_once() -> None:
    assert epsilon([charge(SampledGaussian(noise=1e-3, rate=0.5, steps=10**7))], 1e-5) == math.inf
    assert epsilon([charge(Gaussian(noise=1e-3, count=10**7))], 1e-5) == math.inf


def test_more_of_anything_never_costs_less() -> None:
    costs = [epsilon([charge(SampledGaussian(noise=1, rate=0.02, steps=steps))], 1e-5) for steps in (10, 100, 4000)]
    costs += [epsilon([charge(Gaussian(noise=noise))], 1e-5) for noise in (0.2, 0.1, 0.05, 0.02)]
    assert costs[:3] == sorted(costs[:3]) and costs[3:] == sorted(costs[3:])


@pytest.mark.parametrize("target", slow_but((), [0.1, 1.0, 8.0], [1.0]))
def test_the_noise_for_a_target_keeps_it_and_is_hardly_more_than_needed(target: float) -> None:
    beside = [charge(Geometric(scale=100.0))]
    noise = noise_for(target, 1e-3, 0.1, 60, charges=beside)

    def cost(noise: float) -> float:
        return epsilon([*beside, charge(SampledGaussian(noise=noise, rate=0.1, steps=60))], 1e-3)

    assert cost(noise) <= target < cost(noise * 0.998)


@pytest.mark.parametrize("target", [0.1, 1.0, 20.0, 500.0])
def test_the_noise_for_one_gaussian_release_is_hardly_more_than_needed(target: float) -> None:
    noise = noise_for(target, 1e-5, 1.0, 1)

    def cost(noise: float) -> float:
        return epsilon([charge(Gaussian(noise=noise))], 1e-5)

    assert cost(noise) <= target < cost(noise * 0.998)


def test_less_noise_than_1_in_128_is_not_looked_for() -> None:
    """The search for noise stops at 1/128, because so little noise gives an ε far above the largest that plans may
    have.
    """
    noise = noise_for(20_000, 1e-5, 1.0, 1)
    assert 1 <= noise * 128 <= 1.001 and epsilon([charge(Gaussian(noise=noise))], 1e-5) < 9000


def test_no_noise_is_enough_where_the_rest_costs_all() -> None:
    with pytest.raises(MedsiloError, match="no noise keeps 10 steps within ε = 0.5"):
        noise_for(0.5, 1e-5, 0.1, 10, charges=[charge(Geometric(scale=1.0))])
    with pytest.raises(MedsiloError, match="no noise keeps 1 steps"):
        noise_for(1e-6, 1e-12, 1.0, 1)
    for delta in (0, 1e-13, 1, 2):
        with pytest.raises(MedsiloError, match=f"δ = {delta:g} is out of range"):
            noise_for(0.5, delta, 0.1, 10)


def test_mechanisms_are_bounded() -> None:
    for values in ({"noise": 0}, {"noise": math.nan}, {"noise": -1}, {"noise": 1, "count": 0}, {"noise": 1, "x": 1}):
        with pytest.raises(ValidationError):
            Gaussian.model_validate(values)
    for rate in (0, 1.5):
        with pytest.raises(ValidationError):
            SampledGaussian(noise=1, rate=rate, steps=1)
    assert checked(Charge, {"what": "x", "of": {"kind": "geometric", "scale": 2.0}}, "x").of == Geometric(scale=2.0)


def test_of_what_is_offered_and_demanded_the_stricter_holds() -> None:
    offer = PrivacyGuarantee(epsilon=2, delta=1e-5)
    assert offer.under(None) == offer
    demands = PrivacyRequirements(epsilon=1, delta=1e-6)
    assert offer.under(demands) == PrivacyGuarantee(epsilon=1, delta=1e-6, unit="patient")
    loose = PrivacyRequirements(epsilon=10, delta=1e-3)
    assert offer.under(loose) == PrivacyGuarantee(epsilon=2, delta=1e-5, unit="patient")


# ---------------------------------------------------------------------------------------------------- noise


@pytest.mark.usefixtures("known_noise")
def test_noise_is_added_in_the_type_of_the_tensor_with_its_deviation() -> None:
    exact = torch.full((300, 200), 3.0)
    noisy = NoiseSource().with_normal(exact, 0.25)
    assert noisy.dtype == torch.float32 and noisy.shape == exact.shape and torch.equal(exact, torch.full_like(exact, 3))
    assert float((noisy - 3).std()) == pytest.approx(0.25, rel=0.02)
    assert float(NoiseSource().with_normal(torch.tensor(1.0), 0.0)) == 1


@pytest.mark.usefixtures("known_noise")
def test_two_sources_are_independent_and_a_seed_gives_the_same_again() -> None:
    one, two = (NoiseSource().whole_normal(100_000) for _ in range(2))
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.02
    source = NoiseSource()
    first, second = source.whole_normal(100_000), source.whole_normal(100_000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    seeded = [NoiseSource.from_seed(1, "a", "round", number) for number in (3, 3, 4)]
    same, again, other = (one.whole_normal(1000) for one in seeded)
    assert np.array_equal(same, again) and not np.array_equal(same, other)


@pytest.mark.usefixtures("known_noise")
def test_each_case_is_drawn_by_itself_with_its_chance() -> None:
    source = NoiseSource()
    sizes = [len(source.poisson_sample(400, 0.1)) for _ in range(2000)]
    assert np.mean(sizes) == pytest.approx(40, abs=0.7) and np.std(sizes) == pytest.approx(6, abs=0.5)
    assert source.poisson_sample(5, 1.0) == [0, 1, 2, 3, 4]
