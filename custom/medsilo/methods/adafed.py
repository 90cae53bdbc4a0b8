"""AdaFed: Chen et al., Personalized Federated Learning with Adaptive Batchnorm for Healthcare (FedAP), 2022."""

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from medsilo.learning.layers import batch_norm_names, head_names
from medsilo.learning.statistics import batch_norm_input_statistics
from medsilo.learning.training import Training
from medsilo.methods.base import Blueprint, Groups, Modules, Phase, Workbench, require
from medsilo.methods.headquarters import Headquarters
from medsilo.methods.pretraining import Pretraining
from medsilo.methods.similar import Similar


class AdaFed(Similar):
    """Sites run a pre-trained f over their training data and send the statistics of its batch norms' inputs; W follows.

    Phase "measure" is one round without training: f travels down, statistics travel up. In phase "train" site i gets
    ψ_i ← Σ_j w_ij ψ_j. A refresh measures again, with each site's own model in f's place.
    """

    title = "AdaFed"
    travels = "model without batch norm; statistics"
    passing = frozenset({"pretrained", "statistics"})

    name: Literal["adafed"] = "adafed"
    pretraining: Pretraining = Field(Pretraining(), description="how the network f that measures the sites is made")
    init_from_pretrained: bool = Field(
        False, description="the models start from f, too; the paper leaves it open, its code does not do it"
    )

    def phases(self, training: Training) -> Sequence[Phase]:
        first = Phase("measure", 1 if self.measures or self.init_from_pretrained else 0, trains=False)
        stretch = min(self.refresh or training.rounds, training.rounds) if self.measures else training.rounds
        phases = [first, Phase("train", stretch)]
        for done in range(stretch, training.rounds, stretch):
            phases += [Phase("measure again", 1, trains=False), Phase("train", min(stretch, training.rounds - done))]
        return phases

    @property
    def measures(self) -> bool:
        return self.weights == "similarity"

    def networks(self, build: Blueprint) -> Modules:
        modules = super().networks(build)
        return {**modules, "pretrained": copy.deepcopy(modules["model"]).requires_grad_(False)}

    def check(self, modules: Modules) -> None:
        require(
            batch_norm_names(modules["model"]), self.name, "batch norm", "set network.norm=batch or choose d-adafed"
        )

    # What is shared
    def shared(self, modules: Modules, phase: str) -> Groups:
        if phase == "train":
            return self.trained(modules)
        return {"statistics": modules["statistics"].state_dict()} if self.measures else {}

    def given(self, modules: Modules, phase: str) -> Groups:
        if phase == "measure again":
            return {}
        return {"pretrained": modules["pretrained"].state_dict()} if phase == "measure" else self.trained(modules)

    def prepare(self, modules: Modules, at: Headquarters) -> dict[str, Any]:
        """Before "measure", f is made; before "train", models start from it if they are to."""
        if "model" in at.mixers or not (self.measures or self.init_from_pretrained):
            return {}
        pretrained, facts = modules["pretrained"], {}
        if "pretrained" in at.mixers:
            pretrained.load_state_dict(at.mixers["pretrained"].current(at.sites[0]))
        else:
            facts = {"pretraining": {**self.pretraining.obtain(pretrained, at), "start": self.init_from_pretrained}}
        if self.init_from_pretrained:
            modules["model"].load_state_dict(pretrained.state_dict())
        return facts

    def leaves(self, modules: Modules) -> list[str]:
        lines = super().leaves(modules) if self.measures else []
        if self.pretraining.source == "share" and (self.measures or self.init_from_pretrained):
            share = f"{self.pretraining.share:.0%} of the training cases"
            lines.append(f"pre-training: {share} themselves are declared public and read at the server")
        return lines

    # What is trained
    def train(self, bench: Workbench, phase: str) -> float:
        if phase == "train":
            return bench.train()
        model = bench.modules["pretrained" if phase == "measure" else "model"]
        if self.measures:
            statistics = batch_norm_input_statistics(model, bench.data(), bench.compute.device, self.layers)
            self.measure(bench, statistics)
        if self.init_from_pretrained and phase == "measure":
            bench.modules["model"].load_state_dict(model.state_dict())
        return math.nan


class DAdaFed(AdaFed):
    """AdaFed whose W follows from one layer alone: the input of the classification layer."""

    title = "d-AdaFed"
    layers = "last"

    name: Literal["d-adafed"] = "d-adafed"  # type: ignore[assignment]

    def check(self, modules: Modules) -> None:
        require(
            head_names(modules["model"]), self.name, "features", "choose a network with a linear or convolution layer"
        )
