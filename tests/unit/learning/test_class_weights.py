"""Class weights in the loss equal separate computations, change a study's results, and are rejected for unsuitable
plans.
"""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.learning.class_weights import balanced, weighted
from medsilo.plan import Plan
from medsilo.tasks.classification import Classification
from medsilo.tasks.site_data import Cases, label_counts
from medsilo_lab.engines import inprocess
from medsilo_papers.prostate_mri import loss_of
from tests.conftest import make_plan

SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.batch_size=16", "training.rounds=1"]
FOLDER = "task={name: image-folder, kind: segmentation, labels: [a], size: [32, 32]}"


def test_balanced_weights_count_each_class_alike() -> None:
    weights = balanced([6, 2, 0])
    assert weights.tolist() == pytest.approx([8 / 12, 2.0, 1.0])
    assert float((weights[:2] * torch.tensor([6.0, 2.0])).sum()) == 8


def test_the_weighted_loss_is_a_mean_over_cases() -> None:
    output, target, weights = torch.randn(5, 3), torch.tensor([0, 1, 1, 2, 0]), torch.tensor([1.0, 4.0, 0.5])
    loss = weighted(functional.cross_entropy, weights, 1.0)
    single = [loss(output[n : n + 1], target[n : n + 1]) for n in range(5)]
    expected = [weights[label] * -output[n].log_softmax(0)[label] for n, label in enumerate(target)]
    assert torch.allclose(torch.stack(single), torch.stack(expected))
    assert torch.allclose(loss(output, target), torch.stack(expected).mean())
    scan, mask = torch.randn(2, 2, 4, 4), torch.randint(2, (2, 4, 4))
    both = loss_of("dice-ce")

    def half(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return both(found, right[:, None])

    entropy = functional.cross_entropy(scan, mask, reduction="none")
    more = weighted(half, torch.tensor([1.0, 3.0]), 0.5)(scan, mask) - half(scan, mask)
    assert torch.allclose(more, 0.5 * (entropy * 2 * mask).mean())


def test_one_score_of_two_classes_is_weighted_as_two() -> None:
    goal, score, target = Classification(("no", "yes"), 1), torch.randn(6, 1), torch.tensor([0, 1, 1, 0, 0, 1])
    loss = weighted(goal.loss, torch.tensor([0.5, 3.0]), 1.0)
    each = functional.binary_cross_entropy_with_logits(score[:, 0], target.float(), reduction="none")
    assert torch.allclose(loss(score, target), (torch.where(target > 0, 3.0, 0.5) * each).mean())


def test_labels_are_counted_wherever_they_are_known() -> None:
    labels = torch.tensor([0, 2, 2])
    cases = Cases(torch.zeros(3, 1), labels, ["a", "b", "c"])
    assert label_counts(cases, 3) == [1, 0, 2]
    masks = torch.tensor([[[0, 1], [1, 1]], [[0, 0], [0, 1]]])
    assert label_counts(Cases(torch.zeros(2, 1, 2, 2), masks, ["a", "b"]), 2) == [4, 4]
    assert label_counts([(torch.zeros(1), mask) for mask in masks], 2) == [4, 4]  # type: ignore[arg-type]


def test_a_plan_without_weights_is_the_plan_that_says_none(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL)
    assert plan.with_changes(["training.class_weights=none"]).hash == plan.hash
    left = {}
    for name in ("none", "balanced"):
        inprocess.run(plan.with_changes([f"training.class_weights={name}"]), folder=tmp_path / name)
        left[name] = load_tensors(tmp_path / name / "global/last.safetensors")[0]
    assert not all(torch.allclose(tensor, left["balanced"][name]) for name, tensor in left["none"].items())


def refused(*changes: str, base: Plan | None = None) -> str:
    with pytest.raises(MedsiloError) as caught:
        (base or make_plan("fedavg", *SMALL)).with_changes(changes)
    return str(caught.value)


def test_where_weights_make_no_sense_the_plan_says_what_to_do() -> None:
    assert "no cross entropy over classes" in refused("task.name=nuclei", "training.class_weights=balanced")
    said = refused(FOLDER, "training.class_weights=[1, 2, 3]")
    assert "3 numbers, but task image-folder has 2 classes" in said
    assert "training.class_weights" in refused("training.class_weights=[1, -1]")
    private = "privacy={epsilon: 8, delta: 0.00001, clip: 1.0}"
    said = refused(private, "network.norm=group", "training.class_weights=balanced", base=make_plan("fedavg"))
    assert "balanced weights follow from" in said
    assert "for example [1, 4]" in said
