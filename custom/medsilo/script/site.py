"""A site whose networks a user's own script trains. It answers the coordinator as any site does.

The method's own `train_round` runs here, unchanged. Where it would pass over the data, the script's loop takes its
place: the work waits in a thread of its own until the script has trained each network.
"""

import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.optim import Optimizer

from medsilo.core import weight_cache
from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import load_facts
from medsilo.core.package import machine_facts
from medsilo.core.parent_watch import most_held
from medsilo.core.rounding import Resolution
from medsilo.core.tensors import Tensors
from medsilo.core.text import is_safe_name
from medsilo.federation.site_state import SiteState
from medsilo.learning.compute import Compute, LossFunction
from medsilo.learning.loop import ObjectiveFunction, TrainStep, Watch, train_epoch
from medsilo.learning.perturbation import perturbed_gradients, perturbed_step
from medsilo.learning.seeds import generator_for, seed_for, seed_torch
from medsilo.learning.steps import Closure, Step
from medsilo.learning.training import Training
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import ANSWERS, Counted, Request, StudyMessage
from medsilo.schedule.additions import INPUT
from medsilo.schedule.outcome import SiteEnd
from medsilo.schedule.phase import Phase
from medsilo.schedule.train_context import TrainContext
from medsilo.script.network import ScriptNetwork
from medsilo.site.settings import DataPart

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
        return batch["image"], batch.get("label", batch["image"])
    return (batch[0], batch[1]) if isinstance(batch, Sequence) and len(batch) > 1 else (batch, batch)


# ---------------------------------------------------------------------------------------------------- optimizers
def twin(optimizer: Optimizer, parameters: Sequence[nn.Parameter], of: Sequence[nn.Parameter]) -> Optimizer:
    """Return an optimizer of the same kind and numbers for another network. `of`: the weights of the first one's."""
    places = {id(own): place for place, own in enumerate(of)}
    groups = [
        {**group, "params": [parameters[places[id(own)]] for own in group["params"]]}
        if len(of) == len(parameters)
        else {**group, "params": list(parameters)}
        for group in (optimizer.param_groups if len(of) == len(parameters) else optimizer.param_groups[:1])
    ]
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


# ---------------------------------------------------------------------------------------------------- handing over
@dataclass(frozen=True)
class Turn:
    """One network's part of a round: the script trains it, or a method does, batch by batch."""

    name: str
    by_script: bool  # whether the script's loss and a step of its optimizer are all that there is to it
    lesson: TrainStep

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.lesson(inputs, targets)


@dataclass(frozen=True)
class ScriptContext(TrainContext):
    """The tools of a method at a site that a script trains."""

    hand_over: Callable[[Turn], float] = field(kw_only=True)

    def lesson(
        self, name: str = "model", objective: ObjectiveFunction | None = None, step: Step | None = None
    ) -> TrainStep:
        return Turn(name, objective is None and step is None, super().lesson(name, objective, step))

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
    """A method's work in a thread of its own, which waits while the script trains a network."""

    def __init__(self, work: Callable[[Callable[[Turn], float]], float]) -> None:
        self.asked: SimpleQueue[Turn | None] = SimpleQueue()
        self.done: SimpleQueue[float] = SimpleQueue()
        self.loss = math.nan
        self.error: BaseException | None = None
        self.now: Turn | None = None  # the network whose turn it is
        threading.Thread(target=self._run, args=(work,), name="medsilo-method", daemon=True).start()
        self._next()

    def _run(self, work: Callable[[Callable[[Turn], float]], float]) -> None:
        def hand_over(turn: Turn) -> float:
            self.asked.put(turn)
            return self.done.get()

        try:
            self.loss = work(hand_over)
        except BaseException as error:
            self.error = error
        self.asked.put(None)

    def _next(self) -> None:
        self.now = self.asked.get()
        if self.error:
            raise self.error

    def trained(self, loss: float = math.nan) -> None:
        """Go on: the script has trained the network whose turn it was."""
        self.done.put(loss)
        self._next()


