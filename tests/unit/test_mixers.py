"""Mixers against numbers worked out by hand, and the promises about rounds, refusals, disk and memory."""

import errno
import json
import subprocess
import sys
import tempfile
from itertools import permutations

import pytest
import torch

from medsilo.errors import MedsiloError, PlanError, Refused
from medsilo.mixing import waiting
from medsilo.mixing.layout import BLOCK
from medsilo.mixing.mixers import Identity, SimilarityMix, SoftPull, UniformMean, WeightedMean

WEIGHTS = torch.tensor([[0.5, 0.2, 0.3], [0.0, 1.0, 0.0], [0.1, 0.6, 0.3]], dtype=torch.float64)
MAKERS = {
    "weighted": WeightedMean,
    "uniform": UniformMean,
    "soft": lambda: SoftPull(0.7),
    "similarity": lambda: SimilarityMix(WEIGHTS),
    "identity": Identity,
}
MEANS = ["weighted", "uniform"]
PERSONAL = ["soft", "similarity", "identity"]
every_mixer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def model(value, steps=3, dtype=torch.float32):
    """Three floats around `value`, one counter and one mask."""
    return {
        "body.weight": torch.tensor([[value, -value, 2.0 * value]], dtype=dtype),
        "norm.steps": torch.tensor(steps),
        "mask": torch.tensor([steps > 3, False]),
    }


def play(mixer, contributions, sites="abc", initial=None):
    """One round: contributions are (site, tensors, weight) in the order of arrival."""
    mixer.start(list(sites), initial)
    for site, tensors, weight in contributions:
        mixer.add(site, {name: tensor.clone() for name, tensor in tensors.items()}, weight)
    return {site: mixer.result(site) for site in sorted(sites)}


def first(tensors):
    return tensors["body.weight"][0, 0].item()


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype
        assert tensor.shape == two[name].shape
        assert torch.equal(tensor, two[name]), name


THREE = [("a", model(1.0, 5), 1), ("b", model(2.0, 6), 2), ("c", model(10.0, 7), 5)]

# (1·1 + 2·2 + 5·10)/8; 13/3; .7·θ_i + .15·(the two others); rows of WEIGHTS times (1, 2, 10)
BY_HAND = {
    "weighted": (6.875, 6.875, 6.875),
    "uniform": (13 / 3, 13 / 3, 13 / 3),
    "soft": (0.7 + 0.15 * 12, 1.4 + 0.15 * 11, 7 + 0.15 * 3),
    "similarity": (3.9, 2.0, 4.3),
    "identity": (1.0, 2.0, 10.0),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_values_worked_out_by_hand(kind, dtype):
    contributions = [(site, model(first(t), t["norm.steps"].item(), dtype), w) for site, t, w in THREE]
    results = play(MAKERS[kind](), contributions)
    tolerance = {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(dtype, 1e-6)
    for site, expected in zip("abc", BY_HAND[kind], strict=True):
        row = results[site]["body.weight"]
        assert row.dtype == dtype
        wanted = torch.tensor([[expected, -expected, 2 * expected]], dtype=torch.complex128)
        torch.testing.assert_close(row.to(torch.complex128), wanted, rtol=tolerance, atol=tolerance)


def test_soft_pull_uses_one_snapshot_of_all_sites():
    """In place, site after site, the third would get something else (1.628 and not 1.55 for 0, 1, 2 at λ = 0.55)."""
    results = play(SoftPull(0.55), [(s, model(v), 1) for s, v in zip("abc", (0.0, 1.0, 2.0), strict=True)])
    assert [first(results[s]) for s in "abc"] == pytest.approx([0.675, 1.0, 1.325], abs=1e-6)


@pytest.mark.parametrize("kind", MEANS)
def test_means_take_integers_from_the_first_site_in_sorted_order(kind):
    for order in permutations(THREE):
        results = play(MAKERS[kind](), order)
        assert all(results[s]["norm.steps"].item() == 5 and results[s]["mask"][0] for s in "abc")
    results = play(MAKERS[kind](), THREE[:0:-1])
    assert results["a"]["norm.steps"].item() == 6


@pytest.mark.parametrize("kind", PERSONAL)
def test_personal_mixers_keep_their_own_integers(kind):
    results = play(MAKERS[kind](), THREE)
    assert [results[s]["norm.steps"].item() for s in "abc"] == [5, 6, 7]


@every_mixer
def test_one_contributor_is_unchanged_to_the_last_bit(make):
    sent = {"w": torch.tensor([0.1, -0.0, 1e-40, 3e38, 1 / 3]), "x": torch.tensor([0.1], dtype=torch.float64)}
    for weight in (1, 3, 0.1, 1e12):
        result = play(make(), [("b", sent, weight)])
    for site in "abc" if isinstance(make(), WeightedMean) else "b":
        got = play(make(), [("b", sent, 7)])[site] if isinstance(make(), WeightedMean) else None
        if got is not None:
            assert torch.equal(got["w"].view(torch.int32), sent["w"].view(torch.int32))
    del result


