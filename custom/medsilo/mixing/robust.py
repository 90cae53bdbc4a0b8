"""A plan's robust rules as data: what takes the place of a mean over sites. A plan without one loads no arithmetic.

None of them helps against sites that are the majority.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from medsilo.core import optional
from medsilo.core.section import Feature, Section
from medsilo.core.tensors import Modules

if TYPE_CHECKING:
    from medsilo.mixing.defence import Shield
    from medsilo.mixing.rules import Updates


class RobustRule(Section, ABC):
    """A rule by which the sites' updates become one: `Reweighting` or `Coordinatewise`."""

    # Whether every site counts by the weights of the method (cases), if the plan bounds a site's share of them.
    weighs: ClassVar[bool] = False

    name: str

    @property
    def fewest(self) -> int:
        """The sites that it needs in every round."""
        return 3


class Reweighting(RobustRule):
    """A weighted sum of whole updates."""

    @abstractmethod
    def shares(self, updates: "Updates") -> Tensor:
        """Return how much every update counts, [sites]."""


class Coordinatewise(RobustRule):
    """A rule for every number by itself."""

    @abstractmethod
    def across(self, columns: Tensor) -> Tensor:
        """Return the combined numbers, [columns], of [sites, columns]."""


class NormBound(Reweighting):
    """Sun et al., Can You Really Backdoor Federated Learning?, 2019: d = Σ p_i d_i min(1, B / ‖d_i‖).

    B is a multiple of the (lower) median norm of the round's updates, so nobody has to know a good bound beforehand.
    Against updates that are too long; not against those that point the wrong way.
    """

    weighs: ClassVar[bool] = True

    name: Literal["norm-bound"] = "norm-bound"
    factor: float = Field(1.0, gt=0, le=100, description="the longest update is so many times the median one")

    def shares(self, updates: "Updates") -> Tensor:
        return optional.rules.norm_bound(updates, self.factor)


class Median(Coordinatewise):
    """Yin et al., Byzantine-Robust Distributed Learning, 2018, Def. 1: the median of every number by itself.

    With an even number of sites, the mean of the two in the middle.
    """

    name: Literal["median"] = "median"

    def across(self, columns: Tensor) -> Tensor:
        return optional.rules.median(columns)


class TrimmedMean(Coordinatewise):
    """Yin et al. 2018, Def. 2: of every number by itself, the mean without the largest and the smallest ones."""

    name: Literal["trimmed-mean"] = "trimmed-mean"
    bad: int = Field(1, ge=1, le=2000, description="how many values are left out at either end (b)")

    @property
    def fewest(self) -> int:
        return 2 * self.bad + 1

    def across(self, columns: Tensor) -> Tensor:
        return optional.rules.trimmed_mean(columns, self.bad)


class GeometricMedian(Reweighting):
    """Pillutla et al., Robust Aggregation for Federated Learning (RFA), 2022: d minimises Σ p_i ‖d - d_i‖.

    By the smoothed Weiszfeld algorithm (Alg. 2): β_i = p_i / max(ν, ‖d - d_i‖), d ← Σ β_i d_i / Σ β_i. Every d on the
    way is a mean Σ s_i d_i, so all its distances follow from those between the sites' updates: contributions are read
    twice, however often shares s_i are made. It ends when they settle, or after `iterations`: then short of d.
    """

    weighs: ClassVar[bool] = True

    name: Literal["geometric-median"] = "geometric-median"
    iterations: int = Field(100, ge=1, le=10_000, description="steps of Weiszfeld's algorithm at most")
    smoothing: float = Field(1e-6, gt=0, le=1, description="shorter distances count as this one (ν)")

    def shares(self, updates: "Updates") -> Tensor:
        return optional.rules.geometric_median(updates, self.iterations, self.smoothing)


class MultiKrum(Reweighting):
    """Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, 2017.

    An update's score is the sum of its squared distances to the n - f - 2 updates nearest to it; the mean of those with
    the lowest scores is taken. All others count for nothing.
    """

    name: Literal["multi-krum"] = "multi-krum"
    bad: int = Field(1, ge=1, le=2000, description="how many sites may be dishonest (f); it needs 2 f + 3 sites")
    keep: int | None = Field(
        None, ge=1, le=4096, description="how many updates are averaged (m); 1 is Krum; `null`: all but f"
    )

    @property
    def fewest(self) -> int:
        return max(2 * self.bad + 3, self.keep or 0)

    def shares(self, updates: "Updates") -> Tensor:
        return optional.rules.multi_krum(updates, self.bad, self.keep)


Robust = Annotated[
    NormBound | Median | TrimmedMean | GeometricMedian | MultiKrum,
    Field(discriminator="name"),
]


class AggregationSettings(Feature):
    """The server's defence against hospitals that send wrong or harmful tensors."""

    robust: Robust | None = Field(
        None,
        description="what takes the place of every mean over hospitals, so that a few dishonest ones can't bend the "
        "model. Hospitals count alike in it, unless `max_weight` is given with "
        "`norm-bound` or `geometric-median`. Groups of which every hospital has values of its own stay as the method "
        "mixes them",
    )
    max_weight: float | None = Field(
        None,
        gt=0,
        le=1,
        description="the most that one hospital may count for in a mean, whatever number of cases it claims; what is "
        "cut off goes to the others",
    )

    def shield(self, apart: Collection[str]) -> "Shield | None":
        """Return what mixers are defended by; None where the plan asks for nothing."""
        return optional.Shield(self.robust, self.max_weight, apart) if self.robust or self.max_weight else None

    def conflicts(self, plan: Any, networks: Modules) -> Iterable[str]:
        if not (self.robust or self.max_weight):
            return
        method, hospitals = plan.algorithm.name, plan.participation.required
        means = [group for phase in plan.course.phases for group in phase.sent if not group.personal]
        if not means:
            yield (
                f"mixing: {method} takes no mean over hospitals that a robust rule could take the place of; use "
                "fedavg, fedbn or ditto, or leave aggregation.robust and aggregation.max_weight out"
            )
        for group in means:
            if group.undefended:
                yield (group.undefended)
        if self.robust and hospitals < self.robust.fewest:
            yield (
                f"aggregation.robust: {self.robust.name} needs {self.robust.fewest} hospitals in every round, and "
                f"{hospitals} are enough for this plan; raise participation.minimum, or lower what the rule asks for"
            )
        if self.max_weight and self.robust and not self.robust.weighs:
            yield (f"aggregation.max_weight: all hospitals count alike in {self.robust.name}; set it to null")
        if self.max_weight and self.max_weight * hospitals < 1:
            yield (
                f"aggregation.max_weight: shares of at most {self.max_weight:g} can't sum to 1 with {hospitals} sites; "
                f"give {1 / hospitals:.3g} or more"
            )

    def warnings(self, plan: Any) -> Iterable[str]:
        if not (self.robust or self.max_weight):
            return []
        groups = [group for phase in plan.course.phases for group in phase.groups]
        mixed = sorted({group.title or group.name for group in groups if group.personal and group.travels == "both"})
        return [
            f"mixing: the {title} of every hospital is mixed as the method says, so what a dishonest hospital sends of "
            "it reaches the others"
            for title in mixed
        ]
