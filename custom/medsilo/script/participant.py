"""What a site does for which a user's own script trains and scores."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from medsilo.core.errors import MedsiloError
from medsilo.core.tensors import Tensors
from medsilo.federation.disclosure import Disclosure
from medsilo.federation.evaluation import Evaluation, Measuring
from medsilo.federation.participant import Participant
from medsilo.federation.protection import Protection
from medsilo.federation.raw_results import ExactScores
from medsilo.federation.site_context import SiteContext, UpdateCodec
from medsilo.federation.trainer import SHUFFLE, Trainer
from medsilo.learning.compute import Stop
from medsilo.learning.loop import TrainStep, train_epoch
from medsilo.learning.seeds import seed_for
from medsilo.learning.statistics import evaluating
from medsilo.runs import paths
from medsilo.schedule.phase import Phase
from medsilo.script.data import Data, Evaluate, Metrics
from medsilo.script.handover import ScriptContext, Turn, Work
from medsilo.script.state import ScriptState
from medsilo.script.task import ScriptTask
from medsilo.site.query_budget import PARTS
from medsilo.site.settings import DataPart
from medsilo.tasks.metrics import Measures
from medsilo.tasks.site_data import SiteData
from medsilo.tasks.task import Task


class ScriptDisclosure(Disclosure):
    """Discloses what the script sends: medsilo can't know which cases its numbers cover."""

    def tells(self, part: DataPart) -> bool:
        return True


class ScriptEvaluation(Evaluation):
    """Has the script score models by its own functions."""

    def __init__(self, script: Data, turns: Work, place: SiteContext, data: SiteData, state: ScriptState) -> None:
        self.script, self.turns, self.data, self.state = script, turns, data, state
        self.settings, self.task = place.settings, place.plan.task

    def evaluate(
        self, part: Dataset, stop: Stop, model: nn.Module, measuring: Measuring | None = None
    ) -> tuple[float, float, Measures]:
        script, own = self.script, self.state.module
        tests = part is self.data.test
        net = own if own in model.children() else model  # the script's model is behind its input layer by itself
        if function := script.test if tests else script.evaluate:
            return math.nan, scored(self.task, self.turns.hand_over(partial(_evaluated, function, net))), {}
        if tests and net is not own:  # an outcome that counts its answers
            for inputs, _ in self.in_order(part, net):
                net(inputs)
        return math.nan, math.nan, {}

    def pieces(self, part: Dataset, purpose: str) -> Dataset:
        return part

    def in_order(self, part: Dataset, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the script's validation batches."""
        assert self.script.validation is not None  # see _refuse_lacking
        return self.script.batches(self.script.validation, self.state.compute.device)


class ScriptTrainer(Trainer):
    """Has the script train networks by its own loop, and lets methods pass over its loader."""

    state: ScriptState

    def __init__(self, script: Data, turns: Work, place: SiteContext, data: SiteData, state: ScriptState) -> None:
        nothing = lambda model, stop: None  # noqa: E731
        super().__init__(place, data, state, Protection(place), None, (nothing, nothing))
        self.script, self.turns, self.handed_over = script, turns, False
        self.sent_score: float | None = None  # of the model as it arrived, if the script sent one

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        state = self.state
        self.script.seed(seed_for(self.drawn_from, self.place.site, "script", number))
        state.steps, self.sent_score, self.handed_over = 0, None, False
        state.untrained.clear()
        self.doing.begin("training")
        loss = phase.work(self.bench(SHUFFLE, number, stop))
        if self.handed_over:
            self.sent_score = self.turns.hand_over(None)
        state.refuse_unseen_steps()
        return loss

    def _hand_over(self, turn: Turn) -> float:
        """Let the script train a network; its loss is the script's own."""
        state, self.handed_over = self.state, True
        state.turn = turn.name
        state.untrained.add(turn.name)
        self.turns.hand_over(turn)
        state.turn = None
        return math.nan

    def bench(self, purpose: str, number: int, stop: Stop) -> ScriptContext:
        state, data = self.state, self.script
        usual = super().bench(purpose, number, stop)

        def epoch(lessons: Sequence[TrainStep], number: int, most: int | None = None) -> float:
            state.loss.by_method = True
            try:
                batches = data.batches(data.loader, state.compute.device)
                return train_epoch(islice(batches, most), lessons, state.compute)
            finally:
                state.loss.by_method = False

        own = {"training": state.training, "epoch": epoch, "steps": data.steps}
        hand_over = self._hand_over if purpose == SHUFFLE else lambda turn: math.nan
        return ScriptContext(**{**vars(usual), **own}, hand_over=hand_over)

    def in_order(self, part: Dataset, stop: Stop) -> Iterator[tuple[Tensor, Tensor]]:
        return self.script.measured(self.state.compute.device)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the script's loss, for a method whose objective is more than that."""
        if self.script.loss is None:
            name = self.place.plan.algorithm.name
            raise MedsiloError(f"join: {name} has more than a loss of your own to train; give loss=")
        return self.script.loss(output, target)


class ScriptParticipant(Participant):
    """A participant whose script trains and scores. The script decides what it reads and sends."""

    trainer: ScriptTrainer

    def __init__(
        self, script: Data, turns: Work, state: ScriptState, place: SiteContext, envelope: UpdateCodec
    ) -> None:
        self.place, self.envelope, self.state, self.warnings = place, envelope, state, []
        counts = map(script.cases, PARTS)
        self.data = SiteData(*(TensorDataset(torch.empty(number, 0)) for number in counts))  # cases that nobody sees
        self.disclosure = ScriptDisclosure(place, self.data, Protection(place))
        self.evaluation = ScriptEvaluation(script, turns, place, self.data, state)
        self.trainer = ScriptTrainer(script, turns, place, self.data, state)
        self.scores = False  # whether the script sends scores
        self.received: Tensors | None = None  # the model as it arrived, until the script sends its score

    @property
    def _chooses(self) -> bool:
        return super()._chooses and (self.scores or (self.place.folder / paths.BEST).exists())

    def _consider(self, rounds: int, scored: ExactScores, model: Tensors | None = None) -> None:
        if math.isfinite(scored.score):
            self.scores = True
            super()._consider(rounds, scored, model)
        elif super()._chooses:
            self.received = {name: own.clone() for name, own in self.state.model.state_dict().items()}

    def _scored_late(self, rounds: int) -> ExactScores | None:
        score = self.trainer.sent_score
        if score is None or not self.place.plan.validates(rounds):
            return None
        scored = ExactScores(math.nan, score, {})
        self._consider(rounds, scored, self.received)
        return scored


def scored(task: Task, metrics: Metrics | float) -> float:
    """Return the value of the plan's metric, as the study counts it: higher is better."""
    assert isinstance(task, ScriptTask)
    if isinstance(metrics, Mapping):
        if task.metric not in metrics:
            known = ", ".join(map(str, metrics)) or "none"
            raise MedsiloError(f"metrics: no {task.metric!r} among {known}; name it in the recipe's key_metric")
        metrics = metrics[task.metric]
    return -float(metrics) if task.lower_is_better else float(metrics)


def _evaluated(evaluate: Evaluate, model: nn.Module) -> Metrics | float:
    with torch.no_grad(), evaluating(model):
        return evaluate(model)
