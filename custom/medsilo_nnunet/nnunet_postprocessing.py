"""nnU-Net's choice of postprocessing: where only the largest component is kept, since that raises Dice.

nnU-Net decides in steps: first for all foreground together, then for each structure, on what the steps before left. A
structure's Dice depends on few of them. So each hospital tells sums over its cases for all that those could decide, and
one exchange is enough. The sums of several hospitals add up to those of all their cases.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import product
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import Tensor

from medsilo.extend import Counts, Postprocessings, Refused, Section, checked
from medsilo_nnunet.question import Named, SegmentationQuestion

FOREGROUND = ""  # the first step's name; structures have longer ones
FUNCTION = "remove_all_but_largest_component_from_segmentation"  # of nnU-Net's
NO, YES = "01"


class Postprocessing(Section):
    """The places where only the largest component is kept: in all foreground together, then in these structures."""

    all_foreground: bool = False
    structures: Annotated[tuple[Named, ...], Field(max_length=256)] = ()

    @property
    def steps(self) -> list[str]:
        """The steps in order."""
        return [*([FOREGROUND] if self.all_foreground else []), *self.structures]


class LargestComponents(Postprocessings):
    """All postprocessings that nnU-Net could choose for a question.

    In a trial, some of the steps that a structure's Dice depends on are made. The trial's name is a digit for each of
    these steps, 1 where it is made, and the structure's name.
    """

    def __init__(self, question: SegmentationQuestion) -> None:
        regions, self.ignored = question.regions, question.ignored
        # In nnU-Net's order, and as it names labels and regions
        names = list(regions) if question.has_regions else sorted(regions, key=lambda name: regions[name])
        self.places: dict[str, Any] = {
            name: question.labels[name] if question.has_regions else regions[name][0] for name in names
        }
        self.places[FOREGROUND] = sorted({value for own in regions.values() for value in own})
        self.steps = {name: _steps_of(names[: number + 1], regions) for number, name in enumerate(names)}

    @property
    def number(self) -> int:
        return sum(2 ** len(steps) for steps in self.steps.values())

    @cached_property
    def trials(self) -> dict[str, dict[str, list[str]]]:
        """By structure and trial: the steps that are made."""
        return {
            name: {
                _named(made, name): [step for step, one in zip(steps, made, strict=True) if one == YES]
                for made in product(NO + YES, repeat=len(steps))
            }
            for name, steps in self.steps.items()
        }

    # ------------------------------------------------------------------ at a hospital
    def tried_on(self, found: Tensor, right: Tensor) -> dict[str, float]:
        """Return by trial the Dice of its structure, by nnU-Net; NaN where it is neither there nor found.

        found, right: the labels of one case, [D, H, W].
        """
        from nnunetv2.evaluation.evaluate_predictions import compute_metrics

        every, wanted = [found.numpy()], right.numpy()

        @cache
        def after(number: int, step: str) -> int:
            """Return the number of the labels that a step makes of others."""
            labels = _applied([self.places[step]], every[number])
            if np.array_equal(labels, every[number]):
                return number
            every.append(labels)
            return len(every) - 1

        @cache
        def dice(number: int, structure: str) -> float:
            place, labels = self.places[structure], _Labels(wanted, every[number])
            return float(compute_metrics("right", "found", labels, [place], self.ignored)["metrics"][place]["Dice"])

        scores = {}
        for structure, trials in self.trials.items():
            for trial, made in trials.items():
                number = 0
                for step in made:
                    number = after(number, step)
                scores[trial] = dice(number, structure)
        return scores

    # ------------------------------------------------------------------ where it is decided
    def chosen(self, counts: Counts) -> dict[str, Any]:
        """Return what nnU-Net's determine_postprocessing chooses on the cases behind these sums, as JSON holds it."""

        def mean(structure: str, made: str) -> float:
            total, number = counts.get(_named(made, structure), (0.0, 0.0))
            return total / number if number else math.nan  # which is neither above nor below anything

        plain, cut = (
            [mean(structure, first + NO * (len(steps) - 1)) for structure, steps in self.steps.items()]
            for first in (NO, YES)
        )
        better, worse = np.mean(cut) > np.mean(plain), any(one < other for one, other in zip(cut, plain, strict=True))
        made = {FOREGROUND: bool(better) and not worse}
        for structure, (*before, last) in self.steps.items():
            if last == structure:
                so_far = "".join(YES if made[step] else NO for step in before)
                made[structure] = mean(structure, so_far + YES) > mean(structure, so_far + NO)
        foreground = made.pop(FOREGROUND)
        structures = tuple(name for name, is_made in made.items() if is_made)
        return Postprocessing(all_foreground=foreground, structures=structures).model_dump(mode="json")

    # ------------------------------------------------------------------ in use
    def read(self, choice: Mapping[str, Any]) -> Postprocessing:
        """Check a choice; raises Refused."""
        try:
            read = checked(Postprocessing, choice, "postprocessing")
        except ValidationError as error:
            raise Refused("the postprocessing is none of medsilo's; take the model from its study") from error
        own = [structure for structure, steps in self.steps.items() if steps[-1] == structure]
        if list(read.structures) != [structure for structure in own if structure in read.structures]:
            raise Refused("the postprocessing is of other structures than the question; take the study's own")
        return read

    def applied(self, choice: Postprocessing, labels: Tensor) -> Tensor:
        """Return labels after a postprocessing, both [D, H, W]."""
        return torch.from_numpy(_applied([self.places[step] for step in choice.steps], labels.numpy()))

    def in_nnunet(self, choice: Postprocessing) -> dict[str, Any]:
        """Return a postprocessing as nnU-Net writes it into postprocessing.json."""
        return {
            "postprocessing_fns": [FUNCTION for _ in choice.steps],
            "postprocessing_kwargs": [{"labels_or_regions": self.places[step]} for step in choice.steps],
        }


def _steps_of(names: Sequence[str], regions: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the steps that the last structure's Dice depends on, in order."""
    if len(regions) == 1:
        return (FOREGROUND,)  # nnU-Net takes no second one then
    found: list[str] = []
    touched = set(regions[names[-1]])
    for name in reversed(names):
        if touched & set(regions[name]):
            touched |= set(regions[name])
            found.insert(0, name)
    return (FOREGROUND, *found)


def _named(made: Sequence[str], structure: str) -> str:
    return f"{''.join(made)} {structure}"


def _applied(places: Sequence[Any], labels: np.ndarray) -> np.ndarray:
    from nnunetv2.postprocessing import remove_connected_components as nnunet

    given = [{"labels_or_regions": place} for place in places]
    return np.asarray(nnunet.apply_postprocessing(labels, [getattr(nnunet, FUNCTION)] * len(given), given))


class _Labels:
    """Labels in memory, in place of the class with which nnU-Net reads files."""

    def __init__(self, right: np.ndarray, found: np.ndarray) -> None:
        self.labels = {"right": right, "found": found}

    def read_seg(self, name: str) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the labels of that name."""
        return self.labels[name], {}
