"""Answer the coordinator's requests at a site with exact results, and save the site's local state.

A participant knows neither the transport of messages nor the rules of disclosure. One participant class therefore works
both in a simulation in one process and over NVFlare. The module site_stack.py lists the layers that wrap a participant.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from torch import Tensor, nn

from medsilo.core.errors import DIVERGED, Refused
from medsilo.core.files import free_disk, sweep, write_json
from medsilo.core.tensors import Groups
from medsilo.exchange.checks import check_ranges
from medsilo.federation.disclosure import Disclosure, finite
from medsilo.federation.embeddings import Embedding
from medsilo.federation.evaluation import Evaluation
from medsilo.federation.limits import check_disk, check_limits
from medsilo.federation.own_choice import OwnChoice
from medsilo.federation.protection import Protection
from medsilo.federation.raw_results import (
    ExactDelivery,
    ExactMessage,
    ExactResult,
    ExactRound,
    ExactScores,
    ExactTest,
)
from medsilo.federation.site_context import SiteContext, UpdateCodec, promises_privacy
from medsilo.federation.site_state import SiteState
from medsilo.federation.trainer import Trainer
from medsilo.learning.compute import Stop
from medsilo.learning.seeds import seed_for
from medsilo.runs import paths
from medsilo.runs.messages import LETTERED, Request, SiteWarning
from medsilo.runs.provenance import write_provenance
from medsilo.schedule.outcome import SiteOutcome
from medsilo.schedule.phase import Phase
from medsilo.tasks.metrics import Measures
from medsilo.tasks.site_data import SiteData
from medsilo.tasks.subgroups import Members, members_of

EMBEDDED = ("round", "deliver", "test")  # kinds of requests for which the site needs the embeddings of its cases


@dataclass(frozen=True)
class SiteParts:
    data: SiteData
    state: SiteState
    disclosure: Disclosure
    evaluation: Evaluation
    trainer: Trainer
    choice: OwnChoice
    embedding: Embedding | None = None  # computes embeddings of the cases, if the plan's network needs embeddings


def parts_of(
    context: SiteContext,
    data: SiteData | None = None,
    trainer: Callable[..., Trainer] = Trainer,
    evaluation: Callable[..., Evaluation] = Evaluation,
    embeds: Callable[..., Embedding | None] = Embedding.of,
) -> SiteParts:
    """Return the components of a hospital's participant.

    Args:
        data: data to use instead of the data that the hospital's settings name
    """
    plan, folder, protection = context.plan, context.folder, Protection(context)
    sweep(folder, *(path for path in folder.glob("*") if path.is_dir()))
    compute = context.settings.compute()
    if data is None:
        protection.admit()
        with protection.fitting():
            data = plan.task.site_data(context.site, sorted(context.sites), plan.seed, protection.source())
    embedding = embeds(context, data, compute)
    data = embedding.data if embedding else data
    numbers = None
    if promises_privacy(context):
        from medsilo.federation.private_site import PrivateNumbers, PrivateSite

        numbers = PrivateNumbers.of(plan, context.site, context.settings, folder, data)
    with protection.fitting():
        members = subgroup_members(context)
    disclosure = Disclosure(context, data, protection, numbers, members)
    scoring = evaluation(context, data, compute, protection.on)
    trained = disclosure.cases["train"] if context.trains else None
    patients = None if plan.task.mixes_patients else len(set(disclosure.patients["train"]))
    with protection.fitting():
        check_limits(plan, context.settings, plan.parameters, trained, free_disk(folder), patients)
    private = PrivateSite(numbers, data.train) if numbers and context.trains else None
    state = SiteState(plan, context.site, folder, compute)
    training = trainer(context, data, state, protection, private, disclosure, scoring)
    with protection.fitting():
        training.check_averages()
    return SiteParts(data, state, disclosure, scoring, training, OwnChoice(context, state, disclosure), embedding)


def subgroup_members(context: SiteContext) -> Members:
    """For each subgroup that the hospital's data set declares, such as sex, return the patients of each level."""
    source, task = context.settings.data, context.plan.task
    if source is None or not source.subgroups or task.synthetic:
        return {}
    return members_of(source, source.folder_of(context.site, task.deals))


