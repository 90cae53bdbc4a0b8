"""A plan's `mixing`: the server's defence against hospitals that send wrong or harmful tensors."""

from collections.abc import Collection, Iterable
from typing import Any

from pydantic import Field

from medsilo.core.section import Feature
from medsilo.core.tensors import Modules
from medsilo.mixing.defence import Shield
from medsilo.mixing.rules import Robust


class Mixing(Feature):
    """The server's defence against hospitals that send wrong or harmful tensors."""

    robust: Robust | None = Field(
        None,
        description="what takes the place of every mean over hospitals, so that a few dishonest ones can't bend the "
        "model ([privacy.md](privacy.md#robust-rules)). Hospitals count alike in it, unless `share_cap` is given with "
        "`norm-bound` or `geometric-median`. Groups of which every hospital has values of its own stay as the method "
        "mixes them",
    )
    share_cap: float | None = Field(
        None,
        gt=0,
        le=1,
        description="the most that one hospital may count for in a mean, whatever number of cases it claims; what is "
        "cut off goes to the others",
    )

    def shield(self, apart: Collection[str]) -> Shield | None:
        """Return what mixers are defended by; None where the plan asks for nothing."""
        return Shield(self.robust, self.share_cap, apart) if self.robust or self.share_cap else None

    def conflicts(self, plan: Any, networks: Modules) -> Iterable[str]:
        if not (self.robust or self.share_cap):
            return
        method, hospitals = plan.algorithm.name, plan.participation.required
        means = [group for phase in plan.course.phases for group in phase.sent if not group.personal]
        if not means:
            yield (
                f"mixing: {method} takes no mean over hospitals that a robust rule could take the place of; use "
                "fedavg, fedbn or ditto, or leave mixing.robust and mixing.share_cap out"
            )
        for group in means:
            if group.undefended:
                yield (group.undefended)
        if self.robust and hospitals < self.robust.fewest:
            yield (
                f"mixing.robust: {self.robust.name} needs {self.robust.fewest} hospitals in every round, and "
                f"{hospitals} are enough for this plan; raise participation.minimum, or lower what the rule asks for"
            )
        if self.share_cap and self.robust and not self.robust.weighs:
            yield (f"mixing.share_cap: all hospitals count alike in {self.robust.name}; set it to null")
        if self.share_cap and self.share_cap * hospitals < 1:
            yield (
                f"mixing.share_cap: shares of at most {self.share_cap:g} make no whole with {hospitals} hospitals; "
                f"give {1 / hospitals:.3g} or more"
            )

    def cautions(self, plan: Any) -> Iterable[str]:
        if not (self.robust or self.share_cap):
            return []
        groups = [group for phase in plan.course.phases for group in phase.groups]
        mixed = sorted({group.title or group.name for group in groups if group.personal and group.travels == "both"})
        return [
            f"mixing: the {title} of every hospital is mixed as the method says, so what a dishonest hospital sends of "
            "it reaches the others"
            for title in mixed
        ]
