"""Server optimizers: Reddi et al., Adaptive Federated Optimization, 2021; Hsu et al., Measuring the Effects of
Non-Identical Data Distribution for Federated Visual Classification, 2019."""

from typing import ClassVar, Literal

from pydantic import Field

from medsilo.learning.training import Beta
from medsilo.methods.bases import ServerStep
from medsilo.mixing import server as steps
from medsilo.schedule.algorithm import BY_ITSELF
from medsilo.schedule.phase import ServerSide


class FedAvgM(ServerStep):
    """The server takes a step with momentum along the sites' mean change D = Σ p_k w_k - w.

    FedAvgM's update is m ← β m + D and w ← w + η m.
    """

    title = "FedAvgM"
    paper = "Hsu et al. 2019"
    sends = "model, running statistics"
    extra_work = "none; the server computes more than with FedAvg"
    suits = "scores that fluctuate between rounds"

    name: Literal["fedavgm"] = "fedavgm"
    server_lr: float = Field(
        1.0, gt=0, le=1000, description="η: learning rate of the server's step along the sites' mean change"
    )
    server_momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the server's step (β)")

    def step(self, server: ServerSide) -> steps.FedAvgM:
        return steps.FedAvgM(self.server_lr, self.server_momentum, self.weighting == "uniform")


class FedAdam(ServerStep):
    """The server takes a step of Adam along the sites' mean change D = Σ p_k w_k - w.

    FedAdam's update is m ← β₁ m + (1 - β₁) D, v ← β₂ v + (1 - β₂) D², and w ← w + η m / (√v + τ).
    """

    title = "FedAdam"
    paper = "Reddi et al. 2021"
    sends = "model, running statistics"
    extra_work = "none; the server computes more than with FedAvg"
    suits = "networks that usually need Adam, also in centralised training"
    protocols = {"paper": {**BY_ITSELF, "algorithm.variant": "reddi"}}
    rule: ClassVar[type[steps.FedAdam]] = steps.FedAdam

    name: Literal["fedadam"] = "fedadam"
    server_lr: float = Field(
        0.01, gt=0, le=1000, description="η: learning rate of the server's step along the sites' mean change"
    )
    server_betas: tuple[Beta, Beta] = Field((0.9, 0.99), description="decay rates of the server's moments (β₁, β₂)")
    tau: float = Field(
        1e-3, gt=0, le=1, description="τ: a constant in the denominator; smaller values make the steps more adaptive"
    )
    variant: Literal["reddi", "torch"] = Field(
        "reddi",
        description="`reddi`: as in the paper, v starts at τ², and the first steps have no bias correction. `torch`: "
        "the server uses torch's Adam, as NVFlare does",
    )

    def step(self, server: ServerSide) -> steps.FedAdam:
        return self.rule(self.server_lr, self.server_betas, self.tau, self.variant, self.weighting == "uniform")


class FedYogi(FedAdam):
    """FedAdam with the second moment of the Yogi optimizer: v ← v - (1 - β₂) D² sign(v - D²)."""

    title = "FedYogi"
    sends = "model, running statistics"
    suits = "networks that usually need Adam, if FedAdam's steps grow too fast"
    rule = steps.FedYogi

    name: Literal["fedyogi"] = "fedyogi"  # type: ignore[assignment]


class FedAdagrad(ServerStep):
    """The server takes a step of Adagrad along the sites' mean change D = Σ p_k w_k - w.

    FedAdagrad's update is m ← β m + (1 - β) D, v ← v + D², and w ← w + η m / (√v + τ). By default, a hospital's weight
    in the mean change D is its number of cases. In the paper about server optimizers, all hospitals have equal weights
    in the mean change D.
    """

    title = "FedAdagrad"
    paper = "Reddi et al. 2021"
    sends = "model, running statistics"
    extra_work = "none; the server computes more than with FedAvg"
    suits = "sparse updates"

    name: Literal["fedadagrad"] = "fedadagrad"
    server_lr: float = Field(
        0.1, gt=0, le=1000, description="η: learning rate of the server's step along the sites' mean change"
    )
    server_beta: float = Field(0.0, ge=0, lt=1, description="decay rate of the server's mean change (β₁)")
    tau: float = Field(
        1e-3, gt=0, le=1, description="τ: a constant in the denominator; smaller values make the steps more adaptive"
    )

    def step(self, server: ServerSide) -> steps.FedAdagrad:
        return steps.FedAdagrad(self.server_lr, self.server_beta, self.tau, self.weighting == "uniform")
