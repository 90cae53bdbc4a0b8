"""The cases of a validation, and how far they keep what a study promised."""

import numpy as np
from torch import Tensor

from medsilo.deploy.source import Source


class PromisesKept:
    """Collects of each case how far it keeps what is promised."""

    def __init__(self) -> None:
        self.promised: dict[int, float] = {}

    def __call__(self, source: Source, inputs: Tensor, output: Tensor, target: Tensor, cases: list[int]) -> None:
        self.promised |= {
            case: float(own)
            for told in source.kept(output, target, inputs).values()
            for case, own in zip(cases, told.tolist(), strict=True)
        }

    @property
    def kept(self) -> float | None:
        """Return the mean over cases; None where nothing was promised."""
        told = [own for own in self.promised.values() if np.isfinite(own)]
        return float(np.mean(told)) if told else None
