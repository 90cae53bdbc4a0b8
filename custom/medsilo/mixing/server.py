"""Server optimizers, which take a step from the last model in the direction of the mean of the sites' models.

While a round is open, memory holds the mean and about two answers, and the optimizer's moments are on disk. A server
optimizer must change only trained weights, because a step of Adam could make the variance in running statistics
negative.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.mmap_store import let_go, stored, stretches_of
from medsilo.mixing.aggregators import UniformMean, WeightedMean
from medsilo.mixing.layout import Layout, Tensors
from medsilo.mixing.mean_forms import Form, MeanForm

REACH = "reach"  # name of the tensor ‖a_i‖₁, which FedNova's sites send with their weights
FURTHEST = 1e9


def reach_of(tensors: Tensors) -> float:
    """Return FedNova's ‖a_i‖₁ from a site's tensors, or raise Refused if the value is impossible."""
    reach = float(tensors[REACH]) if REACH in tensors else 0.0
    if not 0.5 < reach < FURTHEST:
        raise Refused(f"{REACH} is {reach}; it must be between 0.5 and {FURTHEST:.0e}")
    return reach


def steps_of(tensors: Tensors, arrived: Tensors) -> Tensors:
    """Return (θ_i - θ) / ‖a_i‖₁ and ‖a_i‖₁, whose means over sites determine FedNova's step."""
    reach = reach_of(tensors)
    ways = {name: (tensor.double() - arrived[name].double()) / reach for name, tensor in tensors.items()}
    return {name: way.to(tensors[name].dtype) for name, way in ways.items()} | {REACH: tensors[REACH]}


class FedNova(WeightedMean):
    """FedNova's aggregation (Wang et al. 2020): θ ← θ - τ_eff Σ p_i (θ - θ_i) / ‖a_i‖₁, where τ_eff = Σ p_i ‖a_i‖₁.

    The step is τ_eff Σ (p_i / ‖a_i‖₁) times the difference between θ and the mean with weights p_i / ‖a_i‖₁. Every site
    sends its ‖a_i‖₁ as the tensor "reach", and the server's new tensor "reach" is τ_eff.

    With `uniform`, p_i is 1 / K instead of n_i / n, where K sites answered and n is the number of their cases.
    """

    _is_mean = False

    def __init__(self, uniform: bool = False) -> None:
        super().__init__()
        self.alike = uniform

    @property
    def sealed(self) -> Form:
        return MeanForm(weighted=not self.alike, enter=steps_of)

    def take_mean(self, tensors: Tensors, weights: Mapping[str, float]) -> None:
        """Accept the means of the sites' steps. The aggregator treats each mean step as if one site had sent the model
        θ + τ_eff times the mean step.
        """
        effective, given = reach_of(tensors), self._given or {}
        moved = {
            name: (given[name].double() + effective * step.double()).to(step.dtype)
            for name, step in tensors.items()
            if name != REACH
        }
        super().take_mean({name: moved.get(name, tensors[name]) for name in given}, weights)

    def _begin_sum(self) -> None:
        super()._begin_sum()
        self._reaches: dict[str, tuple[float, float]] = {}  # for each site, the number of cases n_i (or 1), and ‖a_i‖₁

    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        reach = reach_of(tensors)
        weight = 1.0 if self.alike else weight
        super()._take(site, tensors, weight / reach, layout)
        self._reaches[site] = weight, reach

    def _merge(self) -> None:
        total = math.fsum(weight for weight, _ in self._reaches.values())
        effective = math.fsum(weight * reach for weight, reach in self._reaches.values()) / total
        self.rate = effective * math.fsum(weight / reach for weight, reach in self._reaches.values()) / total
        super()._merge()
        assert self._given is not None
        self._given[REACH] = torch.tensor(effective, dtype=self._given[REACH].dtype)


