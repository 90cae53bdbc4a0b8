"""The server's side of a study: it joins, goes through its rounds, delivers the outcome and has it tested."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from medsilo.core import optional
from medsilo.core.errors import Aborted, MedsiloError, ParticipationError, Passing, reading
from medsilo.core.tensors import Groups
from medsilo.federation.acceptance import Acceptance
from medsilo.federation.channel import Missing, Transport
from medsilo.federation.checks import check_forms
from medsilo.federation.directions import changed_weights, rounded
from medsilo.federation.requests import Exchange, RequestScheduler
from medsilo.federation.server_stack import aggregation_of, asking
from medsilo.federation.server_state import ServerState
from medsilo.federation.summary import StudyUsage, summarise
from medsilo.mixing.mixers import Aggregator
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import Delivered, End, SiteAnswer, Tested, Trained
from medsilo.runs.provenance import now
from medsilo.runs.record import Record
from medsilo.runs.rounds import Round, SentUpdate, SiteRound
from medsilo.runs.schema import SEE_LOG, STOPPED, Summary
from medsilo.schedule.outcome import ServerEnd
from medsilo.schedule.phase import Phase, ServerSide
from medsilo.site.kit import KitFiles
from medsilo.site.party import PartySettings

if TYPE_CHECKING:  # only a study in which sites diverge takes rounds back
    from medsilo.federation.exclusions import Exclusions


class Coordinator:
    """Leads one study from the first parcel to the summary."""

    def __init__(
        self,
        plan: Plan,
        sites: Sequence[str],
        channel: Transport,
        record: Record,
        engine: str,
        on_round: Callable[[Round], None] = lambda line: None,
        settings: PartySettings | None = None,
        kit: KitFiles | None = None,
    ) -> None:
        """settings, kit: the server's own."""
        self.plan, self.record, self.engine, self.on_round = plan, record, engine, on_round
        self.study = record.folder.name
        self.sites = sorted(plan.participation.sites or sites)  # that train; others that are connected are not asked
        self.everyone = sorted(
            {*self.sites, *plan.participation.evaluation_sites}
        )  # those too that only see the outcome
        self.rounds: list[Round] = []
        self.ends: dict[str, Exchange] = {}
        self.outcome_told: dict[str, Any] = {}  # to sites before the test
        settings = settings or PartySettings(device="cpu")
        acceptance = Acceptance(plan, self.study, self.sites, self.everyone)
        mixers: dict[str, Aggregator] = {}
        server = ServerSide(
            self.sites,
            mixers,
            acceptance.joined,
            lambda: {site for line in self.rounds for site in line.answered},
            plan.task,
            plan.training,
            plan.seed,
            settings.compute,
            settings.source,
            partial(channel.pause, 0.0),
        )
        self.state = ServerState(plan, record, server, mixers)
        heads = record.folder.parent / paths.LEDGER_HEADS
        layers = asking(channel, plan, self.sites, record.tell_now, self.state.mark_lost, heads)
        self.asker = RequestScheduler(acceptance, *layers)
        self.aggregation = aggregation_of(self.asker, self.state, kit)
        self.blame: Exclusions | None = None  # from the first round on that could not be ended
        if cautions := plan.warnings(self.sites):
            self.state.details["warnings"] = cautions

    @property
    def absent(self) -> dict[str, str] | None:
        """The sites that did not join a study that has begun, and why."""
        joined = self.ends.get("join")
        if joined is None or self.asker.channel.breach(joined, "join"):
            return None
        return {site: gone.reason for site, gone in sorted(joined.missing.items())}

    # ------------------------------------------------------------------ the course of a study
    def run(self, resume: bool = False) -> Summary:
        """Lead the study to its end; returns the summary, which is also written when the study fails."""
        started, clock = now(), time.monotonic()
        if resume:
            with reading(f"the checkpoint of run {self.record.folder.name}"):
                self.state.restore()
                self.rounds = self.record.forget_after(self.state.done)
        else:
            self.record.begin(self.plan)
        reason: str | None = STOPPED
        passing = True
        try:
            self._check_sites()
            if not resume:
                self.state.open(1)
                self.state.save()
                self.state.written()  # a disk that can't be written to shows before anybody trains
            self._end("join", 0)  # raises when too few have joined
            self.aggregation.agree(self.asker.joined)
            while self.state.done < self.plan.rounds:
                self._round(self.state.done + 1)
            self._finish()
            reason, passing = None, False
        except MedsiloError as error:
            reason, passing = str(error), isinstance(error, Passing | Aborted)
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {SEE_LOG}"
            raise
        finally:
            self.state.writer.shutdown()
            self.asker.turns.end()
            led = StudyUsage(self.asker.acceptance, self.state, self.engine, self.rounds, self.ends)
            summary = summarise(led, reason, passing, started, time.monotonic() - clock)
            self.record.write_summary(summary)
        return summary

    def _check_sites(self) -> None:
        if len(self.sites) < (required := self.plan.participation.required):
            raise ParticipationError(
                f"sites there: {len(self.sites)} ({', '.join(self.sites) or 'none'}) but the plan needs "
                f"{required}; start the others or lower participation.minimum"
            )

    def _round(self, number: int) -> None:
        started = time.monotonic()
        phase = self.plan.course.phase_of(number)
        self.state.open(number)
        away = {**self.aggregation.begin(number, phase), **(self.blame.away(number) if self.blame else {})}
        exchange = self._exchange("round", number, phase, away=away)
        self.state.written()
        breach = self._breach(exchange, number)
        if breach:
            self.blame = self.blame or optional.Exclusions(self.plan.participation.when_missing)
            if self.blame.takes_back(number, exchange, self.state):
                self.rounds = self.record.forget_after(self.state.done)
                return
        else:
            self._consider_best(exchange, number - 1)
            self.state.finish(number)
        updates, shares = self.state.directions.updates(), {} if breach else self.state.shares(phase)
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
            weights=changed_weights((self.state.mixers.get(group.name) for group in phase.sent), self.rounds),
        )
        self.rounds.append(line)
        self.record.add_round(line)
        self.on_round(line)
        if breach:
            raise ParticipationError(breach)
        self.state.save()

    def _breach(self, exchange: Exchange, number: int) -> str | None:
        """Return why a round can't be ended; None where its mixers have all that they need."""
        try:
            self.asker.check(exchange, f"round {number}")
            self.aggregation.finish(number)
        except ParticipationError as error:
            return str(error)
        return None

    def _finish(self) -> None:
        """Deliver the outcome, choose the model, have it tested once."""
        number, end = self.plan.rounds, self._server_end()
        if self.plan.course.delivery is not self.plan.course.last:
            self.state.enter(self.plan.course.delivery)
        delivered = self._end("deliver", number)
        self.state.written()
        self._consider_best(delivered, number)
        chosen = self.state.best["round"] if self.state.best else number
        if self.plan.algorithm.outcome.common:
            self.state.save_common(paths.LAST, number)
        if chosen != number:
            with reading(f"the best checkpoint of run {self.record.folder.name}"):
                self.state.go_back_to(chosen)
        if not self.plan.algorithm.outcome.personal:
            self.state.save_common(paths.BEST, chosen)
        found, self.outcome_told = self.plan.algorithm.outcome.conclude(end, self._outcomes(delivered))
        self.state.details |= found
        tested = self._end("test", number, selected=chosen, empty=chosen == number)
        self.state.details = self.plan.algorithm.outcome.finalize(self.state.details, self._outcomes(tested))

    def _outcomes(self, exchange: Exchange) -> dict[str, Any]:
        """Return what sites tell of the outcome."""
        read, replies = self.asker.acceptance.outcome_of, exchange.replies.items()
        return {site: read(answer) for site, answer in replies if isinstance(answer, Delivered | Tested)}

    # ------------------------------------------------------------------ asking
    def _end(self, task: End, number: int, selected: int | None = None, empty: bool = False) -> Exchange:
        """Ask before the first or after the last round."""
        exchange = self.ends[task] = self._exchange(task, number, self.plan.course.delivery, selected, empty)
        self.asker.check(exchange, task)
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
        """Ask every site and take what it answers; those that are away are not asked."""
        expected = self.aggregation.expected(phase) if task == "round" else {}
        smallest = self._smallest() if self.plan.training.truncate else None

        def words(site: str) -> tuple[Groups, dict[str, Any]]:
            groups: Groups = {} if task == "join" or empty else self.state.payload(site, phase)
            return groups, {
                "selected": selected,
                "train_cases": smallest,
                "last": max((line.round for line in self.rounds if site in line.answered), default=0),
                "outcome": self._outcome_for(site, task),
                "secagg": {} if task == "join" else self.aggregation.letters(site, groups),
            }

        def take(site: str, answer: SiteAnswer, groups: Groups) -> None:
            trained = task == "round" and phase.trains_at(site, number, self.sites, self.plan.seed)
            check_forms(groups, expected if trained else {})
            if isinstance(answer, Trained):
                if trained:
                    self.aggregation.take(site, groups, answer.samples, phase)
                self.state.mark_synced(site)

        asked = self.sites if task == "round" else self.everyone
        exchange = self.asker.ask(task, number, [site for site in asked if site not in away], words, take)
        exchange.missing = {**away, **exchange.missing}
        return exchange

    def _outcome_for(self, site: str, task: str) -> dict[str, Any]:
        """Return what a site is told of the outcome."""
        if task == "deliver":
            return self.plan.algorithm.outcome.delivery_facts(self._server_end(), site)
        return self.outcome_told if task == "test" else {}

    def _server_end(self) -> ServerEnd:
        return ServerEnd(self.plan, self.state.layout, self.state.server, self.record.folder)

    def _smallest(self) -> int | None:
        """Return the training cases of the smallest site that trains."""
        joined = self.asker.joined
        known = (joined[site].cases.train for site in self.sites if site in joined)
        return min((cases for cases in known if cases), default=None)

    def _consider_best(self, exchange: Exchange, rounds: int) -> None:
        """Let the sites' validation scores choose; a site with fewer cases than it tells of has no say."""
        if (
            self.plan.algorithm.outcome.personal
            or self.plan.model_selection.keep != "best"
            or not self.plan.validates(rounds)
        ):
            return
        told = {
            site: answer.validation
            for site, answer in exchange.replies.items()
            if isinstance(answer, Trained | Delivered) and "validation" not in answer.suppressed
        }
        self.state.consider_best(told, rounds)


def _line(exchange: Exchange, site: str, updates: dict[str, SentUpdate], share: float | None) -> SiteRound:
    """Return a site's part in a round's record."""
    reply = exchange.replies[site]
    assert isinstance(reply, Trained)
    return SiteRound(
        train_loss=reply.train_loss,
        validation=reply.validation,
        validation_loss=reply.validation_loss,
        samples=reply.samples,
        seconds=round(reply.seconds, 3),
        memory=int(reply.memory),
        bytes_up=exchange.bytes_up[site],
        bytes_down=exchange.bytes_down[site],
        updates=updates,
        share=None if share is None else rounded(min(share, 1.0)),
    )
