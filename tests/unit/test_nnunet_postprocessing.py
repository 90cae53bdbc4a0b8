"""The choice of postprocessing in a federation, against nnU-Net's own on all validation cases in one place."""

import multiprocessing
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
Case = tuple[np.ndarray, np.ndarray]  # what was found, and what is right


def question_of(labels: dict[str, Any], ignored: bool = False) -> SegmentationQuestion:
    last = max(max(own) if isinstance(own, list) else own for own in labels.values())
    named = {"background": 0, **labels, **({"ignore": last + 1} if ignored else {})}
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


def chosen(question: SegmentationQuestion, cases: Sequence[Case]) -> dict[str, Any]:
    """Return what three hospitals choose that have these cases by turns."""
    return Postprocessings(question).chosen(added(trials_of(question, cases[site::3]) for site in range(3)))


def federated(question: SegmentationQuestion, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the same in nnU-Net's words."""
    every = Postprocessings(question)
    return every.in_nnunet(every.read(chosen(question, cases)))


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return nnU-Net's own choice on all cases, and these after it. Its pools have threads: a process starts slowly."""
    SimpleITK = pytest.importorskip("SimpleITK")
    from nnunetv2.postprocessing.remove_connected_components import determine_postprocessing

    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: SimpleNamespace(Pool=ThreadPool))

    def determined(question: SegmentationQuestion, cases: Sequence[Case]) -> tuple[dict[str, Any], list[np.ndarray]]:
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

    return determined


def organs(more_right: Sequence[int], more_found: Sequence[int]) -> list[Case]:
    """Return cases of three organs that are found as they are, but for second parts that are there, or found."""
    found, right = (np.zeros((6, 16, 22), np.uint8) for _ in range(2))
    for value in (1, 2, 3):
        for labels, more in ((right, more_right), (found, more_found)):
            box(labels, value, (0, 4 * value - 4, 0), 4)
            if value in more:
                box(labels, value, (1, 4 * value - 4, 12), 3)
    return [(found, right)] * 3


def missing(cases: Sequence[Case], value: int) -> list[Case]:
    return [(np.where(found == value, 0, found), np.where(right == value, 0, right)) for found, right in cases]


@pytest.mark.parametrize(
    ("cases", "kept"),
    [
        pytest.param(organs((), (1, 2, 3)), [[1, 2, 3]], id="of all foreground"),
        pytest.param(organs((1,), (1, 2)), [2], id="of one label, as another has two parts"),
        pytest.param(organs((1,), (1, 2, 3)), [2, 3], id="of two labels"),
        pytest.param(organs((1, 2), (1, 2)), [], id="of none, as all is right"),
        pytest.param(organs((), ()), [], id="of none, as nothing changes"),
        pytest.param(missing(organs((), (1, 2)), 3), [1, 2], id="of labels, as nobody has a spleen: the mean is NaN"),
        pytest.param([*organs((), (1,)), *organs((1,), (1,))], [], id="of none, as both are as frequent"),
    ],
)
def test_hospitals_choose_what_can_be_worked_out_by_hand(
    cases: list[Case], kept: list[Any], pooled: Callable[..., Any]
) -> None:
    question = question_of(ORGANS)
    found = federated(question, cases)
    assert [one["labels_or_regions"] for one in found["postprocessing_kwargs"]] == kept
    assert found == pooled(question, cases)[0]


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True], ids=["", "ignored"])
@pytest.mark.parametrize("labels", [LESION, ORGANS, TUMOUR, CHAIN, BETWEEN], ids=lambda labels: "-".join(labels))
def test_hospitals_choose_what_nnunet_chooses_on_all_cases(
    labels: dict[str, Any], ignored: bool, pooled: Callable[..., Any]
) -> None:
    question = question_of(labels, ignored)
    every, seen = Postprocessings(question), set()
    for seed in range(8):
        cases = drawn(question, seed)
        wanted, after = pooled(question, cases)
        choice = every.read(chosen(question, cases))
        assert every.in_nnunet(choice) == wanted
        own = [every.applied(choice, torch.from_numpy(found)).numpy() for found, _ in cases]
        assert all(map(np.array_equal, own, after))
        seen.add(choice)
    assert len(seen) > 1


def test_a_structure_depends_on_those_before_it_that_share_values_with_it() -> None:
    assert Postprocessings(question_of(LESION)).steps == {"lesion": ("",)}  # nnU-Net decides on all foreground alone
    assert Postprocessings(question_of(ORGANS)).steps == {name: ("", name) for name in ("kidney", "liver", "spleen")}
    assert Postprocessings(question_of(CHAIN)).steps["third"] == ("", "first", "second", "third")
    assert Postprocessings(question_of(CHAIN)).steps["alone"] == ("", "alone")
    assert Postprocessings(question_of(BETWEEN)).steps["inner"] == ("", "outer", "inner")


def test_a_structure_with_values_in_too_few_cases_is_left_out_in_all_its_trials() -> None:
    every = Postprocessings(question_of({"liver": 1, "spleen": 2}))
    trials = [trial for trials in every.trials.values() for trial in trials]
    measures = {trial: torch.tensor([0.5, 0.7, 0.9], dtype=torch.float64) for trial in trials}
    measures["10 spleen"][0] = torch.nan  # found where it isn't, which is mended; then it is neither there nor found
    assert every.sums(measures, 2) == {**{trial: [2.1, 3.0] for trial in trials}, "10 spleen": [1.6, 2.0]}
    assert set(every.sums(measures, 3)) == set(every.trials["liver"])
    measures |= {trial: torch.full((3,), torch.nan) for trial in every.trials["spleen"]}
    assert every.sums(measures, 3)["10 spleen"] == [0.0, 0.0]
    assert every.chosen({}) == {"all_foreground": False, "structures": []}


def test_a_choice_of_other_structures_is_refused() -> None:
    every = Postprocessings(question_of(TUMOUR))
    assert every.read({}) == every.read(every.chosen({}))
    for wrong in ({"structures": ["liver"]}, {"structures": ["core", "whole"]}, {"all_foreground": 1}, {"more": True}):
        with pytest.raises(Refused, match="postprocessing"):
            every.read(wrong)
    with pytest.raises(Refused, match="other structures"):
        Postprocessings(question_of(LESION)).read({"structures": ["lesion"]})
