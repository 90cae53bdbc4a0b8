"""FedSM: Xu et al., Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation, CVPR 2022.

Equations and lines of Alg. 1 are the paper's.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from medsilo.core.errors import PlanError
from medsilo.learning.loop import Lesson
from medsilo.learning.training import Training
from medsilo.methods.apfl import APFL
from medsilo.methods.base import Blueprint, Choice, Groups, Modules, Phase, Workbench
from medsilo.methods.ditto import Ditto
from medsilo.methods.fine_tuning import FineTuning
from medsilo.methods.per_fedavg import PerFedAvg
from medsilo.methods.pfedme import PFedMe
from medsilo.methods.selecting import Selecting
from medsilo.mixing.mixers import Gallery, Identity, Mixer, SoftPull

PersonalMethod = Annotated[FineTuning | APFL | PerFedAvg | PFedMe | Ditto, Field(discriminator="name")]


class FedSM(Selecting):
    """A global model, a personal model per hospital, and a selector that tells their images apart, trained together.

    "model", which rounds evaluate, is the personal one. At the end they make one super model, with which an image goes
    to the model of the hospital it resembles when the selector is sure enough, else to the global one (Alg. 2).
    """

    title = "FedSM"
    travels = "global and personal model, selector"
    ending: ClassVar[str | None] = "assemble"
    stand_in: ClassVar[Mapping[str, str]] = {"personal": "global"}
    passing = frozenset({"experts"})
    protocols: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {**Selecting.literal, "algorithm.personal_method": None},
        "released-code": {**Selecting.released, "algorithm.personal_method": None},
    }

    name: Literal["fedsm"] = "fedsm"
    pull: float = Field(
        0.7,
        gt=0,
        le=1,
        description="λ of Eq. 11: how much of its own personal model a site keeps; below 1/K the plan gets a caution",
    )
    personal_method: PersonalMethod | None = Field(
        None,
        description="the method that makes the personal models in place of SoftPull, with its own numbers; the models "
        "then travel once, in a last round (Table 6)",
    )

    def cautions(self, sites: Sequence[str]) -> list[str]:
        if self.pull * len(sites) >= 1:
            return []
        return [f"algorithm.pull {self.pull:g} is below 1/{len(sites)}: personal models lean to the other hospitals"]

    def phases(self, training: Training) -> Sequence[Phase]:
        train = Phase("train", training.rounds)
        return [train, Phase("collect", 1)] if self.personal_method else [train]

    def networks(self, build: Blueprint) -> Modules:
        if not build.sites:
            raise PlanError(f"participation.sites: {self.name} tells hospitals apart, so the plan has to name them")
        if "global" in build.sites:
            raise PlanError(f"participation.sites: 'global' is {self.name}'s model of all hospitals; rename that site")
        modules = self.personal_method.networks(build) if self.personal_method else {"model": build()}
        own = modules["model"]
        modules.setdefault("global", copy.deepcopy(own))
        modules["experts"] = nn.ModuleList(copy.deepcopy(own).requires_grad_(False) for _ in build.sites)
        return self.with_selector(modules, build.channels, self.outputs(len(build.sites)))

    def outputs(self, sites: int) -> int:
        """The selector's scores."""
        return sites

    def choice(self, modules: Modules) -> Choice:
        return Choice(self.selector_network(modules["model"]), "threshold")

    def personal(self, modules: Modules, phase: str) -> bool:
        return True

    def common(self, modules: Modules, phase: str) -> Modules:
        return {**modules, "model": modules["global"]}

    # What is shared
    def shared(self, modules: Modules, phase: str) -> Groups:
        if phase == self.ending:
            return {}
        if phase == "collect":
            return {"personal": modules["model"].state_dict()}
        return self.of_models(modules) | self.of_selector(modules)

    def of_models(self, modules: Modules) -> Groups:
        """The models that come to the server while they learn."""
        common = {"global": modules["global"].state_dict()}
        return common if self.personal_method else {**common, "personal": modules["model"].state_dict()}

    def given(self, modules: Modules, phase: str) -> Groups:
        groups = self.of_models(modules) | self.of_selector(modules)
        return groups | outcome(modules) if phase == self.ending else groups

    def leaves(self, modules: Modules) -> list[str]:
        return [
            "personal model: at the end it goes to the other hospitals that share theirs, if share_personal_model in "
            "medsilo.yaml allows it (by default only with synthetic data); it is this hospital's training in one piece",
            "super model: how often each model was chosen for validation and test cases, and summed scores of them",
            "super model: least and greatest spacing of smallest_average (medsilo.yaml) or more training images",
        ]

    # How it is merged
    def mixer(self, group: str, earlier: Mapping[str, Mixer], sites: Sequence[str]) -> Mixer:
        if group == "experts":
            return Gallery(earlier["personal"], earlier["global"])
        if group == "personal":
            return Identity() if self.personal_method else SoftPull(self.pull)  # line 16
        if group == "global" and self.personal_method:
            return self.personal_method.mixer(group, earlier, sites)
        return super().mixer(group, earlier, sites)

    # What is trained
    def personalise(self, bench: Workbench) -> None:
        if self.personal_method:
            self.personal_method.personalise(bench)

    def train(self, bench: Workbench, phase: str) -> float:
        """Lines 6 to 12: all three from each batch."""
        if phase == "collect":
            return math.nan
        label = bench.sites.index(bench.site)

        def tell_apart(selector: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            """Eq. 2: every image of hospital k has the label k."""
            return functional.cross_entropy(selector(inputs), torch.full((len(inputs),), label, device=inputs.device))

        with self.learning_models(bench) as models, self.learning_selector(bench, tell_apart) as selector:
            return bench.train(*models, selector)

    def learning_models(self, bench: Workbench) -> AbstractContextManager[Sequence[Lesson]]:
        """Lines 8 and 9."""
        if self.personal_method:
            return self.personal_method.learning(bench)
        return nullcontext([bench.lesson("model"), bench.lesson("global")])


def outcome(modules: Modules) -> Groups:
    """The models as hospitals get them when all are done."""
    names = {"global": "global", "personal": "model", "experts": "experts"}
    return {group: modules[name].state_dict() for group, name in names.items()}
