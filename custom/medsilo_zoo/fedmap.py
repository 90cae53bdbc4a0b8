"""FedMAP (Zhang et al., FedMAP: Personalised Federated Learning for Real Large-Scale Healthcare Systems, 2025)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from medsilo.extend import Group, Refused
from medsilo.extend.methods import (
    Aggregator,
    Average,
    Identity,
    ModelFactory,
    Modules,
    Numbers,
    Outcome,
    OwnModels,
    PlanError,
    ServerSide,
    Shares,
    StalenessWeightedMean,
    Tensors,
    TrainContext,
    WeighingMethod,
    at_most,
    copy_into,
    correcting,
    network,
)

WIDEST = 100.0  # maximum absolute value of the logarithm of a contribution, to which larger values are clipped
LARGEST = 1 << 30  # maximum size of the prior in bytes, because every hospital receives the prior in every round


class Convex(nn.Module):
    """The function f_ψ for one tensor: a network of softplus layers whose inputs are θ and μ. All weights except those
    of the first layer are nonnegative, so that f_ψ is convex.
    """

    def __init__(self, size: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*widths) for widths in pairwise([2 * size, *hidden, 1]))
        self.keep_convex()

    def forward(self, theta: Tensor, mu: Tensor) -> Tensor:
        x = torch.cat([theta.flatten(), mu.flatten()])
        for layer in self.layers[:-1]:
            x = functional.softplus(layer(x))
        return cast(Tensor, self.layers[-1](x)).squeeze()

    @torch.no_grad()
    def keep_convex(self) -> None:
        for layer in self.layers[1:]:
            cast(nn.Linear, layer).weight.clamp_(min=0)


class Prior(nn.Module):
    """R(θ; μ, ψ) = Σ_i f_ψi(θ_i, μ_i) + α/2 ‖θ − μ‖² + ε (‖θ‖² + ‖μ‖²), summed over the trained tensors."""

    def __init__(self, sizes: Mapping[str, int], hidden: Sequence[int], alpha: float, epsilon: float) -> None:
        """Create a prior for the tensors of a network.

        Args:
            sizes: The number of elements of each tensor, by the tensor's name in the network.
            alpha: The strength of the pull of θ to μ.
            epsilon: The strength of the pull of θ and μ to zero.
        """
        super().__init__()
        self.names, self.alpha, self.epsilon = list(sizes), alpha, epsilon
        self.of = nn.ModuleDict({key(name): Convex(size, hidden) for name, size in sizes.items()})

    def forward(self, theta: Tensors, mu: Tensors) -> Tensor:
        parts = []
        for name in self.names:
            own, shared = theta[name], mu[name]
            squares = own.square().sum() + shared.square().sum()
            away = (own - shared).square().sum()
            parts.append(self.of[key(name)](own, shared) + self.alpha / 2 * away + self.epsilon * squares)
        return torch.stack(parts).sum()

    def keep_convex(self) -> None:
        for part in self.of.values():
            cast(Convex, part).keep_convex()


class ServersOwn(Aggregator):
    """The tensors of the prior, which only the server changes. All sites receive the prior's tensors, and no site sends
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[str, Tensor] = {}

    def put(self, tensors: Tensors) -> None:
        self._own = {name: tensor.to(self._own[name].dtype) for name, tensor in tensors.items()}

    def _begin_with(self, initial: dict[str, Tensor]) -> None:
        self._own = self._own or initial

    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Any) -> None:
        raise Refused("the server alone changes the prior")

    def _row(self, site: str) -> dict[str, Tensor] | None:
        return self._own or None

    def _save(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        return dict(self._own), {}

    def _load(self, tensors: Mapping[str, Any], facts: dict[str, Any]) -> None:
        self._own = dict(tensors)


class FedMAP(WeighingMethod):
    """Sites compute θ_k = argmin F_k(θ) + R(θ; μ, ψ), starting from μ. The server averages μ ← Σ a_k θ_k with a_k ∝
    P(Z_k | θ_k) exp(−R(θ_k; μ, ψ)).

    F_k is the mean loss of site k. The prior R has an input convex network f_ψ for each tensor, which the server
    trains: ψ ← ψ − η ∇_ψ Σ a_k R(θ_k; μ, ψ). The model of a site is its θ_k.
    """

    title = "FedMAP"
    paper = "Zhang et al. 2025"
    sends = "contribution, model, running statistics"
    bytes_sent = "FedAvg's bytes from a hospital, 130 times FedAvg's bytes to a hospital"
    extra_work = "the prior's gradient, as costly as 130 cases; one pass without training"
    suits = "small networks on tabular data of different hospitals"
    outcome: ClassVar[Outcome] = OwnModels(common="global")
    made_anew: ClassVar[frozenset[str]] = frozenset({"prior"})

    name: Literal["fedmap"] = "fedmap"
    hidden: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = Field(
        (64, 32), min_length=1, max_length=8, description="number of features of each hidden layer in the network f_ψ"
    )
    alpha: float = Field(
        0.01,
        gt=0,
        le=1000,
        description="α: how strongly the regulariser R pulls a site's weights θ towards the prior's weights μ",
    )
    epsilon: float = Field(
        1e-4, ge=0, le=1000, description="ε: how strongly the regulariser R pulls the weights θ and μ towards zero"
    )
    prior_step: float = Field(1e-3, gt=0, le=10, description="η: learning rate with which the server trains ψ")
    prior_steps: int = Field(
        2,
        ge=0,
        le=1000,
        description="number of training steps for ψ that the server takes in each round; with 0, the prior "
        "keeps its random initial values",
    )

    def networks(self, build: ModelFactory) -> Modules:
        """Build the networks of a site: "model" is θ_k, and "prior" is the received R. The network "global" holds μ
        after the site has received it, and θ_k before the site sends its tensors.
        """
        model = build()
        sizes = {name: own.numel() for name, own in learning(model).items()}
        prior = Prior(sizes, self.hidden, self.alpha, self.epsilon).to(next(model.parameters()).dtype)
        parts = {"global": deepcopy(model), "prior": prior}
        frozen = {part: own.requires_grad_(False) for part, own in parts.items()}
        return {"model": model, **frozen, "contribution": Numbers(logarithm=0.0)}

    def check(self, modules: Modules) -> None:
        numbers = sum(own.numel() for own in modules["prior"].parameters())
        if (size := 4 * numbers) > LARGEST:
            raise PlanError(
                f"algorithm.name: fedmap's prior has {numbers:,} numbers ({size / 2**30:.1f} GiB), too many to send in "
                "each round; choose a smaller network, or lower algorithm.hidden"
            )

    def groups(self) -> tuple[Group, ...]:
        def of_shared(group: Group) -> Group:
            return replace(group, of=lambda modules: group.of({"model": modules["global"]}))

        contribution = Group(
            "contribution",
            lambda modules: dict(modules["contribution"].named_buffers()),
            lambda server: Identity(),
            "up",
            personal=True,
            ranges=lambda modules, task: {"logarithm": (-WIDEST, WIDEST)},
            disclosure_notes=lambda tensors: [
                "contribution: in every round, the disclosed mean loss over all training cases under this site's own "
                "model and the prior of that model, which the server can compute, as one number"
            ],
            average=Average("a mean loss over a site's training cases", lambda cases, _: cases),
        )
        prior = Group("prior", network("prior"), lambda server: ServersOwn(), "given")
        return contribution, *map(of_shared, super().groups()), prior

    def train_round(self, context: TrainContext) -> float:
        own, shared, prior = (context.modules[name] for name in ("model", "global", "prior"))
        copy_into(own, shared)
        theta = learning(own)
        mu = {name: tensor.detach().clone() for name, tensor in theta.items()}
        with correcting(context.optimizers["model"], towards(theta, mu, cast(Prior, prior))):
            loss = context.train()
        told = context.cases.told_loss(own)
        if told is None:
            raise Refused("fedmap weights hospitals by training losses, and this one is not disclosed; choose ditto")
        with torch.no_grad():
            value = -told - float(prior(theta, mu)) / max(1, context.cases.count())
        context.modules["contribution"].get_buffer("logarithm").fill_(max(-WIDEST, min(WIDEST, value)))
        copy_into(shared, own)
        return loss

    def weigh(self, server: ServerSide, mean: StalenessWeightedMean) -> Shares:
        """Compute the weights a_k, train ψ on the mean with these weights, and return the weights."""
        told = {site: float(server.aggregators["contribution"].current(site)["logarithm"]) for site in mean.samples}
        top = max(told.values())
        shares = at_most({site: math.exp(value - top) for site, value in told.items()}, self.largest_share)
        held = cast(ServersOwn, server.aggregators["prior"])
        given = held.current(server.sites[0])
        before = mean.current(server.sites[0])
        prior = self._prior_of({name: own.numel() for name, own in before.items() if first_of(name) in given}, given)
        mu = {name: torch.zeros(before[name].shape) for name in prior.names}
        for site, theta in mean.models():
            for name in prior.names:
                mu[name] += shares[site] * theta[name]
        for _ in range(self.prior_steps):
            learn(prior, ((shares[site], theta) for site, theta in mean.models()), mu, self.prior_step)
        held.put(prior.state_dict())
        return shares

    def _prior_of(self, sizes: Mapping[str, int], tensors: Tensors) -> Prior:
        with torch.device("meta"):  # on the meta device, no memory is allocated and no random weights are made
            prior = Prior(sizes, self.hidden, self.alpha, self.epsilon)
        own = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
        prior.load_state_dict(own, assign=True)
        return prior


def key(name: str) -> str:
    """Replace the dots in a tensor's name, because names of modules cannot contain dots."""
    return name.replace(".", "__")


def first_of(name: str) -> str:
    """Return, for a tensor θ_i, the name under which the prior stores the first-layer weights of f_ψi."""
    return f"of.{key(name)}.layers.0.weight"


def learning(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: own for name, own in model.named_parameters() if own.requires_grad}


def towards(theta: Mapping[str, nn.Parameter], mu: Tensors, prior: Prior) -> Callable[[], None]:
    """Return a function that adds ∇_θ R to every gradient, so that training minimises ℓ(θ) + R(θ; μ, ψ)."""

    def correct() -> None:
        leaves = {name: own.detach().requires_grad_() for name, own in theta.items()}
        with torch.enable_grad():
            slopes = torch.autograd.grad(prior(leaves, mu), list(leaves.values()))
        for own, slope in zip(theta.values(), slopes, strict=True):
            if own.grad is not None:
                own.grad.add_(slope)

    return correct


def learn(prior: Prior, sites: Iterable[tuple[float, Mapping[str, Tensor]]], mu: Tensors, step: float) -> None:
    """Update ψ ← ψ − η ∇_ψ Σ a_k R(θ_k; μ, ψ) and keep f_ψ convex. If the sum Σ a_k R is not positive, ψ stays the
    same, because R would otherwise decrease without limit.

    Args:
        prior: The prior R with its parameters ψ.
        sites: a_k and θ_k of each site.
        mu: The mean μ.
        step: The learning rate η.
    """
    weights = [own.requires_grad_() for own in prior.parameters()]
    slopes, total = [torch.zeros_like(weight) for weight in weights], 0.0
    with torch.enable_grad():
        for share, theta in sites:
            value = share * prior({name: theta[name].float() for name in prior.names}, mu)
            total += value.item()
            for slope, more in zip(slopes, torch.autograd.grad(value, weights), strict=True):
                slope += more
    if total <= 0:
        return
    with torch.no_grad():
        for own, slope in zip(weights, slopes, strict=True):
            own.sub_(step * slope)
    prior.keep_convex()
