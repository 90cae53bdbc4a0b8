"""FedSM: Xu et al., Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation, CVPR 2022.

Equations and lines of Alg. 1 are the paper's.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.optim import SGD, Adam, Optimizer

from medsilo.algorithms.base import Algorithm, Blueprint, Choice, Groups, Modules, Workbench
from medsilo.errors import PlanError, Refused
from medsilo.learning.loop import Lesson
from medsilo.learning.moments import GradientSum, Moments
from medsilo.learning.training import Training
from medsilo.mixing.mixers import Gallery, Mixer, SoftPull, WeightedMean
from medsilo.models.activity_cnn import ActivityCnn
from medsilo.models.base import Network
from medsilo.models.small_cnn import SmallCnn
from medsilo.models.vgg11 import Vgg11

ASSEMBLE = "assemble"


class FedSM(Algorithm):
    """A global model, a personal model per hospital, and a selector that tells their images apart, trained together.

    "model", which rounds evaluate, is the personal one. At the end they make one super model, with which an image goes
    to the model of the hospital it resembles when the selector is sure enough, else to the global one (Alg. 2).
    """

    title = "FedSM"
    paper = "Xu et al. 2022"
    travels = "global and personal model, selector (with Adam's moments)"
    ending = ASSEMBLE
    stand_in: ClassVar[Mapping[str, str]] = {"personal": "global"}
    passing = frozenset({"experts"})
    protocols: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # The paper's text: Adam steps per batch, whose memory stays at the site.
        "paper": {
            "algorithm.selector": "vgg11",
            "algorithm.selector_sync": "none",
            "algorithm.selector_step": "batch",
            "algorithm.personal_model": "soft-pull",
        },
        # The released code: one step a round with the gradient of all batches, and Adam's moments are averaged.
        "released-code": {
            "algorithm.selector": "vgg11",
            "algorithm.selector_sync": "adam-moments",
            "algorithm.selector_step": "full-batch",
            "algorithm.personal_model": "soft-pull",
        },
    }

    name: Literal["fedsm"] = "fedsm"
    personal_model: Literal["soft-pull"] = "soft-pull"
    pull: float = Field(0.7, gt=0, le=1)  # λ of Eq. 11: how much of its own model a hospital keeps
    selector: Literal["compact", "vgg11"] = "compact"  # compact: a small network with group norm
    # Every hospital sees one label only, and a selector hardly learns from that by averaging weights alone.
    # none: Alg. 1. adam-moments: Adam's memory is averaged with the weights. server-adam: SGD at the sites, and the
    # server takes Adam steps along their mean change.
    selector_sync: Literal["none", "adam-moments", "server-adam"] = "adam-moments"
    selector_step: Literal["batch", "full-batch"] = "batch"  # full-batch: one step a round with the sum of gradients
    selector_learning_rate: float = Field(0.001, gt=0, le=10)  # η_s, of Adam or of SGD

    def cautions(self, sites: Sequence[str]) -> list[str]:
        if self.pull * len(sites) >= 1:
            return []
        return [
            f"algorithm.pull {self.pull:g} is below 1/{len(sites)}: each personal model counts more at the other "
            "hospitals than at its own"
        ]

    def networks(self, build: Blueprint) -> Modules:
        if not build.sites:
            raise PlanError(f"participation.sites: {self.name} tells hospitals apart, so the plan has to name them")
        model = build()
        section = self.selector_network(model)
        selector = section.build(build.channels, self.outputs(len(build.sites)))
        modules = {
            "model": model,
            "global": copy.deepcopy(model),
            "selector": selector,
            "experts": nn.ModuleList(copy.deepcopy(model).requires_grad_(False) for _ in build.sites),
        }
        if self.selector_sync == "adam-moments":
            modules["moments"] = Moments(selector)
        return modules

    def outputs(self, sites: int) -> int:
        """What the selector chooses among."""
        return sites

    def selector_network(self, model: nn.Module) -> Network:
        """The selector for cases such as this network reads."""
        dimensions = next((layer.weight.ndim - 2 for layer in model.modules() if isinstance(layer, _ConvNd)), 0)
        kinds: dict[int, Network] = {1: ActivityCnn(norm="group"), 2: SmallCnn(width=32, norm="group")}
        if self.selector == "vgg11":
            kinds = {2: Vgg11()}
        if dimensions not in kinds:
            raise PlanError(f"algorithm.selector: no {self.selector} selector reads the cases of this network")
        return kinds[dimensions]

    def choice(self, modules: Modules) -> Choice | None:
        return Choice(self.selector_network(modules["model"]), "threshold")

    def optimizer(self, name: str, module: nn.Module, training: Training) -> Optimizer:
        if name != "selector":
            return super().optimizer(name, module, training)
        kind = SGD if self.selector_sync == "server-adam" else Adam
        return kind(module.parameters(), lr=self.selector_learning_rate)

    def personal(self, modules: Modules, phase: str) -> bool:
        return True

    # What is shared
    def shared(self, modules: Modules, phase: str) -> Groups:
        groups = {"global": "global", "personal": "model", "selector": "selector", "moments": "moments"}
        return {group: modules[name].state_dict() for group, name in groups.items() if name in modules}

    def given(self, modules: Modules, phase: str) -> Groups:
        groups = self.shared(modules, phase)
        return groups | {"experts": modules["experts"].state_dict()} if phase == ASSEMBLE else groups

    def examine(self, groups: Groups, phase: str) -> None:
        for name, tensor in groups.get("moments", {}).items():
            if not name.startswith("first") and tensor.min() < 0:
                raise Refused(f"moments/{name} is below 0, which no sum of squares and no count is")

    # How it is merged
    def mixer(self, group: str, earlier: Mapping[str, Mixer], sites: Sequence[str]) -> Mixer:
        if group == "experts":
            return Gallery(earlier["personal"], earlier["global"])
        return SoftPull(self.pull) if group == "personal" else WeightedMean()  # lines 16 and 15

    # What is trained
    def train(self, bench: Workbench, phase: str) -> float:
        """Lines 6 to 12: all three from each batch."""
        optimizer = bench.optimizers["selector"]
        moments = cast(Moments | None, bench.modules.get("moments"))
        if moments:
            moments.lend(optimizer)
        total = GradientSum(optimizer) if self.selector_step == "full-batch" else None
        loss = bench.train(bench.lesson("model"), bench.lesson("global"), self.selector_lesson(bench, total))
        if total:
            total.step(optimizer)
        if moments:
            moments.take_back(optimizer)
        return loss

    def selector_lesson(self, bench: Workbench, total: GradientSum | None) -> Lesson:
        """Eq. 2: every image of site k has the label k."""
        label = bench.sites.index(bench.site)

        def objective(selector: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(selector(inputs), torch.full((len(inputs),), label, device=inputs.device))

        return bench.lesson("selector", objective, total.collect) if total else bench.lesson("selector", objective)
