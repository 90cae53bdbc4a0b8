"""Discrimination and calibration of predicted probabilities, with intervals; and means over studies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import expit
from scipy.stats import norm, rankdata
from scipy.stats import t as student

NORMAL = float(norm.ppf(0.975))


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, and p of no difference where it is one."""

    value: float
    low: float
    high: float
    p: float = 1.0

    def text(self, scale: float, digits: int, sign: str = "") -> str:
        """Return it as a cell: "0.81 (0.76 to 0.86)"."""
        value, low, high = (f"{number * scale:{sign}.{digits}f}" for number in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


def auc(scores: np.ndarray, died: np.ndarray) -> Estimate:
    """Return the area under the ROC curve with DeLong's interval (DeLong et al. 1988)."""
    ill, well = scores[died == 1], scores[died == 0]
    ranks = rankdata(np.concatenate([ill, well]))
    above = (ranks[: len(ill)] - rankdata(ill)) / len(well)  # of each death, the survivors with a lower score
    below = 1 - (ranks[len(ill) :] - rankdata(well)) / len(ill)
    error = float(np.sqrt(above.var(ddof=1) / len(ill) + below.var(ddof=1) / len(well)))
    value = float(above.mean())
    return Estimate(value, value - NORMAL * error, value + NORMAL * error)


def calibration_in_the_large(scores: np.ndarray, died: np.ndarray) -> Estimate:
    """Return a in logit P(death) = a + scores: above zero, more died than was predicted."""
    return _fitted(np.ones((len(scores), 1)), scores, died)


def calibration_slope(scores: np.ndarray, died: np.ndarray) -> Estimate:
    """Return b in logit P(death) = a + b · scores: below one, predictions are too extreme."""
    return _fitted(np.stack([scores, np.ones(len(scores))], 1), np.zeros(len(scores)), died)


def _fitted(design: np.ndarray, offset: np.ndarray, died: np.ndarray) -> Estimate:
    """Return the first coefficient of a logistic regression, by Newton's steps, with Wald's interval."""
    weights = np.zeros(design.shape[1])
    for _ in range(100):
        chances = expit(offset + design @ weights)
        information = (design * (chances * (1 - chances))[:, None]).T @ design
        step = np.linalg.solve(information, design.T @ (died - chances))
        weights = weights + step
        if np.abs(step).max() < 1e-10:
            half = NORMAL * float(np.sqrt(np.linalg.inv(information)[0, 0]))
            return Estimate(float(weights[0]), float(weights[0]) - half, float(weights[0]) + half)
    raise ValueError("a calibration does not converge: the predictions tell a study's deaths apart without error")


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean over studies with Student's interval: studies are what is drawn."""
    value, degrees = float(np.mean(values)), len(values) - 1
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    half = float(student.ppf(0.975, degrees)) * error
    p = float(2 * student.sf(abs(value) / error, degrees)) if error else float(value == 0)
    return Estimate(value, value - half, value + half, p)
