"""Send requests to sites, repeat requests, and record which sites are missing and why.

Another module transports the messages.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medsilo.core.errors import Aborted, ParticipationError
from medsilo.core.tensors import Groups
from medsilo.exchange.acceptance import Acceptance
from medsilo.exchange.channel import Channel, Missing, Outgoing, Receive
from medsilo.runs.messages import Joined, Request, SiteAnswer, StudyMessage, Task
from medsilo.runs.rounds import RequestStatus, SiteTurn
from medsilo.schedule.participation import Participation

Notify = Callable[[RequestStatus | None], None]
RETRY_PAUSE = 5.0


@dataclass
class Exchange:
    asked: list[str] = field(default_factory=list)
    replies: dict[str, SiteAnswer] = field(default_factory=dict)
    missing: Mapping[str, Missing] = field(default_factory=dict)
    bytes_up: Mapping[str, int] = field(default_factory=dict)
    bytes_down: Mapping[str, int] = field(default_factory=dict)

    def by_kind(self, kind: str) -> dict[str, str]:
        """Return the missing sites of one kind, each with the reason why the site is missing.

        Args:
            kind: "refused" or "lost".
        """
        return {site: gone.reason for site, gone in sorted(self.missing.items()) if gone.kind == kind}

    def warnings(self) -> dict[str, list[str]]:
        return {site: reply.notes for site, reply in sorted(self.replies.items()) if reply.notes}


class Retry:
    """A channel that repeats requests as often as the plan allows, and reports when too few sites have answered."""

    def __init__(
        self,
        inner: Channel,
        rules: Participation,
        sites: Sequence[str],
        pause: Callable[[float], None],
        lost: Callable[[str], None],
    ) -> None:
        """Wrap a channel.

        Args:
            lost: Called with each site that did not answer, because such a site may not have received the request.
        """
        self.inner, self.rules, self.sites, self.pause, self.lost = inner, rules, sites, pause, lost
        # the sites that rejected the request and will get it again, each with the reason of the rejection
        self.again: Mapping[str, str] = {}

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        started = time.monotonic()
        asked, answered = sorted(sites), set[str]()
        again = self.again = dict[str, str]()

        def coming(site: str, reply: StudyMessage) -> None:
            receive(site, reply)
            answered.add(site)
            again.pop(site, None)

        # the sites that do not get the request again, each with the reason
        refused: dict[str, Missing] = {}
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
                again.update({site: missing[site].reason for site in asked if missing[site].kind == "refused"})
                self.pause(RETRY_PAUSE)
        return refused

    def _worth_asking(self, missing: Mapping[str, Missing], attempt: int, waited: float) -> list[str]:
        """Return the sites to which the request is sent again.

        With `when_missing: wait`, lost sites and sites with a temporary problem get the request again. A temporary
        problem is, for example, a training process that died. With `when_missing: stop`, sites with a temporary problem
        get the request once more.

        Args:
            attempt: The number of times that the request was sent.
            waited: The seconds since the request was first sent.
        """
        if waited + RETRY_PAUSE > self.rules.retry_timeout:
            return []
        lost = self.rules.when_missing == "wait"
        died = lost or (self.rules.when_missing == "stop" and attempt == 1)
        return sorted(
            site for site, gone in missing.items() if (gone.passing and died) or (gone.kind == "lost" and lost)
        )

    def breach(self, exchange: Exchange, where: str) -> str | None:
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


PAUSE = 0.001  # Minimum seconds between two status updates, to be multiplied by the number of sites.


class ByteCounter:
    """A channel that records which sites have received a request and have answered, and counts the bytes of tensors.

    Only status displays use the recorded times. Several threads may call the methods at the same time.
    """

    def __init__(
        self, inner: Channel, tell: Notify = lambda turns: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.inner, self._tell, self._clock = inner, tell, clock
        self.bytes_down: dict[str, int] = {}
        self.bytes_up: dict[str, int] = {}
        self._changing = threading.Lock()
        self._what = ("", 0)
        self._asked: dict[str, float | None] = {}
        self._answered: dict[str, float] = {}
        self._told = -1.0

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        def going(site: str) -> StudyMessage:
            message = outgoing(site)
            self.bytes_down[site] = message.size()
            self.asked(site)
            return message

        def coming(site: str, reply: StudyMessage) -> None:
            # `receive` raises an error to reject an answer, and the bytes of a rejected answer are not counted
            receive(site, reply)
            self.bytes_up[site] = reply.size()
            self.answered(site)

        return self.inner.ask(sites, going, coming, timeout)

    def begin(self, task: str, number: int, sites: Sequence[str]) -> None:
        with self._changing:
            self._what, self._asked, self._answered = (task, number), dict.fromkeys(sites), {}
            self.bytes_down, self.bytes_up = {}, {}
            self._say(now=True)

    def asked(self, site: str) -> None:
        with self._changing:
            self._asked[site] = self._clock()
            self._answered.pop(site, None)
            self._say()

    def answered(self, site: str) -> None:
        with self._changing:
            self._answered[site] = self._clock() - (self._asked.get(site) or self._clock())
            self._say()

    def end(self) -> None:
        with self._changing:
            self._what, self._asked, self._answered = ("", 0), {}, {}
            self._tell(None)

    def now(self) -> RequestStatus | None:
        with self._changing:
            return self._turns() if self._what[0] else None

    def _say(self, now: bool = False) -> None:
        if now or self._clock() - self._told >= PAUSE * len(self._asked):
            self._tell(self._turns())
            self._told = self._clock()

    def _turns(self) -> RequestStatus:
        now = self._clock()
        sites = {
            site: SiteTurn(asked=None if since is None else now - since, answered=self._answered.get(site))
            for site, since in self._asked.items()
        }
        return RequestStatus(task=self._what[0], round=self._what[1], at=time.time(), sites=sites)


class RequestScheduler:
    """Sends requests to the sites of a study. An answer is used only if it passes all checks."""

    def __init__(self, acceptance: Acceptance, channel: Retry, turns: ByteCounter) -> None:
        self.plan, self.study, self.acceptance = acceptance.plan, acceptance.study, acceptance
        self.channel, self.turns = channel, turns
        # each site's answer to "join"; the dictionary is not a copy, because `acceptance` adds answers to it later
        self.joined = acceptance.joined

    def ask(
        self,
        task: Task,
        number: int,
        sites: Sequence[str],
        words: Callable[[str], tuple[Groups, dict[str, Any]]],
        take: Callable[[str, SiteAnswer, Groups], None],
    ) -> Exchange:
        """Send a request to sites, and repeat the request as often as the plan allows.

        Args:
            words: Returns the tensors and the other values of a site's request.
            take: Called with the site's name, the checked answer and the tensors. To reject the answer, `take` may
                raise Refused.
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
            return request.message(groups)

        def receive(site: str, reply: StudyMessage) -> None:
            answer = self.acceptance.accept(site, reply, (task, number), exchange.replies)
            take(site, answer, reply.groups)
            exchange.replies[site] = answer
            self.acceptance.stated.setdefault(site, answer)
            if isinstance(answer, Joined):
                self.joined[site] = answer

        self.turns.begin(task, number, exchange.asked)
        exchange.missing = self.channel.ask(exchange.asked, outgoing, receive, timeout)
        exchange.bytes_up, exchange.bytes_down = self.turns.bytes_up, self.turns.bytes_down
        return exchange

    def check(self, exchange: Exchange, subject: str) -> None:
        """Raise ParticipationError if too few sites have answered."""
        if breach := self.channel.breach(exchange, subject):
            errors = (gone.error for _, gone in sorted(exchange.missing.items()) if gone.error)
            raise ParticipationError(breach) from next(errors, None)
