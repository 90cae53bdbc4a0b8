"""Metrics equal numpy's and scikit-learn's, and sites' counts add up to the counts of the pooled cases."""

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from medsilo.tasks.classification import Classification
from medsilo.tasks.decisions import area_under_curve
from medsilo.tasks.measuring import chances
from medsilo.tasks.metrics import BINS, added, by_patient, means
from medsilo.tasks.objective import Objective
from medsilo.tasks.regression import Regression
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.site_data import patients_of
from medsilo.tasks.synthetic.activity import SyntheticActivity
from medsilo.tasks.synthetic.prostate import SyntheticProstate
from tests.conftest import make_plan

NAN = float("nan")
ACTIVITY = SyntheticActivity().goal


class Doubled(Classification):
    """A plug-in's objective that changes only the loss of a batch."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 2 * super().loss(output, target)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------- means
def test_means_are_sums_and_numbers_of_what_is_known() -> None:
    measures = {"dice": double(0.5, NAN, 1.0, 0.25), "hd95": double(NAN, NAN, NAN, 3.0), "none": double(NAN, NAN)}
    assert means(measures, 1) == {"dice": [1.75, 3.0], "hd95": [3.0, 1.0], "none": [0.0, 0.0]}


def test_what_covers_too_few_cases_is_left_out_and_never_zero() -> None:
    measures = {"dice": double(0.5, 0.5, 0.5), "hd95": double(NAN, 2.0, NAN), "none": double(NAN, NAN, NAN)}
    assert means(measures, 3) == {"dice": [1.5, 3.0], "none": [0.0, 0.0]}
    assert "dice" not in means(measures, 4)


def test_each_patient_counts_once() -> None:
    values = double(1.0, 0.0, 0.5, NAN, NAN)
    told = by_patient(values, ["b", "a", "b", "b", "c"])
    assert told[:2].tolist() == [0.75, 0.0] and told[2].isnan()


# ---------------------------------------------------------------------------------------------------- classes
def drawn(cases: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), random.integers(0, classes, cases - classes)])
    logits = random.normal(size=(cases, classes)) + 1.2 * np.eye(classes)[labels]
    return labels, np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def test_ties_count_half() -> None:
    # The cases of class 1 have the probabilities 0.8 and 0.5, and the cases of class 0 have 0.5 and 0.2. Of the four
    # pairs of cases, three are ordered correctly and one is a tie.
    second = double(0.8, 0.5, 0.5, 0.2)
    counts = chances(torch.tensor([1, 1, 0, 0]), torch.stack([1 - second, second], 1))
    assert area_under_curve(counts, 2) == pytest.approx(3.5 / 4)
    same = torch.full((6, 3), 1 / 3, dtype=torch.float64)
    assert area_under_curve(chances(torch.tensor([0, 1, 2, 0, 1, 2]), same), 3) == 0.5


def test_certain_answers_and_a_class_that_is_alone() -> None:
    certain = torch.eye(2, dtype=torch.float64)
    assert area_under_curve(chances(torch.tensor([0, 1]), certain), 2) == 1.0
    assert area_under_curve(chances(torch.tensor([1, 0]), certain), 2) == 0.0
    assert area_under_curve(chances(torch.tensor([0, 0]), certain), 2) is None


# ---------------------------------------------------------------------------------------------------- a site's counts
def measured(labels: np.ndarray, chance: np.ndarray) -> dict[str, torch.Tensor]:
    output = torch.from_numpy(np.log(chance))
    measures = ACTIVITY.measures(output, torch.from_numpy(labels))
    return {name: values.double() for name, values in measures.items()}


def test_merged_counts_are_those_of_the_pooled_cases() -> None:
    sites = [drawn(cases, 6, seed) for seed, cases in enumerate((40, 25, 60))]
    names = [[f"{site}-{case // 3}" for case in range(len(labels))] for site, (labels, _) in enumerate(sites)]
    told = [ACTIVITY.counts(measured(*site), patients, 1) for site, patients in zip(sites, names, strict=True)]
    labels, chance = (np.concatenate(parts) for parts in zip(*sites, strict=True))
    pooled = ACTIVITY.counts(measured(labels, chance), [name for part in names for name in part], 1)
    merged = added(told)
    assert merged.keys() == pooled.keys() == ACTIVITY.layout.keys()
    for name, length in ACTIVITY.layout.items():
        assert len(merged[name]) == length
        assert merged[name] == pytest.approx(pooled[name], abs=1e-9)
    figures = ACTIVITY.figures(merged)
    assert figures["accuracy"] == pytest.approx(np.mean(chance.argmax(1) == labels))
    assert figures["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, chance.argmax(1)))
    right = np.mean([roc_auc_score(labels == label, chance[:, label]) for label in range(6)])
    assert figures["auroc"] == pytest.approx(right, abs=1 / BINS)
    of_patients = [np.mean(hits[i : i + 3]) for hits in hits_of(sites) for i in range(0, len(hits), 3)]
    assert figures["accuracy_by_patient"] == pytest.approx(np.mean(of_patients))


def hits_of(sites: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    return [chance.argmax(1) == labels for labels, chance in sites]


def test_classes_with_few_cases_are_not_told_apart() -> None:
    labels, chance = drawn(60, 6, 0)
    labels[labels == 5] = 4
    labels[:2] = 5
    patients = [str(case) for case in range(60)]
    told = ACTIVITY.counts(measured(labels, chance), patients, 5)
    assert told.keys() == {"accuracy", "accuracy_by_patient"}
    assert ACTIVITY.counts(measured(labels, chance), patients, 2).keys() == ACTIVITY.layout.keys()
    without = labels != 5
    told = ACTIVITY.counts(measured(labels[without], chance[without]), patients[:58], 5)
    assert told.keys() == ACTIVITY.layout.keys()
    assert ACTIVITY.counts(measured(labels[:4], chance[:4]), patients[:4], 5) == {}


# ---------------------------------------------------------------------------------------------------- masks

# two nested structures, on a grid of 1 mm by 2 mm
BONES = Segmentation(3, torch.nn.functional.cross_entropy, {"whole": (1, 2), "core": (2,)}, voxel=(1.0, 2.0))


def mask(*squares: tuple[int, int, int, int, int]) -> torch.Tensor:
    """Return a mask [1, 16, 16] of squares, each given by its label, its rows and its columns."""
    labels = torch.zeros(1, 16, 16, dtype=torch.int64)
    for label, top, bottom, left, right in squares:
        labels[0, top:bottom, left:right] = label
    return labels


def certain(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Return logits with which a network predicts exactly these labels."""
    return torch.nn.functional.one_hot(labels, classes).movedim(-1, 1).float() * 10


