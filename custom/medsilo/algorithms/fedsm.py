"""FedSM: Xu et al., Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation, CVPR 2022.

Equations and lines of Alg. 1 are the paper's.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from medsilo.algorithms.base import Blueprint, Choice, Groups, Modules, Workbench
from medsilo.algorithms.selecting import Selecting
from medsilo.errors import PlanError
from medsilo.mixing.mixers import Gallery, Mixer, SoftPull


class FedSM(Selecting):
    """A global model, a personal model per hospital, and a selector that tells their images apart, trained together.

    "model", which rounds evaluate, is the personal one. At the end they make one super model, with which an image goes
    to the model of the hospital it resembles when the selector is sure enough, else to the global one (Alg. 2).
    """

    title = "FedSM"
    travels = "global and personal model, selector (with Adam's moments)"
    ending: ClassVar[str | None] = "assemble"
    stand_in: ClassVar[Mapping[str, str]] = {"personal": "global"}
    passing = frozenset({"experts"})
    protocols: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": Selecting.literal,
        "released-code": Selecting.released,
    }

    name: Literal["fedsm"] = "fedsm"
    pull: float = Field(0.7, gt=0, le=1)  # λ of Eq. 11: how much of its own model a hospital keeps

    def cautions(self, sites: Sequence[str]) -> list[str]:
        if self.pull * len(sites) >= 1:
            return []
        return [f"algorithm.pull {self.pull:g} is below 1/{len(sites)}: personal models lean to the other hospitals"]

    def networks(self, build: Blueprint) -> Modules:
        if not build.sites:
            raise PlanError(f"participation.sites: {self.name} tells hospitals apart, so the plan has to name them")
        model = build()
        experts = nn.ModuleList(copy.deepcopy(model).requires_grad_(False) for _ in build.sites)
        modules = {"model": model, "global": copy.deepcopy(model), "experts": experts}
        return self.with_selector(modules, build.channels, self.outputs(len(build.sites)))

    def outputs(self, sites: int) -> int:
        """The selector's scores."""
        return sites

    def choice(self, modules: Modules) -> Choice:
        return Choice(self.selector_network(modules["model"]), "threshold")

    def personal(self, modules: Modules, phase: str) -> bool:
        return True

    # What is shared
    def shared(self, modules: Modules, phase: str) -> Groups:
        return models(modules) | self.of_selector(modules)

    def given(self, modules: Modules, phase: str) -> Groups:
        groups = self.shared(modules, phase)
        return groups if phase == "train" else groups | {"experts": modules["experts"].state_dict()}

    def leaves(self, modules: Modules) -> list[str]:
        return [
            "personal model: at the end it goes to the other hospitals that share theirs, if share_personal_model in "
            "medsilo.yaml allows it (by default only with synthetic data); it is this hospital's training in one piece",
            "super model: how often each model was chosen for validation and test cases, and summed scores of them",
        ]

    # How it is merged
    def mixer(self, group: str, earlier: Mapping[str, Mixer], sites: Sequence[str]) -> Mixer:
        if group == "experts":
            return Gallery(earlier["personal"], earlier["global"])
        return SoftPull(self.pull) if group == "personal" else super().mixer(group, earlier, sites)  # line 16

    # What is trained
    def train(self, bench: Workbench, phase: str) -> float:
        """Lines 6 to 12: all three from each batch."""
        label = bench.sites.index(bench.site)

        def tell_apart(selector: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            """Eq. 2: every image of hospital k has the label k."""
            return functional.cross_entropy(selector(inputs), torch.full((len(inputs),), label, device=inputs.device))

        with self.learning_selector(bench, tell_apart) as selector:
            return bench.train(bench.lesson("model"), bench.lesson("global"), selector)


def models(modules: Modules) -> Groups:
    """The two networks that learn the task."""
    return {"global": modules["global"].state_dict(), "personal": modules["model"].state_dict()}
