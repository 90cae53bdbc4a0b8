"""The plan's section `aggregation`: the defence against hospitals that send wrong or harmful tensors.

The module rules.py defines the robust rules, and is imported only if a plan uses a robust rule.
"""

import json
from abc import ABC
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, SerializeAsAny

from medsilo.core.section import Feature, Section
from medsilo.core.tensors import Modules

if TYPE_CHECKING:
    from medsilo.mixing.defence import Shield


class RobustRule(Section, ABC):
    """A robust rule, which the server uses instead of a mean to combine the sites' updates. No robust rule helps if
    most sites are dishonest.
    """

    # True if the rule uses the sites' weights when the plan bounds these weights; False if all sites count equally.
    weighs: ClassVar[bool] = False

    name: str

    @property
    def fewest(self) -> int:
        """Return the minimum number of sites that must answer in every round."""
        return 3


def _rule_named(values: Any) -> Any:
    if values is None or isinstance(values, RobustRule):
        return values
    from medsilo.mixing.rules import NAMED_RULE

    return NAMED_RULE.validate_json(json.dumps(values), strict=True)


class AggregationSettings(Feature):
    robust: Annotated[SerializeAsAny[RobustRule] | None, BeforeValidator(_rule_named)] = Field(
        None,
        description="a rule that replaces every mean over hospitals, so that a few dishonest hospitals can't bend "
        "the model. The rule weights hospitals equally, unless `max_weight` is given with `norm-bound`. If each "
        "method gives each hospital different values for a group of tensors, the rule does not apply to this group",
    )
    max_weight: float | None = Field(
        None,
        gt=0,
        le=1,
        description="the largest weight of one hospital in a mean, regardless of the hospital's number of "
        "cases; the excess weight goes to the other hospitals",
    )

    def shield(self, apart: Collection[str]) -> "Shield | None":
        if not self.robust and not self.max_weight:
            return None
        from medsilo.mixing.defence import Shield

        return Shield(self.robust, self.max_weight, apart)

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
                f"{hospitals} are enough for this plan; raise participation.minimum, or choose a rule that needs fewer"
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
            f"mixing: the method mixes the {title} of every hospital without a robust rule, so a dishonest hospital "
            "can harm the other hospitals"
            for title in mixed
        ]
