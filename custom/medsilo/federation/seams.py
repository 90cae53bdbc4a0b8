"""The two seams of a study: a site answers a parcel, and a channel asks sites. Whatever is optional stands around them.

A layer around a site is a site, and a layer around a channel is a channel (around.py has their order).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from medsilo.core.errors import Died, Lacks, MedsiloError
from medsilo.core.text import plain
from medsilo.federation.sealed.identity import KitFiles
from medsilo.learning.loop import Stop
from medsilo.plan import Plan
from medsilo.runs.messages import Parcel
from medsilo.site.settings import SiteSettings

Outgoing = Callable[[str], Parcel]
Receive = Callable[[str, Parcel], None]


@dataclass(frozen=True)
class Missing:
    """The reason why a site gave nothing in a round."""

    kind: Literal["refused", "lost"]
    reason: str
    passing: bool = False  # a refusal that asking again may heal
    lacks: bool = False  # a refusal that sending all tensors heals
    holds: dict[str, dict[str, str]] | None = None  # what it has of what it was sent, where it says so

    @property
    def text(self) -> str:
        """Return how it is absent, and why."""
        return f"{self.kind}: {self.reason}"

    @classmethod
    def refused(cls, error: MedsiloError, holds: dict[str, dict[str, str]] | None = None) -> "Missing":
        """Return the refusal that an error is; its text may come from a site."""
        return cls("refused", plain(str(error)), isinstance(error, Died), isinstance(error, Lacks), holds)


@dataclass(frozen=True)
class Place:
    """The place of a site in a study: its plan, its hospital's settings, its folder."""

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


class Site(Protocol):
    """A site of a study. Layers stand around one, and are one."""

    def answer(self, parcel: Parcel, stop: Stop) -> Parcel:
        """Answer a parcel. `stop` is asked before every batch, and raises to end the work."""


class Channel(Protocol):
    """The server's side of the line to the sites. Layers stand around one, and are one."""

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        """Ask all these sites at once; `receive` raises Refused for an answer that must not count.

        Returns the sites without an accepted answer. `outgoing` may be called more than once and changes nothing.
        """

    def pause(self, seconds: float) -> None:
        """Wait; raises Aborted when the run was told to stop."""
