"""What the choice of gamma costs: the middle of the plateau of best scores against its edge.

    python benchmarks/gamma.py

Regret is how many points of the mean score the best gamma on other images would have been better, were it known. Images
are drawn: a selector names each hospital's images with some confidence, right more often the surer it is; a personal
model answers its own hospital's images better, and others' worse, than the global model does. gamma is chosen on the
validation images of three hospitals (medsilo.deploy.tuning) and judged on many others: of the same kind, and darker
ones, of which the selector is less sure and less often right.
"""

import numpy as np

from medsilo.deploy.tuning import THRESHOLDS, Tuning, tune

HOSPITALS, VALIDATION, OTHERS, TIMES = 3, 12, 4000, 400
GLOBAL, GAIN, LOSS, SPREAD = 0.80, 0.06, 0.25, 0.05  # scores: the global model's, the right expert's more, a wrong's less
Cases = tuple[np.ndarray, np.ndarray, np.ndarray]  # confidence; score of the chosen expert; score of the global model


def drawn(random: np.random.Generator, cases: int, darker: float, sharp: float) -> Cases:
    """Draw images. darker: how far their logits shrink, 0 to 1. sharp: how sure the study's selector is on the whole."""
    margin = sharp * (1 - darker) * random.gamma(3.0, 1.0, cases) - random.normal(0, 0.8, cases) * (1 + darker)
    confidence = 1 / (1 + (HOSPITALS - 1) * np.exp(-np.abs(margin)))
    common = GLOBAL + random.normal(0, SPREAD, cases)
    return confidence, common + np.where(margin > 0, GAIN, -LOSS), common


def scores(cases: Cases) -> dict[float, tuple[int, float]]:
    """Return the number of cases and their summed score for each gamma that is tried."""
    confidence, expert, common = cases
    return {g: (len(common), float(np.where(confidence > g, expert, common).sum())) for g in THRESHOLDS}


def score(cases: Cases, gamma: float) -> float:
    """Return the mean score with this gamma, which need not be one that was tried."""
    confidence, expert, common = cases
    return float(np.where(confidence > gamma, expert, common).mean())


def edges(tuning: Tuning) -> dict[str, float]:
    """Return the gammas that are compared."""
    low, high = tuning.plateau
    return {"upper edge": high, "lower edge": low, "middle": tuning.threshold}
