"""The threshold gamma of FedSM (Alg. 2), chosen on the hospitals' pooled validation cases."""

from collections.abc import Mapping
from dataclasses import dataclass

THRESHOLDS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)  # those that are tried by default
EQUAL = 1e-9  # mean scores that are nearer to each other are equal


@dataclass(frozen=True)
class Tuning:
    """For each threshold that was tried (threshold, cases, mean score), in rising order."""

    curve: tuple[tuple[float, int, float], ...]

    @property
    def threshold(self) -> float:
        """The middle of the plateau: its edges are where the next image may already be answered by the wrong model."""
        low, high = self.plateau
        return low if low == high else round((low + high) / 2, 6)

    @property
    def plateau(self) -> tuple[float, float]:
        """The ends of the widest run of neighbours that all have the best mean score."""
        best = max(score for _, _, score in self.curve)
        runs: list[list[float]] = [[]]
        for gamma, _, score in self.curve:
            if best - score <= EQUAL:
                runs[-1].append(gamma)
            elif runs[-1]:
                runs.append([])
        low, *_, high = max(((run[0], run[-1]) for run in runs if run), key=lambda ends: (ends[1] - ends[0], ends[1]))
        return low, high


def tune(counts: Mapping[float, tuple[int, float]]) -> Tuning:
    """The curve and its best threshold, from (cases, summed score) of all hospitals together for each threshold."""
    return Tuning(tuple((float(gamma), cases, score / cases) for gamma, (cases, score) in sorted(counts.items())))
