"""The origin of a super model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from medsilo.deploy.tuning import Tuning
from medsilo.models.network import Network
from medsilo.plan import Plan

Spacing = tuple[tuple[float, float], ...]  # least and greatest, millimetres along x, y (and z)


@dataclass(frozen=True)
class Origin:
    """The origin of a super model: enough to build its networks again, and to say how gamma was chosen."""

    plan: Plan
    selector: Network  # the selector's network, a section as the plan has them
    tuning: Tuning | None = None
    spacing: Spacing | None = None  # of the training images
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by site, what it has not
