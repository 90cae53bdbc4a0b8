"""Compute discrimination and calibration of predicted probabilities, their confidence intervals, and means over
studies.

The module needs statsmodels, from pyproject.toml's group dev.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import ttest_1samp
from statsmodels.discrete.discrete_model import Logit
from statsmodels.stats.nonparametric import rank_compare_2indep
from statsmodels.tools.sm_exceptions import PerfectSeparationWarning


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % confidence interval, and with a p-value if the number is a difference."""

    value: float
    low: float
    high: float
    p: float = 1.0

    def text(self, scale: float, digits: int, sign: str = "") -> str:
        """Return the estimate as text, for example "0.81 (0.76 to 0.86)"."""
        value, low, high = (f"{number * scale:{sign}.{digits}f}" for number in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


def auc(scores: np.ndarray, died: np.ndarray) -> Estimate:
    """Return the area under the ROC curve with DeLong's interval (DeLong et al. 1988), computed as in Brunner and
    Munzel's test.
    """
    found = rank_compare_2indep(scores[died == 1], scores[died == 0], use_t=False)
    return Estimate(float(found.prob1), *map(float, found.conf_int()))


def calibration_in_the_large(scores: np.ndarray, died: np.ndarray) -> Estimate:
    """Return the intercept a of the model logit P(death) = a + scores; a value above zero means more deaths than
    predicted.
    """
    return _fitted(np.ones((len(scores), 1)), scores, died)


def calibration_slope(scores: np.ndarray, died: np.ndarray) -> Estimate:
    """Return the slope b of the model logit P(death) = a + b · scores; a value below one means that predictions are too
    extreme.
    """
    return _fitted(np.stack([scores, np.ones(len(scores))], 1), np.zeros(len(scores)), died)


def _fitted(design: np.ndarray, offset: np.ndarray, died: np.ndarray) -> Estimate:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PerfectSeparationWarning)
            fit = Logit(died, design, offset=offset).fit(disp=False)
    except PerfectSeparationWarning:
        raise ValueError("a calibration does not converge: scores separate a study's deaths from others") from None
    return Estimate(float(fit.params[0]), *map(float, fit.conf_int()[0]))


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean over studies with Student's interval, for which the studies are the sample."""
    value = float(np.mean(values))
    if not np.ptp(values):
        return Estimate(value, value, value, float(value == 0))
    test = ttest_1samp(values, 0)
    low, high = test.confidence_interval()
    return Estimate(value, float(low), float(high), float(test.pvalue))
