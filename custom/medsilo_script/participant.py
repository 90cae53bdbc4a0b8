"""Run a site where a user's script trains and scores the models."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from medsilo.core.errors import MedsiloError
from medsilo.core.tensors import Tensors
from medsilo.core.text import plain
from medsilo.federation.disclosure import Disclosure
from medsilo.federation.evaluation import Evaluation, Measuring
from medsilo.federation.own_choice import OwnChoice
from medsilo.federation.participant import Participant, SiteParts
from medsilo.federation.protection import Protection, budget_of
from medsilo.federation.raw_results import ExactScores
from medsilo.federation.site_context import SiteContext, UpdateCodec
from medsilo.federation.trainer import SHUFFLE, RoundCases, Trainer
from medsilo.learning.compute import Stop
from medsilo.learning.loop import TrainStep, train_epoch
from medsilo.learning.seeds import seed_for
from medsilo.learning.statistics import evaluating
from medsilo.runs import paths
from medsilo.runs.schema import FURTHEST
from medsilo.schedule.phase import Phase
from medsilo.site.query_budget import PARTS
from medsilo.site.settings import DataPart, SiteSettings
from medsilo.tasks.metrics import Measures
from medsilo.tasks.site_data import SiteData
from medsilo.tasks.task import Task
from medsilo_script.data import Data, Evaluate, Metrics
from medsilo_script.handover import ScriptContext, Turn, Work
from medsilo_script.state import ScriptState
from medsilo_script.task import ScriptTask


class ScriptDisclosure(Disclosure):
    """Discloses all numbers that a script sends, because medsilo cannot know the cases behind these numbers."""

    def tells(self, part: DataPart) -> bool:
        return True


class ScriptEvaluation(Evaluation):
    def __init__(self, script: Data, turns: Work, context: SiteContext, data: SiteData, state: ScriptState) -> None:
        self.script, self.turns, self.data, self.state = script, turns, data, state
        self.settings, self.task = context.settings, context.plan.task

    def evaluate(
        self, part: Dataset, stop: Stop, model: nn.Module, measuring: Measuring | None = None
    ) -> tuple[float, float, Measures]:
        script, own = self.script, self.state.module
        tests = part is self.data.test
        # the script's function for evaluation gets the script's own model, which already contains the method's input
        # layer
        net = own if own in model.children() else model
        if function := script.test if tests else script.evaluate:
            return math.nan, scored(self.task, self.turns.hand_over(partial(_evaluated, function, net))), {}
        # this loop only runs the network and computes no scores, because the selector of a super model counts its
        # decisions while the network runs
        if tests and net is not own:
            for inputs, _ in self.in_order(part, net):
                net(inputs)
        return math.nan, math.nan, {}

    def pieces(self, part: Dataset, purpose: str) -> Dataset:
        return part

    def in_order(self, part: Dataset, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        # the script passes validation data, as `_refuse_lacking` has checked
        assert self.script.validation is not None
        return self.script.batches(self.script.validation, self.state.compute.device)


class ScriptTrainer(Trainer):
    """Trains networks in the script's loop, and lets methods iterate over the script's data loader."""

    state: ScriptState

    def __init__(
        self,
        script: Data,
        turns: Work,
        context: SiteContext,
        data: SiteData,
        state: ScriptState,
        home: SiteSettings,
        disclosure: Disclosure,
        evaluation: Evaluation,
    ) -> None:
        super().__init__(context, data, state, Protection(context), None, disclosure, evaluation)
        self.script, self.turns, self.home, self.handed_over = script, turns, home, False
        self.sent_score: float | None = None  # the script's score of the received model, if the script sent a score

    @cached_property
    def repeated_from(self) -> int:
        """Return the seed of the script's random numbers in a reproducible study.

        With patients' data, the hospital keeps the seed secret, because the seed determines the script's random noise.
        """
        if self.script.repeats_from is not None:
            return self.script.repeats_from
        seed = self.context.plan.seed
        if not self.home.protects(self.context.plan.task.synthetic):
            return seed
        return seed_for(budget_of(self.home, self.context.site, self.context.folder).number("script"), seed)

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        state, task = self.state, self.context.plan.task
        assert isinstance(task, ScriptTask)
        if task.repeats:  # in a study that is not reproducible, the script itself seeds its random generators
            self.script.seed(seed_for(self.repeated_from, self.context.site, "script", number))
        state.steps, self.sent_score, self.handed_over = 0, None, False
        state.untrained.clear()
        self.doing.begin("training")
        if self.context.plan.algorithm.own_loop:
            self._let_score()
        loss = phase.train_round(self.train_context(SHUFFLE, number, stop))
        if self.handed_over:
            self.sent_score = self.turns.hand_over(None)
        state.refuse_unseen_steps()
        return loss

    def _let_score(self) -> None:
        """Before the method trains without the script, wait until the script's loop has scored the received model."""
        state, self.handed_over = self.state, True
        arrived = [own.detach().clone() for own in state.module.parameters()]
        state.alone = True
        self.turns.hand_over(Turn("model", by_script=False, make=None))
        state.alone = False
        if not all(map(torch.equal, arrived, state.module.parameters())):
            state.refuse_training()

    def _hand_over(self, turn: Turn) -> float:
        """Wait until the script has trained a network; return NaN, because only the script knows the loss."""
        state, self.handed_over = self.state, True
        state.turn = turn.name
        state.untrained.add(turn.name)
        self.turns.hand_over(turn)
        state.turn = None
        return math.nan

    def train_context(self, purpose: str, number: int, stop: Stop) -> ScriptContext:
        usual = vars(super().train_context(purpose, number, stop))
        own = {"training": self.state.training, "cases": ScriptCases(self, purpose, number, stop)}
        hand_over = self._hand_over if purpose == SHUFFLE else lambda turn: math.nan
        return ScriptContext(**{**usual, **own}, hand_over=hand_over)

    def in_order(self, part: Dataset, stop: Stop) -> Iterator[tuple[Tensor, Tensor]]:
        return self.script.measured(self.state.compute.device)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the script's loss on a batch, for a method that adds terms to the loss."""
        if self.script.loss is None:
            name = self.context.plan.algorithm.name
            raise MedsiloError(f"join: {name} adds terms to your loss; give loss=")
        return self.script.loss(output, target)


