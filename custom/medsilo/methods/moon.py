"""MOON: Li et al., Model-Contrastive Federated Learning, 2021."""

import copy
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from medsilo.core.tensors import Modules
from medsilo.learning.steps import frozen_features, with_features
from medsilo.methods.bases import require_features
from medsilo.methods.fedavg import FedAvg
from medsilo.schedule.phase import ModelFactory
from medsilo.schedule.train_context import TrainContext


class Moon(FedAvg):
    """FedAvg with ℓ + μ ℓ_con: features are drawn to those of the global model and away from those of the site's
    previous model.

    ℓ_con = -log(e^{cos(z, z_glob) / τ} / (e^{cos(z, z_glob) / τ} + e^{cos(z, z_prev) / τ})) (Eq. 3). z is the input of
    the last layer; the paper's networks have a two-layer projection to 256 numbers before it. The previous
    model stays at the site; before the first round it is the initial one.
    """

    title = "MOON"
    paper = "Li et al. 2021"
    own_loop: ClassVar[bool] = True

    name: Literal["moon"] = "moon"  # type: ignore[assignment]
    mu: float = Field(1.0, ge=0, le=1000, description="weight of the contrast")
    temperature: float = Field(0.5, gt=0, le=100, description="τ of the contrast")

    def networks(self, build: ModelFactory) -> Modules:
        model = super().networks(build)["model"]
        return {"model": model, "previous": copy.deepcopy(model).requires_grad_(False)}

    def check(self, modules: Modules) -> None:
        require_features(modules["model"], self.name)

    def train_round(self, bench: TrainContext) -> float:
        arrived = copy.deepcopy(bench.modules["model"]).requires_grad_(False)
        previous = bench.modules["previous"]

        def objective(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            output, z = with_features(model, inputs)
            near, far = frozen_features(arrived, inputs), frozen_features(previous, inputs)
            return bench.loss(output, targets) + self.mu * contrast(z, near, far, self.temperature)

        loss = bench.train(bench.lesson(objective=objective))
        previous.load_state_dict(bench.modules["model"].state_dict())
        return loss


def contrast(z: Tensor, near: Tensor, far: Tensor, temperature: float) -> Tensor:
    """Return ℓ_con (Eq. 3), the mean over cases, near the one and away from the other.

    In the features' own type, but for half precision, which is too coarse for a cosine.
    """
    kind = torch.promote_types(z.dtype, torch.float32)
    closer, further = (functional.cosine_similarity(z.to(kind), other.to(kind)) for other in (near, far))
    return functional.softplus((further - closer) / temperature).mean()
