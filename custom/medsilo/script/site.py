"""A site whose networks a user's own script trains. It answers the coordinator as any site does.

The method's own `train_round` runs here, unchanged. Where it would pass over the data, the script's loop takes its
place: the work waits in a thread of its own until the script has trained each network.
"""

import json
import logging
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import signature
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from medsilo.core import model_folders
from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import load_facts
from medsilo.core.tensors import Tensors
from medsilo.core.text import is_safe_name
from medsilo.federation.disclosure import Disclosure
from medsilo.federation.evaluation import Evaluation, Measuring
from medsilo.federation.file_supply import take_files
from medsilo.federation.participant import Participant
from medsilo.federation.protection import Protection
from medsilo.federation.raw_results import ExactScores
from medsilo.federation.site_context import Site, SiteContext, UpdateCodec
from medsilo.federation.site_stack import training_site
from medsilo.federation.site_state import SiteState
from medsilo.federation.trainer import SHUFFLE, Trainer
from medsilo.learning.compute import Compute, LossFunction, Stop
from medsilo.learning.loop import Closure, ObjectiveFunction, Step, TrainStep, Watch, train_epoch
from medsilo.learning.seeds import seed_for, seed_torch
from medsilo.learning.statistics import evaluating
from medsilo.learning.training import Training
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import Request, StudyMessage
from medsilo.schedule.additions import INPUT
from medsilo.schedule.algorithm import Algorithm
from medsilo.schedule.phase import Phase
from medsilo.schedule.train_context import TrainContext
from medsilo.script.network import ScriptNetwork, skeleton
from medsilo.script.perturbed_loss import PerturbedLoss
from medsilo.script.task import ScriptTask
from medsilo.site.query_budget import PARTS
from medsilo.site.settings import DataPart, SiteSettings
from medsilo.tasks.metrics import Measures
from medsilo.tasks.site_data import SiteData

Metrics = Mapping[str, float]
Evaluate = Callable[[nn.Module], Metrics | float]
Batch = Callable[[Any], tuple[Tensor, Tensor]]
Samples = int | Mapping[DataPart, int] | None


