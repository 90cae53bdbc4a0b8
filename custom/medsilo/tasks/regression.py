"""What is learned where each case has a number."""

import math

from torch import Tensor
from torch.nn import functional

from medsilo.tasks.metrics import Counts, Figures, Measures
from medsilo.tasks.objective import Objective

ABSOLUTE, SQUARED = "mae", "mse"  # of the errors in the target's own unit


class Regression(Objective):
    """Mean squared error; closeness, 1 - |error| / (greatest - least), and of the whole test set MAE and RMSE.

    The network's output is a share of the way from the least to the greatest possible value. For scores it is cut to
    that range; for the loss it is not.
    """

    metric = "closeness"
    outputs = 1

    def __init__(self, limits: tuple[float, float]) -> None:
        """limits: the least and the greatest value that a case can have."""
        self.limits = limits

    def shares_of(self, values: Tensor) -> Tensor:
        """Return values as shares of the way from the least to the greatest."""
        low, high = self.limits
        return (values - low) / (high - low)

    def values_of(self, output: Tensor) -> Tensor:
        """Return the numbers that a network's output stands for, [batch], cut to the possible range."""
        low, high = self.limits
        return low + output[:, 0].clamp(0, 1) * (high - low)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output[:, 0], self.shares_of(target))

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        return 1 - (output[:, 0].clamp(0, 1) - self.shares_of(target)).abs()

    def answers(self, output: Tensor, name: str) -> list[dict[str, float | str]]:
        return [{name: value} for value in self.values_of(output.double()).tolist()]

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        """Beside the metric: the error's size and its square; the number that is right and the one found."""
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
