"""AdaFed's equations equal numpy in double precision, and give no NaN in extreme cases."""

import numpy as np
import pytest
import torch
from torch import Tensor

from medsilo.methods.adafed import mixing_weights, uniform_weights, wasserstein_distances
from medsilo.mixing.aggregators import SimilarityMix, UniformMean, WeightedMean
from tests.conftest import over_all
from tests.mixed import result_of

SEEDS = range(6)
Site = list[tuple[Tensor, Tensor]]


def draw(sites: int, seed: int) -> list[Site]:
    generator = torch.Generator().manual_seed(seed)

    def layer(channels: int) -> tuple[Tensor, Tensor]:
        return (
            torch.randn(channels, generator=generator, dtype=torch.float64),
            torch.rand(channels, generator=generator, dtype=torch.float64) * 3,
        )

    return [[layer(6), layer(16), layer(1)] for _ in range(sites)]


def test_small_distances_beside_large_values_are_exact() -> None:
    """A distance of 1e-6 between vectors with large squared norms is exact, although matrix products would lose these
    digits.
    """
    mean = torch.full((50,), 1e4, dtype=torch.float64)
    near = mean.clone()
    near[0] += 1e-6
    ones = torch.ones(50, dtype=torch.float64)
    distances = wasserstein_distances([[(mean, ones)], [(near, ones)], [(mean + 1, ones)]])
    assert distances[0, 1].item() == pytest.approx(1e-6, rel=1e-5)


@over_all("seed", SEEDS)
def test_permuting_sites_permutes_distances_and_weights(seed: int) -> None:
    statistics = draw(9, seed)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    distances, moved = wasserstein_distances(statistics), wasserstein_distances([statistics[i] for i in order])
    assert torch.equal(moved, distances[order][:, order])
    assert torch.equal(distances, distances.T)
    torch.testing.assert_close(
        mixing_weights(moved, 0.5), mixing_weights(distances, 0.5)[order][:, order], rtol=1e-14, atol=0
    )


def test_twins_share_what_a_site_leaves_to_others() -> None:
    statistics = draw(5, 0)
    statistics[1] = statistics[3] = statistics[0]
    weights = mixing_weights(wasserstein_distances(statistics), 0.4)
    np.testing.assert_allclose(weights[0], [0.4, 0.3, 0, 0.3, 0])
    np.testing.assert_allclose(weights[3], [0.3, 0.3, 0, 0.4, 0])
    assert (weights[2] > 0).all()
    assert weights[2, 0] == weights[2, 1] == weights[2, 3]


def test_all_sites_alike_is_the_uniform_control() -> None:
    weights = mixing_weights(torch.zeros(4, 4), 0.4)
    assert torch.equal(weights, uniform_weights(4, 0.4))
    np.testing.assert_allclose(weights.sum(1), 1)


def test_a_single_site_learns_from_itself() -> None:
    assert mixing_weights(wasserstein_distances(draw(1, 0)), 0.5).tolist() == [[1.0]]
    assert uniform_weights(1, 0.5).tolist() == uniform_weights(1).tolist() == [[1.0]]


@pytest.mark.parametrize("tiny", [5e-324, 1e-310, 1e-200])
def test_the_smallest_distances_overflow_nothing(tiny: float) -> None:
    distances = torch.tensor([[0, tiny, 1], [tiny, 0, 1e300], [1, 1e300, 0]], dtype=torch.float64)
    weights = mixing_weights(distances, 0.5)
    assert weights.isfinite().all()
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(weights[0], [0.5, 0.5, 0], atol=1e-12)


# -------------------------------------------------------------------------- cases in which AdaFed equals another method
def mixed(aggregator, models: dict[str, dict[str, Tensor]], samples: dict[str, int]) -> list[dict[str, Tensor]]:
    aggregator.start(sorted(models))
    for site, model in models.items():
        aggregator.add(site, model, samples[site])
    return [result_of(aggregator, site) for site in sorted(models)]


@over_all("seed", SEEDS)
def test_rows_of_shares_are_fedavg_and_uniform_rows_are_equal_weights(seed: int) -> None:
    """AdaFed equals FedAvg if each row of W contains the sites' fractions of all cases.

    AdaFed equals FedBN with equal weights if each element of W is 1/N.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {"conv.weight": (6, 1, 5, 5), "norm.running_var": (6,), "norm.weight": (6,), "head.bias": ()}
    models = {
        site: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for site in "abcde"
    }
    samples = {site: place * 7 + 3 for place, site in enumerate(models)}
    shares = torch.tensor([float(samples[site]) for site in sorted(models)], dtype=torch.float64)
    for weights, mean in (
        ((shares / shares.sum()).repeat(5, 1), WeightedMean()),
        (uniform_weights(5), UniformMean()),
    ):
        for mine, expected in zip(
            mixed(SimilarityMix(weights), models, samples), mixed(mean, models, samples), strict=True
        ):
            assert mine.keys() == expected.keys()
            for name in mine:
                torch.testing.assert_close(mine[name], expected[name], rtol=2.4e-7, atol=2.4e-7)
