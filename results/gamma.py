"""Measure the regret of rules that choose gamma: the middle and the edges of the plateau of best scores.

    python -m results.gamma

Regret is the mean score of the best tried gamma minus the mean score of the chosen gamma, in points. The images are
simulated. A simulated selector names a hospital and a confidence, and is right more often if the confidence is higher.
The right hospital's expert scores higher than the global model, and a wrong hospital's expert scores lower. The study
chooses gamma on twelve validation images of each of three hospitals (medsilo.deploy.supermodel). The chosen gamma is
judged on many further images, and on darker images; for darker images, the selector is less confident and less often
right. Each simulated study has a selector with a different mean confidence. Studies in which only one gamma is best are
left out, because all rules then choose this gamma.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.timing import run
from medsilo.deploy.supermodel import THRESHOLDS, tune

HOSPITALS, VALIDATION, OTHERS, TIMES = 3, 12, 4000, 1000
# the global model's score; the difference by which a wrong expert's score is lower; the standard deviation over images
GLOBAL, LOSS, SPREAD = 0.75, 0.25, 0.05
# the right expert's score minus the global model's score, for similar hospitals and for different hospitals
DIFFERENCES = (0.05, 0.15)
# for each kind of images, the fraction by which the selector gets weaker and its noise gets stronger
KINDS = {"of the same kind": 0.0, "darker": 0.4}
CHOICES = ("upper edge", "lower edge", "middle")
Images = tuple[np.ndarray, np.ndarray, np.ndarray]


def drawn(random: np.random.Generator, images: int, difference: float, sharp: float, darker: float) -> Images:
    """Simulate the images of a study whose selector distinguishes hospitals with the mean ability `sharp`."""
    margin = sharp * (1 - darker) * random.gamma(3.0, 1.0, images) + (1 + darker) * random.normal(0, 0.8, images)
    confidence = 1 / (1 + (HOSPITALS - 1) * np.exp(-np.abs(margin)))
    common = GLOBAL + random.normal(0, SPREAD, images)
    return confidence, common + np.where(margin > 0, difference, -LOSS), common


def score(images: Images, gamma: float) -> float:
    confidence, own, common = images
    return float(np.where(confidence > gamma, own, common).mean())


def regrets(difference: float, darker: float, times: int = TIMES) -> tuple[int, Sequence[float]]:
    """Return the number of studies in which several values of gamma are best, and the mean regret of each rule in these
    studies, in points.
    """
    random = np.random.default_rng(3)
    lost = []
    for _ in range(times):
        sharp = float(np.exp(random.uniform(np.log(0.5), np.log(8.0))))
        validation = drawn(random, HOSPITALS * VALIDATION, difference, sharp, 0.0)
        others = drawn(random, OTHERS, difference, sharp, darker)
        cases = len(validation[0])
        tuning = tune({gamma: (cases, cases * score(validation, gamma)) for gamma in THRESHOLDS})
        low, high = tuning.plateau
        if low < high:
            best = max(score(others, gamma) for gamma in THRESHOLDS)
            lost.append([100 * (best - score(others, gamma)) for gamma in (high, low, tuning.threshold)])
    return len(lost), np.mean(lost, axis=0).tolist()


def main() -> None:
    """Print the table of docs/after/use-a-model.md."""
    print(f"| images | a right expert's difference | studies | {' | '.join(CHOICES)} |\n|{'---|' * (3 + len(CHOICES))}")
    for kind, darker in KINDS.items():
        for difference in DIFFERENCES:
            studies, found = regrets(difference, darker, TIMES)
            print(f"| {kind} | {100 * difference:.0f} | {studies} | {' | '.join(f'{mean:.2f}' for mean in found)} |")


if __name__ == "__main__":
    run(main, globals(), TIMES=20)