class ScriptCases(RoundCases):
    trainer: ScriptTrainer

    @property
    def steps(self) -> int:
        return self.trainer.script.steps

    def epoch(self, train_steps: Sequence[TrainStep], number: int, most: int | None = None) -> float:
        state, data = self.trainer.state, self.trainer.script
        state.loss.by_method = True
        try:
            batches = data.batches(data.loader, state.compute.device)
            return train_epoch(islice(batches, most), train_steps, state.compute)
        finally:
            state.loss.by_method = False

    def told_loss(self, model: nn.Module) -> None:
        """Do nothing, because the script sends its own loss."""

    def told_score(self, model: nn.Module) -> None:
        """Do nothing, because the script sends its own score."""


class ScriptChoice(OwnChoice):
    """Selects the best model of a site by the scores of the script, which may arrive after training."""

    def __init__(
        self, context: SiteContext, state: ScriptState, disclosure: Disclosure, trainer: ScriptTrainer
    ) -> None:
        super().__init__(context, state, disclosure)
        self.trainer = trainer
        self.scores = False  # True if the script has scored a model that may be selected
        # the received model, which is kept until the script sends the model's score
        self.received: Tensors | None = None

    @property
    def chooses(self) -> bool:
        return super().chooses and (self.scores or (self.context.folder / paths.BEST).exists())

    def consider(self, rounds: int, scored: ExactScores, model: Tensors | None = None) -> None:
        if math.isfinite(scored.score):
            self.scores |= self.context.plan.course.used_as_scored(rounds)
            super().consider(rounds, scored, model)
        elif super().chooses:
            self.received = {name: own.clone() for name, own in self.state.model.state_dict().items()}

    def scored_late(self, rounds: int) -> ExactScores | None:
        score = self.trainer.sent_score
        if score is None or not self.context.plan.validates(rounds):
            return None
        scored = ExactScores(math.nan, score, {})
        self.consider(rounds, scored, self.received)
        return scored


def script_participant(
    script: Data, turns: Work, state: ScriptState, home: SiteSettings, context: SiteContext, codec: UpdateCodec
) -> Participant:
    """Create the participant for a site where a script reads the data, trains and scores."""
    counts = map(script.cases, PARTS)
    # the tensors are empty and never read, because only the number of cases is used
    data = SiteData(*(TensorDataset(torch.empty(number, 0)) for number in counts))
    disclosure = ScriptDisclosure(context, data, Protection(context))
    evaluation = ScriptEvaluation(script, turns, context, data, state)
    trainer = ScriptTrainer(script, turns, context, data, state, home, disclosure, evaluation)
    choice = ScriptChoice(context, state, disclosure, trainer)
    return Participant(context, SiteParts(data, state, disclosure, evaluation, trainer, choice), codec)


def scored(task: Task, metrics: Metrics | float) -> float:
    """Return the value of the plan's metric, with a negative sign if lower values of the metric are better."""
    assert isinstance(task, ScriptTask)
    if isinstance(metrics, Mapping):
        if task.metric not in metrics:
            known = ", ".join(map(str, metrics)) or "none"
            raise MedsiloError(f"metrics: no {task.metric!r} among {known}; set the recipe's key_metric to one of them")
        metrics = metrics[task.metric]
    try:
        value = float(metrics)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = math.inf
    if abs(value) > FURTHEST:
        raise MedsiloError(f"metrics: {task.metric} is {plain(metrics, 40)}; give a number of at most {FURTHEST:.0e}")
    return -value if task.lower_is_better else value


def _evaluated(evaluate: Evaluate, model: nn.Module) -> Metrics | float:
    with torch.no_grad(), evaluating(model):
        return evaluate(model)
