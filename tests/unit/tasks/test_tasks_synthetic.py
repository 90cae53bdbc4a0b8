"""Test each synthetic task's claims about shifts between sites, about labels, and about its image files."""

import pytest
import torch

from medsilo.tasks.synthetic.activity import SyntheticActivity
from medsilo.tasks.synthetic.histology import SyntheticHistology
from medsilo.tasks.synthetic.prostate import SyntheticProstate

SITES = ["a", "b", "c", "d"]


def loaded(task, sites=SITES, seed=0):
    return [task.load(site, sites, seed, None).train for site in sites]


def largest_gap(values):
    """Return the largest difference between two sites in any column of the statistics [sites, statistics]."""
    values = torch.stack(list(values))
    return (values[:, None] - values[None]).abs().max().item()


def mean_gap(first, second):
    return (first - second).abs().mean().item()


def colours(cases):
    return torch.cat([cases.inputs.mean((0, 2, 3)), cases.inputs.std((0, 2, 3))])


def sensors(cases):
    return torch.cat([cases.inputs.mean((0, 2)), cases.inputs.std((0, 2))])


def histogram(cases, classes=6):
    return torch.bincount(cases.targets, minlength=classes) / len(cases)


# --- histology


@pytest.mark.slow
def test_histology_sites_differ_under_shift_only():
    gap = {
        shift: largest_gap(map(colours, loaded(SyntheticHistology(shift=shift, patients=30)))) for shift in (0, 0.5, 1)
    }
    assert gap[0] < 0.02 < 0.08 < gap[0.5] < gap[1]


# --- prostate


def test_prostate_sites_have_different_sizes_and_brightness():
    train = loaded(SyntheticProstate(patients=8))
    sizes = [len(set(cases.patients)) for cases in train]
    assert sizes[3] == 3 * sizes[0] and sizes[1] == 2 * sizes[0]
    assert largest_gap(cases.inputs.mean()[None] for cases in train) > 0.5


# --- activity


def test_labels_differ_under_label_shift_only():
    def gap(**numbers):
        return largest_gap(map(histogram, loaded(SyntheticActivity(windows=20, **numbers))))

    assert gap(shift="label", alpha=0.1) > 0.5
    assert gap(shift="label", alpha=1e5) < 0.15
    assert gap(shift="feature", alpha=0.1) < 0.15
    assert gap(shift="none", alpha=0.1) < 0.15


@pytest.mark.slow
def test_devices_differ_between_families_and_not_inside_one():
    first, second, third, fourth = map(sensors, loaded(SyntheticActivity(shift="feature")))
    # the two sites have different persons but the same devices
    inside = max(mean_gap(first, third), mean_gap(second, fourth))
    across = min(mean_gap(first, second), mean_gap(third, fourth))
    assert across > 3 * inside
    first, second, *_ = map(sensors, loaded(SyntheticActivity(shift="none")))
    assert mean_gap(first, second) < 0.5 * across


def test_each_person_is_at_one_site():
    task = SyntheticActivity(persons=5, windows=2)
    parts = [task.load(site, SITES, 0, None) for site in SITES]
    persons = [
        name for data in parts for part in (data.train, data.validation, data.test) for name in set(part.patients)
    ]
    assert len(persons) == len(set(persons)) == 5 * len(SITES)
