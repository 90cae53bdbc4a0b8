"""On synthetic hospitals, methods learn, and the methods' ranking by accuracy equals the ranking in earlier
measurements.

Every ranking in this file was first measured with the seeds 0, 1 and 2. The tests assert each ranking for each seed;
the asserted lead is at most half of the smallest measured lead.

The tests leave out every ranking that differed between seeds, even if papers report it. Data and hyperparameters are
defaults, without tuning.
"""

from functools import cache
from statistics import mean
from typing import Any

import pytest

from medsilo.plan import parse_plan
from tests import inprocess

# the tests share runs, so each run happens once
pytestmark = [pytest.mark.slow, pytest.mark.first, pytest.mark.xdist_group("orders")]
SEEDS = [0, 1, 2]
CHANCE = 1 / 6
THREE, SIX = 3, 6

DESIGNS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "alike": (THREE, 4, {"shift": "none"}),
    "labels differ": (SIX, 4, {"shift": "label", "persons": 20, "windows": 40}),
    "devices differ": (SIX, 4, {"shift": "feature", "persons": 20, "windows": 40}),
    "both differ": (SIX, 4, {"shift": "both", "persons": 20, "windows": 40}),
    "devices differ, longer": (SIX, 12, {"shift": "feature", "persons": 20, "windows": 40}),
}


@cache
def scores(design: str, method: str, seed: int) -> dict[str, float]:
    sites, rounds, numbers = DESIGNS[design]
    plan = parse_plan(
        {
            "algorithm": {"name": method},
            "task": {"name": "synthetic-activity", **numbers},
            "training": {"rounds": rounds, "batch_size": 32, "learning_rate": 0.05, "momentum": 0.9},
            "participation": {"sites": [f"site-{number + 1}" for number in range(sites)]},
            "seed": seed,
        }
    )
    summary = inprocess.run(plan).summary
    assert summary.status == "finished"
    return {site: facts.test["accuracy"] for site, facts in summary.sites.items()}


def accuracy(design: str, method: str, seed: int) -> float:
    return mean(scores(design, method, seed).values())


every_seed = pytest.mark.parametrize(
    "seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.long) for seed in SEEDS[1:])]
)


# ---------------------------------------------------------------------------------------------------- alike
@pytest.mark.long
@every_seed
@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedprox", marks=pytest.mark.long)])
def test_where_sites_are_alike_averaging_is_as_good_as_pooling(method: str, seed: int) -> None:
    """In earlier measurements, each method's accuracy was at most 0.3 points below centralised training, and at least
    99 % at every site.
    """
    assert accuracy("alike", method, seed) > accuracy("alike", "central", seed) - 0.02
    assert min(scores("alike", method, seed).values()) > 0.95


@every_seed
def test_where_sites_are_alike_federation_is_better_than_being_alone(seed: int) -> None:
    """In earlier measurements, FedAvg gained 10.6, 2.6 and 3.9 points over local training on average, and 18.2, 4.6 and
    8.3 points at the smallest site.
    """
    alone, together = scores("alike", "local", seed), scores("alike", "fedavg", seed)
    assert mean(together.values()) > mean(alone.values()) + 0.01
    assert min(together.values()) > min(alone.values()) + 0.02
    assert min(alone.values()) > 3 * CHANCE


# ---------------------------------------------------------------------------------------------------- not alike
ORDERS = [
    # The columns are the design, the better method, the worse method, the threshold, and the differences measured for
    # seeds 0, 1, 2.
    ("labels differ", "central", "fedavg", 0.06, "+23.8 +13.8 +13.3"),
    ("labels differ", "central", "local", 0.10, "+26.0 +20.9 +26.7"),
    ("devices differ", "central", "fedavg", 0.15, "+33.6 +56.2 +49.9"),
    ("devices differ", "central", "local", 0.15, "+42.4 +35.4 +36.7"),
    ("both differ", "central", "local", 0.08, "+21.7 +16.3 +28.7"),
    # In design C1 of the benchmarks, Base has an accuracy of 92.8, FedPer of 79.9 and FedAvg of 41.4.
    ("both differ", "local", "fedavg", 0.06, "+38.8 +13.9 +12.5"),
    ("both differ", "fedper", "fedavg", 0.03, "+30.7 +6.4 +8.2"),
]


@every_seed
@pytest.mark.parametrize(
    ("design", "better", "worse", "threshold", "measured"), ORDERS, ids=lambda part: str(part)[:20]
)
def test_orders(design: str, better: str, worse: str, threshold: float, measured: str, seed: int) -> None:
    assert accuracy(design, better, seed) > accuracy(design, worse, seed) + threshold, measured


@every_seed
@pytest.mark.parametrize(("design", "least"), [("labels differ", 0.5), ("both differ", 0.5), ("devices differ", 0.35)])
def test_alone_is_better_than_chance(design: str, least: float, seed: int) -> None:
    assert accuracy(design, "local", seed) > least > 2 * CHANCE


# ---------------------------------------------------------------------------------------------------- longer
@pytest.mark.long
@every_seed
def test_where_devices_differ_batch_norm_of_ones_own_is_better(seed: int) -> None:
    """In design C4 of the benchmarks, FedBN is better than FedAvg for every seed. For three seeds, FedBN's lead over
    FedAvg was 6.8, 16.1 and 14.2 points after 12 rounds, and 3.9, 7.9 and 8.8 points after 20 rounds.

    For three seeds, FedBN's lead was -21.8, 2.9 and 15.5 points after 4 rounds, since local batch norm learns more
    slowly at first.
    """
    design = "devices differ, longer"
    assert accuracy(design, "fedbn", seed) > accuracy(design, "fedavg", seed) + 0.03
    assert accuracy(design, "fedavg", seed) > accuracy("devices differ", "fedavg", seed) + 0.1
