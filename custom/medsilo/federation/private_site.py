"""A site under a promise of privacy: the noise of its training and of the numbers that it tells, and what each costs.

Each kind of number is told as it is, where the hospital declared it public; with noise and an account of its own, where
the plan offers that; or not at all. A unit (a record, or a patient with all cases) counts for one: in a count, and in
the mean of a score. Noise stands in the place of a hospital's own floors (minimum count, rounding, memory of groups)
only where the hospital demands privacy; elsewhere both hold (disclosure.py).
"""

import json
import math
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from torch import Tensor
from torch.utils.data import Dataset

from medsilo.core.errors import Refused, reading
from medsilo.core.files import write_json
from medsilo.core.rounding import Resolution
from medsilo.learning.loop import steps_in
from medsilo.learning.private import PoissonSample, PrivateSteps
from medsilo.plan import Plan
from medsilo.privacy.accounting import geometric_for, noise_for
from medsilo.privacy.guarantees import PrivacyGuarantee, Unit
from medsilo.privacy.mechanisms import MOST_NOISE, Charge, Geometric, Public, SampledGaussian
from medsilo.privacy.noise import NoiseSource
from medsilo.runs.paths import NOISY_COUNTS
from medsilo.schedule.phase import Phase
from medsilo.site.party import FILE_NAME
from medsilo.site.query_budget import PARTS
from medsilo.site.settings import PrivacyRequirements, SiteSettings, Told
from medsilo.tasks.site_data import SiteData, patients_of, records_of

DIGITS = 4  # of a score with noise
STEPS = 1000  # in half of a score's range
How = Literal["exact", "noisy", "silent"]
# What an answer tells in numbers, by what it answers.
NUMBERS: dict[str, tuple[Told, ...]] = {
    "join": ("counts",),
    "round": ("counts", "train", "validation"),
    "deliver": ("counts", "validation"),
    "test": ("counts", "test"),
}
WHAT: dict[Told, str] = {
    "counts": "numbers of cases",
    "train": "loss over training cases",
    "validation": "score and loss over validation cases",
    "test": "score, loss and counts over test cases",
}
COUNTS_REFUSED = (
    "numbers of cases would leave as they are: declare them public with a reason (privacy.public.counts in this "
    f"hospital's {FILE_NAME}), or ask the lead for a plan with privacy.counts, which adds noise to them"
)


NOBODY_NAMED = (
    "patients are promised privacy, and nothing names the patient of a line or an image; say it in "
    "data.columns.patient or data.patient, where each has one only by what names the case"
)


def agreed(plan: Plan, demands: PrivacyRequirements | None) -> PrivacyGuarantee | None:
    """Return what is promised to a hospital that demands this; raises Refused where the plan promises nothing then."""
    if plan.privacy:
        return plan.privacy.under(demands)
    if demands is None:
        return None
    raise Refused(
        f"this hospital demands differential privacy (privacy in its {FILE_NAME}), and the plan has none; add a "
        f"section privacy with epsilon and delta"
    )


def units_of(cases: Dataset, unit: Unit) -> Sequence[str] | None:
    """Return the unit of each case: its patient, or its record (a file, a line). None: each case is a record."""
    return patients_of(cases) if unit == "patient" else records_of(cases)


def how_told(plan: Plan, demands: PrivacyRequirements | None, told: Told, guarded: bool) -> How:
    """Return how a plan that promises privacy lets one kind of number out. guarded: of patients that are protected."""
    offer = plan.privacy
    assert offer
    if guarded and told in ("validation", "test") and plan.private.exact_networks:
        return "silent"  # a model that learns by exact steps is scored, so its score tells of training cases, too
    if demands and told in demands.public:
        return "exact"
    if (told == "counts" and offer.counts) or (told in ("validation", "test") and offer.scores):
        return "noisy"
    return "silent" if guarded else "exact"


