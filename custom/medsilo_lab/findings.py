"""Define the objective of multi-label classification, in which every case has any number of findings."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from medsilo.tasks.metrics import Figures, Measures
from medsilo.tasks.objective import Objective

SENSITIVITY, SPECIFICITY = "sensitivity", "specificity"


class Findings(Objective):
    """Multi-label classification. The loss is the binary cross entropy, and the metric is the fraction of findings that
    are predicted correctly.

    The test also reports the sensitivity and specificity of each finding, and the balanced accuracy.

    A target has one number for each finding: 1 if the case has the finding, and 0 otherwise. If the output for a
    finding is above 0, the finding is predicted to be present.

    >>> goal = Findings(("oedema", "effusion"))
    >>> goal.case_scores(torch.tensor([[2.0, -1.0], [2.0, 3.0]]), torch.tensor([[1, 0], [1, 0]])).tolist()
    [1.0, 0.5]
    """

    metric = "label_accuracy"

    def __init__(self, names: Sequence[str]) -> None:
        self.label_names = tuple(names)
        self.outputs = len(self.label_names)

    def case_losses(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="none").mean(1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.case_losses(output, target).mean()

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output > 0) == (target > 0)).float().mean(1)

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        """Return the metric of each case. For each finding, the result also contains its presence, its predicted
        probability, and whether the prediction is correct.
        """
        measures, there = super().measures(output, target), target > 0
        right, chances = ((output > 0) == there).double(), output.double().sigmoid()
        for place, name in enumerate(self.label_names):
            own, said = there[:, place], right[:, place]
            measures[f"{SENSITIVITY}_{name}"] = said.where(own, torch.nan)
            measures[f"{SPECIFICITY}_{name}"] = said.where(~own, torch.nan)
            measures |= {f"there_{name}": own, f"probability_{name}": chances[:, place]}
        return measures

    @property
    def layout(self) -> dict[str, int]:
        rates = {f"{rate}_{name}": 2 for rate in (SENSITIVITY, SPECIFICITY) for name in self.label_names}
        return {**super().layout, **rates}

    def figures(self, counts: dict[str, list[float]]) -> Figures:
        figures = super().figures(counts)
        pairs = [[figures.get(f"{rate}_{name}") for rate in (SENSITIVITY, SPECIFICITY)] for name in self.label_names]
        known = [(own + other) / 2 for own, other in pairs if own is not None and other is not None]
        return {**figures, "balanced_accuracy": sum(known) / len(known) if known else None}

    def answers(self, output: Tensor, name: str) -> list[dict[str, float | str]]:
        shares = output.double().sigmoid().tolist()
        named = [f"probability_{label}" for label in self.label_names]
        return [dict(zip(named, share, strict=True)) for share in shares]
