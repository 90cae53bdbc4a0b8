"""Train a linear network at four hospitals with medsilo's private steps, privacy accountant and mixers."""

import math
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from medsilo.learning.compute import Compute
from medsilo.learning.loop import OutputLoss, batches, train_epoch, train_step
from medsilo.learning.private import PoissonSample, PrivateSteps
from medsilo.learning.seeds import generator_for
from medsilo.learning.steps import correcting, pull_back, pull_towards
from medsilo.mixing.aggregators import UniformMean, WeightedMean
from medsilo.privacy.accounting import epsilon, noise_for
from medsilo.privacy.mechanisms import Charge, SampledGaussian
from medsilo.privacy.noise import NoiseSource
from results.heart_dp.data import Hospital, accuracy

COMPUTE = Compute()


@dataclass(frozen=True)
class Setup:
    """The training settings of a study; the default values are FLamby's."""

    method: Literal["fedavg", "mr-mtl"] = "fedavg"
    rounds: int = 15
    steps: int = 100  # number of steps of each hospital in a round
    batch: int | None = 4  # None means all cases in every step
    rate: float = 0.001
    momentum: float = 0.0
    clip: float = 1.1
    pull: float = 0.0  # strength of MR-MTL's pull towards the common weights
    weighting: Literal["samples", "uniform"] = "samples"
    start: Literal["drawn", "zero"] = "drawn"


@dataclass(frozen=True)
class PrivacyGuarantee:
    """A study's ε and δ at each hospital; without differential privacy, ε is None."""

    epsilon: float | None
    delta: float | None


@dataclass(frozen=True)
class Outcome:
    accuracies: dict[str, float]
    epsilon: float

    @property
    def mean(self) -> float:
        return fmean(self.accuracies.values())


@cache
def noise_of(promise: PrivacyGuarantee, rate: float, steps: int) -> float:
    """Return the noise multiplier with which `steps` steps keep a privacy guarantee."""
    assert promise.epsilon and promise.delta
    return noise_for(promise.epsilon, promise.delta, rate, steps)


def run(hospitals: dict[str, Hospital], setup: Setup, promise: PrivacyGuarantee, seed: int) -> Outcome:
    model = _start(setup, seed)
    own = {name: _copy(model) for name in hospitals}
    optimizers = {name: SGD(net.parameters(), lr=setup.rate, momentum=setup.momentum) for name, net in own.items()}
    aggregator = WeightedMean() if setup.weighting == "samples" else UniformMean()
    sites = {name: _Site(name, cases, setup, promise, seed) for name, cases in hospitals.items()}
    common = model.state_dict()
    for number in range(setup.rounds):
        aggregator.start(list(hospitals), common)
        for name, site in sites.items():
            site.train(own[name], optimizers[name], common, number)
            aggregator.add(name, {key: t.clone() for key, t in own[name].state_dict().items()}, site.cases)
        aggregator.finish()
        common = aggregator.current(next(iter(sites)))
    if setup.method == "fedavg":
        for net in own.values():
            net.load_state_dict(common)
    with torch.no_grad():
        found = {
            name: accuracy(own[name](hospitals[name].test.tensors[0])[:, 0], hospitals[name].test.tensors[1])
            for name in own
        }
    return Outcome(found, max(site.epsilon() for site in sites.values()))


class _Site:
    def __init__(self, name: str, hospital: Hospital, setup: Setup, promise: PrivacyGuarantee, seed: int) -> None:
        self.name, self.data, self.setup, self.promise, self.seed = name, hospital.train, setup, promise, seed
        self.cases = len(hospital.train)
        self.batch = min(setup.batch or self.cases, self.cases)
        self.bound = setup.clip

    def noise(self) -> float:
        return noise_of(self.promise, self.batch / self.cases, self.setup.rounds * self.setup.steps)

    def epsilon(self) -> float:
        if self.promise.epsilon is None or self.promise.delta is None:
            return math.inf
        steps = SampledGaussian(
            noise=self.noise(), rate=self.batch / self.cases, steps=self.setup.rounds * self.setup.steps
        )
        return epsilon([Charge(what="training", of=steps)], self.promise.delta)

    def train(self, model: nn.Module, optimizer: SGD, common: dict[str, Tensor], number: int) -> None:
        """Train for one round; FedAvg starts at the common weights, and MR-MTL pulls the hospital's own weights towards
        the common weights.
        """
        weights, mean = list(model.parameters()), [common[name] for name, _ in model.named_parameters()]
        if self.setup.method == "fedavg":
            model.load_state_dict(common)
        pull = pull_towards(weights, mean, self.setup.pull) if self.setup.pull else pull_back(weights, 0.0)
        with correcting(optimizer, pull):
            if self.promise.epsilon is None:
                return self._train_openly(model, optimizer, number)
            # the noise may have a seed, because the data are public
            secret = NoiseSource.from_seed(self.seed, self.name, number)
            sample = PoissonSample(None, self.cases, self.batch, secret)
            private = PrivateSteps(sample, self.bound, self.noise(), secret)
            learn = private.train_step(model, _loss, optimizer)
            train_epoch(sample.batches(self.data, self.setup.steps, COMPUTE), [learn], COMPUTE)

    def _train_openly(self, model: nn.Module, optimizer: SGD, number: int) -> None:
        learn = train_step(model, OutputLoss(_loss), optimizer, COMPUTE)
        left = self.setup.steps
        for epoch in range(self.setup.steps):
            order = generator_for(self.seed, self.name, number, epoch)
            for inputs, targets in batches(self.data, self.batch, COMPUTE, order, whole=True):
                if not left:
                    return
                learn(inputs, targets)
                left -= 1


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(output[:, 0], targets)


def _start(setup: Setup, seed: int) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Linear(13, 1)
    if setup.start == "zero":
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
    return model


def _copy(model: nn.Linear) -> nn.Linear:
    other = nn.Linear(model.in_features, model.out_features)
    other.load_state_dict(model.state_dict())
    return other