# ---------------------------------------------------------------------------------------------------- the state
class ScriptState(SiteState):
    """The state of a site that a script trains: "model" and its optimizer are the script's own objects."""

    def __init__(
        self, plan: Plan, site: str, folder: Path, model: nn.Module, optimizer: Optimizer, scheduler: Any = None
    ) -> None:
        self.module, self.own_optimizer, self.scheduler = model, optimizer, scheduler
        self.steps = 0  # that the script's optimizer has made in this round
        self.by_method = False  # whether a method steps, in a pass over the loader
        self.again = False  # whether a batch passes a network for the second time
        optimizer.register_step_pre_hook(partial(self._prepare, "model"))
        optimizer.register_step_post_hook(self._count)
        super().__init__(plan, site, folder, Compute(device=next(model.parameters()).device))

    def _prepare(
        self, name: str, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Let a step's closure make the method's gradients now: torch asks for it after corrections were made."""
        closure: Closure | None = next((own for own in (*args[1:], *kwargs.values()) if own is not None), None)
        alpha = self.algorithm.perturbation.alpha if self.algorithm.perturbation else 0.0
        if closure is None:
            if alpha and not self.by_method:
                raise MedsiloError(
                    "optimizer.step: this method computes the loss twice; call step(closure): closure() clears the "
                    "gradients, computes the loss, calls backward and returns the loss"
                )
            return None

        def counted() -> Tensor:
            loss = closure()
            self.again = True
            return loss

        try:
            loss = perturbed_gradients(optimizer, counted, alpha, module=self.modules[name])
        finally:
            self.again = False
        return (optimizer, lambda: loss), {}

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
        for module in self.modules.values() if INPUT in fresh else ():
            if type(module) is type(self.module) and not module._forward_pre_hooks:
                module.register_forward_pre_hook(self._normalise)
        self.make_optimizers()
        self.done, self.best = 0, None

    def _normalise(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Let a batch pass the input layer, which learns from it once."""
        layer = self.modules[INPUT]
        layer.train(module.training and not self.again)
        return (layer(inputs[0]), *inputs[1:])

    def make_optimizers(self) -> None:
        self.own_optimizer.state.clear()
        self.optimizers = {
            name: self.own_optimizer
            if module is self.module
            else self.algorithm.make_optimizer(name, module, self.training)
            for name, module in self.modules.items()
            if any(parameter.requires_grad for parameter in module.parameters())
        }
        for name, optimizer in self.optimizers.items():
            if optimizer is not self.own_optimizer:
                optimizer.register_step_pre_hook(partial(self._prepare, name))

    def stepping(self, name: str) -> Optimizer:
        """Return the optimizer with which the script trains a network, with the script's learning rate."""
        optimizer = self.optimizers[name]
        for group, own in zip(optimizer.param_groups, self.own_optimizer.param_groups, strict=False):
            group["lr"] = own["lr"]
        return optimizer

    def follow(self) -> None:
        """Work where the script's model is: NVFlare's examples move it to a card and back in each round."""
        self.compute = Compute(device=next(self.module.parameters()).device)

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


# ---------------------------------------------------------------------------------------------------- the site
@dataclass
class Data:
    """What a script lets a method pass over, and how."""

    loader: Iterable[Any]  # the training batches
    validation: Iterable[Any] | None = None  # for FedSM's threshold
    samples: Samples = None  # training cases, or those of parts; by default those of the loaders' data sets
    batch: Batch = usual_batch
    loss: LossFunction | None = None  # for methods whose objective is more than the script's loss

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
        loader = {"train": self.loader, "validation": self.validation}.get(part)
        return 0 if loader is None else self.count(loader)

    def count(self, loader: Any) -> int:
        """Return the cases of a loader."""
        if isinstance(loader, Sequence):
            return sum(len(self.batch(batch)[0]) for batch in loader)
        try:
            return len(loader.dataset)
        except (TypeError, AttributeError) as error:
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
        for batch in loader:
            inputs, targets = self.batch(batch)
            yield inputs.to(device), targets.to(device)

    def measured(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a pass over the training data that leaves the script's random numbers as they were."""
        generator: torch.Generator | None = getattr(self.loader, "generator", None)
        kept = None if generator is None else generator.get_state()
        with torch.random.fork_rng():
            yield from self.batches(self.loader, device)
        if generator is not None and kept is not None:
            generator.set_state(kept)


def _evaluated(evaluate: Evaluate, model: nn.Module) -> Metrics | float:
    training = model.training
    model.eval()
    with torch.no_grad():
        found = evaluate(model)
    model.train(training)
    return found


def _refuse_lacking(plan: Plan, data: Data) -> None:
    """Raise MedsiloError before the first round where the study's end needs what the script does not give."""
    method, outcome = plan.algorithm, plan.algorithm.outcome
    if outcome.one_network:
        return
    if data.validation is None:
        raise MedsiloError(f"join: {method.title} needs validation=, a loader of validation batches with their labels")
    if not outcome.scores_besides and data.loss is None:  # without a threshold its selector learns by the loss
        raise MedsiloError(f"join: {method.title} needs loss=, the function of (output, target) that you train with")


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
        self.evaluate, self.tests = evaluate, test
        assert isinstance(plan.network, ScriptNetwork)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MedsiloError("join: LBFGS looks at the loss many times in a step; take another optimizer, as SGD")
        _refuse_lacking(plan, data)
        plan.network.make_by(model)
        self._make = lambda folder: ScriptState(self.plan, site, folder, model, optimizer, scheduler)
        self.state: ScriptState
        self.work: Work | None = None
        self.asked: Request | None = None
        self.received: Tensors | None = None  # the model as it came, where its score is told later
        self.started = 0.0
        self.sites: list[str] = []

    # ------------------------------------------------------------------ being asked
    def ask(self, parcel: StudyMessage) -> StudyMessage | None:
        """Answer a parcel; None where the script has to train first."""
        asked = self.asked = Request.received(parcel.facts)
        self.started = time.monotonic()
        if not is_safe_name(asked.study):  # it becomes the name of a folder here
            raise Refused("the study's name has odd characters")
        self.plan = self.plan.among(asked.sites)
        if asked.plan != self.plan.hash:
            raise Refused("the job's plan at this site differs from the server's; submit the job again")
        self.sites = sorted(self.plan.participation.sites or asked.sites)
        if not hasattr(self, "state"):
            folder = paths.site_folder(self.output / asked.study, self.site)
            weight_cache.look_in(self.output)
            self.state = self._make(folder)
        self.state.follow()
        if asked.task == "join":
            return self._answer(shares=True, machine=machine_facts(), absent=[], classes=dict.fromkeys(PARTS))
        if asked.task == "deliver":
            return self._deliver(parcel)
        if asked.task == "test":
            return self._test(parcel)
        if asked.task != "round":
            raise Refused(f"a training script does not answer requests of kind {asked.task}")
        return self._begin_round(parcel)

    def _begin_round(self, parcel: StudyMessage) -> StudyMessage | None:
        asked, state = self.asked, self.state
        assert asked
        phase = self.plan.course.phase_of(asked.round)
        state.restore_after(asked.round - 1, asked.last)
        state.done = -1
        state.take_over(parcel.groups, phase)
        self.validated = self._validate(asked.round - 1)
        if not phase.trains_at(self.site, asked.round, self.sites, self.plan.seed):
            return self._trained(phase, math.nan, sends=False)
        self.data.seed(seed_for(self.plan.seed, self.site, "script", asked.round))
        state.steps = 0
        self.work = Work(lambda hand_over: phase.work(self._bench(asked.round, hand_over)))
        return self._trained(phase, self.work.loss) if self.work.now is None else None

    def weights(self) -> Tensors:
        """Return a copy of the model's weights in memory, as they are now."""
        return {name: own.detach().to("cpu", copy=True) for name, own in self.state.module.state_dict().items()}

    def networks(self) -> Iterator[tuple[nn.Module, Optimizer]]:
        """Yield each network that is to be trained in this round, and the optimizer to step with."""
        assert self.work
        while turn := self.work.now:
            yield self.state.modules[turn.name], self.state.stepping(turn.name)
            self._go_on()

    def _go_on(self) -> None:
        """Let the method go on: the script has trained the network whose turn it was."""
        assert self.work
        self.state.follow()
        self.work.trained()

    def finish(self, metrics: Metrics | float | None = None) -> StudyMessage:
        """Answer the round that was asked, now that the script has trained. metrics: of the model as it arrived."""
        asked, work = self.asked, self.work
        if not asked or asked.task != "round" or not work:
            raise MedsiloError("send: there is no round to answer; call is_running() first")
        if work.now:
            trained = work.now.name
            self._go_on()
            if work.now:
                raise MedsiloError(
                    f"send: {self.plan.algorithm.title} has two networks, and this round trained only {trained!r}; put "
                    "'for net, optimizer in flare.networks():' around your loop, and train net"
                )
        if metrics is not None and self.evaluate is None:
            self.validated = self._score(metrics)
            self._consider(asked.round - 1)
        self.work = None
        return self._trained(self.plan.course.phase_of(asked.round), work.loss)

    def _trained(self, phase: Phase, loss: float, sends: bool = True) -> StudyMessage:
        asked, state = self.asked, self.state
        assert asked
        state.refuse_divergence(asked.round)
        state.done = asked.round
        state.save()
        told = {"train_loss": None if math.isnan(loss) else loss, "validation": self.validated}
        row = {**told, "validation_loss": None}
        state.write_row(asked.round, phase.name, self.samples, row, time.monotonic() - self.started)
        answer = self._answer(samples=self.samples, validation_loss=None, **told)
        return StudyMessage(state.sent(phase) if sends else {}, answer.facts)

    # ------------------------------------------------------------------ scores
    def _score(self, metrics: Metrics | float) -> float | None:
        """Return the value of the plan's metric, as the study counts it: higher is better."""
        task = self.plan.task
        if isinstance(metrics, Mapping):
            if task.metric not in metrics:  # type: ignore[attr-defined]
                known = ", ".join(map(str, metrics)) or "none"
                raise MedsiloError(f"metrics: no {task.metric!r} among {known}; name it in the recipe's key_metric")  # type: ignore[attr-defined]
            metrics = metrics[task.metric]  # type: ignore[attr-defined]
        value = float(metrics)
        if not math.isfinite(value):
            return None
        return -value if task.lower_is_better else value  # type: ignore[attr-defined]

    def _validate(self, rounds: int) -> float | None:
        """Score the model as it is after so many rounds, where the script has said how."""
        plan, state = self.plan, self.state
        if not plan.validates(rounds):
            return None
        plan.algorithm.personalise(self._bench(rounds, lambda turn: math.nan))
        personal = plan.algorithm.outcome.personal
        if self.evaluate is None:
            self.received = {name: own.clone() for name, own in state.model.state_dict().items()} if personal else None
            return None
        self.received = None
        self.validated = self._score(_evaluated(self.evaluate, state.modules["model"]))
        self._consider(rounds)
        return self.validated

    def _consider(self, rounds: int) -> None:
        """Keep the model that came, where each site chooses its own best."""
        plan, state, score = self.plan, self.state, self.validated
        if not plan.algorithm.outcome.personal or score is None or not plan.course.used_as_scored(rounds):
            return
        if state.best is not None and score <= state.best:
            return
        state.best = score
        trained = {name: own.clone() for name, own in state.model.state_dict().items()} if self.received else None
        if self.received:
            state.model.load_state_dict(self.received)
        state.save_model(paths.BEST, rounds)
        if trained:
            state.model.load_state_dict(trained)

    # ------------------------------------------------------------------ the end
    def _deliver(self, parcel: StudyMessage) -> StudyMessage:
        asked, state, plan = self.asked, self.state, self.plan
        assert asked
        state.restore_after(asked.round, asked.last)
        state.done = -1
        state.take_over(parcel.groups, plan.course.delivery)
        scored = self._validate(asked.round)
        state.refuse_divergence(asked.round)
        state.save_model(paths.LAST, asked.round)
        told = plan.algorithm.outcome.take(self._end(), asked.outcome)
        return self._answer(validation=scored, validation_loss=None, outcome=told)

    def _test(self, parcel: StudyMessage) -> StudyMessage:
        asked, state, plan = self.asked, self.state, self.plan
        assert asked
        state.done = -1
        selected = asked.round
        if plan.algorithm.outcome.personal and (state.folder / paths.BEST).exists():
            selected = state.load_model(paths.BEST)["round"]
        else:
            state.load_model(paths.LAST)
            if parcel.groups and asked.selected is not None:
                state.take_over(parcel.groups, plan.course.last)
                selected = asked.selected
        state.save_model(paths.BEST, selected)
        end = self._end()
        model = plan.algorithm.outcome.tested(end, state.modules["model"], asked.outcome)
        score = None if self.tests is None else self._score(_evaluated(self.tests, model))
        if self.tests is None and model is not state.modules["model"]:  # an outcome that counts its answers
            for inputs, _ in end.validation():
                model(inputs)
        told = plan.algorithm.outcome.after_test(end, model)
        made_of = selected if told is None else asked.round
        return self._answer(test=score, test_loss=None, selected=made_of, counts={}, outcome=told)

    def _end(self) -> SiteEnd:
        data, state = self.data, self.state

        def validation() -> Iterator[tuple[Tensor, Tensor]]:
            if data.validation is None:
                raise MedsiloError(f"join: {self.plan.algorithm.name} needs validation=, batches with their labels")
            return data.batches(data.validation, state.compute.device)

        return SiteEnd(
            self.plan,
            self.site,
            state.modules,
            state.folder,
            self.plan.task,
            state.compute,
            validation,
            [],
            {"validation": Resolution(), "test": Resolution()},
            lambda: None,
        )

    # ------------------------------------------------------------------ tools
    @property
    def samples(self) -> int:
        """The training cases of this site."""
        return self.data.cases("train")

    def _bench(self, number: int, hand_over: Callable[[Turn], float]) -> ScriptContext:
        data, state, plan = self.data, self.state, self.plan

        def loss(output: Tensor, target: Tensor) -> Tensor:
            if data.loss is None:
                raise MedsiloError(f"join: {plan.algorithm.name} has more than a loss of your own to train; give loss=")
            return data.loss(output, target)

        def epoch(lessons: Sequence[TrainStep], number: int, most: int | None = None) -> float:
            state.by_method = True
            try:
                return train_epoch(
                    islice(data.batches(data.loader, state.compute.device), most), lessons, state.compute
                )
            finally:
                state.by_method = False

        return ScriptContext(
            self.site,
            self.sites,
            state.modules,
            state.optimizers,
            state.training,
            loss,
            state.compute,
            epoch,
            lambda: data.measured(state.compute.device),
            self.samples,
            data.steps,
            generator_for(plan.seed, self.site, "method", number),
            partial(perturbed_step, perturbed.alpha) if (perturbed := plan.algorithm.perturbation) else None,
            hand_over=hand_over,
        )

    def _answer(self, **told: Any) -> StudyMessage:
        asked = self.asked
        assert asked
        return ANSWERS[asked.task](
            task=asked.task,
            round=asked.round,
            study=asked.study,
            packages=self.plan.code,
            cases=Counted(**{part: self.data.cases(part) for part in PARTS}),
            seconds=time.monotonic() - self.started,
            memory=most_held(),
            warnings=[],
            suppressed=[],
            **told,
        ).parcel()


PARTS: tuple[DataPart, ...] = ("train", "validation", "test")
