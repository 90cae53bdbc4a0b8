"""FedAWA (Shi et al., FedAWA: Adaptive Optimization of Aggregation Weights in Federated Learning Using Client Vectors,
CVPR 2025).
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from medsilo.extend.methods import ServerSide, Shares, StalenessWeightedMean, WeighingMethod, uncompiled

BETAS = (0.5, 0.999)  # Adam's β1 and β2


class FedAWA(WeighingMethod):
    """The server averages θ ← Σ_k λ_k θ_k with λ = softmax(T), and optimises T so that the updates g_k = θ_k − θ agree.

    T ← T − Adam(∇ Σ_k λ_k (1 − cos(θ, θ_k)) + λ_k ‖g_k − Σ_j λ_j g_j‖). T starts as each site's fraction of all cases;
    T is kept between rounds, but Adam's moments are not. The server needs only the inner products of θ and the g_k.
    """

    title = "FedAWA"
    paper = "Shi et al. 2025 (FedAWA)"
    sends = "model, running statistics"
    extra_work = "none; the server computes more than with FedAvg"
    suits = "hospitals whose updates point in different directions"

    name: Literal["fedawa"] = "fedawa"
    server_lr: float = Field(
        0.001,
        gt=0,
        le=1,
        description="learning rate of the server's Adam optimizer, which learns the sites' weights in the mean",
    )
    server_steps: int = Field(
        1, ge=1, le=1000, description="number of steps of the server's Adam optimizer in each round"
    )

    def weigh(self, server: ServerSide, mean: StalenessWeightedMean) -> Shares:
        """Optimise the entries of T that belong to the sites which answered. The entries of T that belong to sites
        without an answer stay the same.
        """
        total = sum(mean.samples.values())
        before = [mean.memory.get(site, {"T": n / total})["T"] for site, n in mean.samples.items()]
        t = torch.tensor(before, dtype=torch.float64, requires_grad=True)
        adam = uncompiled(torch.optim.Adam)([t], self.server_lr, BETAS)
        (products,) = mean.products().values()
        for _ in range(self.server_steps):
            with torch.enable_grad():
                t.grad = torch.autograd.grad(disagreement(t.softmax(0), products), t)[0]
            adam.step()
        mean.memory |= {site: {"T": value} for site, value in zip(mean.samples, t.tolist(), strict=True)}
        return dict(zip(mean.samples, t.detach().softmax(0).tolist(), strict=True))


def disagreement(weights: Tensor, products: Tensor) -> Tensor:
    """Return Σ λ_k (1 − cos(θ, θ_k)) + λ_k ‖g_k − Σ_j λ_j g_j‖, given the inner products of θ and all g_k."""
    square, along, g = products[0, 0], products[0, 1:], products[1:, 1:]
    lengths = (square * (square + 2 * along + g.diagonal())).clamp(min=0).sqrt()
    turned = 1 - (square + along) / lengths.clamp(min=1e-8)
    mixed = g @ weights
    squares = g.diagonal() - 2 * mixed + weights @ mixed
    apart = torch.where(squares > 0, squares, 1.0).sqrt() * (squares > 0)
    return (weights * (turned + apart)).sum()