class ServerOptimizer(WeightedMean):
    """The step θ ← θ + η u(D), where an optimizer uses the mean update D = Σ p_i θ_i - θ as its gradient (Reddi et
    al. 2021, Algorithm 2).

    The optimizer's vectors are in a temporary file, and each vector is as large as an answer in at least single
    precision. Every step writes a new file, so that a checkpoint can still be written from the old file.

    With `uniform`, p_i is 1 / K instead of n_i / n, where K sites answered and n is the number of their cases.
    """

    _is_mean = False
    first: tuple[float, ...] = (0.0,)  # initial value of each of the optimizer's vectors

    def __init__(self, lr: float, uniform: bool) -> None:
        super().__init__()
        self.lr, self.uniform = float(lr), uniform
        self._steps = 0
        self._memory: list[Tensor] = []  # the optimizer's vectors, in order of the blocks

    @abstractmethod
    def update(self, d: Tensor, *memory: Tensor) -> Tensor:
        """Return u(D) in double precision for a block, and change the optimizer's vectors in place.

        Args:
            d: the block's mean update D in double precision
            memory: the block of each of the optimizer's vectors
        """

    def _move(self, blocks: Iterator[tuple[Tensor, Tensor]], layout: Layout) -> None:
        self._steps += 1
        self._memory = stored(self._stepped(blocks, layout))

    def _stepped(self, blocks: Iterator[tuple[Tensor, Tensor]], layout: Layout) -> Iterator[Tensor]:
        kinds, count = [section.kept for section in layout.sections for _ in section.blocks], len(self.first)
        for place, (theta, d) in enumerate(blocks):
            before = self._memory[place * count : (place + 1) * count]
            wide = [vector.to(d.dtype, copy=True) for vector in before]
            let_go(stretches_of(before))
            wide = wide or [torch.full_like(d, value) for value in self.first]
            torch.add(theta, self.update(d, *wide), alpha=self.lr, out=d)
            yield from (vector.to(kinds[place]) for vector in wide)

    def _save(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """The keys of the optimizer's vectors begin with a slash, so that no key equals the name of a tensor."""
        tensors, facts = super()._save()
        vectors = {f"/{place}": vector for place, vector in enumerate(self._memory)}
        return {**tensors, **vectors}, {**facts, "steps": self._steps}

    def _load(self, tensors: Mapping[str, Any], facts: dict[str, Any]) -> None:
        super()._load({name: tensor for name, tensor in tensors.items() if not name.startswith("/")}, facts)
        count = len(tensors) - len(self._given or {})
        self._memory = stored(tensors[f"/{place}"] for place in range(count))
        self._steps = facts["steps"]


class FedAvgM(ServerOptimizer):
    """FedAvgM (Hsu et al. 2019): m ← β m + D, u = m."""

    def __init__(self, lr: float = 1.0, momentum: float = 0.9, uniform: bool = False) -> None:
        super().__init__(lr, uniform)
        self.momentum = momentum

    def update(self, d: Tensor, *memory: Tensor) -> Tensor:
        (m,) = memory
        return m.mul_(self.momentum).add_(d)


class FedAdam(ServerOptimizer):
    """FedAdam (Reddi et al. 2021): m ← β₁ m + (1 - β₁) D, v ← β₂ v + (1 - β₂) D², u = m / (√v + τ).

    Args:
        variant: "reddi" as in the paper, where v starts at τ² without bias correction; "torch" as in torch's Adam with
            gradient -D, where v starts at 0, and m and v are divided by 1 - β₁ᵗ and 1 - β₂ᵗ
    """

    def __init__(
        self,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
        variant: Literal["reddi", "torch"] = "reddi",
        uniform: bool = False,
    ) -> None:
        super().__init__(lr, uniform)
        self.betas, self.tau, self.variant = betas, tau, variant
        self.first = (0.0, tau**2 if variant == "reddi" else 0.0)

    def update(self, d: Tensor, *memory: Tensor) -> Tensor:
        m, v = memory
        m.lerp_(d, 1 - self.betas[0])
        self._second(v, d.square_())
        if self.variant == "torch":
            m, v = (kept / (1 - beta**self._steps) for kept, beta in zip(memory, self.betas, strict=True))
        return m / v.sqrt().add_(self.tau)

    def _second(self, v: Tensor, squares: Tensor) -> None:
        v.lerp_(squares, 1 - self.betas[1])


class FedYogi(FedAdam):
    """FedYogi is FedAdam with another second moment: v ← v - (1 - β₂) D² sign(v - D²)."""

    def _second(self, v: Tensor, squares: Tensor) -> None:
        v.sub_(squares * (v - squares).sign_(), alpha=1 - self.betas[1])


class FedAdagrad(FedAdam):
    """FedAdagrad is FedAdam with a second moment v that starts at τ² and changes by v ← v + D²."""

    def __init__(self, lr: float = 0.1, beta: float = 0.0, tau: float = 1e-3, uniform: bool = False) -> None:
        super().__init__(lr, (beta, 1.0), tau, uniform=uniform)

    def _second(self, v: Tensor, squares: Tensor) -> None:
        v.add_(squares)


class DynamicStep(ServerOptimizer):
    """FedDyn's server step `h ← h - α/N Σ (θ_k - θ)`, `u = D - h/α`, where Σ covers the sites that answered, and N is
    the number of all sites.
    """

    def __init__(self, alpha: float) -> None:
        super().__init__(lr=1.0, uniform=True)
        self.alpha = alpha

    def update(self, d: Tensor, *memory: Tensor) -> Tensor:
        (h,) = memory
        h.sub_(d, alpha=self.alpha * (len(self._answered) / len(self._sites)))
        return d - h / self.alpha


class Scaffold(UniformMean):
    """The server's control variate in SCAFFOLD (Karimireddy et al. 2020): c ← c + |S| / N · mean over S of (c_i⁺ -
    c_i).

    S is the set of sites that answered, and N is the number of all sites. A site sends the control variate c + c_i⁺ -
    c_i.
    """

    @property
    def sealed(self) -> Form:
        return MeanForm(weighted=False)

    def _merge(self) -> None:
        """Close the round: the server's step towards the mean is multiplied by the fraction of the sites that
        answered.
        """
        assert self._layout is not None
        # True if the server adds up models, and False if it adds up differences from the last model
        models = self._origin is None
        self.rate = len(self._answered) / len(self._sites)
        if models and self._total and self._origin is not None:
            for _, c, mean in self._beside(self._origin, self._layout):
                mean.sub_(c)
        super()._merge()
        self.rate = 1.0
