"""Manage the networks and optimizers of a site where a user's script trains."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medsilo.core.errors import MedsiloError, reading
from medsilo.core.files import load_facts
from medsilo.federation.site_state import SiteState
from medsilo.learning.compute import Compute
from medsilo.learning.loop import Closure
from medsilo.learning.training import Training
from medsilo.plan import Plan
from medsilo.schedule.additions import INPUT
from medsilo.schedule.algorithm import Algorithm
from medsilo_script.network import ScriptNetwork, skeleton
from medsilo_script.optimizer import ScriptTraining
from medsilo_script.perturbed_loss import PerturbedLoss

VARYING = ("lr", "momentum", "betas")  # optimizer settings that scripts and schedulers may change during training


class ScriptCompute(Compute):
    """Computes on the device of the script's model; the script itself determines the precision and the number of
    threads.
    """

    @contextmanager
    def reproducible(self, seed: int) -> Iterator[None]:
        yield


def has_own_steps(method: Algorithm) -> bool:
    """Return True if a method changes the training steps of a site, so that medsilo must observe each step."""
    return (
        bool(method.perturbation)
        or type(method).train_round is not Algorithm.train_round
        or not method.outcome.one_network
    )


class ScriptState(SiteState):
    """The networks and optimizers of a site where a script trains; the script itself creates the network "model" and
    its optimizer.
    """

    def __init__(
        self, plan: Plan, site: str, folder: Path, model: nn.Module, optimizer: Optimizer, scheduler: Any, loss: object
    ) -> None:
        self.module, self.own_optimizer, self.scheduler = model, optimizer, scheduler
        self.steps = 0
        self.turn: str | None = None
        # True if the script's loop only scores the model, because the method trains without the loop
        self.alone = False
        # names of the networks whose optimizers have not taken a step in this round
        self.untrained: set[str] = set()
        self.loss = PerturbedLoss(added.alpha if (added := plan.algorithm.perturbation) else 0.0, loss)
        self.hooked: WeakSet[nn.Module] = WeakSet()
        optimizer.register_step_pre_hook(self._prepare)
        optimizer.register_step_post_hook(self._count)
        self._joined_with = self.besides()
        super().__init__(plan, site, folder, ScriptCompute(device=next(model.parameters()).device))

    def _prepare(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Call the closure of an optimizer step before the method corrects the gradients, because PyTorch would call
        the closure afterwards.
        """
        if self.alone:
            self.refuse_training()
        closure: Closure | None = next((own for own in (*args[1:], *kwargs.values()) if own is not None), None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_other_network(optimizer)
        self.loss.refuse_plain()
        return None if closure is None else ((optimizer, lambda: loss), {})

    def _refuse_other_network(self, optimizer: Optimizer) -> None:
        """Raise MedsiloError if an optimizer step does not train the network that the script should train."""
        if self.turn is None or not has_own_steps(self.algorithm):
            return
        self.untrained.discard(self.turn)
        weights = (own for group in optimizer.param_groups for own in group["params"])
        if optimizer is not self.optimizers[self.turn] or all(weight.grad is None for weight in weights):
            raise MedsiloError(
                "optimizer.step: no gradient of the network whose turn it is; put 'for net, optimizer in "
                "flare.networks():' around your loop, and train net with this optimizer"
            )

    def refuse_training(self) -> None:
        """Raise MedsiloError because the script took a training step, although only the method trains."""
        raise MedsiloError(
            f"optimizer.step: {self.algorithm.title} trains by a loop of its own, with loss=; put "
            "'for net, optimizer in flare.networks():' around your loop, which medsilo then skips"
        )

    def refuse_unseen_steps(self) -> None:
        """Raise MedsiloError if the script trained a network with an optimizer that medsilo does not observe."""
        if has_own_steps(self.algorithm) and self.untrained:
            raise MedsiloError(
                f"optimizer.step: {self.algorithm.title} saw no step of {min(self.untrained)!r} in this round; make one"
                " optimizer before join, and step with it or with that of flare.networks()"
            )

    def _count(self, *_: object) -> None:
        self.steps += 1

    @property
    def training(self) -> Training:
        """Return the plan's training settings, with the settings that the script's optimizer has at this moment."""
        return ScriptTraining.of(self.plan.training, self.own_optimizer, self.module, lambda: self.steps)

    def begin(self) -> None:
        fresh = self.plan.build_networks()
        self.module.load_state_dict(fresh["model"].state_dict())
        self.modules = {name: module.to(self.compute.device) for name, module in fresh.items()}
        self.modules["model"] = self.module
        self._put_besides(self._joined_with)
        self.make_optimizers()
        for name, module in self.modules.items():
            if type(module) is type(self.module) and module not in self.hooked:
                self._hook(name, module)
        self.done, self.best = 0, None

    def _hook(self, name: str, module: nn.Module) -> None:
        """Apply the method's input layer before each call of a network, and before each call of the script's copies of
        the network.
        """

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
        """Raise MedsiloError if the frozen weights differ from those of the recipe's model.

        The frozen weights are checked only for methods that store values for each trained weight.
        """
        if not any(isinstance(module, nn.ParameterList) for module in self.modules.values()):
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
        """Raise MedsiloError in the first round if a super model could not combine the network's outputs."""
        if not module.training and not isinstance(output, Tensor):
            raise MedsiloError(
                f"model: the network returns a {type(output).__name__}; {self.algorithm.title}'s super model needs "
                "one tensor in evaluation; let forward return a tensor if self.training is False"
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
        """Return a network's optimizer, with the learning rate of the script's optimizer."""
        optimizer = self.optimizers[name]
        for group, param_group in zip(optimizer.param_groups, self.own_optimizer.param_groups, strict=False):
            group["lr"] = param_group["lr"]
        return optimizer

    def follow(self) -> None:
        """Compute on the present device of the script's model, because scripts may move the model to a GPU and back."""
        self.compute = ScriptCompute(device=next(self.module.parameters()).device)

    def besides(self) -> dict[str, Any]:
        groups = [{name: _plain(group[name]) for name in VARYING if name in group} for group in self._groups]
        return {
            "groups": groups,
            "scheduler": None if self.scheduler is None else json.dumps(self.scheduler.state_dict()),
        }

    def _put_besides(self, values: Mapping[str, Any]) -> None:
        for group, numbers in zip(self._groups, values["groups"], strict=True):
            for name, number in numbers.items():
                if isinstance(group[name], Tensor):
                    group[name].fill_(number)
                else:
                    group[name] = tuple(number) if isinstance(number, list) else number
        if self.scheduler is not None:
            self.scheduler.load_state_dict(json.loads(values["scheduler"]))

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.own_optimizer.param_groups

    def _load(self, number: int) -> None:
        super()._load(number)
        with reading("this site's saved state"):
            self._put_besides(load_facts(self.state_file(number)))


def _plain(number: Any) -> Any:
    if isinstance(number, tuple | list):
        return [_plain(own) for own in number]
    return None if number is None else float(number)  # None if the optimizer has no fixed learning rate
