"""The interface of a site: it answers a parcel. All that is optional wraps it. And the place of a site in a study.

A layer around a site is a site (site_stack.py has their order).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from medsilo.core import optional
from medsilo.core.errors import Refused
from medsilo.core.tensors import Groups, Modules
from medsilo.learning.compute import Stop
from medsilo.plan import Plan, parse_plan
from medsilo.runs.messages import Request, StudyMessage
from medsilo.runs.paths import MODELS
from medsilo.schedule.phase import Phase
from medsilo.site.kit import KitFiles
from medsilo.site.settings import SiteSettings


@dataclass(frozen=True)
class SiteContext:
    """The place of a site in a study: its plan, its hospital's settings, its folder.

    >>> from pathlib import Path
    >>> SiteContext(None, "a", ["a", "b"], None, Path("runs/my-study/sites/a")).study
    'my-study'
    """

    plan: Plan
    site: str
    sites: Sequence[str]  # of the study
    settings: SiteSettings
    folder: Path  # the site's, of the study
    lead: str = ""  # who submitted the study, as far as it is known
    kit: KitFiles | None = None  # what the site signs with
    submitted: Plan | None = None  # the job's, where it names no hospitals and `plan` does

    @property
    def asked(self) -> Plan:
        """Return the plan that hospitals are asked to approve: as it was submitted."""
        return self.submitted or self.plan

    @staticmethod
    def with_noise(exact: Tensor, deviation: float) -> Tensor:
        """Return numbers with normal noise of this standard deviation, which is secret and new in every answer."""
        return optional.NoiseSource().with_normal(exact, deviation)

    @property
    def study(self) -> str:
        """The study's name."""
        return self.folder.parents[1].name

    @property
    def trains(self) -> bool:
        """Return whether the site trains, or only sees the outcome."""
        return self.site not in self.plan.participation.evaluation_sites

    @property
    def trainers(self) -> list[str]:
        """The sites that train in this study, in sorted order."""
        return sorted(set(self.sites) - set(self.plan.participation.evaluation_sites))

    @property
    def models(self) -> Path:
        """The folder with files that networks begin with, those that were sent among them."""
        return self.folder.parents[2] / MODELS

    def to_facts(self) -> dict[str, Any]:
        """Return the place as another process of the site is told of it."""
        return {
            "plan": self.plan.resolved(),
            "site": self.site,
            "sites": list(self.sites),
            "settings": self.settings.model_dump(mode="json"),
            "folder": str(self.folder.absolute()),
            "lead": self.lead,
            "kit": asdict(self.kit) if self.kit else None,
        }

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> "SiteContext":
        """Return the place that the site's first process told of."""
        settings = SiteSettings.model_validate(told["settings"])
        plan = parse_plan(told["plan"], allowed=settings.packages)
        kit = KitFiles(**told["kit"]) if told["kit"] else None
        return cls(plan, told["site"], told["sites"], settings, Path(told["folder"]), told["lead"], kit)


def promises_privacy(place: SiteContext) -> bool:
    """Return whether the plan promises differential privacy, or this hospital demands it."""
    return place.plan.privacy is not None or place.settings.privacy is not None


class Site(Protocol):
    """A site of a study. Layers wrap one, and are one.

    >>> class Counting:  # a layer
    ...     def __init__(self, inner: Site) -> None:
    ...         self.inner, self.answers = inner, 0
    ...     def answer(self, parcel: StudyMessage, stop: Stop) -> StudyMessage:
    ...         self.answers += 1
    ...         return self.inner.answer(parcel, stop)
    """

    def answer(self, parcel: StudyMessage, stop: Stop) -> StudyMessage:
        """Answer a parcel. `stop` is asked before every batch, and raises to end the work."""


class UpdateCodec:
    """Tensors in clear."""

    keeps_at_home = False  # whether groups that a site can make by itself are not sent to it

    def letter(self, asked: Request) -> dict[str, Any]:
        """Answer a letter that is no round."""
        raise Refused("the server asks for masked numbers, and the plan has no secure aggregation")

    def open(self, asked: Request, groups: Groups, modules: Modules) -> Groups:
        """Return what came, with what only this site or all hospitals can read opened."""
        return groups

    def check(self, asked: Request, phase: Phase, modules: Modules) -> None:
        """Raise Refused, before anything is kept, where numbers that would be sent can't be."""

    def seal(self, asked: Request, phase: Phase, groups: Groups, samples: int) -> Groups:
        """Return what is sent. samples: the training cases that it rests on, as the site tells them."""
        return groups
