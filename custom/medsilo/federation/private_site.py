"""A site's training under a promise of privacy: its noise, whose cases are drawn, and the charge of each round."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.utils.data import Dataset

from medsilo.core.errors import Refused
from medsilo.course.phase import Phase
from medsilo.federation.private_numbers import PrivateNumbers, units_of
from medsilo.learning.loop import steps_in
from medsilo.learning.private import PoissonSample, PrivateSteps
from medsilo.plan import Plan
from medsilo.privacy.accounting import gaussian_for, noise_for
from medsilo.privacy.mechanisms import MOST_NOISE, Charge, Demands, Gaussian, Promise, SampledGaussian, stricter
from medsilo.privacy.noise import NoiseSource
from medsilo.site.settings import FILE_NAME


@dataclass(frozen=True)
class PrivateSite:
    """The meaning of a promise at one site. The stricter of plan and hospital holds."""

    plan: Plan
    site: str
    promise: Promise
    train: Dataset  # all training cases
    numbers: PrivateNumbers | None = None  # what else leaves, and how much that costs

    @classmethod
    def of(
        cls, plan: Plan, site: str, demands: Demands | None, train: Dataset, numbers: PrivateNumbers | None = None
    ) -> "PrivateSite | None":
        """Return it where the plan promises privacy; raises Refused where the hospital demands that and it doesn't."""
        if plan.privacy is None:
            if demands is None:
                return None
            raise Refused(
                f"this hospital demands differential privacy (privacy in its {FILE_NAME}), and the plan promises none; "
                "add a section privacy with epsilon and delta"
            )
        return cls(plan, site, stricter(plan.privacy, demands), train, numbers)

    @property
    def _units(self) -> Sequence[str] | None:
        """Return the unit of each case that is protected, its patient or its record; None: each case is by itself."""
        return units_of(self.train, self.promise.unit)

    def sample(self, secret: NoiseSource) -> PoissonSample:
        """Return what draws this site's cases; on average as many as the plan's batches have."""
        cases = len(self.train)  # type: ignore[arg-type]
        return PoissonSample(self._units, cases, self.plan.training.batch_size, secret, self.size)

    @cached_property
    def size(self) -> int:
        """Return the training cases as everybody may know them; where counts have noise, the units with that noise.

        Rate, steps and what sums are divided by follow from it, so that they tell nothing more.
        """
        noisy = self.numbers.noisy_size if self.numbers else None
        return len(self.train) if noisy is None else noisy  # type: ignore[arg-type]

    @cached_property
    def rate(self) -> float:
        """Return the chance of a unit to be in a step's batch."""
        return min(1.0, self.plan.training.batch_size / self.size)

    @property
    def steps(self) -> int:
        """Return the steps of one round."""
        return self.plan.training.steps_of_round(self.steps_in_epoch)

    @property
    def steps_in_epoch(self) -> int:
        """Return the steps of one local epoch."""
        return steps_in(self.size, self.plan.training.batch_size)

    @cached_property
    def effective(self) -> float:
        """Return the noise with which a single gradient a step would keep the promise over all rounds."""
        rounds = sum(phase.rounds for phase in self.plan.course.phases if phase.trains)
        beside = [*(self.numbers.planned() if self.numbers else ()), *self._releases(self._released)]
        return noise_for(self.promise.epsilon, self.promise.delta, self.rate, self.steps * rounds, beside=beside)

    @cached_property
    def noise(self) -> float:
        """Return the noise on each gradient over its bound: all gradients of a batch keep the promise together."""
        assert self.plan.privacy
        noise = self.plan.privacy.noise(self.effective, self.plan.gradients)
        if noise > MOST_NOISE:
            raise Refused(
                f"no noise up to {MOST_NOISE:g} keeps ε = {self.promise.epsilon:g} here; ask for fewer rounds"
            )
        return noise

    def charges(self, number: int, phase: Phase) -> list[Charge]:
        """Return what a round's training costs, whatever of it leaves."""
        released = self._releases(phase.releases)
        if not phase.trains:
            return released
        assert self.plan.privacy
        noise = self.plan.privacy.effective(self.noise, self.plan.gradients)
        of = SampledGaussian(noise=noise, rate=self.rate, steps=self.steps)
        names = ", ".join(self.plan.private.networks)
        return [*released, Charge(what=f"training of {names} in round {number}", of=of)]

    @property
    def _released(self) -> int:
        """Return the means over cases that leave in all rounds."""
        return sum(phase.releases * phase.rounds for phase in self.plan.course.phases)

    @cached_property
    def releasing(self) -> float:
        """Return the noise on each of these means over the bound, so that all keep to their part of the promise."""
        assert self.plan.privacy and self.plan.privacy.statistics
        share = self.plan.privacy.statistics.epsilon / self.plan.privacy.epsilon
        return gaussian_for(share * self.promise.epsilon, self.promise.delta, self._released)

    def _releases(self, count: int) -> list[Charge]:
        return [Charge(what="mean over cases", of=Gaussian(noise=self.releasing, count=count))] if count else []

    def secret(self, number: int) -> NoiseSource:
        """Return the random numbers of one attempt at a round: nobody's, or with drawn hospitals the seed's."""
        if self.plan.task.synthetic:
            return NoiseSource.from_seed(self.plan.seed, self.site, "round", number)
        return NoiseSource()

    def training(self, number: int) -> PrivateSteps:
        """Return how the networks of this site learn in one attempt at a round."""
        secret = self.secret(number)
        assert self.plan.privacy
        clip = self.plan.privacy.clip
        steps = PrivateSteps(self.sample(secret), clip, self.noise, secret, self.plan.private.at_home)
        if self.plan.privacy.statistics:
            steps.releasing, steps.clip = self.releasing, self.plan.privacy.statistics.clip
        return steps
