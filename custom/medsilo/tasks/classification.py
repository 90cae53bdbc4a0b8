"""Define the objective of classification, in which every case has exactly one class."""

from collections.abc import Sequence

from torch import Tensor, cat, float64, ones, stack, zeros_like
from torch.nn import functional

from medsilo.tasks.decisions import (
    DECIDED,
    PLACED,
    ClassCounts,
    area_under_curve,
    areas_under_curve,
    average_precisions,
    balanced_accuracy,
    best_beside,
    calibration_error,
)
from medsilo.tasks.measuring import chances, confusion, judged, rates_of, reliability
from medsilo.tasks.metrics import BINS, BROAD, CHANCES, CONFUSION, RELIABILITY, WEIGHT, Counts, Figures, Measures
from medsilo.tasks.objective import Objective

AT_LEAST = 0.9  # sensitivity is reported at this specificity, and specificity at this sensitivity
AT_RATE = ("sensitivity_at_90_specificity", "specificity_at_90_sensitivity")


class Classification(Objective):
    """Classification with cross entropy as loss and accuracy as metric.

    Besides the accuracy, the test of a classification reports balanced accuracy, calibration, and the areas under the
    ROC curve and the precision-recall curve. For two classes, the test also reports sensitivity, specificity, precision
    and F1 at a threshold on the probability.

    >>> Classification(("well", "ill")).label_names
    ('well', 'ill')
    """

    metric = "accuracy"
    cross_entropy = 1.0

    def __init__(self, classes: int | Sequence[str], outputs: int | None = None) -> None:
        """Create the objective.

        Args:
            classes: the names of the classes, or their number
            outputs: the number of logits, which is 1 if a single logit distinguishes two classes; by default, the
                number of classes
        """
        self.label_names = tuple(map(str, range(classes)) if isinstance(classes, int) else classes)
        self.classes = len(self.label_names)
        self.outputs = outputs or self.classes

    @property
    def classifies(self) -> ClassCounts:
        return ClassCounts(self.classes)

    def scores(self, output: Tensor) -> Tensor:
        """Return a logit for each class. A single output of a network is the logit of the second class; the first class
        then has the logit 0.
        """
        return output if output.shape[1] > 1 else cat([zeros_like(output), output], 1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(output), target)

    def case_losses(self, output: Tensor, target: Tensor) -> Tensor:
        if type(self).loss is not Classification.loss:  # the subclass has another loss
            return super().case_losses(output, target)
        return functional.cross_entropy(self.scores(output), target, reduction="none")

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.scores(output).argmax(1) == target).float()

    def probabilities(self, output: Tensor) -> Measures:
        return {f"p{label}": column for label, column in enumerate(self.scores(output).softmax(1).unbind(1))}

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        found = {"label": target, "found": self.scores(output).argmax(1)}
        return {**super().measures(output, target), **found, **self.probabilities(output)}

    def counts(self, measures: Measures, patients: Sequence[str], least: int) -> Counts:
        """Return the counts of a site's test cases, including a weighted confusion matrix and weighted histograms.

        The confusion matrix and the histograms are left out if a class that occurs has too few cases.
        """
        counts = super().counts(measures, patients, least)
        labels, found = measures["label"].long(), measures["found"].long()
        weights = measures.get(WEIGHT, ones(len(labels), dtype=float64))
        sizes = labels.bincount(weights).round(decimals=6)
        if sizes[sizes > 0].min() >= least:
            counts[CONFUSION] = confusion(labels, found, self.classes, weights)
            probabilities = stack([measures[f"p{label}"] for label in range(self.classes)], 1)
            counts |= {
                CHANCES: chances(labels, probabilities, weights),
                RELIABILITY: reliability(probabilities, weights),
            }
        return counts

    @property
    def layout(self) -> dict[str, int]:
        places = {CHANCES: self.classes * 2 * BINS, RELIABILITY: len(judged(self.classes)) * BROAD}
        return {**super().layout, CONFUSION: self.classes**2, **places}

    def figures(self, counts: Counts) -> Figures:
        figures = super().figures(counts)
        if CONFUSION in counts:
            figures["balanced_accuracy"] = balanced_accuracy(counts[CONFUSION], self.classes)
        if CHANCES in counts:
            figures["auroc"] = area_under_curve(counts[CHANCES], self.classes)
            if self.classes > 2:  # with two classes, both classes have the same area under the ROC curve
                areas = areas_under_curve(counts[CHANCES], self.classes)
                figures |= {f"auroc_{label}": area for label, area in enumerate(areas)}
            figures |= self._of_curves(counts[CHANCES])
        if PLACED in counts:
            figures["calibration_error"] = calibration_error(counts[RELIABILITY], counts[PLACED])
        if DECIDED in counts:
            rates = rates_of(counts[DECIDED])
            figures["sensitivity"], figures["specificity"] = rates or (None, None)
            _, wrong, missed, right = counts[DECIDED]
            figures["precision"] = right / (right + wrong) if right + wrong else None
            figures["f1"] = 2 * right / (2 * right + wrong + missed) if right + wrong + missed else None
        return figures

    def _of_curves(self, histograms: Sequence[float]) -> Figures:
        """Return the area under each class's precision-recall curve, and rates from each class's ROC curve. `pr_auc` is
        the area of the second of two classes, or the mean area of more classes.
        """
        areas, best = average_precisions(histograms, self.classes), best_beside(histograms, self.classes, AT_LEAST)
        known = [area for area in areas if area is not None]
        whole = areas[1] if self.classes == 2 else sum(known) / len(known) if known else None
        figures: Figures = {"pr_auc": whole, **{f"pr_auc_{label}": area for label, area in enumerate(areas)}}
        for place, name in enumerate(AT_RATE):
            figures |= {f"{name}_{label}": both[place] if both else None for label, both in enumerate(best)}
        return figures

    def answers(self, output: Tensor, name: str) -> list[dict[str, float | str]]:
        return [self.in_words(shares) for shares in self.scores(output.double()).softmax(1).tolist()]

    def in_words(self, shares: Sequence[float]) -> dict[str, float | str]:
        """Return a case's row of predictions.csv: a mapping from column names to the predicted class and the class
        probabilities.
        """
        named = [f"probability_{label}" for label in self.label_names]
        best = max(range(len(shares)), key=shares.__getitem__)
        return {"class": self.label_names[best], **dict(zip(named, shares, strict=True))}
