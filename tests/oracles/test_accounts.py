"""Compare medsilo's privacy accounts with dp-accounting's Rényi accountant and with OpenDP, and compare medsilo's noise
with OpenDP's noise.
"""

from collections import Counter
from collections.abc import Sequence

import pytest
from dp_accounting import dp_event
from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant
from scipy import stats

from medsilo.privacy.accounting import epsilon
from medsilo.privacy.mechanisms import Charge, Gaussian, Geometric, Mechanism, SampledGaussian
from medsilo.privacy.noise import CELLS, NoiseSource

opendp = pytest.importorskip("opendp.prelude", reason="needs opendp, from pyproject.toml's group dev")
opendp.enable_features("contrib")

LEAST_P = 1e-6  # OpenDP's noise cannot be seeded, so the test fails by chance once in a million runs
DRAWS = 20_000


def ours(delta: float, *mechanisms: Mechanism) -> float:
    return epsilon([Charge(what="x", of=one) for one in mechanisms], delta)


# ---------------------------------------------------------------------------------------------------- Rényi
def rdp(delta: float, *mechanisms: Mechanism) -> float:
    """Return an upper bound of ε by Rényi divergences, a method that uses no privacy loss distributions."""
    accountant = RdpAccountant()
    for one in mechanisms:
        if isinstance(one, SampledGaussian):
            step = dp_event.PoissonSampledDpEvent(one.rate, dp_event.GaussianDpEvent(one.noise))
            accountant.compose(step, one.steps)
        elif isinstance(one, Gaussian):
            accountant.compose(dp_event.GaussianDpEvent(one.noise), one.count)
        elif isinstance(one, Geometric):
            accountant.compose(dp_event.LaplaceDpEvent(one.scale), one.count)
    return accountant.get_epsilon(delta)


STUDIES: dict[str, Sequence[Mechanism]] = {
    "steps of a small share": [SampledGaussian(noise=0.8, rate=0.01, steps=1000)],
    "steps of a large share": [SampledGaussian(noise=2.0, rate=0.3, steps=60)],
    "steps of all": [SampledGaussian(noise=8.0, rate=1.0, steps=20)],
    "releases": [Gaussian(noise=5.0, count=3)],
    "steps and releases": [SampledGaussian(noise=1.2, rate=0.05, steps=200), Gaussian(noise=5.0)],
    "two samplings": [
        SampledGaussian(noise=1.2, rate=0.05, steps=200),
        SampledGaussian(noise=2.0, rate=0.1, steps=50),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_renyis_account_is_a_close_bound(name: str, delta: float) -> None:
    found = ours(delta, *STUDIES[name])
    assert found <= rdp(delta, *STUDIES[name]) <= 1.35 * found


# ---------------------------------------------------------------------------------------------------- OpenDP's account
def whole_numbers() -> tuple[object, object]:
    return opendp.vector_domain(opendp.atom_domain(T=int)), opendp.l1_distance(T=int)


@pytest.mark.parametrize(("scale", "sensitivity"), [(0.5, 1), (3.0, 2), (40.0, 20)])
def test_a_geometric_release_costs_what_opendp_says(scale: float, sensitivity: int) -> None:
    """OpenDP's noise has an absolute scale, but medsilo's noise has a scale relative to the sensitivity. OpenDP's ε is
    for δ = 0.
    """
    theirs = opendp.m.make_laplace(*whole_numbers(), scale=scale * sensitivity).map(sensitivity)
    found = ours(1e-9, Geometric(scale=scale, sensitivity=sensitivity))
    assert theirs == pytest.approx(1 / scale)
    assert found == pytest.approx(theirs, abs=1e-3)


def test_geometric_releases_together_cost_at_most_opendps_sum() -> None:
    release = opendp.m.make_laplace(*whole_numbers(), scale=10.0)
    theirs = opendp.c.make_composition([release] * 20).map(1)
    assert ours(1e-5, Geometric(scale=10.0, count=20)) <= theirs + 1e-3
    assert ours(1e-12, Geometric(scale=10.0, count=2)) == pytest.approx(2 / 10, abs=1e-3)


@pytest.mark.parametrize(("noise", "count", "delta"), [(1.0, 1, 1e-5), (4.0, 3, 1e-3), (30.0, 200, 1e-6)])
def test_gaussian_releases_cost_at_most_what_opendp_says(noise: float, count: int, delta: float) -> None:
    """OpenDP uses concentrated differential privacy, which gives a bound close to the exact ε."""
    numbers = opendp.vector_domain(opendp.atom_domain(T=float, nan=False)), opendp.l2_distance(T=float)
    release = opendp.m.make_gaussian(*numbers, scale=noise)
    together = opendp.c.make_zCDP_to_approxDP(opendp.c.make_composition([release] * count))
    theirs = together.map(1.0).epsilon(delta)
    found = ours(delta, Gaussian(noise=noise, count=count))
    assert found <= theirs <= 1.2 * found


# ---------------------------------------------------------------------------------------------------- OpenDP's noise
def alike(mine: Sequence[int], theirs: Sequence[int]) -> float:
    """Return the p-value of a χ² test that two samples have equal distributions; the test ignores rare values."""
    counts = Counter(mine), Counter(theirs)
    both = counts[0] + counts[1]
    usual = [value for value in both if both[value] >= 40]
    return float(stats.chi2_contingency([[own[value] for value in usual] for own in counts]).pvalue)


@pytest.mark.slow
def test_geometric_noise_is_opendps() -> None:
    theirs, wider = (opendp.m.make_laplace(*whole_numbers(), scale=scale)([0] * DRAWS) for scale in (3.0, 3.6))
    source = NoiseSource()
    mine = [source.geometric(3.0) for _ in range(DRAWS // 4)]
    assert alike(mine, theirs) > LEAST_P > alike(mine, wider)


def test_whole_normal_noise_is_opendps_discrete_gaussian() -> None:
    numbers = opendp.vector_domain(opendp.atom_domain(T=int)), opendp.l2_distance(T=float)
    theirs, wider = (opendp.m.make_gaussian(*numbers, scale=scale)([0] * DRAWS) for scale in (4.0, 4.8))
    mine = NoiseSource().whole_normal(DRAWS, bits=2).astype(int).tolist()
    assert alike(mine, theirs) > LEAST_P > alike(mine, wider)


def test_normal_noise_is_opendps() -> None:
    numbers = opendp.vector_domain(opendp.atom_domain(T=float, nan=False)), opendp.l2_distance(T=float)
    theirs, wider = (opendp.m.make_gaussian(*numbers, scale=scale)([0.0] * (DRAWS // 4)) for scale in (1.0, 1.5))
    mine = NoiseSource().whole_normal(DRAWS) / CELLS
    assert stats.ks_2samp(mine, theirs).pvalue > LEAST_P > stats.ks_2samp(mine, wider).pvalue
