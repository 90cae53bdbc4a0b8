"""The loss of a case at each cut, and the answer at one: labels, a finding, a structure, an interval, a time.

Cuts rise: each answer holds all of that before it, and the last leaves nothing out. An answer never holds less than the
model's own: the likeliest label, the ordinary mask, a finding of one half.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medsilo.extend import Classification, Goal, Segmentation

CUTS = 96
SHARES = torch.cat([torch.logspace(0, -4, CUTS - 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
WIDTHS = torch.logspace(-3, 0, CUTS, dtype=torch.float64)  # of half an interval, as a share of the whole range
TIMES = torch.cat([torch.linspace(12, -11, CUTS - 1, dtype=torch.float64), torch.tensor([-torch.inf])])
LARGEST = 20.0  # a mask's size against the structure's, from where on it is all one
TEMPERATURES = torch.logspace(-0.6, 0.6, 13, dtype=torch.float64)
LOST, OF, SIZE = "lost", "of", "size"


class Risk(ABC):
    """A kind of promise for one goal. `lost` of `of` is what a case loses at each cut; `size` is that of its answer."""

    says: str  # what is promised
    sized: str  # what size means

    def __init__(self, goal: Any) -> None:
        self.goal = goal

    @abstractmethod
    def measure(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return lost and size, [cases, cuts], and of, [cases]."""

    def columns(self, output: Tensor, cuts: Sequence[int]) -> list[dict[str, Any]]:
        """Return what each case's answer is at its cut."""
        return [{} for _ in output]


