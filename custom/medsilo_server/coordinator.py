"""Lead a study on the server: the sites join, train in rounds, receive the final model, and test the final model."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from medsilo.core.errors import Aborted, MedsiloError, ParticipationError, Refused, TemporaryRefusal, reading
from medsilo.core.tensors import Groups
from medsilo.exchange.acceptance import Acceptance
from medsilo.exchange.channel import Missing, Transport
from medsilo.exchange.checks import check_forms
from medsilo.mixing.aggregators import Aggregator
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import DISCLOSED, VARYING, Delivered, End, Joined, SiteAnswer, Tested, Trained
from medsilo.runs.provenance import now
from medsilo.runs.rounds import Round, SentUpdate, SiteRound
from medsilo.runs.schema import SEE_LOG, STOPPED, Summary
from medsilo.schedule.outcome import ServerEnd
from medsilo.schedule.phase import Phase, ServerSide
from medsilo.schedule.weighting import update_weight
from medsilo.site.kit import KitFiles
from medsilo.site.party import PartySettings
from medsilo_server.directions import changed_weights, rounded
from medsilo_server.record import Record
from medsilo_server.requests import Exchange, RequestScheduler
from medsilo_server.server_stack import aggregation_of, asking
from medsilo_server.server_state import ServerState
from medsilo_server.summary import StudyUsage, summarise

# the module exclusions is imported later, because it is only needed when sites diverge and a round is repeated
if TYPE_CHECKING:
    from medsilo_server.exclusions import Exclusions

# the scores, losses and counts of an answer that the record of a round contains
TOLD = (DISCLOSED["round"].keys() & SiteRound.model_fields.keys()) - VARYING
OVERWEIGHT = 0.9  # maximum fraction of all training cases that a site may state without a warning


class Coordinator:
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
        """Prepare a study.

        Args:
            sites: The connected sites. All of them train, unless the plan names the training sites.
        """
        self.plan, self.record, self.engine, self.on_round = plan, record, engine, on_round
        self.study = record.folder.name
        self.sites = sorted(plan.participation.sites or sites)
        self.everyone = sorted({*self.sites, *plan.participation.evaluation_sites})
        self.rounds: list[Round] = []
        self.ends: dict[str, Exchange] = {}
        self.outcome_told: dict[str, Any] = {}
        settings = settings or PartySettings(device="cpu")
        acceptance = Acceptance(plan, self.study, self.sites, self.everyone)
        aggregators: dict[str, Aggregator] = {}
        server = ServerSide(
            self.sites,
            aggregators,
            acceptance.joined,
            lambda: {site for line in self.rounds for site in line.answered},
            plan.task,
            plan.training,
            plan.seed,
            settings.compute,
            settings.source,
            partial(channel.pause, 0.0),
        )
        self.state = ServerState(plan, record, server, aggregators)
        heads = record.folder.parent / paths.LEDGER_HEADS
        layers = asking(channel, plan, self.sites, record.tell_now, self.state.mark_lost, heads)
        self.scheduler = RequestScheduler(acceptance, *layers)
        self.aggregation = aggregation_of(self.scheduler, self.state, kit)
        # excludes sites that made other sites diverge; created after the first round that could not be completed
        self.blame: Exclusions | None = None
        if cautions := plan.warnings(self.sites):
            self.state.details["warnings"] = cautions

    @property
    def absent(self) -> dict[str, str] | None:
        """The sites that did not join, each with the reason, or None until enough sites have joined."""
        joined = self.ends.get("join")
        if joined is None or self.scheduler.channel.breach(joined, "join"):
            return None
        return {site: gone.reason for site, gone in sorted(joined.missing.items())}

    @property
    def stated(self) -> dict[str, int]:
        """In a study with training scripts, the number of training cases that each site has stated.

        A site's stated number of training cases is the site's weight in means. For tasks without a script, the mapping
        is empty, because a task without a script counts its cases itself.
        """
        stated = self.scheduler.acceptance.stated if self.plan.task.scripted else {}
        return {site: stated[site].cases.train for site in self.sites if site in stated}

    # ------------------------------------------------------------------ phases of a study
    def run(self, resume: bool = False) -> Summary:
        """Lead the study to its end, write the study's summary, and return the summary.

        The summary is written even if the study fails.
        """
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
                # waits for the checkpoint, so that a study with a full or read-only disk fails here, before any site
                # trains
                self.state.written()
            self._end("join", 0)  # if too few sites joined, the study ends here with ParticipationError
            if told := overweight(self.stated):
                self.state.details["warnings"] = [*self.state.details.get("warnings", []), told]
            self.aggregation.agree(self.scheduler.joined)
            while self.state.done < self.plan.rounds:
                self._round(self.state.done + 1)
            self._finish()
            reason, passing = None, False
        except MedsiloError as error:
            reason, passing = str(error), isinstance(error, TemporaryRefusal | Aborted)
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {SEE_LOG}"
            raise
        finally:
            self.state.writer.shutdown()
            self.scheduler.turns.end()
            led = StudyUsage(self.scheduler.acceptance, self.state, self.engine, self.rounds, self.ends)
            summary = summarise(led, reason, passing, started, time.monotonic() - clock)
            self.record.write_summary(summary)
        return summary

    def _check_sites(self) -> None:
        if len(self.sites) < (required := self.plan.participation.required):
            raise ParticipationError(
                f"connected sites: {len(self.sites)} ({', '.join(self.sites) or 'none'}) but the plan needs "
                f"{required}; start the other sites or lower participation.minimum"
            )

    def _round(self, number: int) -> None:
        started, phase = time.monotonic(), self.plan.course.phase_of(number)

        self.state.open(number)
        away = {**self.aggregation.begin(number, phase), **(self.blame.away(number) if self.blame else {})}

        exchange = self._exchange("round", number, phase, away=away)
        self.state.written()

        # The sites' validation scores belong to the model that the sites received, so the scores are compared before
        # the updates are aggregated.
        breach = self._breach(exchange, number)
        if breach is None:
            self._consider_best(exchange, number - 1)
            self.state.finish(number)
        elif self._takes_back(number, exchange):
            return

        line = self._line(number, phase, exchange, time.monotonic() - started, mixed=breach is None)
        self.rounds.append(line)
        self.record.add_round(line)
        self.on_round(line)
        if breach:
            raise breach
        self.state.save()

    def _takes_back(self, number: int, exchange: Exchange) -> bool:
        """Undo the previous round if the update of one site made other sites diverge. Return True if a round was
        undone.
        """
        from medsilo_server.exclusions import Exclusions

        self.blame = self.blame or Exclusions(self.plan.participation.when_missing)
        if not self.blame.takes_back(number, exchange, self.state):
            return False
        self.rounds = self.record.forget_after(self.state.done)
        return True

    def _line(self, number: int, phase: Phase, exchange: Exchange, seconds: float, mixed: bool) -> Round:
        updates, shares = self.state.directions.updates(), self.state.shares(phase) if mixed else {}
        return Round(
            round=number,
            phase=phase.name,
            seconds=round(seconds, 3),
            asked=self.sites,
            answered=sorted(exchange.replies),
            refused=exchange.by_kind("refused"),
            lost=exchange.by_kind("lost"),
            warnings=exchange.warnings(),
            sites={
                site: _part(exchange, site, updates.get(site, {}), shares.get(site), self.scheduler.joined.get(site))
                for site in sorted(exchange.replies)
            },
            weights=changed_weights((self.state.aggregators.get(group.name) for group in phase.sent), self.rounds),
        )

    def _breach(self, exchange: Exchange, number: int) -> ParticipationError | None:
        """Complete the aggregation of a round; if an error prevents this, return the error."""
        try:
            self.scheduler.check(exchange, f"round {number}")
            self.aggregation.finish(number)
        except ParticipationError as error:
            return error
        return None

    def _finish(self) -> None:
        """Deliver the final tensors to the sites, choose the best model, and request the sites to test the chosen
        model.
        """
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
        read, replies = self.scheduler.acceptance.outcome_of, exchange.replies.items()
        return {site: read(answer) for site, answer in replies if isinstance(answer, Delivered | Tested)}

    # ------------------------------------------------------------------ requests
    def _end(self, task: End, number: int, selected: int | None = None, empty: bool = False) -> Exchange:
        """Send a request outside rounds (`join`, `deliver` or `test`), and check that enough sites answer.

        Args:
            selected: The round whose model the sites test.
            empty: True to send no tensors, because the sites already have all tensors.
        """
        exchange = self.ends[task] = self._exchange(task, number, self.plan.course.delivery, selected, empty)
        if task == "join":
            self._refuse_too_large(exchange)
        self.scheduler.check(exchange, task)
        return exchange

    def _refuse_too_large(self, exchange: Exchange) -> None:
        """Reject each site that states more than the allowed fraction of all training cases, beginning with the site
        that has the most cases.

        This method is called once, after all sites have joined.
        """
        joined, acceptance = self.scheduler.joined, self.scheduler.acceptance
        for site in sorted(joined, key=lambda site: (-acceptance.weight_of(joined[site]), site)):
            if told := acceptance.too_large(site, joined[site]):
                del joined[site], exchange.replies[site], acceptance.stated[site]
                exchange.missing = {**exchange.missing, site: Missing.refused(Refused(told))}

    def _exchange(
        self,
        task: End | Literal["round"],
        number: int,
        phase: Phase,
        selected: int | None = None,
        empty: bool = False,
        away: Mapping[str, Missing] = MappingProxyType({}),
    ) -> Exchange:
        expected = self.aggregation.expected(phase) if task == "round" else {}
        smallest = self._smallest() if self.plan.training.truncate else None

        def words(site: str) -> tuple[Groups, dict[str, Any]]:
            groups: Groups = {} if task == "join" or empty else self.state.payload(site, phase)
            return groups, {
                "selected": selected,
                "train_cases": smallest,
                "last": max((line.round for line in self.rounds if site in line.answered), default=0),
                "outcome": self._outcome_for(site, task),
                "stated": self.stated if task == "round" else {},
                "secagg": {} if task == "join" else self.aggregation.letters(site, groups),
            }

        def take(site: str, answer: SiteAnswer, groups: Groups) -> None:
            trained = task == "round" and phase.trains_at(site, number, self.sites, self.plan.seed)
            check_forms(groups, expected if trained else {})
            if isinstance(answer, Trained):
                if trained:
                    self.aggregation.take(site, groups, self._weight(answer), phase)
                self.state.mark_synced(site)

        asked = self.sites if task == "round" else self.everyone
        exchange = self.scheduler.ask(task, number, [site for site in asked if site not in away], words, take)
        exchange.missing = {**away, **exchange.missing}
        return exchange

    def _outcome_for(self, site: str, task: str) -> dict[str, Any]:
        if task == "deliver":
            return self.plan.algorithm.outcome.delivery_facts(self._server_end(), site)
        return self.outcome_told if task == "test" else {}

    def _server_end(self) -> ServerEnd:
        return ServerEnd(self.plan, self.state.layout, self.state.server, self.record.folder)

    def _weight(self, answer: Trained) -> int:
        """Return the weight of a site's update. A site can't change its numbers of cases and patients after joining."""
        return update_weight(self.plan.weighting, answer.samples, answer.cases.train, answer.patients.train)

    def _smallest(self) -> int | None:
        joined = self.scheduler.joined
        known = (joined[site].cases.train for site in self.sites if site in joined)
        return min((cases for cases in known if cases), default=None)

    def _consider_best(self, exchange: Exchange, rounds: int) -> None:
        """Compare a model's validation scores with the scores of the best model so far, and keep the better model.

        Suppressed scores are not compared.

        Args:
            rounds: The number of rounds that the model was trained for.
        """
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


def overweight(cases: Mapping[str, int]) -> str:
    """Return a warning if one site states nearly all training cases, and an empty text otherwise.

    >>> overweight({"a": 30, "b": 10_000_000})
    'b states 10,000,000 of all 10,000,030 training cases, so the mean is nearly its model alone; ask it why'
    """
    total, most = sum(cases.values()), max(cases, key=lambda site: (cases[site], site), default="")
    if len(cases) < 2 or cases[most] <= OVERWEIGHT * total:
        return ""
    return (
        f"{most} states {cases[most]:,} of all {total:,} training cases, so the mean is nearly its model alone; ask "
        "it why"
    )


def _part(
    exchange: Exchange, site: str, updates: dict[str, SentUpdate], share: float | None, joined: Joined | None
) -> SiteRound:
    reply = exchange.replies[site]
    assert isinstance(reply, Trained)
    return SiteRound(
        **{name: getattr(reply, name) for name in TOLD},
        step=joined.steps.get("validation", 0.0) if joined else 0.0,
        validated=joined.cases.validation if joined else None,
        seconds=round(reply.seconds, 3),
        memory=int(reply.memory),
        bytes_up=exchange.bytes_up[site],
        bytes_down=exchange.bytes_down[site],
        updates=updates,
        share=None if share is None else rounded(min(share, 1.0)),
    )
