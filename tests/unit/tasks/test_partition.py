"""The Dirichlet partition assigns each sample to one site, leaves no site empty, and repeats exactly for a seed."""

import itertools

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from medsilo.core.errors import DataError, PlanError
from medsilo.tasks.shares import Partition
from medsilo.tasks.splits import by_column, deal, dirichlet, iid
from medsilo.tasks.synthetic.activity import SyntheticActivity
from tests.conftest import over_all

COMBINATIONS = [
    (samples, sites, alpha, minimum)
    for samples, sites, alpha, minimum in itertools.product(
        (1, 7, 60, 1000), (1, 2, 5, 50), (0.01, 0.5, 1000.0), (0, 1, 3, 20)
    )
    if sites * minimum <= samples
]


@over_all("samples, sites, alpha, minimum", COMBINATIONS)
def test_every_sample_exactly_once_and_no_site_below_the_minimum(samples, sites, alpha, minimum):
    labels = np.random.default_rng(samples).integers(0, 6, samples)
    parts = dirichlet(labels, sites, alpha, seed=3, minimum=minimum)
    assert len(parts) == sites
    assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
    assert min(map(len, parts)) >= minimum
    assert all(np.issubdtype(part.dtype, np.integer) and (np.diff(part) > 0).all() for part in parts)


def test_exactly_as_many_samples_as_the_minima_need():
    parts = dirichlet(np.zeros(150, int), 50, 0.01, seed=0, minimum=3)
    assert [len(part) for part in parts] == [3] * 50


def test_depends_on_the_seed_and_on_no_global_generator():
    labels = np.arange(500) % 7
    np.random.seed(1)
    first = dirichlet(labels, 4, 0.3, seed=1)
    np.random.seed(2)
    again, other = dirichlet(labels, 4, 0.3, seed=1), dirichlet(labels, 4, 0.3, seed=2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_takes_tensors_and_lists_and_any_label_values():
    labels = [5, -1, 5, 99, -1, 5, 99, 99]
    parts = dirichlet(labels, 2, 1.0, seed=0)
    for same in (torch.tensor(labels), np.array(labels)):
        assert all(np.array_equal(a, b) for a, b in zip(parts, dirichlet(same, 2, 1.0, seed=0), strict=True))


def test_small_alpha_shifts_labels_and_sizes_large_alpha_hardly_does():
    labels = np.arange(6000) % 6

    # mean total variation distance between a site's label histogram and the histogram of all sites' labels
    def distance(alpha):
        parts = dirichlet(labels, 5, alpha, seed=0)
        shares = np.stack([np.bincount(labels[part], minlength=6) / len(part) for part in parts])
        return np.abs(shares - 1 / 6).sum(1).mean() / 2

    assert distance(0.1) > 0.4
    assert distance(1000.0) < 0.05
    sizes = [len(part) for part in dirichlet(labels, 5, 0.1, seed=0)]
    assert max(sizes) > 2 * min(sizes)


@pytest.mark.parametrize("alpha", [1e-3, 1e6])
@pytest.mark.parametrize("sites", [2, 100])
def test_the_least_and_the_greatest_alpha_of_a_plan_deal_everything(sites, alpha):
    for seed in range(20):
        parts = dirichlet(np.arange(600) % 6, sites, alpha, seed=seed, minimum=3)
        assert sorted(np.concatenate(parts).tolist()) == list(range(600))


@pytest.mark.parametrize("alpha", [0.0, -1.0, 9e-4, 2e6, float("nan"), float("inf")])
def test_a_plan_has_no_alpha_for_which_draws_are_no_numbers(alpha):
    for kind in (Partition, SyntheticActivity):
        with pytest.raises(ValidationError, match="alpha"):
            kind(alpha=alpha)


def test_too_few_samples_are_a_one_line_error():
    with pytest.raises(
        PlanError, match=r"^minimum: 4 sites with at least 3 samples each need 12, but there are 10;.*$"
    ):
        dirichlet(np.zeros(10, int), 4, 1.0, seed=0, minimum=3)


@pytest.mark.parametrize(("samples", "sites"), [(1, 1), (7, 3), (60, 7), (1000, 50)])
def test_iid_deals_everything_once_and_evenly(samples, sites):
    parts = iid(samples, sites, seed=4)
    assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and all((np.diff(part) > 0).all() for part in parts)
    if samples > 50:
        assert not np.array_equal(parts[0], iid(samples, sites, seed=5)[0])
        assert not np.array_equal(parts[0], np.arange(sizes[0]))
    with pytest.raises(PlanError, match="minimum"):
        iid(samples, sites, seed=4, minimum=samples + 1)


def test_natural_sites_come_from_the_column():
    column = ["b", "a", "", "b", "c", "a"]
    assert [part.tolist() for part in by_column(column, ["a", "b"])] == [[1, 5], [0, 3]]
    with pytest.raises(DataError, match="gives no case to d"):
        by_column(column, ["a", "d"])


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
@pytest.mark.parametrize("alpha", [0.05, 100.0])
def test_patients_stay_whole_whatever_the_partition(kind, alpha):
    """With a small alpha, the sites' class frequencies differ strongly."""
    random = np.random.default_rng(1)
    owner = random.integers(0, 120, 900)
    patients = [f"p{number}" for number in owner]
    main = random.integers(0, 3, 120)
    classes = np.where(random.random(900) < 0.8, main[owner], random.integers(0, 3, 900)).tolist()
    sites = ["a", "b", "c", "d"]
    dealt = deal(Partition(kind=kind, alpha=alpha, minimum=5), patients, classes, [""] * 900, sites)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(900))
    people = [{patients[case] for case in part} for part in dealt]
    assert sum(map(len, people)) == len(set(patients)) and min(map(len, people)) >= 5
    shares = np.array([np.bincount(np.array(classes)[part], minlength=3) / len(part) for part in dealt])
    apart = np.abs(shares - shares.mean(0)).max()
    assert apart > 0.3 if kind == "dirichlet" and alpha < 1 else apart < 0.2
