"""The two seams of a study: a site answers a parcel, and a channel asks sites. All that is optional wraps them.

A layer around a site is a site, and a layer around a channel is a channel (around.py has their order).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from medsilo.core.errors import Died, Lacks, MedsiloError
from medsilo.core.text import plain
from medsilo.federation.sealed.identity import KitFiles
from medsilo.learning.loop import Stop
from medsilo.plan import Plan, parse_plan
from medsilo.runs.messages import Parcel
from medsilo.runs.paths import MODELS
from medsilo.site.settings import SiteSettings

Outgoing = Callable[[str], Parcel]
Receive = Callable[[str, Parcel], None]


@dataclass(frozen=True)
class Missing:
    """The reason why a site gave nothing in a round.

    >>> Missing("lost", "no answer in time").text
    'lost: no answer in time'
    """

    kind: Literal["refused", "lost"]
    reason: str
    passing: bool = False  # a refusal that asking again may heal
    lacks: bool = False  # a refusal that sending it the network's files heals

    @property
    def text(self) -> str:
        """Return how it is absent, and why."""
        return f"{self.kind}: {self.reason}"

    @classmethod
    def refused(cls, error: MedsiloError) -> "Missing":
        """Return the refusal that an error is; its text may come from a site."""
        return cls("refused", plain(str(error)), isinstance(error, Died), isinstance(error, Lacks))


@dataclass(frozen=True)
class Place:
    """The place of a site in a study: its plan, its hospital's settings, its folder.

    >>> from pathlib import Path
    >>> Place(None, "a", ["a", "b"], None, Path("runs/my-study/sites/a")).study
    'my-study'
    """

    plan: Plan
    site: str
    sites: Sequence[str]  # of the study
    settings: SiteSettings
    folder: Path  # the site's, of the study
    lead: str = ""  # who submitted the study, as far as it is known
    kit: KitFiles | None = None  # what the site signs with

    @property
    def study(self) -> str:
        """The study's name."""
        return self.folder.parents[1].name

    @property
    def trains(self) -> bool:
        """Return whether the site trains, or only sees the outcome."""
        return self.site not in self.plan.participation.unseen

    @property
    def trainers(self) -> list[str]:
        """The sites that train in this study, in sorted order."""
        return sorted(set(self.sites) - set(self.plan.participation.unseen))

    @property
    def models(self) -> list[Path]:
        """The folders with files that networks begin with; the last has those that were sent."""
        return [*self.settings.models, self.folder.parents[2] / MODELS]

    def told(self) -> dict[str, Any]:
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
    def read(cls, told: Mapping[str, Any]) -> "Place":
        """Return the place that the site's first process told of."""
        settings = SiteSettings.model_validate(told["settings"])
        plan = parse_plan(told["plan"], allowed=settings.packages)
        kit = KitFiles(**told["kit"]) if told["kit"] else None
        return cls(plan, told["site"], told["sites"], settings, Path(told["folder"]), told["lead"], kit)


class Site(Protocol):
    """A site of a study. Layers wrap one, and are one.

    >>> class Counting:  # a layer
    ...     def __init__(self, inner: Site) -> None:
    ...         self.inner, self.answers = inner, 0
    ...     def answer(self, parcel: Parcel, stop: Stop) -> Parcel:
    ...         self.answers += 1
    ...         return self.inner.answer(parcel, stop)
    """

    def answer(self, parcel: Parcel, stop: Stop) -> Parcel:
        """Answer a parcel. `stop` is asked before every batch, and raises to end the work."""


class Channel(Protocol):
    """The server's side of the line to the sites. Layers wrap one, and are one.

    >>> class Counting:  # a layer
    ...     def __init__(self, inner: Channel) -> None:
    ...         self.inner, self.asked = inner, 0
    ...     def ask(self, sites, outgoing, receive, timeout):
    ...         self.asked += len(sites)
    ...         return self.inner.ask(sites, outgoing, receive, timeout)
    ...     def pause(self, seconds: float) -> None:
    ...         self.inner.pause(seconds)
    """

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        """Ask all these sites at once; `receive` raises Refused for an answer that must not count.

        Returns the sites without an accepted answer. `outgoing` may be called more than once and changes nothing.
        """

    def pause(self, seconds: float) -> None:
        """Wait; raises Aborted when the run was told to stop."""
