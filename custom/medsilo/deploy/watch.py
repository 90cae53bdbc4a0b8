"""Watching predictions: what a package keeps, at the hospital, of the cases that a model answers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

Seen = dict[str, float]  # numbers of one case, by name
SEEN = "seen"  # under which a row has them until the rows are written
MACHINE = "scanner "  # before a scanner's maker and model: 1 for a case of it


class Watch(Protocol):
    """Keeps numbers of cases. An entry point `medsilo.watchers` is a function from a Predictor to one or None;
    the first that returns one does.
    """

    def measure(self, inputs: Tensor, output: Tensor, said: Sequence[Mapping[str, Any]]) -> list[Seen]:
        """Return the numbers of each case. said: its row of predictions.csv, as far as it is known."""

    def keep(self, cases: Sequence[Seen]) -> None:
        """Keep what was measured of patients, in order."""


def mean_of(cases: Sequence[Seen]) -> Seen:
    """Return the numbers of a patient: the mean over cases.

    >>> mean_of([{"entropy": 0.0}, {"entropy": 1.0}])
    {'entropy': 0.5}
    """
    return {name: sum(case.get(name, 0.0) for case in cases) / len(cases) for name in (cases[0] if cases else ())}
