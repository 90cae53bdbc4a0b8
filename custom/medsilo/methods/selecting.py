"""What the three FedSMs share: a selector f_s that learns whose model an image needs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, cast

from pydantic import Field
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import SGD, Adam, Optimizer

from medsilo.core.errors import PlanError, Refused
from medsilo.learning.loop import Lesson, Objective
from medsilo.learning.moments import GradientSum, Moments
from medsilo.learning.steps import plain_step
from medsilo.learning.training import Training
from medsilo.methods.base import Algorithm, Groups, Modules, Workbench
from medsilo.mixing.mixers import Mixer, WeightedMean
from medsilo.mixing.server import FedAdam
from medsilo.models.activity_cnn import ActivityCnn
from medsilo.models.network import Network
from medsilo.models.small_cnn import SmallCnn
from medsilo.models.vgg11 import Vgg11

COMPACT: Mapping[int, Network] = {  # by axes
    1: ActivityCnn(norm="group"),
    2: SmallCnn(width=32, norm="group"),
    3: SmallCnn(dimensions=3, width=16, norm="group"),
}
GROUPS = ("selector", "moments")


class Selecting(Algorithm):
    """The selector's network, and steps of it that work although a hospital sees one label only."""

    paper = "Xu et al. 2022"
    # The paper's text: Adam steps for every batch, with a memory that stays at the site.
    literal: ClassVar[Mapping[str, Any]] = {
        "algorithm.selector": "vgg11",
        "algorithm.selector_sync": "none",
        "algorithm.selector_step": "batch",
    }
    # The released code: one step a round with the gradient of all batches, and Adam's moments are averaged.
    released: ClassVar[Mapping[str, Any]] = {
        "algorithm.selector": "vgg11",
        "algorithm.selector_sync": "adam-moments",
        "algorithm.selector_step": "full-batch",
    }
    protocols: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": literal}

    selector: Literal["compact", "vgg11"] = "compact"  # compact: a small network with group norm
    # Weights of selectors that saw one label each are hardly worth averaging by themselves.
    # server-adam: SGD at the sites, and the server takes Adam's steps along their mean change. adam-moments: Adam's
    # memory is averaged with the weights. none: Alg. 1.
    selector_sync: Literal["server-adam", "adam-moments", "none"] = "server-adam"
    selector_step: Literal["batch", "full-batch"] = "batch"  # full-batch: one step a round with the sum of gradients
    # η_s: of SGD under server-adam, where null is 0.02; else of Adam, where it is 0.001
    selector_learning_rate: float | None = Field(None, gt=0, le=10)
    selector_server_lr: float = Field(0.003, gt=0, le=10)  # of the server's Adam

    def with_selector(self, modules: Modules, channels: int, outputs: int) -> Modules:
        """These networks and a selector with so many outputs."""
        selector = self.selector_network(modules["model"]).build(channels, outputs)
        moments = {"moments": Moments(selector)} if self.selector_sync == "adam-moments" else {}
        return {**modules, "selector": selector, **moments}

    def selector_network(self, model: nn.Module) -> Network:
        """The selector for cases such as this network reads."""
        axes = next((layer.weight.ndim - 2 for layer in model.modules() if isinstance(layer, _ConvNd)), 0)
        kinds = COMPACT if self.selector == "compact" else {2: Vgg11()}
        if axes not in kinds:
            raise PlanError(f"algorithm.selector: no {self.selector} selector reads the cases of this network")
        return kinds[axes]

    def make_optimizer(self, name: str, module: nn.Module, training: Training) -> Optimizer:
        if name != "selector":
            return super().make_optimizer(name, module, training)
        kind, rate = (SGD, 0.02) if self.selector_sync == "server-adam" else (Adam, 0.001)
        return kind(module.parameters(), lr=self.selector_learning_rate or rate)

    def of_selector(self, modules: Modules) -> Groups:
        """What of the selector travels."""
        return {name: modules[name].state_dict() for name in GROUPS if name in modules}

    def examine(self, groups: Groups, phase: str) -> None:
        for name, tensor in groups.get("moments", {}).items():
            if not name.startswith("first") and tensor.min() < 0:
                raise Refused(f"moments/{name} is below 0, which no mean of squares and no count is")

    def mixer(self, group: str, earlier: Mapping[str, Mixer], sites: Sequence[str]) -> Mixer:
        if group == "selector" and self.selector_sync == "server-adam":
            return FedAdam(self.selector_server_lr, betas=(0.9, 0.999), tau=1e-8, variant="torch")
        return WeightedMean()  # line 15

    @contextmanager
    def learning_selector(self, bench: Workbench, objective: Objective) -> Iterator[Lesson]:
        """The selector's lesson, for a round's passes over the data."""
        optimizer = bench.optimizers["selector"]
        moments = cast(Moments | None, bench.modules.get("moments"))
        if moments:
            moments.lend(optimizer)
        if self.selector_step == "batch":
            yield bench.lesson("selector", objective, plain_step)
        else:
            total = GradientSum(optimizer)
            yield bench.lesson("selector", objective, total.collect)
            total.step(optimizer)
        if moments:
            moments.take_back(optimizer)
