"""The regret of the chosen gamma: the middle of the plateau of best scores against its edges.

    python -m results.gamma

Regret is how many points of the mean score the best of the gammas that are tried would have been better, had it been
known. Images are simulated. A selector names a hospital with some confidence, and is right more often the surer it is.
A right expert's score is better than the global model's, a wrong expert's is worse. gamma is chosen on twelve
validation images of each of three hospitals (medsilo.deploy.supermodel). It is judged on many others: of the same kind,
and darker images, of which the selector is less sure and less often right. How sure it is on the whole differs from
study to study. Studies in which one gamma alone was best are left out, because there is no choice.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.timing import run
from medsilo.deploy.supermodel import THRESHOLDS, tune

HOSPITALS, VALIDATION, OTHERS, TIMES = 3, 12, 4000, 1000
GLOBAL, LOSS, SPREAD = 0.75, 0.25, 0.05  # the global model's score; how much worse a wrong expert is; images differ
GAINS = (0.05, 0.15)  # how much better a right expert is: hospitals that are alike, and that are not
KINDS = {"of the same kind": 0.0, "darker": 0.4}  # how far the selector's scores shrink
CHOICES = ("upper edge", "lower edge", "middle")
Images = tuple[np.ndarray, np.ndarray, np.ndarray]  # confidence; the chosen expert's score; the global model's


def drawn(random: np.random.Generator, images: int, gain: float, sharp: float, darker: float) -> Images:
    """Draw images. sharp: the study's selector's mean ability to distinguish hospitals."""
    margin = sharp * (1 - darker) * random.gamma(3.0, 1.0, images) + (1 + darker) * random.normal(0, 0.8, images)
    confidence = 1 / (1 + (HOSPITALS - 1) * np.exp(-np.abs(margin)))
    common = GLOBAL + random.normal(0, SPREAD, images)
    return confidence, common + np.where(margin > 0, gain, -LOSS), common


def score(images: Images, gamma: float) -> float:
    """Return the mean score with this gamma, which need not be one that was tried."""
    confidence, own, common = images
    return float(np.where(confidence > gamma, own, common).mean())


def regrets(gain: float, darker: float, times: int = TIMES) -> tuple[int, Sequence[float]]:
    """Return in how many studies there was something to choose, and the mean regret of each choice there, in points."""
    random = np.random.default_rng(3)
    lost = []
    for _ in range(times):
        sharp = float(np.exp(random.uniform(np.log(0.5), np.log(8.0))))
        validation = drawn(random, HOSPITALS * VALIDATION, gain, sharp, 0.0)
        others = drawn(random, OTHERS, gain, sharp, darker)
        cases = len(validation[0])
        tuning = tune({gamma: (cases, cases * score(validation, gamma)) for gamma in THRESHOLDS})
        low, high = tuning.plateau
        if low < high:
            best = max(score(others, gamma) for gamma in THRESHOLDS)
            lost.append([100 * (best - score(others, gamma)) for gamma in (high, low, tuning.threshold)])
    return len(lost), np.mean(lost, axis=0).tolist()


def main() -> None:
    """Print the table of docs/after/use-a-model.md."""
    print(f"| images | a right expert's gain | studies | {' | '.join(CHOICES)} |\n|{'---|' * (3 + len(CHOICES))}")
    for kind, darker in KINDS.items():
        for gain in GAINS:
            studies, found = regrets(gain, darker, TIMES)
            print(f"| {kind} | {100 * gain:.0f} | {studies} | {' | '.join(f'{mean:.2f}' for mean in found)} |")


if __name__ == "__main__":
    run(main, globals(), TIMES=20)
