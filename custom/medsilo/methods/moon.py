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
    """FedAvg with the loss ℓ + μ ℓ_con, which pulls features towards the global model's features.

    The contrastive loss ℓ_con also pushes features away from the features of the site's previous model. Equation 3 is
    ℓ_con = -log(e^{cos(z, z_glob) / τ} / (e^{cos(z, z_glob) / τ} + e^{cos(z, z_prev) / τ})), where z is the input of
    the last layer. The paper's networks also have two layers that project features to 256 numbers; medsilo's networks
    lack these two layers. The model that a site trained in the previous round stays at the site; in the first round,
    the initial model replaces it.
    """

    title = "MOON"
    paper = "Li et al. 2021"
    sends = "model"
    stays = "the hospital's model of the previous round"
    extra_work = "each batch passes through two more networks, without training"
    suits = "classification in which the hospitals' features drift apart"
    own_loop: ClassVar[bool] = True

    name: Literal["moon"] = "moon"  # type: ignore[assignment]
    mu: float = Field(1.0, ge=0, le=1000, description="μ: weight of the contrastive loss")
    temperature: float = Field(0.5, gt=0, le=100, description="τ: temperature of the contrastive loss")

    def networks(self, build: ModelFactory) -> Modules:
        model = super().networks(build)["model"]
        return {"model": model, "previous": copy.deepcopy(model).requires_grad_(False)}

    def check(self, modules: Modules) -> None:
        require_features(modules["model"], self.name)

    def train_round(self, context: TrainContext) -> float:
        arrived = copy.deepcopy(context.modules["model"]).requires_grad_(False)
        previous = context.modules["previous"]

        def objective(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            output, z = with_features(model, inputs)
            near, far = frozen_features(arrived, inputs), frozen_features(previous, inputs)
            return context.loss(output, targets) + self.mu * contrast(z, near, far, self.temperature)

        loss = context.train(context.train_step(objective=objective))
        previous.load_state_dict(context.modules["model"].state_dict())
        return loss


def contrast(z: Tensor, near: Tensor, far: Tensor, temperature: float) -> Tensor:
    """Return the mean contrastive loss ℓ_con (Equation 3) of a batch.

    Features in half precision are converted to single precision, because a cosine in half precision is inexact.

    Args:
        z: features of the trained model
        near: features of the global model
        far: features of the site's previous model
    """
    kind = torch.promote_types(z.dtype, torch.float32)
    closer, further = (functional.cosine_similarity(z.to(kind), other.to(kind)) for other in (near, far))
    return functional.softplus((further - closer) / temperature).mean()
