"""Define the privacy mechanism of a method, and the section `privacy` of a plan."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, model_validator

from medsilo.core.section import Feature, Section
from medsilo.core.tensors import Modules
from medsilo.learning.layers import mixes_cases
from medsilo.privacy.guarantees import Delta, Epsilon, PrivacyGuarantee, Unit


@dataclass(frozen=True)
class Private:
    """States which of a method's networks train with noise. The tensors that a site sends depend on the site's cases
    only through networks that train with noise.

    In each step, all networks train on one sample of cases, so the privacy account charges the networks' gradients
    together. Averages or momentum that are computed from noisy weights cost no additional privacy.
    """

    networks: tuple[str, ...]  # names of networks that train with noisy steps
    # Names of networks that train without noise; sites send neither these networks nor values that depend on these
    # networks.
    exact_networks: tuple[str, ...] = ()
    disclosure_notes: str = "everything that leaves follows from noisy gradients"


class NumbersOffer(Section):
    """The fraction of ε that is spent on the scores or counts that a site sends in addition to tensors."""

    epsilon: Epsilon = Field(
        description="the part of `privacy.epsilon` for all numbers to which this section applies, taken together"
    )


class StatisticsOffer(NumbersOffer):
    """The fraction of ε for means over a site's cases, each of which the site sends once."""

    clip: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="norm to which the contribution of a unit (a record or a patient) to a mean is clipped. "
        "For HarmoFL's amplitudes, the norm is divided by the number of pixels. With AdaFed, the clipped norm is the "
        "root mean square of the features",
    )


class PrivacyOffer(Feature, PrivacyGuarantee):
    epsilon: Epsilon = Field(
        description="ε of all rounds together, at every hospital; a hospital may demand a smaller ε"
    )
    delta: Delta = Field(
        description="δ of the guarantee with `privacy.epsilon`; must be less than 1 / number of patients of the "
        "largest hospital"
    )
    unit: Unit = Field(
        "record",
        description="the unit that the guarantee protects: one record, or one patient with all of the patient's cases",
    )
    clip: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="norm to which a unit's gradient is clipped: the gradient of a record, or of all cases of a "
        "patient together",
    )
    scores: NumbersOffer | None = Field(
        None,
        description="scores over validation and test cases leave a hospital with geometric noise, and the noisy "
        "scores select the model. `null`: scores leave a hospital only if it declares its scores public; without "
        "scores, the last round's model is kept",
    )
    counts: NumbersOffer | None = Field(
        None,
        description="numbers of cases leave a hospital with geometric noise, which is sampled once. With "
        "`privacy.counts`, every count, even the batch size, is a count of records or of patients, as "
        "`privacy.unit` says. `null`: a hospital that does not declare its numbers of cases public can't "
        "join",
    )

    statistics: StatisticsOffer | None = Field(
        None,
        description="adds Gaussian noise to the means that a hospital computes over its cases, and sends before "
        "training: AdaFed's "
        "statistics or HarmoFL's amplitude. A plan under which hospitals send means before training "
        "needs `privacy.statistics`",
    )

    @property
    def besides(self) -> float:
        return sum(own.epsilon for own in (self.scores, self.counts, self.statistics) if own)

    @model_validator(mode="after")
    def _leaves_some_for_tensors(self) -> Self:
        if self.besides >= self.epsilon:
            raise ValueError(
                f"scores and statistics cost ε = {self.besides:g} of {self.epsilon:g}, so nothing is left for tensors; "
                "lower the ε of scores, counts or statistics"
            )
        return self

    def conflicts(self, plan: Any, networks: Modules) -> Iterable[str]:
        """Yield conflicts between a plan and differential privacy, under which all values that depend on cases need
        noise.
        """
        private: Private = plan.private
        if why := plan.task.not_private:
            yield f"privacy: {why}, or leave privacy out"
        if plan.training.truncate:
            yield (
                "training.truncate: which cases a hospital trains on would depend on the others' numbers of cases; set "
                "it to false where the plan promises privacy"
            )
        if plan.training.class_weights == "balanced":
            yield (
                "training.class_weights: balanced weights follow from each hospital's own numbers of cases, which no "
                "noise hides; give numbers that all hospitals know, for example [1, 4]"
            )
        releases = any(phase.releases for phase in plan.course.phases)
        if releases != (self.statistics is not None):
            yield (
                "privacy.statistics: means over a hospital's cases leave before training, and need an account of their "
                "own; set privacy.statistics.epsilon"
                if releases
                else "privacy.statistics: nothing leaves before training under this plan; remove it"
            )
        if private.exact_networks and self.scores:
            yield (
                f"privacy.scores: the model that {plan.algorithm.name} scores learns by exact steps, so scores "
                f"reveal training cases, which this noise does not protect; leave scores out"
            )
        for name in private.networks:
            if layer := mixes_cases(networks[name]):
                yield (
                    f"privacy: {layer} of network {name} lets cases of a batch change each other's gradients, so no "
                    "bound holds for one; choose network.norm=group, or instance for a U-Net"
                )

    def leaves(self, plan: Any) -> Iterable[str]:
        yield (
            f"The study promised differential privacy: ε = {self.epsilon:g} at δ = {self.delta:g} for each {self.unit}."
        )

    def warnings(self, plan: Any) -> Iterable[str]:
        if self.scores:
            yield (
                "scores have noise for privacy (privacy.scores), but for hospitals that declared theirs public: small "
                "differences between them mean nothing"
            )
        if self.counts:
            yield "numbers of cases have noise for privacy (privacy.counts), so weighted means have it, too"