def usual_batch(batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch: the first two of a list, or "image" and "label" of MONAI's dictionary.

    >>> usual_batch({"image": torch.zeros(2, 1), "label": torch.ones(2)})[1]
    tensor([1., 1.])
    """
    if isinstance(batch, Mapping):
        if "image" not in batch:
            raise MedsiloError(
                f"join: a batch has {', '.join(map(str, batch))}; give batch=, a function that returns its inputs and "
                "targets"
            )
        return batch["image"], batch.get("label", batch["image"])
    return (batch[0], batch[1]) if isinstance(batch, Sequence) and len(batch) > 1 else (batch, batch)


def twin(optimizer: Optimizer, parameters: Sequence[nn.Parameter], of: Sequence[nn.Parameter]) -> Optimizer:
    """Return an optimizer of the same kind and numbers for another network. `of`: the weights of the first one's."""
    groups, others = optimizer.param_groups, dict(zip(map(id, of), parameters, strict=False))
    if len(of) != len(parameters):
        groups = [{**groups[0], "params": list(parameters)}]
    elif any(id(own) not in others for group in groups for own in group["params"]):
        raise MedsiloError("join: the optimizer has weights besides the model's; give one of model.parameters() alone")
    else:
        groups = [{**group, "params": [others[id(own)] for own in group["params"]]} for group in groups]
    takes = signature(type(optimizer)).parameters
    return type(optimizer)(groups, **{name: value for name, value in optimizer.defaults.items() if name in takes})


class ScriptTraining(Training):
    """The numbers of the script's own optimizer, as methods ask for them."""

    _twin: Callable[[list[nn.Parameter]], Optimizer] = PrivateAttr()
    _steps: Callable[[], int] = PrivateAttr()

    @classmethod
    def of(cls, training: Training, optimizer: Optimizer, model: nn.Module, steps: Callable[[], int]) -> Training:
        """Return the plan's training with the numbers of the script's optimizer. steps: counts those of a round."""
        own = optimizer.param_groups[0]
        adam = "betas" in own
        numbers = {
            "optimizer": "adam" if adam else "sgd",
            "learning_rate": float(own["lr"]),
            "momentum": float(own.get("momentum", 0.0)),
            "nesterov": bool(own.get("nesterov", False)),
            "weight_decay": float(0.0 if own.get("decoupled_weight_decay") else own.get("weight_decay", 0.0)),
        }
        made = cls.model_construct(**{**training.model_dump(), **numbers})
        made._twin = lambda parameters: twin(optimizer, parameters, list(model.parameters()))
        made._steps = steps
        return made

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self._twin(list(parameters))

    def steps_of_round(self, in_epoch: int) -> int:
        return self._steps() or super().steps_of_round(in_epoch)


@dataclass(frozen=True)
class Turn:
    """One network's part of a round: the script trains it, or a method does, batch by batch."""

    name: str
    by_script: bool  # whether the script's loss and a step of its optimizer are all that there is to it
    make: Callable[[], TrainStep]  # sets a network to training, also the layers that the script has not

    @cached_property
    def lesson(self) -> TrainStep:
        return self.make()

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.lesson(inputs, targets)


@dataclass(frozen=True)
class ScriptContext(TrainContext):
    """The tools of a method at a site that a script trains."""

    hand_over: Callable[[Turn], float] = field(kw_only=True)

    def lesson(
        self, name: str = "model", objective: ObjectiveFunction | None = None, step: Step | None = None
    ) -> TrainStep:
        by_script = objective is None and step is None
        return Turn(name, by_script, partial(super().lesson, name, objective, step))

    def train(self, *lessons: TrainStep, share: float = 1.0) -> float:
        lessons = lessons or (self.lesson(),)
        turns = [lesson for lesson in lessons if isinstance(lesson, Turn) and lesson.by_script]
        watches = [lesson for lesson in lessons if isinstance(lesson, Watch)]
        if len(turns) + len(watches) < len(lessons):
            return super().train(*lessons, share=share)
        losses = [self.hand_over(turn) for turn in turns]
        if watches:
            for inputs, targets in self.data():
                for watch in watches:
                    watch(inputs, targets)
        return losses[0] if losses else math.nan


class Work:
    """An answer in the making, in a thread of its own, which waits where the script has something to do."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[Turn | Callable[[], Any] | StudyMessage | BaseException | None]
        self.done: SimpleQueue[Any]
        self.now: Turn | None = None  # the network whose turn it is
        self.sends = False  # whether the script's turn is to send
        self.answer: StudyMessage | None = None

    def begin(self, make: Callable[[], StudyMessage]) -> None:
        """Begin, and wait until the script has something to do."""
        self.asked, self.done = SimpleQueue(), SimpleQueue()
        threading.Thread(target=self._run, args=(make,), name="medsilo-site", daemon=True).start()
        self._wait()

    def _run(self, make: Callable[[], StudyMessage]) -> None:
        try:
            self.asked.put(make())
        except BaseException as error:
            self.asked.put(error)

    def hand_over(self, what: Turn | Callable[[], Any] | None) -> Any:
        """Let the script train a network, call a function, or, of None, send; returns what came of it."""
        self.asked.put(what)
        return self.done.get()

    def go_on(self, done: Any = None) -> None:
        """Go on: the script has done what it was asked for."""
        self.done.put(done)
        self._wait()

    def _wait(self) -> None:
        asked = self.asked.get()
        while callable(asked) and not isinstance(asked, Turn):
            self.done.put(asked())
            asked = self.asked.get()
        if isinstance(asked, BaseException):
            raise asked
        self.now = asked if isinstance(asked, Turn) else None
        self.answer = asked if isinstance(asked, StudyMessage) else None
        self.sends = asked is None


class ScriptCompute(Compute):
    """The script's device. How exactly it computes, and with how many threads, is the script's affair."""

    @contextmanager
    def reproducible(self, seed: int) -> Iterator[None]:
        yield


def has_own_steps(method: Algorithm) -> bool:
    """Return whether sites do more than step with one optimizer: then steps that medsilo does not see are wrong."""
    return bool(method.perturbation) or type(method).work is not Algorithm.work or not method.outcome.one_network


class ScriptState(SiteState):
    """The state of a site that a script trains: "model" and its optimizer are the script's own objects."""

    def __init__(
        self, plan: Plan, site: str, folder: Path, model: nn.Module, optimizer: Optimizer, scheduler: Any, loss: object
    ) -> None:
        self.module, self.own_optimizer, self.scheduler = model, optimizer, scheduler
        self.steps = 0  # that the script's optimizer has made in this round
        self.turn: str | None = None  # the network that the script trains now
        self.untrained: set[str] = set()  # networks handed to the script whose optimizers made no step since
        self.loss = PerturbedLoss(added.alpha if (added := plan.algorithm.perturbation) else 0.0, loss)
        self.hooked: WeakSet[nn.Module] = WeakSet()
        optimizer.register_step_pre_hook(self._prepare)
        optimizer.register_step_post_hook(self._count)
        super().__init__(plan, site, folder, ScriptCompute(device=next(model.parameters()).device))

    def _prepare(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Let a step's closure make its gradients now: torch asks for it after corrections were made."""
        closure: Closure | None = next((own for own in (*args[1:], *kwargs.values()) if own is not None), None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_other_network(optimizer)
        self.loss.refuse_plain()
        return None if closure is None else ((optimizer, lambda: loss), {})

    def _refuse_other_network(self, optimizer: Optimizer) -> None:
        """Raise MedsiloError for a step that trains nothing of the network whose turn it is."""
        if self.turn is None or not has_own_steps(self.algorithm):
            return
        self.untrained.discard(self.turn)
        weights = (own for group in optimizer.param_groups for own in group["params"])
        if optimizer is not self.optimizers[self.turn] or all(own.grad is None for own in weights):
            raise MedsiloError(
                "optimizer.step: no gradient of the network whose turn it is; put 'for net, optimizer in "
                "flare.networks():' around your loop, and train net with this optimizer"
            )

    def refuse_unseen_steps(self) -> None:
        """Raise MedsiloError after a round in which the script trained a network, and not by its optimizer."""
        if has_own_steps(self.algorithm) and self.untrained:
            raise MedsiloError(
                f"optimizer.step: {self.algorithm.title} saw no step of {min(self.untrained)!r} in this round; make one"
                " optimizer before join, and step with it or with that of flare.networks()"
            )

    def _count(self, *_: object) -> None:
        self.steps += 1

    @property
    def training(self) -> Training:
        """The numbers of the script's optimizer, as they are now."""
        return ScriptTraining.of(self.plan.training, self.own_optimizer, self.module, lambda: self.steps)

    def begin(self) -> None:
        fresh = self.plan.build_networks()
        self.module.load_state_dict(fresh["model"].state_dict())
        self.modules = {name: module.to(self.compute.device) for name, module in fresh.items()}
        self.modules["model"] = self.module
        self.make_optimizers()
        for name, module in self.modules.items():
            if type(module) is type(self.module) and module not in self.hooked:
                self._hook(name, module)
        self.done, self.best = 0, None

    def _hook(self, name: str, module: nn.Module) -> None:
        """Let batches pass the input layer before this network. A script's copies of the network have it, too."""

        def normalise(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            layer = self.modules[INPUT]
            layer.train(module.training)
            return (layer(inputs[0]), *inputs[1:])

        self.hooked.add(module)
        if not self.algorithm.outcome.one_network:
            module.register_forward_hook(self._refuse_many_outputs)
        if INPUT in self.modules:
            module.register_forward_pre_hook(normalise)
        self.loss.watch(module, lambda: self.optimizers[name])

    def refuse_other_learning(self) -> None:
        """Raise MedsiloError where a method keeps numbers for each weight that learns, and the recipe knew others."""
        if not any(isinstance(kept, nn.ParameterList) for kept in self.modules.values()):
            return
        assert isinstance(self.plan.network, ScriptNetwork)
        recipes = skeleton(self.plan.network.layers)
        now, planned = ({n for n, own in net.named_parameters() if own.requires_grad} for net in (self.module, recipes))
        if odd := sorted(now ^ planned):
            raise MedsiloError(
                f"model: {odd[0]} learns either here or in the recipe's model; {self.algorithm.title} needs the same "
                "weights frozen in both, in all rounds"
            )

    def _refuse_many_outputs(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Raise MedsiloError in the first round for what the super model could not put together after the last."""
        if not module.training and not isinstance(output, Tensor):
            raise MedsiloError(
                f"model: it returns a {type(output).__name__}; {self.algorithm.title}'s super model needs one tensor"
                " in evaluation; let forward return it where not self.training"
            )

    def make_optimizers(self) -> None:
        self.own_optimizer.state.clear()
        self.optimizers = {
            name: self.own_optimizer
            if module is self.module
            else self.algorithm.make_optimizer(name, module, self.training)
            for name, module in self.modules.items()
            if any(parameter.requires_grad for parameter in module.parameters())
        }
        for optimizer in self.optimizers.values():
            if optimizer is not self.own_optimizer:
                optimizer.register_step_pre_hook(self._prepare)

    def stepping(self, name: str) -> Optimizer:
        """Return the optimizer with which the script trains a network, with the script's learning rate."""
        optimizer = self.optimizers[name]
        for group, own in zip(optimizer.param_groups, self.own_optimizer.param_groups, strict=False):
            group["lr"] = own["lr"]
        return optimizer

    def follow(self) -> None:
        """Work where the script's model is: NVFlare's examples move it to a card and back in each round."""
        self.compute = ScriptCompute(device=next(self.module.parameters()).device)

    def besides(self) -> dict[str, Any]:
        if self.scheduler is None:
            return {}
        rates = [float(group["lr"]) for group in self.own_optimizer.param_groups]  # which no scheduler's state has
        return {"scheduler": json.dumps(self.scheduler.state_dict()), "rates": rates}

    def _load(self, number: int) -> None:
        super()._load(number)
        if self.scheduler is not None:
            facts = load_facts(self._path(number))
            self.scheduler.load_state_dict(json.loads(facts["scheduler"]))
            for group, rate in zip(self.own_optimizer.param_groups, facts["rates"], strict=True):
                group["lr"] = rate


@dataclass
class Data:
    """What a script lets a method pass over, and how."""

    loader: Iterable[Any]  # the training batches
    validation: Iterable[Any] | None = None  # for FedSM's threshold
    samples: Samples = None  # training cases, or those of parts; by default those of the loaders' data sets
    batch: Batch = usual_batch
    loss: LossFunction | None = None  # for methods whose objective is more than the script's loss
    passing: bool = field(default=False, init=False)  # whether a method is in a pass of its own

    def __post_init__(self) -> None:
        stated = self.samples if isinstance(self.samples, Mapping) else {}
        if odd := {*stated} - {*PARTS} or {part for part, number in stated.items() if number < 0}:
            raise MedsiloError(f"join: samples has {odd.pop()!r} wrong; give cases of {', '.join(PARTS)}")

    def cases(self, part: DataPart) -> int:
        """Return the cases of a part, as the script states or a loader counts them; 0 where nobody knows."""
        if isinstance(self.samples, Mapping) and part in self.samples:
            return self.samples[part]
        if isinstance(self.samples, int) and part == "train":
            return self.samples
        loader: Any = {"train": self.loader, "validation": self.validation}.get(part)
        if isinstance(loader, Sequence):
            return sum(len(self.batch(batch)[0]) for batch in loader)
        try:
            return 0 if loader is None else len(loader.dataset)
        except (TypeError, AttributeError) as error:
            if part != "train":
                return 0
            raise MedsiloError("join: the loader does not say how many cases it has; give samples=") from error

    @property
    def steps(self) -> int:
        """Return the batches of a pass."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return 1

    def seed(self, seed: int) -> None:
        """Let all chance of a round follow from a number, also where the script's process is another one."""
        seed_torch(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # by which scripts draw
        if isinstance(generator := getattr(self.loader, "generator", None), torch.Generator):
            generator.manual_seed(seed)

    def batches(self, loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a pass."""
        self.passing = True
        for batch in loader:
            inputs, targets = self.batch(batch)
            yield inputs.to(device), targets.to(device)
        self.passing = False

    def measured(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a pass over the training data that leaves the script's random numbers as they were."""
        generator: torch.Generator | None = getattr(self.loader, "generator", None)
        kept = None if generator is None else generator.get_state()
        with torch.random.fork_rng():
            yield from self.batches(self.loader, device)
        if generator is not None and kept is not None:
            generator.set_state(kept)


class ScriptDisclosure(Disclosure):
    """Discloses what the script sends: medsilo can't know which cases its numbers cover."""

    def tells(self, part: DataPart) -> bool:
        return True


class ScriptEvaluation(Evaluation):
    """Has the script score models by its own functions."""

    def __init__(self, site: "ScriptSite", place: SiteContext, data: SiteData, state: ScriptState) -> None:
        self.script, self.data, self.state = site, data, state
        self.settings, self.task = place.settings, place.plan.task

    def evaluate(
        self, part: Dataset, stop: Stop, model: nn.Module, measuring: Measuring | None = None
    ) -> tuple[float, float, Measures]:
        script, own = self.script, self.state.module
        tests = part is self.data.test
        net = own if own in model.children() else model  # the script's model is behind its input layer by itself
        if function := script.test if tests else script.evaluate:
            return math.nan, script.score(script.work.hand_over(partial(_evaluated, function, net))), {}
        if tests and net is not own:  # an outcome that counts its answers
            for inputs, _ in self.in_order(part, net):
                net(inputs)
        return math.nan, math.nan, {}

    def pieces(self, part: Dataset, purpose: str) -> Dataset:
        return part

    def in_order(self, part: Dataset, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the script's validation batches."""
        data = self.script.data
        assert data.validation is not None  # see _refuse_lacking
        return data.batches(data.validation, self.state.compute.device)


class ScriptTrainer(Trainer):
    """Has the script train networks by its own loop, and lets methods pass over its loader."""

    state: ScriptState

    def __init__(self, site: "ScriptSite", place: SiteContext, data: SiteData, state: ScriptState) -> None:
        nothing = lambda model, stop: None  # noqa: E731
        super().__init__(place, data, state, Protection(place), None, (nothing, nothing))
        self.script, self.handed_over = site, False
        self.sent_score: float | None = None  # of the model as it arrived, if the script sent one

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        state = self.state
        self.script.data.seed(seed_for(self.drawn_from, self.place.site, "script", number))
        state.steps, self.sent_score, self.handed_over = 0, None, False
        state.untrained.clear()
        self.doing.begin("training")
        loss = phase.work(self.bench(SHUFFLE, number, stop))
        if self.handed_over:
            self.sent_score = self.script.work.hand_over(None)
        state.refuse_unseen_steps()
        return loss

    def _hand_over(self, turn: Turn) -> float:
        """Let the script train a network; its loss is the script's own."""
        state, self.handed_over = self.state, True
        state.turn = turn.name
        state.untrained.add(turn.name)
        self.script.work.hand_over(turn)
        state.turn = None
        return math.nan

    def bench(self, purpose: str, number: int, stop: Stop) -> ScriptContext:
        state, data = self.state, self.script.data
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
        return self.script.data.measured(self.state.compute.device)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the script's loss, for a method whose objective is more than that."""
        if self.script.data.loss is None:
            name = self.place.plan.algorithm.name
            raise MedsiloError(f"join: {name} has more than a loss of your own to train; give loss=")
        return self.script.data.loss(output, target)


class ScriptParticipant(Participant):
    """A participant whose script trains and scores. The script decides what it reads and sends."""

    trainer: ScriptTrainer

    def __init__(self, site: "ScriptSite", state: ScriptState, place: SiteContext, envelope: UpdateCodec) -> None:
        self.place, self.envelope, self.state, self.warnings = place, envelope, state, []
        counts = map(site.data.cases, PARTS)
        self.data = SiteData(*(TensorDataset(torch.empty(number, 0)) for number in counts))  # cases that nobody sees
        self.disclosure = ScriptDisclosure(place, self.data, Protection(place))
        self.evaluation = ScriptEvaluation(site, place, self.data, state)
        self.trainer = ScriptTrainer(site, place, self.data, state)
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


def _evaluated(evaluate: Evaluate, model: nn.Module) -> Metrics | float:
    with torch.no_grad(), evaluating(model):
        return evaluate(model)


def _refuse_optimizer(method: Algorithm, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise MedsiloError for an optimizer by which the method would not train the model."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MedsiloError("join: LBFGS looks at the loss many times in a step; take another optimizer, as SGD")
    steps = {id(own) for group in optimizer.param_groups for own in group["params"]}
    learning = {name: id(own) in steps for name, own in model.named_parameters() if own.requires_grad}
    if not any(learning.values()):
        raise MedsiloError("join: the optimizer has none of the model's weights; make it of model.parameters()")
    if lacks := next((name for name, own in learning.items() if not own), ""):
        told = f"join: the optimizer lacks {lacks}; give one of all weights that learn, or freeze the others"
        if has_own_steps(method):
            raise MedsiloError(f"{told} by requires_grad_(False): {method.title} needs it")
        logging.getLogger(__name__).warning("%s: a restart loses the state of any other optimizer", told)


def _refuse_lacking(plan: Plan, data: Data) -> None:
    """Raise MedsiloError before the first round where the study's end needs what the script does not give."""
    method, outcome = plan.algorithm, plan.algorithm.outcome
    if outcome.one_network:
        return
    if data.validation is None:
        raise MedsiloError(f"join: {method.title} needs validation=, a loader of validation batches with their labels")
    if not outcome.scores_besides and data.loss is None:  # without a threshold its selector learns by the loss
        raise MedsiloError(f"join: {method.title} needs loss=, the function of (output, target) that you train with")


# As of data that need no protection: what leaves is decided by the script.
SETTINGS = SiteSettings(device="cpu", public_data=True, min_patients_per_metric=1, share_personal_model=True)


class ScriptSite:
    """A site of a study, without NVFlare: it is asked, and the script trains in between."""

    def __init__(
        self,
        plan: Plan,
        site: str,
        output: Path,
        model: nn.Module,
        optimizer: Optimizer,
        data: Data,
        evaluate: Evaluate | None = None,
        test: Evaluate | None = None,
        scheduler: Any = None,
    ) -> None:
        """output: the folder under which this site keeps its studies. test: scores the model that was chosen, once."""
        self.plan, self.site, self.output, self.data = plan, site, output, data
        self.evaluate, self.test = evaluate, test
        assert isinstance(plan.network, ScriptNetwork)
        _refuse_optimizer(plan.algorithm, model, optimizer)
        _refuse_lacking(plan, data)
        plan.network.make_by(model)
        self._make = lambda folder: ScriptState(self.plan, site, folder, model, optimizer, scheduler, data.loss)
        self.state: ScriptState
        self.asked: Request | None = None
        self.waiting: Any = None  # what the script receives, until it has sent
        self.work = Work()
        self._inner: Site | None = None

    def ask(self, parcel: StudyMessage) -> StudyMessage | None:
        """Answer a parcel; None where the script has to train first. Raises Lacks without the initial weights."""
        asked = self.asked = Request.received(parcel.facts)
        if not is_safe_name(asked.study):  # it becomes the name of a folder here
            raise Refused("the study's name has odd characters")
        self.plan = self.plan.among(asked.sites)
        if asked.plan != self.plan.hash:
            raise Refused("the job's plan at this site differs from the server's; submit the job again")
        folder = paths.site_folder(self.output / asked.study, self.site)
        sites = sorted(self.plan.participation.sites or asked.sites)
        place = SiteContext(self.plan, self.site, sites, SETTINGS, folder)
        model_folders.look_in(place.models)
        order = take_files(place, parcel)
        if self._inner is None:
            self.state = self._make(folder)
            self._inner = training_site(place, partial(ScriptParticipant, self, self.state))
        self.state.follow()
        self.state.refuse_other_learning()
        self.data.passing = False
        self.work.begin(partial(self._answer, order))
        return self.work.answer

    def _answer(self, order: StudyMessage) -> StudyMessage:
        """Answer a request. Where a method's own pass over the data fails, the error says which argument to change."""
        assert self._inner
        try:
            return self._inner.answer(order, lambda: None)
        except Exception as error:
            if isinstance(error, MedsiloError) or not self.data.passing:
                raise
            raise MedsiloError(
                f"join: {type(error).__name__}: {error}. {self.plan.algorithm.title} calls net(inputs) and loss(output,"
                " targets) in a pass of its own; give batch= and loss= that fit"
            ) from error

    def weights(self) -> Tensors:
        """Return the model's weights as they are now, in memory of their own."""
        return {name: own.detach().to("cpu", copy=True) for name, own in self.state.module.state_dict().items()}

    def networks(self) -> Iterator[tuple[nn.Module, Optimizer]]:
        """Yield each network that is to be trained in this round, and the optimizer to step with."""
        while turn := self.work.now:
            yield self.state.modules[turn.name], self.state.stepping(turn.name)
            self._go_on()

    def _go_on(self, score: float | None = None) -> None:
        """Let the site go on: the script has trained the network whose turn it was, or has sent."""
        self.state.follow()
        self.work.go_on(score)

    def finish(self, metrics: Metrics | float | None = None) -> StudyMessage:
        """Answer the round that was asked, now that the script has trained. metrics: of the model as it arrived."""
        work = self.work
        if not work.now and not work.sends:
            raise MedsiloError("send: there is no round to answer; call is_running() first")
        score = None if metrics is None or self.evaluate else self.score(metrics)
        if work.now:
            trained = work.now.name
            self._go_on()
            if work.now:
                raise MedsiloError(
                    f"send: {self.plan.algorithm.title} has two networks, and this round trained only {trained!r}; put "
                    "'for net, optimizer in flare.networks():' around your loop, and train net"
                )
        self._go_on(score)
        assert work.answer
        return work.answer

    def score(self, metrics: Metrics | float) -> float:
        """Return the value of the plan's metric, as the study counts it: higher is better."""
        task = self.plan.task
        assert isinstance(task, ScriptTask)
        if isinstance(metrics, Mapping):
            if task.metric not in metrics:
                known = ", ".join(map(str, metrics)) or "none"
                raise MedsiloError(f"metrics: no {task.metric!r} among {known}; name it in the recipe's key_metric")
            metrics = metrics[task.metric]
        return -float(metrics) if task.lower_is_better else float(metrics)
