"""Asking sites: who is asked, how often, who is missing and why. No word here of how parcels travel."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medsilo.core.errors import Aborted, ParticipationError
from medsilo.core.tensors import Groups
from medsilo.federation.acceptance import Acceptance
from medsilo.federation.channel import Channel, Missing, Outgoing, Receive
from medsilo.runs.messages import Joined, Request, SiteAnswer, StudyMessage, Task
from medsilo.runs.rounds import SiteTurn, Turns
from medsilo.schedule.participation import Participation

Notify = Callable[[Turns | None], None]
RETRY_PAUSE = 5.0  # seconds before a missing site is asked again


@dataclass
class Exchange:
    """The replies to asking all sites once."""

    asked: list[str] = field(default_factory=list)
    replies: dict[str, SiteAnswer] = field(default_factory=dict)  # without tensors: those are in the mixers
    missing: Mapping[str, Missing] = field(default_factory=dict)
    bytes_up: Mapping[str, int] = field(default_factory=dict)
    bytes_down: Mapping[str, int] = field(default_factory=dict)

    def by_kind(self, kind: str) -> dict[str, str]:
        """Return why sites are missing that were refused, or lost."""
        return {site: gone.reason for site, gone in sorted(self.missing.items()) if gone.kind == kind}

    def warnings(self) -> dict[str, list[str]]:
        """Return what sites had to say beside their answers."""
        return {site: reply.warnings for site, reply in sorted(self.replies.items()) if reply.warnings}


class Retry:
    """A channel that asks sites as often as the plan allows, and says whether too few answered."""

    def __init__(
        self,
        inner: Channel,
        rules: Participation,
        sites: Sequence[str],
        pause: Callable[[float], None],
        lost: Callable[[str], None],
    ) -> None:
        """sites: those that train; pause: waits so many seconds; lost: hears of every site that did not answer, as it
        may not have what it was sent."""
        self.inner, self.rules, self.sites, self.pause, self.lost = inner, rules, sites, pause, lost

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        started = time.monotonic()
        asked, answered = sorted(sites), set[str]()

        def coming(site: str, reply: StudyMessage) -> None:
            receive(site, reply)
            answered.add(site)

        refused: dict[str, Missing] = {}  # are not asked again: they would be refused again
        attempt = 0
        while asked:
            attempt += 1
            try:
                unheard = self.inner.ask(asked, outgoing, coming, timeout)
            except Aborted as error:
                silent = ", ".join(site for site in asked if site not in answered)
                raise Aborted(f"{error} before {silent} answered") from error
            for site in unheard:
                self.lost(site)
            missing = {**refused, **unheard}
            asked = self._worth_asking(missing, attempt, time.monotonic() - started)
            refused = {site: gone for site, gone in missing.items() if site not in asked}
            if asked:
                self.pause(RETRY_PAUSE)
        return refused

    def _worth_asking(self, missing: Mapping[str, Missing], attempt: int, waited: float) -> list[str]:
        """Return who may answer yet: under `wait` whoever is lost, and whose trainer died; under `stop` the latter,
        once."""
        if waited + RETRY_PAUSE > self.rules.retry_timeout:
            return []
        lost = self.rules.when_missing == "wait"
        died = lost or (self.rules.when_missing == "stop" and attempt == 1)
        return sorted(
            site for site, gone in missing.items() if (gone.passing and died) or (gone.kind == "lost" and lost)
        )

    def breach(self, exchange: Exchange, where: str) -> str | None:
        """Return how an exchange breaks what the plan agreed on; None when it doesn't."""
        needed, required = self.sites, self.rules.required
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


PAUSE = 0.001  # seconds for each site between two words, so that many sites cost no more than few


