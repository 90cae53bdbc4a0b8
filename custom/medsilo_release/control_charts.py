"""Control charts: sums that rise when what is seen drifts away from the cases of the validation.

Page, Continuous inspection schemes, Biometrika 1954. Every number has a chart to both sides. There are three groups, of
what goes in, of what the model says and of outcomes, each with limits of its own and a share of the false alarms.
Limits are found by drawing years of patients like those of the validation, and with each year other cases to estimate
mean and deviation from: so they know how many charts there are, how they go together, and how few cases they rest on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medsilo_release.patient_sums import BLOCK, OUTCOME, group_of

YEARS = 400  # that are drawn
# False alarms of a year, by group; of n on average there are none in a share of exp(-n) of the years. What goes in
# changes more, where it changes, than outcomes do. Less than one together: cases drawn again have thinner tails.
SHARES = {"inputs": 0.25, "answers": 0.25, OUTCOME: 0.4}
SELDOM = 0.9  # share of the years in which a chart stays below what is its own measure: the others' tails differ
SLACK, FEW = 0.5, 2.5  # deviations of a sum that are let pass; more where few cases make the mean uncertain
LEAST_DEVIATION = 0.2  # that is believed of cases drawn again
A_YEAR = 1000  # patients, until it is known how many there are
LONGEST = 4000  # sums of a year


@dataclass(frozen=True)
class Alarm:
    """An alarm: after which sum, by which number, and how far it has drifted, in standard deviations of a patient."""

    block: int
    name: str
    drift: float


@dataclass(frozen=True)
class Charts:
    """Charts of some numbers, and the sums at which there is an alarm.

    >>> import numpy as np
    >>> charts = Charts.against(np.random.default_rng(0).normal(size=(200, 2)), ("age", "entropy"), 500)
    >>> blocks = np.random.default_rng(1).normal(size=(60, 2)) / 5**0.5
    >>> charts.run(blocks)[1], charts.run(blocks + np.array([0, 1.0]))[1][0].name
    ([], 'entropy')
    """

    names: Sequence[str]
    slack: float
    limits: np.ndarray  # of each

    @classmethod
    def against(cls, reference: np.ndarray, names: Sequence[str], a_year: int = A_YEAR) -> "Charts":
        """Return charts with one false alarm a year. reference: [cases, names], standardised; a_year: patients."""
        draw, (cases, _) = np.random.default_rng(0), reference.shape
        slack = max(SLACK, FEW * (BLOCK / cases) ** 0.5)
        means, apart = np.empty((YEARS, len(names))), np.empty((YEARS, len(names)))
        for year in range(YEARS):
            again = reference[draw.integers(cases, size=cases)]
            means[year], apart[year] = again.mean(0), again.std(0).clip(min=LEAST_DEVIATION)
        up, down, most = (np.zeros((YEARS, len(names))) for _ in range(3))
        for _ in range(min(LONGEST, max(1, a_year // BLOCK))):
            drawn = reference[draw.integers(cases, size=(YEARS, BLOCK))].mean(1)
            up, down = _after(up, down, (drawn - means) / apart, slack)
            most = np.maximum(most, np.maximum(up, down))
        groups, own = np.array([group_of(name) for name in names]), np.quantile(most, SELDOM, axis=0).clip(min=1)
        shares = {group: (most / own)[:, groups == group].max(1) for group in {*groups}}
        return cls(names, slack, own * [np.quantile(shares[group], np.exp(-SHARES[group])) for group in groups])

    def of(self, names: Sequence[str]) -> "Charts":
        """Return the charts of some of the numbers alone."""
        return Charts(names, self.slack, self.limits[[list(self.names).index(name) for name in names]])

    def run(self, blocks: np.ndarray) -> tuple[np.ndarray, list[Alarm]]:
        """Return the sums after each block, [blocks, names], as shares of their limits, and the alarms; after one all
        charts begin again. blocks: means over patients, [blocks, names]."""
        up = down = np.zeros(len(self.names))
        shares, alarms, since = np.zeros(blocks.shape), list[Alarm](), np.zeros((2, len(self.names)), int)
        for number, block in enumerate(blocks):
            up, down = _after(up, down, block, self.slack)
            since = np.where(np.stack([up, down]) == 0, number + 1, since)
            shares[number] = np.maximum(up, down) / self.limits
            if shares[number].max() > 1:
                worst = int(shares[number].argmax())
                begun = int(since[int(down[worst] > up[worst]), worst])
                alarms.append(Alarm(number, self.names[worst], float(blocks[begun : number + 1, worst].mean())))
                up = down = np.zeros(len(self.names))
                since = np.full_like(since, number + 1)
        return shares, alarms


def _after(up: np.ndarray, down: np.ndarray, mean: np.ndarray, slack: float) -> tuple[np.ndarray, np.ndarray]:
    apart = mean * BLOCK**0.5
    return np.maximum(0, up + apart - slack), np.maximum(0, down - apart - slack)
