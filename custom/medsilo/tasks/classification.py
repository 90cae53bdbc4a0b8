"""Tasks that give every case one of several classes."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, cat, stack, zeros_like
from torch.nn import functional

from medsilo.tasks.metrics import (
    BINS,
    CHANCES,
    CONFUSION,
    Counts,
    Figures,
    Measures,
    area_under_curve,
    balanced_accuracy,
    chances,
    confusion,
)
from medsilo.tasks.task import Task


class Classification(Task):
    """Cross entropy; accuracy, and of the whole test set balanced accuracy and the area under the ROC curve."""

    metric: ClassVar[str] = "accuracy"

    def output_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.classes,)

    def scores(self, output: Tensor) -> Tensor:
        """Return a score for each class: one output of two classes is the second's, against 0 of the first."""
        return output if output.shape[1] > 1 else cat([zeros_like(output), output], 1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(output), target)

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.scores(output).argmax(1) == target).float()

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        """Beside the metric: the class, the class found, and the probability of each class."""
        scores = self.scores(output)
        probabilities = {f"p{label}": column for label, column in enumerate(scores.softmax(1).unbind(1))}
        return {**super().measures(output, target), "label": target, "found": scores.argmax(1), **probabilities}

    def counts(self, measures: Measures, patients: Sequence[str], least: int) -> Counts:
        """Classes are told apart only where each that occurs has `least` cases."""
        counts = super().counts({self.metric: measures[self.metric]}, patients, least)
        labels, found = measures["label"].long(), measures["found"].long()
        sizes = labels.bincount()
        if sizes[sizes > 0].min() >= least:
            counts[CONFUSION] = confusion(labels, found, self.classes)
            counts[CHANCES] = chances(labels, stack([measures[f"p{label}"] for label in range(self.classes)], 1))
        return counts

    @property
    def layout(self) -> dict[str, int]:
        return {**super().layout, CONFUSION: self.classes**2, CHANCES: self.classes * 2 * BINS}

    def figures(self, counts: Counts) -> Figures:
        figures = super().figures(counts)
        if CONFUSION in counts:
            figures["balanced_accuracy"] = balanced_accuracy(counts[CONFUSION], self.classes)
        if CHANCES in counts:
            figures["auroc"] = area_under_curve(counts[CHANCES], self.classes)
        return figures
