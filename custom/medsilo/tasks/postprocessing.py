"""Postprocessings among which validation cases choose: what each hospital tells of them, and what follows.

In a trial something is done to what a model has found, and a structure's score is measured then. Scores of several
hospitals' cases add up to those of all.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch

from medsilo.tasks.metrics import Counts, Measures


class Postprocessings(ABC):
    """A task's postprocessings."""

    @property
    @abstractmethod
    def number(self) -> int:
        """The number of all trials."""

    @property
    @abstractmethod
    def trials(self) -> Mapping[str, Collection[str]]:
        """The names of each structure's trials; in the first one nothing is done."""

    @abstractmethod
    def chosen(self, counts: Counts) -> dict[str, Any]:
        """Return what the trials' sums and numbers speak for, as JSON holds it."""

    def sums(self, measures: Measures, least: int) -> Counts:
        """Return the sum and number of what was measured in each trial.

        A structure is left out if in one of its trials it has a value in fewer cases than `least`, and in some.
        """
        counts: Counts = {}
        for trials in self.trials.values():
            known = {trial: [value for value in measures[trial].tolist() if value == value] for trial in trials}
            if all(not values or len(values) >= least for values in known.values()):
                counts |= {trial: [math.fsum(values), float(len(values))] for trial, values in known.items()}
        return counts

    def gains(self, measures: Measures, most: float) -> Measures:
        """Return what each trial adds to a case's score, cut at `most`: that is also what it gains where something was
        found that is not there, and nothing is left of it."""
        gains = {}
        for plain, *trials in self.trials.values():
            for trial in (plain, *trials):
                gain = (measures[trial] - measures[plain]).clamp(-most, most).nan_to_num(most)
                gains[trial] = torch.where(measures[plain].isnan(), torch.nan, gain)
        return gains
