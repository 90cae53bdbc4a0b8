"""Define the interface of a site, which answers the server's messages, and the site's context in a study.

A layer wraps a site and has the interface of a site (site_stack.py lists the order of layers).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.tensors import Groups, Modules
from medsilo.learning.compute import Stop
from medsilo.plan import Plan, parse_plan
from medsilo.runs.messages import Request, StudyMessage
from medsilo.runs.paths import MODELS
from medsilo.schedule.phase import Phase
from medsilo.site.job_code import JobCode
from medsilo.site.kit import KitFiles
from medsilo.site.query_budget import QueryBudget
from medsilo.site.settings import SiteSettings


@dataclass(frozen=True)
class SiteContext:
    """All that a site knows about one study, such as the plan, the site's settings and the site's folder.

    >>> from pathlib import Path
    >>> SiteContext(None, "a", ["a", "b"], None, Path("runs/my-study/sites/a")).study
    'my-study'
    """

    plan: Plan
    site: str
    sites: Sequence[str]  # the study's sites
    settings: SiteSettings
    folder: Path  # the site's folder in the study's run
    lead: str = ""  # the person who submitted the study, if known
    kit: KitFiles | None = None  # the startup kit whose key signs decisions and the ledger
    # the plan before the study's hospitals were added to the plan
    submitted: Plan | None = None
    job_code: JobCode | None = None  # the code that the NVFlare job contains in its folder custom
    # the study's query budget, if another process of the site has already admitted the study
    budget: QueryBudget | None = None

    @property
    def asked(self) -> Plan:
        """The plan exactly as the lead submitted it; hospitals approve this plan."""
        return self.submitted or self.plan

    @staticmethod
    def with_noise(exact: Tensor, deviation: float) -> Tensor:
        """Add normal noise to a tensor. The noise is secret, and each call samples new noise.

        Args:
            exact: the tensor
            deviation: the standard deviation of the noise
        """
        from medsilo.privacy.noise import NoiseSource

        return NoiseSource().with_normal(exact, deviation)

    @property
    def study(self) -> str:
        """The study's name."""
        return self.folder.parents[1].name

    @property
    def trains(self) -> bool:
        """False for an evaluation site, which does not train and only tests the final model."""
        return self.site not in self.plan.participation.evaluation_sites

    @property
    def trainers(self) -> list[str]:
        """The sites that train in this study, sorted."""
        return sorted(set(self.sites) - set(self.plan.participation.evaluation_sites))

    @property
    def models(self) -> Path:
        """The folder that contains files of initial weights, including files that the server sent."""
        return self.folder.parents[2] / MODELS

    def to_facts(self) -> dict[str, Any]:
        """Return the context as JSON values, for another process of the site."""
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
    def read(cls, payload: Mapping[str, Any], budget: QueryBudget | None = None) -> "SiteContext":
        """Restore the context from the values of another process.

        Args:
            payload: the values that `to_facts` returned
            budget: the query budget, if another process keeps it
        """
        settings = SiteSettings.model_validate(payload["settings"])
        plan = parse_plan(payload["plan"], allowed=settings.packages)
        kit = KitFiles(**payload["kit"]) if payload["kit"] else None
        return cls(
            plan,
            payload["site"],
            payload["sites"],
            settings,
            Path(payload["folder"]),
            payload["lead"],
            kit,
            budget=budget,
        )


def promises_privacy(context: SiteContext) -> bool:
    """True if the plan promises differential privacy, or this hospital demands it."""
    return context.plan.privacy is not None or context.settings.privacy is not None


class Site(Protocol):
    """A site of a study.

    A layer wraps a site and has the interface of a site.

    >>> class Counting:  # a layer
    ...     def __init__(self, inner: Site) -> None:
    ...         self.inner, self.answers = inner, 0
    ...     def answer(self, message: StudyMessage, stop: Stop) -> StudyMessage:
    ...         self.answers += 1
    ...         return self.inner.answer(message, stop)
    """

    def answer(self, message: StudyMessage, stop: Stop) -> StudyMessage:
        """Answer a request.

        Args:
            message: the server's request
            stop: a function that is called before every batch, and raises an error to end the work
        """


class UpdateCodec:
    """Sends and receives tensors as they are, without encoding. Secure aggregation overrides the methods of this class
    to mask the tensors.
    """

    # whether the server leaves out tensor groups that a site computes itself
    keeps_at_home = False

    def letter(self, request: Request) -> dict[str, Any]:
        """Answer a request that secure aggregation makes between two rounds."""
        raise Refused("the server asks for masked numbers, but the plan has no secure aggregation")

    def open(self, request: Request, groups: Groups, modules: Modules) -> Groups:
        """Decrypt the received groups of tensors that only sites, and not the server, can read."""
        return groups

    def check(self, request: Request, phase: Phase, modules: Modules) -> None:
        """If the tensors of a round can't be encoded, raise Refused before the site saves the round's state."""

    def seal(self, request: Request, phase: Phase, groups: Groups, samples: int) -> Groups:
        """Encode the groups of tensors to send.

        Args:
            samples: the update's aggregation weight
        """
        return groups