class ByteCounter:
    """A channel that knows who has been asked and who has answered, tells it at every change, and counts bytes.

    It is for people who watch: no decision of the study depends on it. Several threads may call it.
    """

    def __init__(
        self, inner: Channel, tell: Notify = lambda turns: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.inner, self._tell, self._clock = inner, tell, clock
        self.bytes_down: dict[str, int] = {}  # of tensors, by site, since the last question began
        self.bytes_up: dict[str, int] = {}
        self._changing = threading.Lock()
        self._what = ("", 0)
        self._asked: dict[str, float | None] = {}
        self._answered: dict[str, float] = {}
        self._told = -1.0

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        def going(site: str) -> StudyMessage:
            parcel = outgoing(site)
            self.bytes_down[site] = parcel.size()
            self.asked(site)
            return parcel

        def coming(site: str, reply: StudyMessage) -> None:
            receive(site, reply)  # raises where these are no tensors
            self.bytes_up[site] = reply.size()
            self.answered(site)

        return self.inner.ask(sites, going, coming, timeout)

    def begin(self, task: str, number: int, sites: Sequence[str]) -> None:
        """Begin to ask these sites; all of them wait."""
        with self._changing:
            self._what, self._asked, self._answered = (task, number), dict.fromkeys(sites), {}
            self.bytes_down, self.bytes_up = {}, {}
            self._say(now=True)

    def asked(self, site: str) -> None:
        """A site has its question."""
        with self._changing:
            self._asked[site] = self._clock()
            self._answered.pop(site, None)
            self._say()

    def answered(self, site: str) -> None:
        """A site's answer is here."""
        with self._changing:
            self._answered[site] = self._clock() - (self._asked.get(site) or self._clock())
            self._say()

    def end(self) -> None:
        """Nobody is asked any more."""
        with self._changing:
            self._what, self._asked, self._answered = ("", 0), {}, {}
            self._tell(None)

    def now(self) -> Turns | None:
        """Return who has been asked and who has answered; None before the first question and after the last."""
        with self._changing:
            return self._turns() if self._what[0] else None

    def _say(self, now: bool = False) -> None:
        if now or self._clock() - self._told >= PAUSE * len(self._asked):
            self._tell(self._turns())
            self._told = self._clock()

    def _turns(self) -> Turns:
        now = self._clock()
        sites = {
            site: SiteTurn(asked=None if since is None else now - since, answered=self._answered.get(site))
            for site, since in self._asked.items()
        }
        return Turns(task=self._what[0], round=self._what[1], at=time.time(), sites=sites)


class RequestScheduler:
    """Asks the sites of a study, and takes nothing of an answer before all of it was accepted."""

    def __init__(self, acceptance: Acceptance, channel: Retry, turns: ByteCounter) -> None:
        self.plan, self.study, self.acceptance = acceptance.plan, acceptance.study, acceptance
        self.channel, self.turns = channel, turns
        self.joined = acceptance.joined  # live: the answers with which sites joined

    def ask(
        self,
        task: Task,
        number: int,
        sites: Sequence[str],
        words: Callable[[str], tuple[Groups, dict[str, Any]]],
        take: Callable[[str, SiteAnswer, Groups], None],
    ) -> Exchange:
        """Ask these sites, as often as the plan allows.

        words: the tensors that a site is sent, and what its request tells beside what every one does. take: is given a
        site's accepted answer with its tensors, and raises Refused where it must not count.
        """
        exchange, timeout = Exchange(list(sites)), self.plan.participation.timeout

        def outgoing(site: str) -> StudyMessage:
            groups, own = words(site)
            request = Request(
                task=task,
                round=number,
                study=self.study,
                plan=self.plan.hash,
                sites=tuple(self.acceptance.everyone),
                timeout=timeout,
                packages=self.plan.code,
                **own,
            )
            return request.parcel(groups)

        def receive(site: str, reply: StudyMessage) -> None:
            answer = self.acceptance.accept(site, reply, (task, number), exchange.replies)
            take(site, answer, reply.groups)
            exchange.replies[site] = answer
            if isinstance(answer, Joined):
                self.joined[site] = answer

        self.turns.begin(task, number, exchange.asked)
        exchange.missing = self.channel.ask(exchange.asked, outgoing, receive, timeout)
        exchange.bytes_up, exchange.bytes_down = self.turns.bytes_up, self.turns.bytes_down
        return exchange

    def check(self, exchange: Exchange, what: str) -> None:
        """Raise ParticipationError where too few have answered."""
        if breach := self.channel.breach(exchange, what):
            raise ParticipationError(breach)
