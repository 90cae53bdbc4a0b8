"""Claims of each synthetic task: which shifts it has, where the label lives, and that its files are real."""

import numpy as np
import pytest
import torch

from medsilo.core.errors import DataError
from medsilo.tasks.scans import Scan
from medsilo.tasks.synthetic.activity import SyntheticActivity
from medsilo.tasks.synthetic.histology import SyntheticHistology
from medsilo.tasks.synthetic.prostate import SyntheticProstate
from tests.hospital import Volume, write_volume

SITES = ["a", "b", "c", "d"]


def loaded(task, sites=SITES, seed=0):
    return [task.load(site, sites, seed, None).train for site in sites]


def largest_gap(values):
    """The largest difference between two sites in any of the statistics: [sites, statistics]."""
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


@pytest.mark.parametrize("stored_as", ["LPS", "RAS", "PIR", "SLA"])
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_volumes_survive_their_files(tmp_path, stored_as, suffix):
    random = np.random.default_rng(0)
    angle = np.deg2rad(15)
    affine = np.eye(4)
    affine[1:3, 1:3] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    affine[:3, :3] *= [0.5, 0.75, 3.0]
    affine[:3, 3] = [-20, 11, 300]
    image = Volume(random.standard_normal((4, 6, 5), np.float32), affine)
    mask = Volume((image.values > 0).astype(np.uint8), affine)
    write_volume(tmp_path / f"image{suffix}", image, stored_as)
    write_volume(tmp_path / f"mask{suffix}", mask, "LPS")
    places = tmp_path / f"image{suffix}", tmp_path / f"mask{suffix}"
    read, found = Scan.read(places[0]), Scan.of_mask(places[1])
    values, labels = read.values[0], read.mask(places[1])
    assert np.array_equal(values, image.values) and np.array_equal(labels, mask.values)
    assert values.dtype == np.float32 and labels.dtype == np.int64
    assert read.spacing == pytest.approx((0.5, 0.75, 3.0), abs=1e-4)
    np.testing.assert_allclose(read.affine, affine, atol=1e-3)
    np.testing.assert_allclose(found.affine, affine, atol=1e-3)


def test_volumes_that_do_not_fit_are_data_errors_without_file_names(tmp_path):
    values, moved = np.zeros((3, 4, 5), np.float32), np.eye(4)
    moved[0, 3] = 2
    write_volume(tmp_path / "image.nii", Volume(values, np.eye(4)))
    write_volume(tmp_path / "moved.nii", Volume(values.astype(np.uint8), moved))
    write_volume(tmp_path / "cut.nii", Volume(values[1:].astype(np.uint8), np.eye(4)))
    (tmp_path / "text.nii").write_text("no volume")
    image = Scan.read(tmp_path / "image.nii")
    with pytest.raises(DataError, match="different places") as caught:
        image.mask(tmp_path / "moved.nii")
    assert str(tmp_path) not in str(caught.value) and "moved.nii" in caught.value.private
    with pytest.raises(DataError, match="different sizes"):
        image.mask(tmp_path / "cut.nii")
    for read in (Scan.read, Scan.of_mask):
        for name in ("text.nii", "absent.nii"):
            with pytest.raises(DataError) as caught:
                read(tmp_path / name)
            assert name not in str(caught.value)


# --- activity


def test_labels_differ_under_label_shift_only():
    def gap(**numbers):
        return largest_gap(map(histogram, loaded(SyntheticActivity(windows=20, **numbers))))

    assert gap(shift="label", alpha=0.1) > 0.5
    assert gap(shift="label", alpha=1e5) < 0.15
    assert gap(shift="feature", alpha=0.1) < 0.15
    assert gap(shift="none", alpha=0.1) < 0.15


def test_devices_differ_between_families_and_not_inside_one():
    first, second, third, fourth = map(sensors, loaded(SyntheticActivity(shift="feature")))
    inside = max(mean_gap(first, third), mean_gap(second, fourth))  # persons differ, devices do not
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
