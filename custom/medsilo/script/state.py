"""The state of a site that a user's own script trains."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_facts
from medsilo.federation.site_state import SiteState
from medsilo.learning.compute import Compute
from medsilo.learning.loop import Closure
from medsilo.learning.training import Training
from medsilo.plan import Plan
from medsilo.schedule.additions import INPUT
from medsilo.schedule.algorithm import Algorithm
from medsilo.script.network import ScriptNetwork, skeleton
from medsilo.script.optimizer import ScriptTraining
from medsilo.script.perturbed_loss import PerturbedLoss


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