class Participant:
    """One site of a study, which saves its state after each round, so that another process can continue the study."""

    def __init__(self, context: SiteContext, parts: SiteParts, codec: UpdateCodec | None = None) -> None:
        """The codec `envelope` encodes and decodes tensors; by default, the codec changes no tensor."""
        self.context, self.data, self.state = context, parts.data, parts.state
        self.disclosure, self.evaluation = parts.disclosure, parts.evaluation
        self.trainer, self.choice, self.embedding = parts.trainer, parts.choice, parts.embedding
        self.codec = codec or UpdateCodec()
        self.warnings: list[SiteWarning] = []  # warnings to the lead that the site sends with the present answer

    def find(self, request: Request, groups: Groups, stop: Stop) -> ExactResult:
        """Carry out the server's request, and return the exact result.

        Args:
            stop: a function that is called before every batch, and raises an error to end the work
        """
        work = {"join": self._join, "round": self._round, "deliver": self._deliver, "test": self._test}
        work |= dict.fromkeys(LETTERED, lambda asked, groups, stop: ExactMessage(self.codec.letter(asked)))
        doing, self.warnings = self.trainer.doing, []

        def step() -> None:
            stop()
            doing.step()

        with doing.answering(request.task, request.round):
            check_disk(self.context.folder)
            seed = seed_for(self.trainer.drawn_from, self.context.site, "work", request.round)
            with self.state.compute.reproducible(seed):
                if self.embedding and request.task in EMBEDDED:
                    doing.begin("measuring")
                    self.embedding.complete(step)
                return work[request.task](request, groups, step)

    # ------------------------------------------------------------------ the kinds of work
    def _join(self, request: Request, groups: Groups, stop: Stop) -> ExactResult:
        write_provenance(self.context.folder, self.context.plan, self.state.compute.description)
        if self.data.survey:
            # the survey of the data stays at the site, because the survey contains file names
            write_json(self.context.folder / paths.DATA, asdict(self.data.survey))
        if self.context.trains and (self.disclosure.protected or self.disclosure.numbers):
            # the exact aggregation weight stays at the site
            write_json(self.context.folder / paths.WEIGHT, self.disclosure.weighed().as_json())
        return ExactResult()

    def _round(self, request: Request, groups: Groups, stop: Stop) -> ExactRound:
        """Load the aggregated tensors, validate, train, and return the tensors that the site sends in the phase."""
        if not self.context.trains:
            raise Refused("this hospital does not train in this study (participation.evaluation_sites)")
        started, number, trainer = time.monotonic(), request.round, self.trainer
        phase = self.context.plan.course.phase_of(number)
        self._stand_after(number - 1, request)
        self._receive(request, groups, phase)
        scored = self._validate(number - 1, stop)
        learns = phase.trains_at(self.context.site, number, self.context.trainers, self.context.plan.seed)
        loss = trainer.work(number, phase, stop) if learns else math.nan
        scored = self.choice.scored_late(number - 1) or scored
        self.state.refuse_divergence(number)
        self._refuse_impossible(number, phase)
        self.codec.check(request, phase, self.state.modules)
        self.state.done = number
        self.state.save()
        self._write_row(number, phase.name, scored, time.monotonic() - started, train_loss=finite(loss))
        given = self.state.sent(phase) if learns else {}
        sent = self.codec.seal(request, phase, given, self.disclosure.weight(trainer.samples))
        return ExactRound({"train_loss": loss}, trainer.samples, scored, groups=sent)

    def _deliver(self, request: Request, groups: Groups, stop: Stop) -> ExactDelivery:
        """Load the models of the last round, and evaluate these models on the validation cases."""
        number, plan, folder = request.round, self.context.plan, self.context.folder
        self._stand_after(number, request)
        self._receive(request, groups, plan.course.delivery)
        if not self.context.trains:
            part = self.data.train if self.disclosure.cases["train"] else self.data.test
            plan.algorithm.measure_unseen(self.state.modules, lambda: (x for x, _ in self.trainer.in_order(part, stop)))
        scored = self._validate(number, stop)
        self.state.refuse_divergence(number)
        self._write_row(number + 1, "deliver", scored, 0.0)
        self.evaluation.draw_inputs(plan.algorithm.input_layer(self.state.modules), folder)
        self.state.save_model(paths.LAST, number)
        return ExactDelivery(scored, plan.algorithm.outcome.take(self._end(stop), request.outcome))

    def _test(self, request: Request, groups: Groups, stop: Stop) -> ExactTest:
        """Evaluate the selected model on the site's test cases."""
        folder, outcome = self.context.folder, self.context.plan.algorithm.outcome
        selected = self._take_selected(request, groups)
        self.state.save_model(paths.BEST, selected)
        end = self._end(stop)
        model = outcome.tested(end, self.state.model, request.outcome)
        task = self.context.plan.task
        self.trainer.doing.begin("testing")
        scores = ExactScores(*self.evaluation.evaluate(self.data.test, stop, model, task.goal.measuring))
        told = outcome.after_test(end, model)
        self.evaluation.draw_found(model, self.state.modules["model"], scores.measures, folder)
        self.disclosure.write_cases(folder, scores.measures)  # the measures of single cases stay at the site
        made_of = (
            selected if told is None else request.round
        )  # a super model counts as the model of the requested round
        return ExactTest(made_of, scores, self.decisive(model, stop), told)

    # ------------------------------------------------------------------ models
    def _take_selected(self, request: Request, groups: Groups) -> int:
        """Load the model to test, and return the round of this model.

        The tested model is the site's best model by its own validation, the model that the coordinator sends, or the
        last round's model.
        """
        self.state.reload()
        # from here on, the networks in memory contain the model under test, and no longer the state after a round
        self.state.done = -1
        if self.choice.chooses:
            return self.state.load_model(paths.BEST)["round"]
        self.state.load_model(paths.LAST)
        if not groups or request.selected is None:
            return request.round
        self.state.take_over(groups, self.context.plan.course.last, self.codec.keeps_at_home)
        return request.selected

    def decisive(self, model: nn.Module, stop: Stop) -> Measures | None:
        """Return the measures of the validation cases, from which the threshold is computed, or None if the site sends
        no threshold.
        """
        if not self.disclosure.tells_threshold:
            return None
        return self.evaluation.evaluate(self.data.validation, stop, model, self.context.plan.task.goal.measuring)[2]

    def _validate(self, rounds: int, stop: Stop) -> ExactScores | None:
        """Validate the model after a number of rounds. If the site selects its own best model and this model is the
        best so far, save the model.
        """
        if not self.context.plan.validates(rounds):
            return None
        self.trainer.doing.begin("validating")
        if self.disclosure.cases["train"]:
            self.context.plan.algorithm.personalise(self.trainer.train_context("personalise", rounds, stop))
        scored = self.disclosure.scored(rounds, *self.evaluation.evaluate(self.data.validation, stop, self.state.model))
        self.choice.consider(rounds, scored)
        return scored

    def _end(self, stop: Stop) -> SiteOutcome:
        """Return the state of the site at the end of a study, from which the method computes the study's outcome."""
        place, disclosure = self.context, self.disclosure

        def validation() -> Iterator[tuple[Tensor, Tensor]]:
            cases = self.evaluation.pieces(self.data.validation, "super model")
            return self.evaluation.in_order(cases, self.state.modules["model"])

        return SiteOutcome(
            place.plan,
            place.site,
            self.state.modules,
            place.folder,
            place.plan.task,
            self.state.compute,
            validation,
            [*disclosure.suppressed, *disclosure.noisy],
            disclosure.resolution,
            stop,
        )

    # ------------------------------------------------------------------ tensors in and out
    def _receive(self, asked: Request, groups: Groups, phase: Phase) -> None:
        # while the site works on this request, the networks in memory do not contain the state after any round
        self.state.done = -1
        opened = self.codec.open(asked, groups, self.state.modules)
        # The server does not send tensor groups that the site computes itself.
        self.state.take_over(opened, phase, self.codec.keeps_at_home)

    def _refuse_impossible(self, number: int, phase: Phase) -> None:
        """Raise Refused with the likely reason if the server would reject a value in this round's tensors."""
        if not phase.trains:
            return
        for own in phase.sent:
            try:
                ranges = own.ranges(self.state.modules, self.context.plan.task)
                check_ranges(own.name, own.of(self.state.modules), ranges)
            except Refused as error:
                raise Refused(f"{DIVERGED} in round {number}: {error}; lower the learning rate") from error

    # ------------------------------------------------------------------ saving the state and files for the hospital
    def _stand_after(self, number: int, request: Request) -> None:
        with self.trainer.protection.fitting():
            self.trainer.truncate(request.train_cases)
        if warning := self.state.restore_after(number, request.last):
            self.warnings.append(warning)

    def _write_row(
        self, number: int, phase: str, scored: ExactScores | None, seconds: float, **more: float | None
    ) -> None:
        found = (finite(scored.score), finite(scored.loss)) if scored else (None, None)
        metrics = dict(zip(("validation", "validation_loss"), found, strict=True)) | more
        self.state.write_row(number, phase, self.trainer.samples, metrics, seconds)


def participant_of(
    context: SiteContext,
    data: SiteData | None = None,
    codec: UpdateCodec | None = None,
    trainer: Callable[..., Trainer] = Trainer,
) -> Participant:
    """Build a hospital's participant from the components of the participant.

    Args:
        data: data to use instead of the data that the hospital's settings name
    """
    return Participant(context, parts_of(context, data, trainer), codec)