@dataclass(frozen=True)
class PrivateNumbers:
    """The numbers of one site in one study that promises privacy."""

    plan: Plan
    site: str
    demands: PrivacyRequirements | None
    promise: PrivacyGuarantee
    guarded: bool  # whether patients are behind the numbers: what is neither public nor noisy is not told
    folder: Path
    units: Mapping[str, Sequence[str]] = field(repr=False)  # by part, the unit of each case
    step: int = 1  # numbers of units are rounded to multiples of it before they get noise

    @classmethod
    def of(cls, plan: Plan, site: str, settings: SiteSettings, folder: Path, data: SiteData) -> "PrivateNumbers | None":
        """Return them where the plan promises privacy."""
        demands, synthetic = settings.privacy, plan.task.synthetic
        promise = agreed(plan, demands)
        if promise is None:
            return None
        if promise.unit == "patient" and data.survey and not data.survey.patients_named:
            raise Refused(NOBODY_NAMED)
        units: dict[str, Sequence[str]] = {}
        for part in PARTS:
            cases = getattr(data, part)
            units[part] = units_of(cases, promise.unit) or [str(case) for case in range(len(cases))]
        guarded = settings.protects(synthetic) or demands is not None
        step = 1 if promise.suffices(demands) else settings.count_unit(synthetic)
        return cls(plan, site, demands, promise, guarded, folder, units, step)

    @property
    def suffices(self) -> bool:
        """Return whether the noise stands in the place of this hospital's floors; else both hold."""
        return self.promise.suffices(self.demands)

    def how(self, told: Told) -> How:
        """Return how one kind of number is told."""
        return how_told(self.plan, self.demands, told, self.guarded)

    # ------------------------------------------------------------------ what it costs
    @cached_property
    def counting(self) -> Geometric:
        """Return the noise on the numbers of units. One unit is in one part: all parts together change by one."""
        assert self.plan.privacy and self.plan.privacy.counts
        return Geometric(scale=1 / self._scaled(self.plan.privacy.counts.epsilon))

    @cached_property
    def scoring(self) -> Geometric:
        """Return the noise on the sum behind one score, in whole steps; all scores of the study keep to their ε."""
        assert self.plan.privacy and self.plan.privacy.scores
        epsilon = self._scaled(self.plan.privacy.scores.epsilon)
        return Geometric(scale=geometric_for(epsilon, self.promise.delta, self._scores, STEPS), sensitivity=STEPS)

    def _scaled(self, epsilon: float) -> float:
        """Return a part of the plan's ε in proportion to what is promised here, where the hospital demands less."""
        assert self.plan.privacy
        return epsilon * self.promise.epsilon / self.plan.privacy.epsilon

    @property
    def _scores(self) -> int:
        """Return the scores with noise that the study asks for."""
        return self.plan.validations * (self.how("validation") == "noisy") + (self.how("test") == "noisy")

    def charges(self, task: str, number: int) -> list[Charge]:
        """Return what the numbers of an answer in a round cost, but for the counts, which are drawn once."""
        found = []
        for told in NUMBERS.get(task, ()):
            if (task, told) == ("round", "validation") and not self.plan.validates(number - 1):
                continue
            if self.demands and told in self.demands.public:
                found.append(Charge(what=WHAT[told], of=Public(reason=self.demands.public[told])))
            elif told != "counts" and self.how(told) == "noisy":
                found.append(Charge(what=f"score over {told} cases", of=self.scoring))
        return found

    @property
    def count_charges(self) -> list[Charge]:
        """Return the charge for the study's numbers of cases, which are drawn once."""
        return [Charge(what=WHAT["counts"], of=self.counting)] if self.how("counts") == "noisy" else []

    def planned(self) -> list[Charge]:
        """Return what all numbers of the study cost."""
        last = self.plan.rounds
        rounds = [charge for number in range(1, last + 1) for charge in self.charges("round", number)]
        return [*self.count_charges, *rounds, *self.charges("deliver", last), *self.charges("test", last)]

    # ------------------------------------------------------------------ what is told
    @cached_property
    def counted(self) -> tuple[str, dict[str, int]] | None:
        """Return the numbers of units with noise, and the name of their draw; None where they have none.

        Drawn once and kept on the disk: each draw costs, and two would tell more than one. In all that leaves, and in
        the training, they take the place of the true numbers.
        """
        if self.how("counts") != "noisy":
            return None
        path = self.folder / NOISY_COUNTS
        if path.exists() and not self.plan.task.synthetic:
            with reading("this site's noisy counts"):
                kept = json.loads(path.read_text("utf-8"))
                return str(kept["draw"]), {part: int(kept["counts"][part]) for part in PARTS}
        secret, rounding = self.secret("counts"), Resolution(unit=self.step)
        noise = self.counting.scale * self.counting.sensitivity  # in steps: one unit moves a rounded count by one
        found: dict[str, int] = {
            part: max(self.step, rounding.count(len(set(self.units[part]))) + self.step * secret.geometric(noise))
            for part in PARTS
        }
        draw = secrets.token_hex(16)
        if not self.plan.task.synthetic:
            write_json(path, {"draw": draw, "counts": found})
        return draw, found

    def size(self, part: str) -> int:
        """Return the number of a part's units as everybody may know it."""
        return self.counted[1][part] if self.counted else len(set(self.units[part]))

    def score(self, part: str, number: int, values: Tensor, low: float, high: float, step: float = 0.0) -> float:
        """Return a part's mean score with noise: the mean over units of each unit's mean over its cases.

        Each unit's distance from the middle of the range is at most half of the range, in whole steps of a thousandth
        of that, and so is what it changes in their sum.
        step: in which scores leave this hospital. The mean is rounded first, and the noise is added to that, so that no
        number of answers, averaged, tells more than one without noise; one unit then moves it by whole steps.
        """
        middle, half = (low + high) / 2, (high - low) / 2
        own: dict[str, list[float]] = defaultdict(list)
        cut = values.double().nan_to_num(middle).clamp(low, high).tolist()
        for unit, value in zip(self.units[part], cut, strict=True):
            own[unit].append(value)
        total = sum(round((sum(found) / len(found) - middle) / half * STEPS) for found in own.values())
        secret, each = self.secret("score", part, number), half / self.size(part)  # most that one unit moves the mean
        if not step:
            noise = secret.geometric(self.scoring.scale * STEPS)
            return round(min(max(middle + (total + noise) / STEPS * each, low), high), DIGITS)
        rounded = round((min(max(middle + total / STEPS * each, low), high) - low) / step)
        noise = secret.geometric(self.scoring.scale * STEPS * math.ceil(each / step))
        told = rounded + (noise + STEPS // 2) // STEPS  # as wide for each: a tie to the even one would tell the parity
        return round(min(max(low + told * step, low), high), DIGITS)

    def secret(self, *purpose: str | int) -> NoiseSource:
        """Return the random numbers of one release: nobody's, or with drawn hospitals the seed's."""
        if self.plan.task.synthetic:
            return NoiseSource.from_seed(self.plan.seed, self.site, *purpose)
        return NoiseSource()


@dataclass(frozen=True)
class PrivateSite:
    """The meaning of a promise for the training at one site."""

    numbers: PrivateNumbers  # what else leaves, and how much that costs
    train: Dataset  # all training cases

    def sample(self, secret: NoiseSource) -> PoissonSample:
        """Return what draws this site's cases; on average as many as the plan's batches have."""
        cases, units = len(self.train), units_of(self.train, self.numbers.promise.unit)  # type: ignore[arg-type]
        return PoissonSample(units, cases, self.numbers.plan.training.batch_size, secret, self.size)

    @cached_property
    def size(self) -> int:
        """Return the training cases as everybody may know them; where counts have noise, the units with that noise.

        Rate, steps and what sums are divided by follow from it, so that they tell nothing more.
        """
        counted = self.numbers.counted
        return counted[1]["train"] if counted else len(self.train)  # type: ignore[arg-type]

    @cached_property
    def rate(self) -> float:
        """Return the chance of a unit to be in a step's batch."""
        return min(1.0, self.numbers.plan.training.batch_size / self.size)

    @property
    def steps(self) -> int:
        """Return the steps of one round."""
        return self.numbers.plan.training.steps_of_round(self.steps_in_epoch)

    @property
    def steps_in_epoch(self) -> int:
        """Return the steps of one local epoch."""
        return steps_in(self.size, self.numbers.plan.training.batch_size)

    @cached_property
    def effective(self) -> float:
        """Return the noise with which a single gradient a step would keep the promise over all rounds."""
        rounds = sum(phase.rounds for phase in self.numbers.plan.course.phases if phase.trains)
        beside = [*self.numbers.planned(), *self._releases(self._released)]
        return noise_for(
            self.numbers.promise.epsilon, self.numbers.promise.delta, self.rate, self.steps * rounds, beside=beside
        )

    @cached_property
    def noise(self) -> float:
        """Return the noise on each gradient over its bound: all gradients of a batch keep the promise together."""
        noise = self.effective * math.sqrt(self.numbers.plan.gradients)
        if noise > MOST_NOISE:
            raise Refused(
                f"no noise up to {MOST_NOISE:g} keeps ε = {self.numbers.promise.epsilon:g} here; ask for fewer rounds"
            )
        return noise

    def charges(self, number: int, phase: Phase) -> list[Charge]:
        """Return what a round's training costs, whatever of it leaves."""
        released = self._releases(phase.releases)
        if not phase.trains:
            return released
        noise = self.noise / math.sqrt(
            self.numbers.plan.gradients
        )  # of a single gradient that costs what all cost together
        of = SampledGaussian(noise=noise, rate=self.rate, steps=self.steps)
        names = ", ".join(self.numbers.plan.private.networks)
        return [*released, Charge(what=f"training of {names} in round {number}", of=of)]

    @property
    def _released(self) -> int:
        """Return the means over cases that leave in all rounds."""
        return sum(phase.releases * phase.rounds for phase in self.numbers.plan.course.phases)

    @cached_property
    def releasing(self) -> float:
        """Return the noise on each of these means over the bound, so that all keep to their part of the promise."""
        assert self.numbers.plan.privacy and self.numbers.plan.privacy.statistics
        share = self.numbers.plan.privacy.statistics.epsilon / self.numbers.plan.privacy.epsilon
        return noise_for(share * self.numbers.promise.epsilon, self.numbers.promise.delta, 1.0, self._released)

    def _releases(self, count: int) -> list[Charge]:
        return [Charge.normal("mean over cases", self.releasing, count)] if count else []

    def training(self, number: int) -> PrivateSteps:
        """Return how the networks of this site learn in one attempt at a round."""
        secret = self.numbers.secret("round", number)
        assert self.numbers.plan.privacy
        clip = self.numbers.plan.privacy.clip
        steps = PrivateSteps(self.sample(secret), clip, self.noise, secret, self.numbers.plan.private.exact_networks)
        if self.numbers.plan.privacy.statistics:
            steps.releasing, steps.clip = self.releasing, self.numbers.plan.privacy.statistics.clip
        return steps