class Label(Risk):
    """The set of labels whose probability is at least the cut's, and the likeliest."""

    says, sized = "the set of labels holds the true one", "labels in a set"

    def _sets(self, output: Tensor) -> Tensor:
        """Return which labels are in, [cases, labels, cuts]."""
        shares = self.goal.scores(output.double()).softmax(1)
        first = torch.nn.functional.one_hot(shares.argmax(1), shares.shape[1]).bool()
        return first[..., None] | (shares[..., None] >= SHARES.to(shares.device))

    def measure(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        sets = self._sets(output)
        missed = ~sets[torch.arange(len(target)), target]
        return {LOST: missed, OF: torch.ones(len(target)), SIZE: sets.sum(1)}

    def columns(self, output: Tensor, cuts: Sequence[int]) -> list[dict[str, Any]]:
        names = self.goal.label_names
        sets = (own[:, cut] for own, cut in zip(self._sets(output), cuts, strict=True))
        return [{"promised_set": "|".join(n for n, own in zip(names, each, strict=True) if own)} for each in sets]


class Sensitivity(Risk):
    """A case counts as found where the second label's probability is at least the cut's, or one half."""

    says, sized = "sensitivity: a case with the finding is found", "share of cases that are called found"

    def _found(self, output: Tensor) -> Tensor:
        shares = self.goal.scores(output.double()).softmax(1)[:, 1, None]
        return shares >= SHARES.clamp(max=0.5).to(shares.device)

    def measure(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        found, having = self._found(output), (target == 1)
        return {LOST: ~found & having[:, None], OF: having, SIZE: found}

    def columns(self, output: Tensor, cuts: Sequence[int]) -> list[dict[str, Any]]:
        return [{"promised_found": int(own[cut])} for own, cut in zip(self._found(output), cuts, strict=True)]


class Structure(Risk):
    """The ordinary mask, and each place whose probability of the structure is at least the cut's."""

    says, sized = "at most this share of the structure is missed", "mask against the structure's size"

    def __init__(self, goal: Segmentation) -> None:
        super().__init__(goal)
        self.labels = list(next(iter(goal.structures.values())))

    def measure(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        share = output.softmax(1)[:, self.labels].sum(1).flatten(1)
        labels = torch.tensor(self.labels, dtype=target.dtype, device=target.device)
        share = torch.where(torch.isin(output.argmax(1).flatten(1), labels), 1.0, share)
        right = self.goal.masks(target)[:, 0].flatten(1)
        cuts = SHARES.to(share).flip(0)  # rising
        place = torch.bucketize(share, cuts, right=True) - 1  # the last cut that is not above the share

        def reached(counted: Tensor) -> Tensor:
            at = torch.zeros(len(share), CUTS, dtype=torch.float64, device=share.device)
            return at.scatter_add_(1, place, counted.double()).flip(1).cumsum(1)

        whole = right.sum(1)
        size = reached(torch.ones_like(share)) / whole.clamp(min=1)[:, None]
        return {LOST: whole[:, None] - reached(right), OF: whole, SIZE: size.clamp(max=LARGEST)}

    def marked(self, output: Tensor, cut: int) -> Tensor:
        """Return outputs whose likeliest label is the structure's at each place of the promised mask."""
        rest = [label for label in range(output.shape[1]) if label not in self.labels]
        own, other = output[:, self.labels], output[:, rest]
        least = torch.logit(SHARES[cut]).clamp(-30, 30).to(output)
        more = own.logsumexp(1) - other.logsumexp(1) - least + other.amax(1) - own.amax(1)
        marked = output.clone()
        marked[:, self.labels] += more.clamp(min=0)[:, None]
        return marked


class Interval(Risk):
    """The number found, and half of an interval's width to both sides."""

    says, sized = "the interval holds the true number", "width of the interval, as a share of the whole range"

    def measure(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        apart = (output[:, 0].double().clamp(0, 1) - self.goal.shares_of(target.double())).abs()
        widths = WIDTHS.to(apart.device)
        size = (2 * widths).clamp(max=1).expand(len(apart), -1)
        return {LOST: apart[:, None] > widths + 1e-9, OF: torch.ones_like(apart), SIZE: size}

    def columns(self, output: Tensor, cuts: Sequence[int]) -> list[dict[str, Any]]:
        low, high = self.goal.limits
        half = WIDTHS[list(cuts)] * (high - low)
        found = self.goal.values_of(output.double().cpu())
        ends = zip((found - half).clamp(min=low).tolist(), (found + half).clamp(max=high).tolist(), strict=True)
        return [{"promised_low": first, "promised_high": last} for first, last in ends]


class Time(Risk):
    """A time until which a case is without the event: exp(cut − log risk).

    Calibrated on the time that was seen, whether an event or the end of watching ended it: no case was without the
    event for less than that, so that the promise holds whatever ended the watching (Candès et al. 2023).
    """

    says, sized = "the case is without the event until the time given", "the time given, against the time seen"

    def measure(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        given = (TIMES.to(output.device) - output[:, :1].double()).exp()
        seen = target[:, :1].double()
        return {LOST: given > seen, OF: torch.ones(len(given)), SIZE: (given / seen.clamp(min=1e-9)).clamp(max=1)}

    def columns(self, output: Tensor, cuts: Sequence[int]) -> list[dict[str, Any]]:
        times = (TIMES[list(cuts)] - output[:, 0].double().cpu()).exp()
        return [{"promised_until": time} for time in times.tolist()]


def risk_of(goal: Goal, kind: str | None) -> Risk | None:
    """Return the promise of this kind for a goal, the goal's own where none is named; None where there is none."""
    if isinstance(goal, Classification):
        return Label(goal) if kind is None else Sensitivity(goal) if goal.decides else None
    if kind is not None:
        return None
    if isinstance(goal, Segmentation):
        return Structure(goal) if not goal.overlaps and goal.outputs == goal.classes else None
    if hasattr(goal, "shares_of"):  # a regression
        return Interval(goal)
    return None if goal.by_case else Time(goal)  # of survival


def calibration(goal: Goal, output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return, of a classification, each case's loss at every temperature, its confidence there, and if it is right."""
    scores = goal.scores(output.double())[..., None] / TEMPERATURES.to(output.device)  # type: ignore[attr-defined]
    chances = scores.log_softmax(1)
    sure, found = chances.max(1)
    losses = -chances[torch.arange(len(target)), target]
    return {"nll": losses, "sure": sure.exp(), "right": found[:, 0] == target}
