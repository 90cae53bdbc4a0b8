"""Secure sums against Flower's SecAgg+: the same models, numbers of cases and dropouts, each protocol as a whole."""

import json
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from medsilo.core.errors import ParticipationError
from medsilo_secagg.fixed_point import FixedPoint, Flat
from medsilo_secagg.terms import SealedBlock
from tests.sealed import Hospitals, as_groups, block, mean_of, names, numbers, terms

ROOT = Path(__file__).parents[2]
FLOWER = ROOT / "build" / "flower" / "bin" / "python"  # an environment of its own: Flower needs an older protobuf
CASES = (10, 25, 3, 40, 17)
THRESHOLD = 3
STEP = 16 / 2**22  # of Flower's numbers, which it rounds at random and then weighs

pytestmark = pytest.mark.skipif(not FLOWER.exists(), reason="needs Flower in an environment of its own: make flower")


def flowers(models: dict[str, list[float]], gone: Collection[str]) -> torch.Tensor | None:
    """Return the mean that Flower opens, weighted by cases; None where it opens nothing."""
    place = {site: str(number) for number, site in enumerate(models, 1)}
    told = {
        "models": {place[site]: model for site, model in models.items()},
        "cases": dict(zip(place.values(), CASES, strict=True)),
        "gone": [int(place[site]) for site in gone],
        "threshold": THRESHOLD,
    }
    script = Path(__file__).with_name("flower_sums.py")
    ended = subprocess.run([FLOWER, script], input=json.dumps(told), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    return None if found is None else torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("gone", [(), ("site-2",), ("site-0", "site-3")], ids=["all", "one gone", "two gone"])
def test_the_weighted_mean_is_flowers(gone: tuple[str, ...]) -> None:
    """To Flower's rounding: ours is nearer to the exact mean."""
    models, sites = numbers(len(CASES)), names(len(CASES))
    weights = dict(zip(sites, CASES, strict=True))
    left = [site for site in sites if site not in gone]
    theirs = flowers({site: torch.cat([own["a"], own["b"].flatten()]).tolist() for site, own in models.items()}, gone)
    study, own = Hospitals(terms(len(CASES), THRESHOLD)), block(models, one=max(CASES))
    counts = SealedBlock("counts", Flat.of({"cases": torch.ones(1)}), FixedPoint(1.0, sum(CASES), max(CASES)))
    groups = {site: {"model": model, "counts": {"cases": torch.ones(1)}} for site, model in models.items()}
    server = study.begin(1, [own, counts])
    study.seal(server, groups, gone, {site: dict.fromkeys(("model", "counts"), weights[site]) for site in sites})
    sums = study.open(server)
    total = counts.read(sums["counts"])["cases"].item()
    mean = own.read(sums["model"], int(total))
    ours = torch.cat([mean["a"], mean["b"].flatten()]).double()
    exact = mean_of(models, left, weights)
    right = torch.cat([exact["a"], exact["b"].flatten()])
    assert total == sum(weights[site] for site in left)
    assert (ours - theirs).abs().max() <= 2 * STEP * len(left) * max(CASES) / total
    assert (ours - right).abs().max() <= 1e-6


def test_neither_opens_a_sum_of_fewer_than_the_threshold() -> None:
    models, gone = numbers(len(CASES)), names(len(CASES))[: len(CASES) - THRESHOLD + 1]
    assert flowers({site: own["a"].tolist() for site, own in models.items()}, gone) is None
    study, own = Hospitals(terms(len(CASES), THRESHOLD)), block(models)
    server = study.begin(1, [own])
    study.seal(server, as_groups(models), gone)
    with pytest.raises(ParticipationError, match="only 2 sites"):
        study.open(server)