def test_dice_and_surfaces_by_hand() -> None:
    task = SyntheticProstate()
    # a square of 4 by 4 pixels, which is predicted one column too far to the right
    right, found = mask((1, 2, 6, 4, 8)), mask((1, 2, 6, 5, 9))
    measures = task.goal.measures(certain(found, 2), right)
    assert measures["dice"].item() == pytest.approx(2 * 12 / 32)
    # each border pixel is at most one pixel from the other mask's border
    assert measures["hd95"].item() == pytest.approx(1.0)
    assert measures["surface_dice"].item() == 1.0
    far = task.goal.measures(
        certain(mask((1, 2, 6, 8, 12)), 2), right
    )  # the prediction is shifted by four columns, so the two squares only touch
    assert far["dice"].item() == 0.0
    assert far["hd95"].item() == pytest.approx(4.0)
    # Of the 12 border pixels of each square, 4 have the distance 1 and 2 the distance 2 to the other square's border.
    # Half of the 24 border pixels are within the tolerance of two pixels.
    assert far["surface_dice"].item() == pytest.approx(12 / 24)


def test_structures_have_figures_of_their_own_in_millimetres() -> None:
    right, found = mask((1, 2, 8, 2, 8), (2, 4, 6, 4, 6)), mask((1, 2, 8, 2, 8), (2, 4, 6, 5, 7))
    measures = BONES.measures(certain(found, 3), right)
    assert measures["dice_whole"].item() == 1.0
    assert measures["dice_core"].item() == pytest.approx(2 * 2 / 8)
    assert measures["dice"].item() == pytest.approx((1.0 + 0.5) / 2)
    assert measures["hd95_whole"].item() == 0.0
    assert measures["hd95_core"].item() == pytest.approx(2.0)  # one column is 2 mm
    assert BONES.layout.keys() == {
        "dice",
        "dice_by_patient",
        *(f"{name}_{part}" for name in ("dice", "hd95", "surface_dice") for part in ("whole", "core")),
    }
    assert set(BONES.counts(measures, ["a"], 1)) == set(BONES.layout)


def test_a_structure_that_is_missing_has_no_surface() -> None:
    task = SyntheticProstate()
    nothing, something = mask(), mask((1, 2, 6, 4, 8))
    labels, found = torch.cat([nothing, nothing, something]), torch.cat([nothing, something, nothing])
    measures = task.goal.measures(certain(found, 2), labels)
    assert measures["dice"].tolist() == [1.0, 0.0, 0.0]
    assert measures["hd95"].isnan().all()
    assert measures["surface_dice"][0].isnan() and measures["surface_dice"][1:].tolist() == [0.0, 0.0]
    counts = task.goal.counts({name: values.double() for name, values in measures.items()}, ["a", "a", "b"], 2)
    assert counts["dice"] == [1.0, 3.0] and counts["dice_by_patient"] == [0.5, 2.0]
    assert counts["hd95"] == [0.0, 0.0] and task.goal.figures(counts)["hd95"] is None
    assert counts["surface_dice"] == [0.0, 2.0]
    assert "surface_dice" not in task.goal.counts({k: v.double() for k, v in measures.items()}, ["a", "a", "b"], 3)


def test_a_case_without_a_known_patient_is_its_own() -> None:
    data = make_plan().task.load("hospital-a", ["hospital-a"], 0, None)
    assert len(patients_of(data.test)) == len(data.test)
    pair = torch.utils.data.ConcatDataset([data.test, data.test])
    assert patients_of(pair) == [*data.test.patients, *data.test.patients]
    assert patients_of(torch.utils.data.TensorDataset(torch.zeros(3, 1))) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "goal", [Classification(2), Classification(9), Classification(2, outputs=1), Regression((-3.0, 7.0)), Doubled(3)]
)
def test_the_losses_of_a_batch_are_those_of_each_case_alone(goal: Objective) -> None:
    """The losses have the same bits, so that results do not depend on how cases are batched."""
    for scale in (1.0, 1e4):
        output = scale * torch.randn(257, goal.outputs)
        target = torch.randint(0, goal.classes, (257,)) if goal.classes else torch.randn(257)
        alone = torch.stack([goal.loss(output[case : case + 1], target[case : case + 1]) for case in range(257)])
        assert torch.equal(goal.case_losses(output, target), alone)
