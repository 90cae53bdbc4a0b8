"""Asking sites: who is asked, how often, who is missing and why. No word here of how parcels travel."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

from medsilo.core.errors import Aborted, Died, Lacks, MedsiloError
from medsilo.core.text import plain
from medsilo.federation.turns import TurnKeeper
from medsilo.plan import Participation
from medsilo.runs.messages import Parcel, SiteAnswer

RETRY_PAUSE = 5.0  # seconds before a missing site is asked again

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


class Messenger(Protocol):
    """Brings parcels to sites and their answers back."""

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        """Ask all these sites at once; `receive` raises Refused for an answer that must not count.

        Returns the sites without an accepted answer.
        """

    def pause(self, seconds: float) -> None:
        """Wait; raises Aborted when the run was told to stop."""


@dataclass
class Exchange:
    """The replies to asking all sites once."""

    asked: list[str] = field(default_factory=list)
    replies: dict[str, SiteAnswer] = field(default_factory=dict)  # without tensors: those are in the mixers
    missing: dict[str, Missing] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)

    def by_kind(self, kind: str) -> dict[str, str]:
        """Return why sites are missing that were refused, or lost."""
        return {site: gone.reason for site, gone in sorted(self.missing.items()) if gone.kind == kind}

    def warnings(self) -> dict[str, list[str]]:
        """Return what sites had to say beside their answers."""
        return {site: reply.warnings for site, reply in sorted(self.replies.items()) if reply.warnings}


class Asking:
    """Asks sites as often as the plan allows, and says whether too few answered."""

    def __init__(
        self,
        messenger: Messenger,
        rules: Participation,
        sites: Sequence[str],
        required: int,
        turns: TurnKeeper | None = None,
    ) -> None:
        """turns: is told who is asked and who has answered."""
        self.messenger, self.rules, self.turns = messenger, rules, turns or TurnKeeper()
        self.sites, self.required = sites, required  # those that train, and how many of them every answer needs

    def ask(
        self, exchange: Exchange, outgoing: Outgoing, receive: Receive, lost: Callable[[str, Missing], None]
    ) -> None:
        """Fill an exchange; `lost` hears of every site that did not answer, each time it was asked."""
        started = time.monotonic()
        asked = exchange.asked

        def going(site: str) -> Parcel:
            parcel = outgoing(site)
            self.turns.asked(site)
            return parcel

        def coming(site: str, reply: Parcel) -> None:
            receive(site, reply)
            self.turns.answered(site)

        refused: dict[str, Missing] = {}  # are not asked again: they would be refused again
        sent_whole: set[str] = set()  # to which all tensors were sent because they lacked some
        for attempt in count(1):
            try:
                missing = self.messenger.ask(asked, going, coming, self.rules.timeout)
            except Aborted as error:
                silent = ", ".join(site for site in asked if site not in exchange.replies)
                raise Aborted(f"{error} before {silent} answered") from error
            exchange.missing = {**refused, **missing}
            for site, gone in exchange.missing.items():
                lost(site, gone)
            lacking = [site for site, gone in sorted(missing.items()) if gone.lacks and site not in sent_whole]
            sent_whole.update(lacking)
            later = self._worth_asking(exchange, attempt, time.monotonic() - started)
            asked = sorted({*lacking, *later})
            if not asked:
                return
            refused = {site: gone for site, gone in exchange.missing.items() if site not in asked}
            if later:
                self.messenger.pause(RETRY_PAUSE)

    def _worth_asking(self, exchange: Exchange, attempt: int, waited: float) -> list[str]:
        """Return who may answer yet: under `wait` whoever is lost, and whose trainer died; under `stop` the latter,
        once."""
        if waited + RETRY_PAUSE > self.rules.patience:
            return []
        lost = self.rules.when_missing == "wait"
        died = lost or (self.rules.when_missing == "stop" and attempt == 1)
        return sorted(
            site for site, gone in exchange.missing.items() if (gone.passing and died) or (gone.kind == "lost" and lost)
        )

    def breach(self, exchange: Exchange, where: str) -> str | None:
        """Return how an exchange breaks what the plan agreed on; None when it doesn't."""
        needed, required = self.sites, self.required
        if self.rules.when_missing == "stop":
            needed, required = exchange.asked, len(exchange.asked)
        replies = len(exchange.replies.keys() & set(needed))
        if replies >= required:
            return None
        causes: dict[str, list[str]] = {}
        for site, gone in sorted(exchange.missing.items()):
            causes.setdefault(gone.text, []).append(site)
        reasons = "; ".join(f"{', '.join(sites)} {cause}" for cause, sites in causes.items())
        answered = f"{replies} of {len(needed)} sites answered"
        return f"{where}: {answered}, the plan needs {required}: {reasons}"
