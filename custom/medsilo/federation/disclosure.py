"""The disclosure layer decides which numbers leave a site, rounds these numbers, and records each disclosure.

A participant computes exact scores, losses, counts, thresholds and numbers of cases (raw_results.py). The disclosure
layer computes each field of an answer from the participant's exact results. If a plan promises differential privacy,
private_site.py adds noise and computes the privacy charges. The hospital's query budget counts the answers to each
requester (protection.py). If only the plan and not the hospital demands the noise, the hospital's minimum counts and
rounding apply in addition to the noise.
"""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.package import machine_facts
from medsilo.core.rounding import Resolution
from medsilo.federation.protection import Protection
from medsilo.federation.raw_results import (
    ExactDelivery,
    ExactMessage,
    ExactResult,
    ExactRound,
    ExactScores,
    ExactTest,
    write_levels,
    write_measures,
)
from medsilo.federation.site_context import SiteContext
from medsilo.federation.subgroup_scores import Group, Level, levels_of, safe_levels, scores_of, some_of
from medsilo.runs.messages import MOST_LOSS, Counted, SiteWarning, SubgroupScore, declared
from medsilo.runs.own_files import Weighed
from medsilo.schedule.weighting import update_weight
from medsilo.site.query_budget import PARTS
from medsilo.site.settings import DataPart, SiteSettings
from medsilo.tasks.measuring import threshold_of
from medsilo.tasks.metrics import BINS, BROAD, CHANCES, WEIGHT, Counts, Measures
from medsilo.tasks.site_data import SiteData, labels_of, patients_of
from medsilo.tasks.subgroups import Members

# imported only for type checking, because only studies with differential privacy need private_site.py
if TYPE_CHECKING:
    from medsilo.federation.private_site import How, PrivateNumbers

CLASS = 4  # counts by class need this multiple of the hospital's minimum number of patients in each class
LOSS = "loss"  # name of the measure that holds each case's loss
# A score over pairs depends twice as much on one patient: of all pairs among n patients, a fraction of 2 / n includes
# this patient.
PAIR = 2
Part = Literal["validation", "test"]
SCORED: tuple[Part, ...] = ("validation", "test")
Told = dict[str, Any]  # the fields of a site's answer to the server
NOTHING: Told = {"validation": None, "validation_loss": None}


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def resolution_of(settings: SiteSettings, synthetic: bool, patients: Sequence[str], sway: float | None) -> Resolution:
    """Return the rules by which scores and counts over cases are rounded.

    Args:
        patients: The patient of each case.
        sway: The largest change of the score that one patient can cause, if it exceeds the patient's fraction of cases.
    """
    own = settings.resolution(patients, synthetic)
    return own if sway is None else replace(own, weight=max(own.weight, min(sway, 1.0)))


def is_swayed(resolution: Resolution, sway: float | None, least: int) -> bool:
    """True if a single patient influences a score too much, or if the score's rounding step would be wider than the
    score's range. Where no patients need protection, scores are exact, and the function returns False.
    """
    return bool(resolution.patients) and ((sway or 0) * least > PAIR or resolution.patients * resolution.weight > 1)


