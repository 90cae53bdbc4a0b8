"""The server's side of a study: it joins, goes through its rounds, delivers the outcome and has it tested."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from medsilo.core.errors import MedsiloError, ParticipationError, reading
from medsilo.core.tensors import Groups
from medsilo.course.outcome import ServerEnd
from medsilo.course.phase import Phase
from medsilo.course.server_side import ServerSide
from medsilo.federation.accepting import Acceptance, check_forms
from medsilo.federation.around import asking
from medsilo.federation.asking import Exchange
from medsilo.federation.directions import rounded
from medsilo.federation.sealed.sealed_server import Letters, SealedServer
from medsilo.federation.seams import Channel, Missing
from medsilo.federation.server_state import ServerState
from medsilo.federation.summary import Account, summarise
from medsilo.mixing.mixers import Mixer
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import (
    Delivered,
    End,
    Joined,
    Lettered,
    Parcel,
    Request,
    Task,
    Tested,
    Trained,
    Tried,
)
from medsilo.runs.record import Record, now
from medsilo.runs.schema import STOPPED, Round, SentUpdate, SiteRound, Summary
from medsilo.site.settings import SiteSettings
from medsilo.tasks.metrics import added


class Coordinator:
    """Leads one study from the first parcel to the summary."""

    def __init__(
        self,
        plan: Plan,
        sites: Sequence[str],
        channel: Channel,
        record: Record,
        engine: str,
        on_round: Callable[[Round], None] = lambda line: None,
        settings: SiteSettings | None = None,
    ) -> None:
        self.plan, self.course, self.outcome, self.record = plan, plan.course, plan.algorithm.outcome, record
        self.sites = sorted(plan.participation.sites or sites)  # others that are connected are not asked
        self.everyone = sorted({*self.sites, *plan.participation.unseen})  # those too that only see the outcome
        self.required = plan.participation.required
        self.engine, self.on_round = engine, on_round
        self.study = record.folder.name
        self.settings = settings or SiteSettings(device="cpu")  # the server's own
        self.acceptance = Acceptance(plan, self.study, self.sites, self.everyone)
        self.rounds: list[Round] = []
        self.ends: dict[str, Exchange] = {}
        self.absent: dict[str, str] | None = None  # who did not join a study that has begun, and why
        self.outcome_told: dict[str, Any] = {}  # to sites before the test
        self.postprocessing: dict[str, Any] = {}  # that the sites' validation cases have chosen
        mixers: dict[str, Mixer] = {}
        self.server = ServerSide(
            self.sites,
            mixers,
            self.acceptance.joined,
            self._contributors,
            plan.task,
            plan.training,
            plan.seed,
            self.settings.compute(),
            self.settings.data,
            partial(channel.pause, 0.0),
        )
        self.state = ServerState(plan, record, self.server, mixers, self.settings.waiting_memory << 20)
        self.channel, self.turns = asking(channel, plan, self.sites, record.tell_now, self.state.may_have_lost)
        self.parameters = sum(parameter.numel() for parameter in self.state.layout["model"].parameters())
        self.sealed = self._sealed(mixers) if plan.transport.sealed else None
        if cautions := plan.cautions(self.sites):
            self.state.details["cautions"] = cautions

    def _sealed(self, mixers: dict[str, Mixer]) -> SealedServer:
        def enough(exchange: Exchange, what: str) -> None:
            if breach := self.channel.breach(exchange, what):
                raise ParticipationError(breach)

        state = self.state
        return SealedServer(self.plan, self.study, state.layout, mixers, state.store, self._ask_letters, enough)

    def _contributors(self) -> set[str]:
        return {site for line in self.rounds for site in line.answered}

    # ------------------------------------------------------------------ the course of a study
    def run(self, resume: bool = False) -> Summary:
        """Lead the study to its end; returns the summary, which is also written when the study fails."""
        started, clock = now(), time.monotonic()
        if resume:
            with reading(f"the checkpoint of run {self.record.folder.name}"):
                self._go_on()
        else:
            self.record.begin(self.plan)
        reason: str | None = STOPPED
        try:
            self._check_sites()
            if not resume:
                self.state.open(1)
                self.state.save()
                self.state.written()  # a disk that can't be written to shows before anybody trains
            joined = self._end("join", 0)  # raises when too few have joined
            self.absent = {site: gone.reason for site, gone in sorted(joined.missing.items())}
            if self.sealed:
                here = [site for site in self.sites if site in joined.replies]
                transport = self.plan.transport
                heaviest = max(self.acceptance.joined[site].cases.train or 1 for site in here)
                self.sealed.agree(here, transport.sealing_counts or heaviest)
                facts = {"mode": transport.sealing, "keys": self.sealed.keys, "protects": transport.promises}
                self.state.details["sealing"] = facts
            for number in range(self.state.done + 1, self.plan.rounds + 1):
                self._round(number)
            self._finish()
            reason = None
        except MedsiloError as error:
            reason = str(error)
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: see the server's log"
            raise
        finally:
            self.state.writer.shutdown()
            self.turns.end()
            summary = summarise(self._account(), reason, started, time.monotonic() - clock)
            self.record.write_summary(summary)
        return summary

    def _go_on(self) -> None:
        self.state.restore()
        self.rounds = self.record.forget_after(self.state.done)

    def _check_sites(self) -> None:
        if len(self.sites) < self.required:
            raise ParticipationError(
                f"{len(self.sites)} sites are there ({', '.join(self.sites) or 'none'}) but the plan needs "
                f"{self.required}; start the others or lower participation.minimum"
            )

    def _round(self, number: int) -> None:
        started = time.monotonic()
        phase = self.course.phase_of(number)
        self.state.open(number)
        away = self._begin_sealed(number, phase)
        exchange = self._exchange("round", number, phase, away=away)
        self.state.written()
        breach = self.channel.breach(exchange, f"round {number}") or self._end_sealed(number)
        if breach is None:
            self._consider_best(exchange, number - 1)
            self.state.finish(number)
        told = breach is None and not self.plan.transport.sealing_counts
        updates, shares = self.state.directions.updates(), self.state.shares(phase) if told else {}
        line = Round(
            round=number,
            phase=phase.name,
            seconds=round(time.monotonic() - started, 3),
            asked=self.sites,
            answered=sorted(exchange.replies),
            refused=exchange.by_kind("refused"),
            lost=exchange.by_kind("lost"),
            warnings=exchange.warnings(),
            sites={
                site: _line(exchange, site, updates.get(site, {}), shares.get(site))
                for site in sorted(exchange.replies)
            },
        )
        self.rounds.append(line)
        self.record.add_round(line)
        self.on_round(line)
        if breach:
            raise ParticipationError(breach)
        self.state.save()

    def _begin_sealed(self, number: int, phase: Phase) -> dict[str, Missing]:
        """Let a sealed round begin; returns the sites that are not in it, and why."""
        if self.sealed is None:
            return {}
        late = Missing("refused", "was not there when the sites agreed on keys; it may be when the study is resumed")
        absent = {site: late for site in self.sites if site not in self.sealed.sites}
        return {**absent, **self.sealed.begin(number, phase)}

    def _end_sealed(self, number: int) -> str | None:
        """Let a sealed round end; returns why it can't."""
        if self.sealed:
            try:
                self.sealed.finish(number)
            except ParticipationError as error:
                return str(error)
            if said := self.sealed.cautions:
                self.state.details["cautions"] = [*self.plan.cautions(self.sites), *said]
        return None

    def _finish(self) -> None:
        """Deliver the outcome, choose the model, have it tested once."""
        number, end = self.plan.rounds, self._server_end()
        if self.course.delivery is not self.course.last:
            self.state.enter(self.course.delivery)
        delivered = self._end("deliver", number)
        self.state.written()
        self._consider_best(delivered, number)
        chosen = self.state.best["round"] if self.state.best else number
        if self.outcome.common:
            self.state.save_common(paths.LAST, number)
        if chosen != number:
            with reading(f"the best checkpoint of run {self.record.folder.name}"):
                self.state.go_back_to(chosen)
        if not self.outcome.personal:
            self.state.save_common(paths.BEST, chosen)
        conclusion = self.outcome.conclude(end, self._told(delivered))
        if conclusion:
            self.state.details |= conclusion.details
            self.outcome_told = conclusion.told
        empty = chosen == number
        if self.plan.trials:
            self._choose_postprocessing(self._end("try", number, selected=chosen, empty=empty), chosen)
        tested = self._end("test", number, selected=chosen, empty=empty)
        self.state.details = self.outcome.concluded(self.state.details, self._told(tested))

    def _choose_postprocessing(self, exchange: Exchange, chosen: int) -> None:
        """Choose by what the sites have tried, and keep it with the model."""
        every, replies = self.plan.task.postprocessings, sorted(exchange.replies.items())
        assert every
        tried = {site: answer.trials for site, answer in replies if isinstance(answer, Tried) and answer.trials}
        self.postprocessing = every.chosen(added(tried.values()))
        self.state.details["postprocessing"] = {**self.postprocessing, "sites": list(tried)}
        if not tried:
            nobody = "no hospital may tell enough of its validation cases, so no postprocessing was chosen"
            self.state.details["cautions"] = [*self.state.details.get("cautions", []), nobody]
        self.state.save_common(paths.BEST, chosen, self.postprocessing)

    def _told(self, exchange: Exchange) -> dict[str, Any]:
        """Return what sites tell of the outcome."""
        told: dict[str, Any] = {}
        for site, answer in exchange.replies.items():
            if isinstance(answer, Delivered):
                told[site] = self.acceptance.outcome_of(answer, "validation")
            elif isinstance(answer, Tested):
                told[site] = self.acceptance.outcome_of(answer, "test")
        return told

    # ------------------------------------------------------------------ asking
    def _end(self, task: End, number: int, selected: int | None = None, empty: bool = False) -> Exchange:
        """Ask before the first or after the last round."""
        exchange = self.ends[task] = self._exchange(task, number, self.course.delivery, selected, empty)
        breach = self.channel.breach(exchange, task)
        if breach:
            raise ParticipationError(breach)
        return exchange

    def _exchange(
        self,
        task: End | Literal["round"],
        number: int,
        phase: Phase,
        selected: int | None = None,
        empty: bool = False,
        away: Mapping[str, Missing] = MappingProxyType({}),
    ) -> Exchange:
        """Ask every site, as often as the plan allows; those that are away are not asked."""
        asked = self.sites if task in ("round", "try") else self.everyone
        exchange = Exchange([site for site in asked if site not in away])
        expected = self.state.expected(phase) if task == "round" else {}
        if self.sealed and task == "round":
            expected = self.sealed.expected(expected)
        smallest = self._smallest() if self.plan.training.truncate else None

        def outgoing(site: str) -> Parcel:
            groups: Groups = {} if task == "join" or empty else self.state.payload(site, phase)
            request = self._request(
                task,
                number,
                selected=selected,
                train_cases=smallest,
                last=max((line.round for line in self.rounds if site in line.answered), default=0),
                outcome=self._outcome_for(site, task),
                postprocessing=self.postprocessing if task == "test" else {},
                sealing=self._letters(task, site, groups),
            )
            return request.parcel(groups)

        def receive(site: str, reply: Parcel) -> None:
            answer = self.acceptance.accept(site, reply, (task, number), exchange.replies)
            trained = task == "round" and phase.trains_at(site, number, self.sites, self.plan.seed)
            check_forms(reply.groups, expected if trained else {})
            if isinstance(answer, Trained):
                if trained:
                    self._take(site, reply.groups, answer, phase)
                self.state.has_settled(site)
            exchange.replies[site] = answer
            if isinstance(answer, Joined):
                self.acceptance.joined[site] = answer

        self.turns.begin(task, number, exchange.asked)
        missing = self.channel.ask(exchange.asked, outgoing, receive, self.plan.participation.timeout)
        exchange.missing = {**away, **missing}
        exchange.bytes_up, exchange.bytes_down = self.turns.bytes_up, self.turns.bytes_down
        return exchange

    def _request(self, task: Task, number: int, **own: Any) -> Request:
        """Return a request with what every one tells."""
        return Request(
            task=task,
            round=number,
            study=self.study,
            plan=self.plan.hash,
            sites=tuple(self.everyone),
            timeout=self.plan.participation.timeout,
            package=self.plan.code,
            **own,
        )

    def _take(self, site: str, groups: Groups, answer: Trained, phase: Phase) -> None:
        if self.sealed is None:
            self.state.take(site, groups, answer.samples, phase)
            return
        clear = {name: tensors for name, tensors in groups.items() if name not in self.sealed.groups}
        self.state.take(site, clear, answer.samples, phase)
        self.sealed.take(site, groups, answer.samples)

    def _letters(self, task: str, site: str, groups: Groups) -> Letters:
        """Return what a site is told beside what it is sent."""
        return {} if self.sealed is None or task == "join" else self.sealed.letters(site, groups)

    def _ask_letters(
        self,
        task: Task,
        number: int,
        sites: Sequence[str],
        letters: Callable[[str], Letters],
        take: Callable[[str, Letters], None],
        groups: Groups | None = None,
    ) -> Exchange:
        """Ask sites for letters of a sealed study. groups: what all are sent beside."""
        exchange = Exchange(list(sites))

        def outgoing(site: str) -> Parcel:
            return self._request(task, number, sealing=letters(site)).parcel(groups or {})

        def receive(site: str, reply: Parcel) -> None:
            answer = self.acceptance.accept(site, reply, (task, number), exchange.replies)
            check_forms(reply.groups, {})
            assert isinstance(answer, Lettered)
            take(site, answer.sealing)
            exchange.replies[site] = answer

        self.turns.begin(task, number, exchange.asked)
        exchange.missing = self.channel.ask(exchange.asked, outgoing, receive, self.plan.participation.timeout)
        return exchange

    def _outcome_for(self, site: str, task: str) -> dict[str, Any]:
        """Return what a site is told of the outcome."""
        if task == "deliver":
            return self.outcome.told(self._server_end(), site)
        return self.outcome_told if task == "test" else {}

    def _server_end(self) -> ServerEnd:
        return ServerEnd(self.plan, self.state.layout, self.server, self.record.folder)

    def _smallest(self) -> int | None:
        """Return the training cases of the smallest site that trains."""
        joined = self.acceptance.joined
        known = (joined[site].cases.train for site in self.sites if site in joined)
        return min((cases for cases in known if cases), default=None)

    def _consider_best(self, exchange: Exchange, rounds: int) -> None:
        """Let the sites' validation scores choose; a site with fewer cases than it tells of has no say."""
        if self.outcome.personal or self.plan.tracking.select != "best" or not self.plan.validates(rounds):
            return
        told = {
            site: answer.validation
            for site, answer in exchange.replies.items()
            if isinstance(answer, Trained | Delivered) and "validation" not in answer.withheld
        }
        self.state.consider_best(told, rounds)

    def _account(self) -> Account:
        return Account(
            self.plan,
            self.study,
            self.engine,
            self.sites,
            self.everyone,
            self.required,
            self.parameters,
            self.state.done,
            self.rounds,
            {task: end.replies for task, end in self.ends.items()},
            {task: {site: gone.text for site, gone in end.missing.items()} for task, end in self.ends.items()},
            self.state.found(),
        )


def _line(exchange: Exchange, site: str, updates: dict[str, SentUpdate], share: float | None) -> SiteRound:
    """Return a site's part in a round's record."""
    reply = exchange.replies[site]
    assert isinstance(reply, Trained)
    return SiteRound(
        train_loss=reply.train_loss,
        validation=reply.validation,
        validation_loss=reply.validation_loss,
        samples=None if reply.cases.train is None else reply.samples,
        seconds=round(reply.seconds, 3),
        memory=int(reply.memory),
        bytes_up=exchange.bytes_up[site],
        bytes_down=exchange.bytes_down[site],
        updates=updates,
        share=None if share is None else rounded(min(share, 1.0)),
    )
