"""The choice of postprocessing in a federation, against nnU-Net's own on all validation cases in one place."""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from medsilo.core.errors import Refused
from medsilo.tasks.metrics import Counts, added
from medsilo.tasks.own.nnunet_postprocessing import Postprocessings
from medsilo.tasks.own.question import SegmentationQuestion
from tests.brains import QUESTION

pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")

LESION = {"lesion": 1}
ORGANS = {"liver": 2, "kidney": 1, "spleen": 3}  # not in the order of their values
TUMOUR = {"whole": [1, 2, 3], "core": [2, 3], "enhancing": 3}
CHAIN = {"first": [1, 2], "second": [2, 3], "third": [3, 4], "alone": 5}  # each shares a value with the next
BETWEEN = {"outer": [1, 2], "other": [1, 3], "inner": 2}  # the second changes the first, when its turn is over
WRITTEN = {"whole": [1, 2, 3], "first": [1, 2, 3, 5], "outer": [1, 3, 2]}
NONE = {"postprocessing_fns": [], "postprocessing_kwargs": []}
Case = tuple[np.ndarray, np.ndarray]  # what was found, and what is right


def question_of(labels: dict[str, Any], ignore: int | None = None) -> SegmentationQuestion:
    named = {"background": 0, **labels, **({"ignore": ignore} if ignore else {})}
    order = WRITTEN.get(next(iter(labels)))
    given = {"name": QUESTION.name, "channels": ["FLAIR"], "labels": named, "regions_class_order": order}
    return SegmentationQuestion.model_validate(given)


def box(labels: np.ndarray, value: int, corner: Sequence[int], size: int) -> None:
    labels[tuple(slice(start, start + size) for start in corner)] = value


def drawn(question: SegmentationQuestion, seed: int, cases: int = 7) -> list[Case]:
    """Return cases of structures side by side: some missing, some in two parts, as they are, as found, or both."""
    chance = np.random.default_rng(seed)
    values = sorted({value for own in question.regions.values() for value in own})
    parts = {value: (chance.choice([0, 0.2, 0.9]), chance.choice([0.1, 0.6, 0.9])) for value in values}
    every = []
    for _ in range(cases):
        right, found = (np.zeros((6, 4 * len(values) + 4, 22), np.uint8) for _ in range(2))
        for value in values:
            for labels, there, second in ((right, 0.85, parts[value][0]), (found, 0.95, parts[value][1])):
                if chance.random() < there:
                    box(labels, value, (int(chance.integers(2)), 4 * value - 4, int(chance.integers(3))), 4)
                if chance.random() < second:
                    box(labels, value, (1, 4 * value - 4, 12 + int(chance.integers(6))), 3)
        if question.ignored:
            right[:, :, 16:] = question.ignored
        every.append((found, right))
    return every


def trials_of(question: SegmentationQuestion, cases: Sequence[Case]) -> Counts:
    """Return what a hospital with these validation cases tells."""
    every = Postprocessings(question)
    each = [every.tried_on(torch.from_numpy(found), torch.from_numpy(right)) for found, right in cases]
    return every.sums({name: torch.tensor([one[name] for one in each], dtype=torch.float64) for name in each[0]}, 1)


def federated(question: SegmentationQuestion, cases: Sequence[Case]) -> dict[str, Any]:
    """Return what three hospitals choose that have these cases by turns, in nnU-Net's words."""
    every = Postprocessings(question)
    choice = every.chosen(added(trials_of(question, cases[site::3]) for site in range(3)))
    return every.in_nnunet(every.read(choice))


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return nnU-Net's own choice on all cases; its pools have threads here, since a process takes seconds to start."""
    SimpleITK = pytest.importorskip("SimpleITK")
    from nnunetv2.postprocessing.remove_connected_components import determine_postprocessing

    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: SimpleNamespace(Pool=ThreadPool))

    def chosen(question: SegmentationQuestion, cases: Sequence[Case]) -> dict[str, Any]:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        for number, (found, right) in enumerate(cases):
            for place, labels in (("found", found), ("right", right)):
                (folder / place).mkdir(parents=True, exist_ok=True)
                SimpleITK.WriteImage(SimpleITK.GetImageFromArray(labels), folder / place / f"case{number:03}.nii.gz")
        plans = {"image_reader_writer": "SimpleITKIO", "label_manager": "LabelManager", "configurations": {}}
        settings = question.in_nnunet() | {"file_ending": ".nii.gz"}
        functions, given = determine_postprocessing(str(folder / "found"), str(folder / "right"), plans, settings, 1)
        after = [SimpleITK.ReadImage(file) for file in sorted((folder / "found" / "postprocessed").glob("*.nii.gz"))]
        words = {"postprocessing_fns": [one.__name__ for one in functions], "postprocessing_kwargs": given}
        return words, [SimpleITK.GetArrayFromImage(image) for image in after]

    return chosen


def test_x(pooled) -> None:
    for labels, ignore in ((LESION, None), (ORGANS, None), (ORGANS, 4), (TUMOUR, None), (TUMOUR, 4), (CHAIN, None), (BETWEEN, None)):
        seen = Counter()
        for seed in range(10):
            question = question_of(labels, ignore)
            cases = drawn(question, seed)
            wanted, after = pooled(question, cases)
            assert federated(question, cases) == wanted
            seen[str([one["labels_or_regions"] for one in wanted["postprocessing_kwargs"]])] += 1
        print(labels, ignore, seen)