class Disclosure:
    def __init__(
        self,
        context: SiteContext,
        data: SiteData,
        protection: Protection,
        numbers: "PrivateNumbers | None" = None,
        members: Members | None = None,
    ) -> None:
        self.plan, self.task, self.data, self.settings = context.plan, context.plan.task, data, context.settings
        self.protection, self.numbers = protection, numbers
        self.protected = protection.on  # whether the data come from patients who need protection
        self.least = self.settings.least(self.task.synthetic)  # minimum number of cases for a disclosed metric
        self.patients: dict[DataPart, Sequence[str]] = {part: patients_of(getattr(data, part)) for part in PARTS}
        self.cases = {part: len(getattr(data, part)) for part in PARTS}
        self.sway = {part: self.task.goal.sway(getattr(data, part), self.patients[part], self.least) for part in PARTS}
        self.resolution: dict[str, Resolution] = {
            part: resolution_of(self.settings, self.task.synthetic, self.patients[part], self.sway[part])
            for part in PARTS
        }
        near = protection.budget.near(protection.requester.data, self.patients, self.least) if self.protected else set()
        # parts of the data (training, validation or test) whose patients are nearly the same as those of a part in
        # another study
        self.too_near = {part for part in near if not self._noise_alone(part)}
        declared = self.settings.data.subgroups if self.settings.data and members else {}
        self.levels = levels_of(declared, members or {}, self.patients["test"], context.site)

    def disclose(self, result: ExactResult) -> Told:
        """Return an answer's fields from an exact result, and record the disclosed numbers in the query budget."""
        match result:
            case ExactMessage(secagg=secagg):
                return {"secagg": secagg}
            case ExactRound():
                return self._trained(result)
            case ExactDelivery():
                if self.tells("validation"):
                    self.protection.note(validation=1 + self.plan.algorithm.outcome.scores_besides)
                return {**self.validated(result.validated), "outcome": result.outcome}
            case ExactTest():
                tested = self.tested(result.selected, result.scores)
                decisive = result.decisive if CHANCES in tested["counts"] else None
                threshold = None if decisive is None else self.threshold(decisive)
                self.protection.note(test=self.tells("test"), validation=threshold is not None)
                return {**tested, "threshold": threshold, "outcome": result.outcome}
        shares = self.settings.shares(self.task.synthetic) and not self.plan.sealed
        told = {"classes": self.classes(), "machine": machine_facts(), "absent": self.data.absent}
        return {"shares": shares, "steps": self.steps, **told}

    @property
    def steps(self) -> dict[Part, float]:
        """Return the steps to which the validation and the test score are rounded. A score that is suppressed or noisy
        has no step.
        """
        told = [part for part in SCORED if self.tells(part) and part not in self.noisy]
        steps = {part: self.resolution[part].step(*self.task.goal.metric_range) for part in told}
        return {part: step for part, step in steps.items() if step}

    # ------------------------------------------------------------------ validation
    def scored(self, rounds: int, loss: float, score: float, measures: Measures) -> ExactScores:
        """Return a model's exact scores. If the site must not send an exact score, the result also contains a noisy
        score.

        Each noisy score is an additional release of data, which differential privacy must count.
        """
        noisy = self.noisy_score("validation", rounds, measures) if measures and "validation" in self.noisy else None
        return ExactScores(loss, score, measures, noisy)

    def rank(self, rounds: int, scored: ExactScores) -> float:
        """Return the rank of a round's model; a site that selects a model itself selects the model with the highest
        rank.

        The site reports the round that it selects, and so discloses something about its scores. If patients are
        protected, the rank therefore uses only scores that the site also sends. If the site sends no scores, the model
        of the last round ranks highest.
        """
        stays = self.protection.on and "validation" in self.suppressed
        if self._how("validation") != "exact" or stays or self.is_undefined("validation"):
            return float(rounds) if scored.noisy is None else scored.noisy
        return scored.score if math.isfinite(scored.score) else -sys.float_info.max

    # ------------------------------------------------------------------ answers
    def warnings(self) -> list[SiteWarning]:
        """Return warnings for the study's lead about suppressed scores and about the split of the data. Some warnings
        concern a hospital that splits its data into training, validation and test cases itself. If another study used
        nearly the same patients, a score is suppressed, and a warning names the part of the data.
        """
        return [
            *self.protection.warnings(),
            *(SiteWarning(kind="near", numbers=(PARTS.index(part), self.least)) for part in sorted(self.too_near)),
        ]

    def _trained(self, result: ExactRound) -> Told:
        means = {name: finite(self.trained(name, mean, result.samples)) for name, mean in result.trained.items()}
        tells = result.validated is not None and self.tells("validation")
        self.protection.note(train=any(mean is not None for mean in means.values()), validation=tells)
        return {"samples": self.samples(result.samples), **self.validated(result.validated), **means}

    def validated(self, scored: ExactScores | None) -> Told:
        if scored is None or not self.tells("validation"):
            return NOTHING
        if scored.noisy is not None:
            return {**NOTHING, "validation": scored.noisy}
        loss = self.loss("validation", scored.loss, scored.measures)
        return {"validation": finite(self.score("validation", scored.score)), "validation_loss": finite(loss)}

    def tested(self, selected: int, scored: ExactScores) -> Told:
        """Return the fields of an answer that disclose test results. The fields for test results contain counts and
        means, but no values of single cases.
        """
        counts, loss, score = Counts(), math.nan, math.nan
        if "test" in self.noisy:
            score = self.noisy_score("test", selected, scored.measures)
        elif self.tells("test"):
            counts = self.counts(scored.measures)
            loss, score = self.loss("test", scored.loss, scored.measures), self.score("test", scored.score)
        told = {"test": finite(score), "test_loss": finite(loss), "selected": selected, "counts": counts}
        return {**told, "subgroups": self.subgroups(scored.measures)}

    def loss_within(self, loss: float, samples: int) -> float | None:
        """Return a loss over training cases that a method requests within a round, and record the disclosed loss in the
        query budget.
        """
        told = finite(self.trained("train_loss", loss, samples))
        self.protection.note(train=told is not None)
        return told

    def score_within(self, score: float) -> float | None:
        """Return a score over validation cases that a method requests within a round, and record the disclosed score in
        the query budget.
        """
        self.protection.note(validation=1)
        return finite(self.score("validation", score))

    @property
    def scores_within(self) -> bool:
        """True if the site may send a validation score that a method requests within a round."""
        return self.cases["validation"] > 0 and "validation" not in self.suppressed and not self.noisy

    # ------------------------------------------------------------------ subgroups
    @property
    def tells_subgroups(self) -> bool:
        """True if the hospital declares subgroups, and the site sends its test score without noise."""
        return bool(self.levels) and self.numbers is None and "test" not in self.suppressed

    @cached_property
    def told_levels(self) -> dict[Level, Resolution]:
        """Return the rounding rules for each subgroup level whose test score the site may send. If scores have noise,
        the site sends no subgroup scores, so the function returns an empty mapping.
        """
        if not self.tells_subgroups:
            return {}
        data, names, found = self.data.test, self.patients["test"], dict[Level, Resolution]()

        def may(level: Level) -> bool:
            places = [place for place, who in enumerate(names) if who in self.levels[level]]
            own = [names[place] for place in places]
            sway = self.task.goal.sway(some_of(data, places), own, self.least)
            found[level] = resolution_of(self.settings, self.task.synthetic, own, sway)
            if (sway is None) != (self.sway["test"] is None) or is_swayed(found[level], sway, self.least):
                return False
            return not (
                self.protected
                and self.protection.budget.near(self.protection.requester.data, {"test": own}, self.least)
            )

        kept = safe_levels(self.levels, [frozenset(names), *self._classes_of_patients()], self.least, may)
        return {level: found[level] for level in kept}

    def _classes_of_patients(self) -> list[Group]:
        """Return the test patients of each class. The scores of classes count as disclosed, because the counts of
        decisions, which are disclosed, determine them.
        """
        labels = labels_of(self.data.test) if self.task.goal.classifies else None
        pairs = [*zip(self.patients["test"], [] if labels is None else labels.tolist(), strict=labels is not None)]
        return [frozenset(who for who, own in pairs if own == label) for label in sorted({own for _, own in pairs})]

    def subgroups(self, measures: Measures) -> list[SubgroupScore]:
        if not self.tells_subgroups:
            return []
        return scores_of(self.task.goal, measures, self.patients["test"], self.levels, self.told_levels)

    def write_cases(self, folder: Path, measures: Measures) -> None:
        """Save each test case's measures, and the patients of each subgroup level whose score the site may send."""
        write_measures(folder, measures, self.patients["test"])
        if self.tells_subgroups:
            told = {level: own if level in self.told_levels else frozenset() for level, own in self.levels.items()}
            write_levels(folder, told, self.patients["test"])

    # ------------------------------------------------------------------ single numbers
    @cached_property
    def told_cases(self) -> Counted:
        return self._counts("cases")

    @cached_property
    def told_patients(self) -> Counted:
        return self._counts("patients")

    def _counts(self, of: Literal["cases", "patients"]) -> Counted:
        if self.numbers and self.numbers.counted:
            return Counted(**self.numbers.counted[1])
        found: dict[str, int] = {}
        for part in PARTS:
            own = self.resolution[part]
            found[part] = self._once(part, {"cases": own.cases, "patients": own.counted})[of]
        return Counted(**found)

    def _once(self, part: DataPart, numbers: Told) -> Mapping[str, Any]:
        """Return the numbers that the hospital disclosed first about a group of patients, so that every plan gets
        identical numbers.
        """
        names = self.patients[part]
        if not self.protected or not names:
            return numbers
        return self.protection.budget.told_once(self.protection.requester.data, names, self.least, numbers)

    @property
    def by_patient(self) -> bool:
        """True if disclosed counts of classes and decisions are numbers of patients, and not of cases."""
        return not self.resolution["test"].exact

    @property
    def counted(self) -> Counted:
        """The disclosed totals of patients or of cases; the counts of classes and the counts of decisions add up to
        these totals.
        """
        return self.told_patients if self.by_patient else self.told_cases

    def weight(self, cases: int) -> int:
        """Return the aggregation weight of an update that was trained on the given number of cases."""
        told = self.told_cases.train, self.told_patients.train
        return update_weight(self.plan.weighting, self.samples(cases), *told)

    def weighed(self) -> Weighed:
        """Return the disclosed and the exact aggregation weight of the site's updates, for a file that stays at the
        hospital.
        """
        cases, patients, by = self.cases["train"], len(set(self.patients["train"])), self.plan.weighting
        return Weighed(
            by=by,
            patients=patients,
            told_patients=self.told_patients.train,
            cases=cases,
            told_cases=self.told_cases.train,
            weight=update_weight(by, cases, cases, patients),
            told_weight=self.weight(cases),
        )

    def tells(self, part: DataPart) -> bool:
        """True if the site may send a score over this part of the data (training, validation or test).

        A score is suppressed if it is computed from too few patients, or if a single patient influences it too much. A
        score is also suppressed if its difference from another disclosed score would disclose a score of too few
        patients. If the study promises differential privacy, a score is sent only if noise was added or if the hospital
        declared the score public.
        """
        if self._how(part) == "silent" or not self.cases[part]:
            return False
        if self._noise_alone(part):
            return True
        if part in self.too_near or is_swayed(self.resolution[part], self.sway[part], self.least):
            return False
        return (len(set(self.patients[part])) if self.protected else self.cases[part]) >= self.least

    def _how(self, part: DataPart) -> "How":
        return self.numbers.how(part) if self.numbers else "exact"

    def _noise_alone(self, part: DataPart) -> bool:
        """True if the site's score is noisy, and the noise makes minimum counts, rounding and the comparison with
        earlier studies unnecessary.
        """
        return self.numbers is not None and self.numbers.suffices and self._how(part) == "noisy"

    @property
    def noisy(self) -> list[Part]:
        """The parts of the data (validation or test) whose scores are sent only with noise."""
        return [part for part in SCORED if self._how(part) == "noisy" and self.tells(part)]

    def samples(self, cases: int) -> int:
        """Return the disclosed number of training cases on which a site's tensors were trained."""
        told = self.told_cases.train
        return told if cases == self.cases["train"] or (self.numbers and self.numbers.counted) else min(told, cases)

    def noisy_score(self, part: Part, number: int, measures: Measures) -> float:
        """Return the validation or test score with new random noise; differential privacy counts each call as an
        additional release.
        """
        assert self.numbers
        values, between = measures[self.task.goal.metric], self.task.goal.metric_range
        return self.numbers.score(part, number, values, *between, step=self._step_of_units(part))

    def _step_of_units(self, part: Part) -> float:
        """Return the step to which the site rounds a mean over privacy units (patients or records); 0 if noise makes
        rounding unnecessary.
        """
        assert self.numbers
        if self._noise_alone(part):
            return 0.0
        patient_of_unit = dict(zip(self.numbers.units[part], self.patients[part], strict=True))
        of_units = self.settings.resolution([*patient_of_unit.values()], self.task.synthetic)
        return max(own.step(*self.task.goal.metric_range) for own in (self.resolution[part], of_units))

    @property
    def suppressed(self) -> list[Part]:
        """The parts of the data whose score is undefined or must not leave the site."""
        return [part for part in SCORED if not self.tells(part) or self.is_undefined(part)]

    def is_undefined(self, part: Part) -> bool:
        """True if the score is undefined, as the AUROC is if all cases have one class, and if the site may say so.

        At a hospital whose patients need protection, the score is suppressed instead. Otherwise, the answer would
        reveal that all patients have one class.
        """
        return self.sway[part] == math.inf and self.tells(part)

    def score(self, part: Part, score: float) -> float:
        return self.resolution[part].mean(score, *self.task.goal.metric_range)

    def loss(self, part: Part, loss: float, measures: Measures) -> float:
        """Return the disclosed mean loss over the training, validation or test cases.

        For data of patients, the loss of each case is clamped to the bound MOST_LOSS.
        """
        resolution = self.resolution[part]
        if not resolution.patients:
            return loss
        return resolution.mean(float(measures[LOSS].clamp(0, MOST_LOSS).mean()), 0, MOST_LOSS)

    def trained(self, name: str, mean: float, samples: int) -> float:
        """Return a disclosed mean over a number of training cases, such as the training loss, or NaN if the mean must
        not leave the site. Raises Refused if the mean is not declared as a mean over training cases.
        """
        own = declared(name)
        if own.form != "mean" or own.part != "train" or own.between is None:
            raise Refused(f"the value {name} is not declared as a mean over training cases")
        if self.numbers and not own.private:
            return math.nan
        if not self.tells("train") and (self.protected or self.numbers):
            return math.nan
        return self.resolution["train"].among(samples / self.cases["train"]).mean(mean, *own.between)

    def counts(self, measures: Measures) -> Counts:
        from medsilo.federation.coarse_counts import coarse_counts

        goal, resolution, patients = self.task.goal, self.resolution["test"], self.patients["test"]
        if resolution.exact:
            return goal.counts(measures, patients, self.least)
        own = {**measures, WEIGHT: self._weights("test")}
        return coarse_counts(goal, own, patients, resolution, self.least, CLASS * self.least)

    def _weights(self, part: DataPart) -> Tensor:
        """Return the weight of each case in disclosed counts. If counts are rounded, the weights of one patient's cases
        add up to one.
        """
        each, exact = Counter(self.patients[part]), self.resolution[part].exact
        weights = [1.0 if exact else 1 / each[patient] for patient in self.patients[part]]
        return torch.tensor(weights, dtype=torch.float64)

    @property
    def tells_threshold(self) -> bool:
        """True if the site may send a threshold computed from validation cases; always False if the study promises
        differential privacy.
        """
        asked = self.task.goal.decides and self.numbers is None
        return asked and self.cases["validation"] > 0 and self.tells("validation")

    def threshold(self, measures: Measures) -> float | None:
        """Return the disclosed decision threshold, computed from the validation cases.

        For data of patients, the threshold is a bound between two broad histogram bins, so that only few different
        values are possible.

        Returns None instead of a threshold if a class has too few patients.
        """
        exact, own = self.resolution["validation"].exact, {**measures, WEIGHT: self._weights("validation")}
        counts = self.task.goal.counts(own, self.patients["validation"], self.least * (1 if exact else CLASS))
        return threshold_of(counts[CHANCES], BINS if exact else BROAD) if CHANCES in counts else None

    def classes(self) -> dict[str, list[int] | None]:
        """For each part of the data, return the number of cases of each class, or None if no class has enough patients.

        If a class has too few patients, its count is 0. Larger classes keep their counts, because suppressing them
        could depend on a single patient.
        """
        goal = self.task.goal
        if (self.numbers and (self.numbers.guarded or self.numbers.counted)) or not goal.classifies:
            # The privacy charge for `counts` in the plan covers only numbers of cases, so disclosing counts of classes
            # would need an additional charge.
            return dict.fromkeys(PARTS)
        told: dict[str, list[int] | None] = dict.fromkeys(PARTS)
        for part in PARTS:
            labels = labels_of(getattr(self.data, part))
            own = [] if labels is None else torch.bincount(labels, self._weights(part), minlength=goal.classes).tolist()
            if self.resolution[part].exact:
                enough = any(own) and round(min(filter(None, own)), 6) >= self.least
            else:
                own = [count if round(count, 6) >= self.least else 0.0 for count in own]
                enough, whole = any(own), sum(own)
                own = [count * getattr(self.told_patients, part) / whole for count in own] if enough else own
            if enough:
                counts = [int(count) for count in self.resolution[part].shared_out(own)]
                names = [*map(str, goal.label_names)]
                # the labels are sorted, so that the key does not depend on the plan's order of labels
                key = f"classes {sorted(names)}"
                known = self._once(part, {key: dict(zip(names, counts, strict=True))}).get(key)
                told[part] = known and [known[name] for name in names]
        return told
