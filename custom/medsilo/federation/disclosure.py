"""Disclosure: the layer that decides what of a site's numbers leaves, how it is rounded, and what counts as reported.

Scores, losses, counts, choices of a threshold, and numbers of cases: a participant finds them
exactly (exact.py), and every field of an answer is made of that here. Where a plan promises privacy, private_site.py
adds noise and says its price; who asked for how much is in the hospital's book (protection.py). Noise that the hospital
did not demand itself comes on top of its floors and takes the place of none.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from medsilo.core import optional
from medsilo.core.package import machine_facts
from medsilo.core.rounding import Resolution
from medsilo.federation.protection import Protection
from medsilo.federation.raw_results import ExactDelivery, ExactMessage, ExactResult, ExactRound, ExactScores, ExactTest
from medsilo.federation.site_context import SiteContext
from medsilo.runs.messages import Counted
from medsilo.site.party import FILE_NAME
from medsilo.site.query_budget import PARTS
from medsilo.site.settings import DataPart
from medsilo.tasks.measuring import threshold_of
from medsilo.tasks.metrics import BINS, BROAD, CHANCES, WEIGHT, Counts, Measures
from medsilo.tasks.site_data import SiteData, labels_of, patients_of

if TYPE_CHECKING:  # only under a promise of privacy
    from medsilo.federation.private_site import How, PrivateNumbers

MOST = 2.0  # loss of a patient's case, from where on it is all one in what is told
CLASS = 4  # times the least: the patients of each class of a part where patients' classes are told apart
LOSS = "loss"  # of each case
PAIR = 2  # cases of a pair: of n patients each is in 2 / n of all pairs
Part = Literal["validation", "test"]
SCORED: tuple[Part, ...] = ("validation", "test")
Told = dict[str, Any]  # fields of an answer
NOTHING: Told = {"validation": None, "validation_loss": None}


def finite(value: float) -> float | None:
    """Return a number that JSON can hold; None stands for one that could not be computed, never 0."""
    return value if math.isfinite(value) else None


class Disclosure:
    """A site's numbers, as they may leave."""

    def __init__(
        self, place: SiteContext, data: SiteData, protection: Protection, numbers: "PrivateNumbers | None" = None
    ) -> None:
        """numbers: how they are told in a study that promises privacy."""
        self.plan, self.task, self.data, self.settings = place.plan, place.plan.task, data, place.settings
        self.protection, self.numbers = protection, numbers
        self.protected = protection.on  # whether patients are behind the numbers
        self.least = self.settings.least(self.task.synthetic)  # cases that a metric must cover before it leaves
        self.patients: dict[DataPart, Sequence[str]] = {part: patients_of(getattr(data, part)) for part in PARTS}
        self.cases = {part: len(getattr(data, part)) for part in PARTS}
        self.sway = {part: self.task.goal.sway(getattr(data, part), self.patients[part]) for part in PARTS}
        self.resolution: dict[str, Resolution] = {part: self._resolution(part) for part in PARTS}
        near = protection.book.near(protection.asker.data, self.patients, self.least) if self.protected else set()
        self.too_near = {part for part in near if not self._noise_alone(part)}  # another study had nearly the same

    def disclose(self, found: ExactResult) -> Told:
        """Return what an answer tells of what was found, and count it as told."""
        match found:
            case ExactMessage(secagg=secagg):
                return {"secagg": secagg}
            case ExactRound():
                return self._trained(found)
            case ExactDelivery():
                if self.tells("validation"):
                    self.protection.note(validation=1 + self.plan.algorithm.outcome.scores_besides)
                return {**self.validated(found.validated), "outcome": found.outcome}
            case ExactTest():
                tested = self.tested(found.selected, found.scores)
                decisive = found.decisive if CHANCES in tested["counts"] else None
                threshold = None if decisive is None else self.threshold(decisive)
                self.protection.note(test=self.tells("test"), validation=threshold is not None)
                return {**tested, "threshold": threshold, "outcome": found.outcome}
        shares = self.settings.shares(self.task.synthetic) and not self.plan.sealed
        told = {"classes": self.classes(), "machine": machine_facts(), "absent": self.data.absent}
        return {"shares": shares, "steps": self.steps, **told}

    def _resolution(self, part: DataPart) -> Resolution:
        own, share = self.settings.resolution(self.patients[part], self.task.synthetic), self.sway[part]
        return own if share is None else replace(own, weight=max(own.weight, share))

    @property
    def steps(self) -> dict[Part, float]:
        """Return in what steps the scores of each part leave, where they leave rounded and without noise."""
        told = [part for part in SCORED if self.tells(part) and part not in self.noisy]
        steps = {part: self.resolution[part].step(*self.task.goal.metric_range) for part in told}
        return {part: step for part, step in steps.items() if step}

    # ------------------------------------------------------------------ validation
    def scored(self, rounds: int, loss: float, score: float, measures: Measures) -> ExactScores:
        """Return the scores of the model after so many rounds; with noise where that leaves: another release."""
        noisy = self.noisy_score("validation", rounds, measures) if measures and "validation" in self.noisy else None
        return ExactScores(loss, score, measures, noisy)

    def rank(self, rounds: int, scored: ExactScores) -> float:
        """Return by what this site chooses among its models. Which one it chooses leaves, so the choice follows from
        what is told, or is the last one."""
        if self._how("validation") != "exact":
            return float(rounds) if scored.noisy is None else scored.noisy
        return scored.score if math.isfinite(scored.score) else -sys.float_info.max

    # ------------------------------------------------------------------ answers
    def warnings(self) -> list[str]:
        """Say what the lead should know: of the split, and of parts of which another study had nearly the same
        patients, so that no score over them leaves."""
        return [
            *self.protection.warnings(),
            *(
                f"no score over this hospital's {part} cases is told: they are those of an earlier study but for fewer "
                f"than {self.least} patients (min_patients_per_metric in its {FILE_NAME})"
                for part in sorted(self.too_near)
            ),
        ]

    def _trained(self, found: ExactRound) -> Told:
        told = {**self.validated(found.validated), "train_loss": finite(self.train_loss(found.loss, found.samples))}
        tells = found.validated is not None and self.tells("validation")
        self.protection.note(train=told["train_loss"] is not None, validation=tells)
        return {"samples": self.samples(found.samples), **told}

    def validated(self, scored: ExactScores | None) -> Told:
        """Return a validation as it is told."""
        if scored is None or not self.tells("validation"):
            return NOTHING
        if scored.noisy is not None:
            return {**NOTHING, "validation": scored.noisy}
        loss = self.loss("validation", scored.loss, scored.measures)
        return {"validation": finite(self.score("validation", scored.score)), "validation_loss": finite(loss)}

    def tested(self, selected: int, scored: ExactScores) -> Told:
        """Return what is told of the test of the model of a round: counts, and no single case."""
        counts, loss, score = Counts(), math.nan, math.nan
        if "test" in self.noisy:
            score = self.noisy_score("test", selected, scored.measures)
        elif self.tells("test"):
            counts = self.counts(scored.measures)
            loss, score = self.loss("test", scored.loss, scored.measures), self.score("test", scored.score)
        return {"test": finite(score), "test_loss": finite(loss), "selected": selected, "counts": counts}

    def loss_within(self, loss: float, samples: int) -> float | None:
        """Return a loss over training cases that a method asks for within a round, and count it."""
        told = finite(self.train_loss(loss, samples))
        self.protection.note(train=told is not None)
        return told

    def score_within(self, score: float) -> float | None:
        """Return a score over validation cases that a method asks for within a round, and count it."""
        self.protection.note(validation=1)
        return finite(self.score("validation", score))

    @property
    def scores_within(self) -> bool:
        """Return whether such a score may leave."""
        return self.cases["validation"] > 0 and self.tells("validation") and not self.noisy

    # ------------------------------------------------------------------ single numbers
    @property
    def counted(self) -> Counted:
        """The numbers of cases, as they are told."""
        if self.numbers and self.numbers.counted:
            return Counted(**self.numbers.counted[1])
        return Counted(**{part: own.cases for part, own in self.resolution.items()})

    def tells(self, part: DataPart) -> bool:
        """Return whether a score over a part may leave. It may not if it covers too few patients, alone or as the
        difference to another score, or mostly one. Nor if the study promises privacy, and it has no noise and is not
        public."""
        if self._how(part) == "silent" or not self.cases[part]:
            return False
        if self._noise_alone(part):
            return True
        if part in self.too_near or (self.protected and (self.sway[part] or 0) * self.least > PAIR):
            return False
        if self.resolution[part].patients * self.resolution[part].weight > 1:  # a step is wider than all scores are
            return False
        return (len(set(self.patients[part])) if self.protected else self.cases[part]) >= self.least

    def _how(self, part: DataPart) -> "How":
        return self.numbers.how(part) if self.numbers else "exact"

    def _noise_alone(self, part: DataPart) -> bool:
        """Return whether noise stands in the place of the minimum count, the rounding and the memory of groups."""
        return self.numbers is not None and self.numbers.suffices and self._how(part) == "noisy"

    @property
    def noisy(self) -> list[Part]:
        """Return the parts of which a score leaves with noise, and nothing else."""
        return [part for part in SCORED if self._how(part) == "noisy" and self.tells(part)]

    def samples(self, cases: int) -> int:
        """Return the number of training cases on which tensors rest, as it is told."""
        told = self.counted.train
        return told if cases == self.cases["train"] or (self.numbers and self.numbers.counted) else min(told, cases)

    def noisy_score(self, part: Part, number: int, measures: Measures) -> float:
        """Return a part's score with noise; every call is another release."""
        assert self.numbers
        values, between = measures[self.task.goal.metric], self.task.goal.metric_range
        return self.numbers.score(part, number, values, *between, step=self._step_of_units(part))

    def _step_of_units(self, part: Part) -> float:
        """Return in what steps a mean over units leaves; 0 where noise is enough."""
        assert self.numbers
        if self._noise_alone(part):
            return 0.0
        patient_of_unit = dict(zip(self.numbers.units[part], self.patients[part], strict=True))
        of_units = self.settings.resolution([*patient_of_unit.values()], self.task.synthetic)
        return max(own.step(*self.task.goal.metric_range) for own in (self.resolution[part], of_units))

    @property
    def suppressed(self) -> list[Part]:
        """The parts that have too few cases to tell a score."""
        return [part for part in SCORED if not self.tells(part)]

    def score(self, part: Part, score: float) -> float:
        """Return a part's mean score as it is told."""
        return self.resolution[part].mean(score, *self.task.goal.metric_range)

    def loss(self, part: Part, loss: float, measures: Measures) -> float:
        """Return a part's mean loss as it is told: where patients are behind it, no case counts for more than MOST."""
        resolution = self.resolution[part]
        return resolution.mean(float(measures[LOSS].clamp(0, MOST).mean()), 0, MOST) if resolution.patients else loss

    def train_loss(self, loss: float, samples: int) -> float:
        """Return the mean loss over so many training cases as it is told; nan where it may not be."""
        if not self.tells("train") and (self.protected or self.numbers):
            return math.nan
        return self.resolution["train"].among(samples / self.cases["train"]).mean(loss, 0, MOST)

    def counts(self, measures: Measures) -> Counts:
        """Return the counts over the test cases as they are told."""
        goal, resolution, patients = self.task.goal, self.resolution["test"], self.patients["test"]
        if resolution.exact:
            return goal.counts(measures, patients, self.least)
        own = {**measures, WEIGHT: self._weights("test")}
        return optional.coarse_counts(goal, own, patients, resolution, self.least, CLASS * self.least)

    def _weights(self, part: DataPart) -> Tensor:
        """Return for how much each case counts: of patients each counts for one, divided among its cases."""
        each, exact = Counter(self.patients[part]), self.resolution[part].exact
        weights = [1.0 if exact else 1 / each[patient] for patient in self.patients[part]]
        return torch.tensor(weights, dtype=torch.float64)

    @property
    def tells_threshold(self) -> bool:
        """Return whether a threshold that follows from validation cases may leave; never under a promise of privacy."""
        asked = self.task.goal.decides and self.numbers is None
        return asked and self.cases["validation"] > 0 and self.tells("validation")

    def threshold(self, measures: Measures) -> float | None:
        """Return the threshold of validation cases as it is told: of patients one of the few between the broad places.

        None where a class has too few patients.
        """
        exact, own = self.resolution["validation"].exact, {**measures, WEIGHT: self._weights("validation")}
        counts = self.task.goal.counts(own, self.patients["validation"], self.least * (1 if exact else CLASS))
        return threshold_of(counts[CHANCES], BINS if exact else BROAD) if CHANCES in counts else None

    def classes(self) -> dict[str, list[int] | None]:
        """Return the cases of each class in every part; None where there are none, or one has too few patients."""
        goal = self.task.goal
        if (self.numbers and (self.numbers.guarded or self.numbers.counted)) or not goal.classifies:
            return dict.fromkeys(PARTS)  # each would be one more release, and `counts` declares numbers of cases alone
        told: dict[str, list[int] | None] = dict.fromkeys(PARTS)
        for part in PARTS:
            labels = labels_of(getattr(self.data, part))
            own = [] if labels is None else torch.bincount(labels, self._weights(part), minlength=goal.classes).tolist()
            if any(own) and round(min(filter(None, own)), 6) >= self.least:
                told[part] = [int(count) for count in self.resolution[part].shared_out(own)]
        return told
