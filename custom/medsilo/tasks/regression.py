"""Define the objective of regression, in which networks predict one number for every case."""

import math

from torch import Tensor
from torch.nn import functional

from medsilo.tasks.metrics import Counts, Figures, Measures
from medsilo.tasks.objective import Objective

ABSOLUTE, SQUARED = "mae", "mse"  # absolute and squared errors in the unit of the target


class Regression(Objective):
    """Regression with the mean squared error as loss, and closeness as metric: 1 - |error| / (greatest - least possible
    value).

    A network's output of 0 stands for the least possible value, and 1 for the greatest. Scores clip outputs to this
    range, but the loss does not. Besides the closeness, the test of a regression reports the mean absolute error and
    the root mean squared error.
    """

    metric = "closeness"
    outputs = 1

    def __init__(self, limits: tuple[float, float]) -> None:
        """Create the objective from the least and the greatest possible value."""
        self.limits = limits

    def shares_of(self, values: Tensor) -> Tensor:
        """Scale values: the least possible value becomes 0, and the greatest becomes 1."""
        low, high = self.limits
        return (values - low) / (high - low)

    def values_of(self, output: Tensor) -> Tensor:
        """Convert a network's outputs to values [batch] in the possible range."""
        low, high = self.limits
        return low + output[:, 0].clamp(0, 1) * (high - low)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output[:, 0], self.shares_of(target))

    def case_losses(self, output: Tensor, target: Tensor) -> Tensor:
        if type(self).loss is not Regression.loss:  # the subclass has another loss
            return super().case_losses(output, target)
        return functional.mse_loss(output[:, 0], self.shares_of(target), reduction="none")

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        return 1 - (output[:, 0].clamp(0, 1) - self.shares_of(target)).abs()

    def answers(self, output: Tensor, name: str) -> list[dict[str, float | str]]:
        return [{name: value} for value in self.values_of(output.double()).tolist()]

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        found = self.values_of(output)
        error = found - target
        sizes = {ABSOLUTE: error.abs(), SQUARED: error.square()}
        return {**super().measures(output, target), **sizes, "value": target, "found": found}

    @property
    def layout(self) -> dict[str, int]:
        return {**super().layout, ABSOLUTE: 2, SQUARED: 2}

    def range_of(self, name: str) -> tuple[float, float]:
        low, high = self.limits
        return {ABSOLUTE: (0.0, high - low), SQUARED: (0.0, (high - low) ** 2)}.get(name) or super().range_of(name)

    def figures(self, counts: Counts) -> Figures:
        figures = super().figures(counts)
        squared = figures.pop(SQUARED, None)
        return figures if squared is None else {**figures, "rmse": math.sqrt(squared)}
