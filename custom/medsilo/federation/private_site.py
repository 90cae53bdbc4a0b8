"""Under differential privacy, add noise to a site's training and to its disclosed numbers, and compute the privacy
charges of training and numbers.

A number that the hospital declared public is sent exactly. A number that is not public is sent with noise and charged
to the privacy budget if the plan offers noise; otherwise, it is suppressed. The privacy unit is either one record, or
one patient with all of this patient's cases. Each privacy unit counts once in counts and mean scores. If the hospital
demands differential privacy, noise replaces the hospital's minimum counts and rounding. If only the plan promises
differential privacy, minimum counts and rounding apply in addition to the noise (disclosure.py).
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
from medsilo.runs.disclosed import CASES, words_of
from medsilo.runs.messages import ALL_DISCLOSED, DISCLOSED, LETTERED
from medsilo.runs.paths import NOISY_COUNTS
from medsilo.schedule.phase import Phase
from medsilo.site.party import FILE_NAME
from medsilo.site.query_budget import PARTS
from medsilo.site.settings import PrivacyRequirements, SiteSettings, Told
from medsilo.tasks.site_data import SiteData, patients_of, records_of

DIGITS = 4  # decimal digits of a noisy score
STEPS = 1000  # number of rounding steps in half of a score's range
How = Literal["exact", "noisy", "silent"]
# for each kind of request, the kinds of private numbers in the answer
NUMBERS: dict[str, tuple[Told, ...]] = {
    task: tuple(dict.fromkeys(own.of for own in answer.values() if own.of and own.private))
    for task, answer in DISCLOSED.items()
    if task not in LETTERED
}
# The names of the numbers of each kind
WHAT: dict[Told, str] = {
    "counts": "numbers of cases",
    **{
        part: f"{words_of(own for own in ALL_DISCLOSED.values() if own.of == part and own.private)} over {words} cases"
        for part, words in CASES.items()
    },
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
    """Return the privacy guarantee for a hospital; raises Refused if the plan promises less than the hospital
    demands."""
    if plan.privacy:
        return plan.privacy.under(demands)
    if demands is None:
        return None
    raise Refused(
        f"this hospital demands differential privacy (privacy in its {FILE_NAME}), and the plan has none; add a "
        f"section privacy with epsilon and delta"
    )


def units_of(cases: Dataset, unit: Unit) -> Sequence[str] | None:
    """Return the privacy unit (patient or record) of each case; None if each case is a separate record."""
    return patients_of(cases) if unit == "patient" else records_of(cases)


def how_told(plan: Plan, demands: PrivacyRequirements | None, told: Told, guarded: bool) -> How:
    """Return the form in which a plan with differential privacy discloses a number: exact, noisy, or not at all.

    Args:
        guarded: whether the data come from protected patients
    """
    offer = plan.privacy
    assert offer
    if guarded and told in ("validation", "test") and plan.private.exact_networks:
        # If a model was trained without noise, its score would disclose training cases.
        return "silent"
    if demands and told in demands.public:
        return "exact"
    if (told == "counts" and offer.counts) or (told in ("validation", "test") and offer.scores):
        return "noisy"
    return "silent" if guarded else "exact"


@dataclass(frozen=True)
class PrivateNumbers:
    """A site's noisy numbers in a study with differential privacy, and the privacy charges of these numbers."""

    plan: Plan
    site: str
    demands: PrivacyRequirements | None
    promise: PrivacyGuarantee
    # Whether the data are protected, so that only public or noisy numbers leave the site.
    guarded: bool
    folder: Path
    units: Mapping[str, Sequence[str]] = field(repr=False)  # the privacy unit of each case, by part of the data
    # Before noise is added, the numbers of privacy units are rounded to multiples of this step.
    step: int = 1

    @classmethod
    def of(cls, plan: Plan, site: str, settings: SiteSettings, folder: Path, data: SiteData) -> "PrivateNumbers | None":
        """Return a site's noisy numbers; None if the study has no differential privacy."""
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
        """True if noise replaces this hospital's minimum counts and rounding."""
        return self.promise.suffices(self.demands)

    def how(self, told: Told) -> How:
        return how_told(self.plan, self.demands, told, self.guarded)

    # ------------------------------------------------------------------ charges
    @cached_property
    def counting(self) -> Geometric:
        """The noise on the numbers of privacy units (patients or records) in the training, validation and test data.
        Each privacy unit is in only one data part, so adding one unit changes the sum of all counts by one.
        """
        assert self.plan.privacy and self.plan.privacy.counts
        return Geometric(scale=1 / self._scaled(self.plan.privacy.counts.epsilon))

    @cached_property
    def scoring(self) -> Geometric:
        """The noise for the sum from which a score is computed; the noise is a whole number of rounding steps. All
        noisy scores of the study together cost at most the fraction of ε that the plan assigns to scores.
        """
        assert self.plan.privacy and self.plan.privacy.scores
        epsilon = self._scaled(self.plan.privacy.scores.epsilon)
        return Geometric(scale=geometric_for(epsilon, self.promise.delta, self._scores, STEPS), sensitivity=STEPS)

    def _scaled(self, epsilon: float) -> float:
        """Return a given part of the plan's ε; if the hospital demands a smaller total ε, the part is reduced in
        proportion.
        """
        assert self.plan.privacy
        return epsilon * self.promise.epsilon / self.plan.privacy.epsilon

    @property
    def _scores(self) -> int:
        """The number of noisy scores that the study requests."""
        return self.plan.validations * (self.how("validation") == "noisy") + (self.how("test") == "noisy")

    def charges(self, task: str, number: int) -> list[Charge]:
        """Return the privacy charges of the numbers in an answer. The charges do not include the noisy counts, because
        the noise of the counts is sampled once per study.
        """
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
        """The privacy charge for the noisy numbers of cases, whose noise is sampled once per study."""
        return [Charge(what=WHAT["counts"], of=self.counting)] if self.how("counts") == "noisy" else []

    def planned(self) -> list[Charge]:
        last = self.plan.rounds
        rounds = [charge for number in range(1, last + 1) for charge in self.charges("round", number)]
        return [*self.count_charges, *rounds, *self.charges("deliver", last), *self.charges("test", last)]

    # ------------------------------------------------------------------ disclosure
    @cached_property
    def counted(self) -> tuple[str, dict[str, int]] | None:
        """An identifier of the sampled noise, and the noisy number of privacy units in each part of the data; None if
        counts have no noise.

        The noise is sampled once and saved, because new noise would disclose more and cost an additional charge. The
        noisy numbers of units replace the true numbers in every answer and in training.
        """
        if self.how("counts") != "noisy":
            return None
        path = self.folder / NOISY_COUNTS
        if path.exists() and not self.plan.task.synthetic:
            with reading("this site's noisy counts"):
                kept = json.loads(path.read_text("utf-8"))
                return str(kept["draw"]), {part: int(kept["counts"][part]) for part in PARTS}
        secret, rounding = self.secret("counts"), Resolution(unit=self.step)
        # The noise on counts is a whole number of rounding steps, because one privacy unit changes a rounded count by
        # at most one step.
        noise = self.counting.scale * self.counting.sensitivity
        found: dict[str, int] = {
            part: max(self.step, rounding.count(len(set(self.units[part]))) + self.step * secret.geometric(noise))
            for part in PARTS
        }
        draw = secrets.token_hex(16)
        if not self.plan.task.synthetic:
            write_json(path, {"draw": draw, "counts": found})
        return draw, found

    def size(self, part: str) -> int:
        """Return the number of privacy units in a part of the data, with noise if counts have noise."""
        return self.counted[1][part] if self.counted else len(set(self.units[part]))

    def score(self, part: str, number: int, values: Tensor, low: float, high: float, step: float = 0.0) -> float:
        """Return a noisy mean over privacy units, where each unit has the mean score of its cases.

        A unit's contribution is its distance from the middle of the range, and is rounded to a thousandth of half the
        range. The mean is rounded before noise is added, so that an average of many answers reveals only the rounded
        mean. One privacy unit changes the rounded mean by a whole number of rounding steps.

        Args:
            step: the rounding step of this hospital's scores
        """
        middle, half = (low + high) / 2, (high - low) / 2
        own: dict[str, list[float]] = defaultdict(list)
        cut = values.double().nan_to_num(middle).clamp(low, high).tolist()
        for unit, value in zip(self.units[part], cut, strict=True):
            own[unit].append(value)
        total = sum(round((sum(found) / len(found) - middle) / half * STEPS) for found in own.values())
        # One privacy unit changes the mean score by at most twice `each`.
        secret, each = self.secret("score", part, number), half / self.size(part)
        if not step:
            noise = secret.geometric(self.scoring.scale * STEPS)
            return round(min(max(middle + (total + noise) / STEPS * each, low), high), DIGITS)
        rounded = round((min(max(middle + total / STEPS * each, low), high) - low) / step)
        noise = secret.geometric(self.scoring.scale * STEPS * math.ceil(each / step))
        # Noise is rounded to intervals of equal width, because rounding to even would disclose whether the sum is even
        # or odd.
        told = rounded + (noise + STEPS // 2) // STEPS
        return round(min(max(low + told * step, low), high), DIGITS)

    def secret(self, *purpose: str | int) -> NoiseSource:
        """Return the source of random numbers for one release: a secret source, or, for synthetic data, a source with
        the plan's seed.
        """
        if self.plan.task.synthetic:
            return NoiseSource.from_seed(self.plan.seed, self.site, *purpose)
        return NoiseSource()


@dataclass(frozen=True)
class PrivateSite:
    """The random batches and the noise of a site's training under differential privacy."""

    numbers: PrivateNumbers  # the site's noisy numbers with the privacy charges of these numbers
    train: Dataset  # all training cases

    def sample(self, secret: NoiseSource) -> PoissonSample:
        """Return a Poisson sampler of the training cases, whose batches have the plan's batch size on average."""
        cases, units = len(self.train), units_of(self.train, self.numbers.promise.unit)  # type: ignore[arg-type]
        return PoissonSample(units, cases, self.numbers.plan.training.batch_size, secret, self.size)

    @cached_property
    def size(self) -> int:
        """The disclosed size of the training data: the noisy number of privacy units if counts have noise, and
        otherwise the number of cases.

        The sampling rate, the number of steps and the divisor of sums depend only on the disclosed number of cases or
        units.
        """
        counted = self.numbers.counted
        return counted[1]["train"] if counted else len(self.train)  # type: ignore[arg-type]

    @cached_property
    def rate(self) -> float:
        """The probability that a privacy unit is in the batch of a training step."""
        return min(1.0, self.numbers.plan.training.batch_size / self.size)

    @property
    def steps(self) -> int:
        return self.numbers.plan.training.steps_of_round(self.steps_in_epoch)

    @property
    def steps_in_epoch(self) -> int:
        return steps_in(self.size, self.numbers.plan.training.batch_size)

    @cached_property
    def effective(self) -> float:
        """The noise multiplier that would keep the privacy guarantee over all rounds if each training step computed
        only one gradient.
        """
        rounds = sum(phase.rounds for phase in self.numbers.plan.course.phases if phase.trains)
        beside = [*self.numbers.planned(), *self._releases(self._released)]
        return noise_for(
            self.numbers.promise.epsilon, self.numbers.promise.delta, self.rate, self.steps * rounds, charges=beside
        )

    @cached_property
    def noise(self) -> float:
        """The noise multiplier of each gradient; it is so large that all gradients of a training step together keep the
        guarantee.
        """
        noise = self.effective * math.sqrt(self.numbers.plan.gradients)
        if noise > MOST_NOISE:
            raise Refused(
                f"no noise up to {MOST_NOISE:g} keeps ε = {self.numbers.promise.epsilon:g} here; ask for fewer rounds"
            )
        return noise

    def charges(self, number: int, phase: Phase) -> list[Charge]:
        """Return the privacy charges of a round's training; the charges do not depend on which tensors the site
        sends.
        """
        released = self._releases(phase.releases)
        if not phase.trains:
            return released
        noise = self.noise / math.sqrt(
            self.numbers.plan.gradients
            # a noise multiplier with which one gradient costs as much privacy as all gradients of a training step
            # together
        )
        of = SampledGaussian(noise=noise, rate=self.rate, steps=self.steps)
        names = ", ".join(self.numbers.plan.private.networks)
        return [*released, Charge(what=f"training of {names} in round {number}", of=of)]

    @property
    def _released(self) -> int:
        """The number of means over cases that the site releases in the whole study."""
        return sum(phase.releases * phase.rounds for phase in self.numbers.plan.course.phases)

    @cached_property
    def releasing(self) -> float:
        """The noise multiplier of each released mean over cases. All released means together cost at most the fraction
        of ε that the plan assigns to statistics.
        """
        assert self.numbers.plan.privacy and self.numbers.plan.privacy.statistics
        share = self.numbers.plan.privacy.statistics.epsilon / self.numbers.plan.privacy.epsilon
        return noise_for(share * self.numbers.promise.epsilon, self.numbers.promise.delta, 1.0, self._released)

    def _releases(self, count: int) -> list[Charge]:
        return [Charge.normal("mean over cases", self.releasing, count)] if count else []

    def training(self, number: int) -> PrivateSteps:
        """Return the object that trains this site's networks with clipping and noise, for one attempt at a round."""
        secret = self.numbers.secret("round", number)
        assert self.numbers.plan.privacy
        clip = self.numbers.plan.privacy.clip
        steps = PrivateSteps(self.sample(secret), clip, self.noise, secret, self.numbers.plan.private.exact_networks)
        if self.numbers.plan.privacy.statistics:
            steps.releasing, steps.clip = self.releasing, self.numbers.plan.privacy.statistics.clip
        return steps
