"""Methods with a personal network equal numpy in float64 at each step, and in special cases equal other methods."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from medsilo.core.errors import PlanError
from medsilo.core.files import load_tensors
from medsilo.learning.amplitude import AmplitudeNorm
from medsilo.learning.compute import Compute
from medsilo.learning.loop import OutputLoss, TrainStep, passed_through, train_epoch, train_step
from medsilo.learning.training import Training
from medsilo.methods.per_fedavg import MetaGradient, adapt
from medsilo.methods.pfedme import moreau
from medsilo.mixing.aggregators import aggregator_of
from medsilo.registry import METHODS
from medsilo.schedule.algorithm import Algorithm
from medsilo.schedule.phase import ModelFactory, ServerSide, views
from medsilo.schedule.train_context import TrainContext
from tests import inprocess
from tests.conftest import SITES, make_plan

CPU = Compute()
RATE, MOMENTUM, DECAY, EPOCHS, ROUNDS = 0.2, 0.9, 0.01, 2, 2
SIZES = {"a": 12, "b": 20, "c": 7}  # number of training cases for each site; the batch size is 4
TRAINING = Training(local_epochs=EPOCHS, learning_rate=RATE, momentum=MOMENTUM, weight_decay=DECAY)
TASK = make_plan().task
SERVER = ServerSide(list(SIZES), {}, {}, set, TASK, TRAINING, 0, CPU, None, lambda: None)
Array = np.ndarray
Batches = list[tuple[Array, Array]]


# ---------------------------------------------------------------------------------------------------- by hand
def data_of(site: str) -> Batches:
    numbers = np.random.default_rng(ord(site))
    x, y = numbers.normal(size=(SIZES[site], 4)) + 0.3 * ord(site) % 1, numbers.integers(0, 3, SIZES[site])
    return [(x[start : start + 4], y[start : start + 4]) for start in range(0, len(x), 4)]


def in_epoch(batches: Batches, number: int) -> Batches:
    return batches[number:] + batches[:number]


def likelihoods(theta: Array, x: Array) -> tuple[Array, Array]:
    """Return log-likelihoods of a softmax regression; the last column of theta [3, 5] has the biases."""
    padded = np.concatenate([x, np.ones((len(x), 1))], 1)
    z = padded @ theta.T
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True), padded


def gradient(theta: Array, batch: tuple[Array, Array]) -> Array:
    p, padded = likelihoods(theta, batch[0])
    return (p - np.eye(3)[batch[1]]).T @ padded / len(padded)


class Sgd:
    """SGD as in torch: weight decay is added to the gradient, and the momentum starts at the first gradient."""

    def __init__(self) -> None:
        self.memory: Array | None = None

    def step(self, theta: Array, g: Array) -> Array:
        g = g + DECAY * theta
        self.memory = g if self.memory is None else MOMENTUM * self.memory + g
        return theta - RATE * self.memory


@dataclass
class ByHand:
    data: Batches
    w: Array
    v: Array
    alpha: float = 0.5
    of_w: Sgd = field(default_factory=Sgd)
    of_v: Sgd = field(default_factory=Sgd)

    def passes(self) -> Batches:
        return [batch for number in range(EPOCHS) for batch in in_epoch(self.data, number)]

    def learn_shared(self, batch: tuple[Array, Array]) -> None:
        self.w = self.of_w.step(self.w, gradient(self.w, batch))


def ditto(site: ByHand, pull: float) -> None:
    arrived = site.w
    for batch in site.passes():
        site.v = site.of_v.step(site.v, gradient(site.v, batch) + pull * (site.v - arrived))
        site.learn_shared(batch)


def mr_mtl(site: ByHand, pull: float) -> None:
    mean = site.w
    for batch in site.passes():
        site.v = site.of_v.step(site.v, gradient(site.v, batch) + pull * (site.v - mean))
    site.w = site.v


def apfl(site: ByHand, adaptive: bool) -> None:
    for number, batch in enumerate(site.passes()):
        if adaptive and number == 0:
            mixed = site.alpha * site.v + (1 - site.alpha) * site.w
            slope = float(((site.v - site.w) * gradient(mixed, batch)).sum())
            site.alpha = min(max(site.alpha - RATE * slope, 0.0), 1.0)
        mixed = site.alpha * site.v + (1 - site.alpha) * site.w
        site.v = site.of_v.step(site.v, site.alpha * gradient(mixed, batch))
        site.learn_shared(batch)


def per_fedavg(site: ByHand, a: float) -> None:
    batches = site.passes()
    for number, batch in enumerate(batches):
        g = gradient(site.w - a * gradient(site.w, batches[max(number - 1, 0)]), batch)
        site.w = site.of_w.step(site.w, g)


def pfedme(site: ByHand, pull: float, steps: int, outer: float) -> None:
    site.v = site.w
    for batch in site.passes():
        for _ in range(steps):
            site.v = site.of_v.step(site.v, gradient(site.v, batch) + pull * (site.v - site.w))
        site.w = site.w - outer * pull * (site.w - site.v)


def fine_tuning(site: ByHand) -> None:
    for batch in site.passes():
        site.learn_shared(batch)


def after_all_data(site: ByHand, a: float) -> Array:
    everything = tuple(np.concatenate(part) for part in zip(*site.data, strict=True))
    return site.w - a * gradient(site.w, everything)  # type: ignore[arg-type]


def after_tuning(site: ByHand, epochs: int) -> Array:
    tuned, sgd = site.w, Sgd()
    for number in range(epochs):
        for batch in in_epoch(site.data, number):
            tuned = sgd.step(tuned, gradient(tuned, batch))
    return tuned


@dataclass(frozen=True)
class Case:
    name: str
    numbers: dict
    learn: Callable[[ByHand], None]
    evaluated: Callable[[ByHand], Array] = lambda site: site.v
    server: float = 1.0

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.numbers.items())])


def mixture(site: ByHand) -> Array:
    return site.alpha * site.v + (1 - site.alpha) * site.w


CASES = [
    Case("ditto", {"pull": 0.7}, lambda site: ditto(site, 0.7)),
    Case("mr-mtl", {"pull": 0.7, "weighting": "uniform"}, lambda site: mr_mtl(site, 0.7)),
    Case("mr-mtl", {"pull": 0.1, "weighting": "cases"}, lambda site: mr_mtl(site, 0.1)),
    Case("apfl", {"alpha": 0.5}, lambda site: apfl(site, False), mixture),
    Case("apfl", {"alpha": 0.5, "adaptive": True}, lambda site: apfl(site, True), mixture),
    Case("per-fedavg", {"inner_lr": 0.1}, lambda s: per_fedavg(s, 0.1), lambda s: after_all_data(s, 0.1)),
    Case("pfedme", {"pull": 2.0, "steps": 3, "outer_lr": 0.3}, lambda site: pfedme(site, 2.0, 3, 0.3)),
    Case(
        "pfedme",
        {"pull": 2.0, "steps": 1, "outer_lr": 0.1, "server_lr": 0.4, "weighting": "uniform"},
        lambda site: pfedme(site, 2.0, 1, 0.1),
        server=0.4,
    ),
    Case("fine-tuning", {"epochs": 2}, fine_tuning, lambda site: after_tuning(site, 2)),
    Case("fine-tuning", {"epochs": 0}, fine_tuning, lambda site: site.w),
]


def study_by_hand(case: Case, start: Array) -> list[dict[str, Array]]:
    sites = {site: ByHand(data_of(site), start, start) for site in SIZES}
    shared, curve = start, []
    for number in range(ROUNDS + 1):
        for site in sites.values():
            site.w = shared
        curve.append({name: case.evaluated(site) for name, site in sites.items()} | {"shared": shared})
        if number == ROUNDS:
            break
        for site in sites.values():
            case.learn(site)
        uniform = case.numbers.get("weighting") == "uniform"
        weights = {name: 1.0 if uniform else float(SIZES[name]) for name in sites}
        mean = sum(weights[name] * site.w for name, site in sites.items()) / sum(weights.values())
        shared = (1 - case.server) * shared + case.server * mean
    return curve


# ---------------------------------------------------------------------------------------------------- ours
class Site:
    """Each case has four equal time steps, because the selector needs a time axis."""

    def __init__(self, name: str, algorithm: Algorithm, build: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.modules = algorithm.networks(ModelFactory(build, (4, 4), 4, tuple(SIZES)))
        for module in self.modules.values():
            module.double()
        self.phase, *self.others = algorithm.phases(TRAINING.rounds)
        optimizers = {
            name: algorithm.make_optimizer(name, module, TRAINING)
            for name, module in self.modules.items()
            if any(parameter.requires_grad for parameter in module.parameters())
        }
        self.data = [(torch.tensor(x)[..., None].repeat(1, 1, 4), torch.tensor(y)) for x, y in data_of(name)]
        self.context = TrainContext(
            site=name,
            sites=list(SIZES),
            modules=self.modules,
            optimizers=optimizers,
            training=TRAINING,
            loss=functional.cross_entropy,
            compute=CPU,
            cases=self,
            random=torch.Generator(),
        )
        self.steps = len(self.data)

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.data)

    def count(self) -> int:
        return len(self.data)

    def labels(self) -> list[int]:
        return np.bincount(np.concatenate([y for _, y in self.data]), minlength=3).tolist()

    def epoch(self, train_steps: Sequence[TrainStep], number: int, most: int | None = None) -> float:
        return train_epoch(iter(in_epoch(self.data, number)[:most]), train_steps, CPU)

    def receive(self, groups: dict[str, dict[str, Tensor]]) -> None:
        with torch.no_grad():
            for group, tensors in views(self.phase.given, self.modules).items():
                for name, tensor in tensors.items():
                    tensor.copy_(groups[group][name])
        for group in self.phase.given:
            group.arrived(self.modules, True)


def regression(start: Array) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.Conv1d(4, 3, 1)
        model = nn.Sequential(layer, nn.AdaptiveAvgPool1d(1), nn.Flatten()).double()
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(start[:, :4, None]))
            layer.bias.copy_(torch.tensor(start[:, 4]))
        return model

    return build


def theta_of(tensors: dict[str, Tensor]) -> Array:
    weight, bias = tensors.values()
    return torch.cat([weight.flatten(1), bias[:, None]], 1).detach().numpy().copy()


def curve_of(
    algorithm: Algorithm, build: Callable[[], nn.Module], of: Callable[[dict[str, Tensor]], Any]
) -> list[dict]:
    sites = {name: Site(name, algorithm, build) for name in SIZES}
    first = sites["a"]
    groups = [group for group in first.phase.groups if group.of(first.modules)]
    mixers = {group.name: aggregator_of(group.mix, SERVER) for group in groups}
    for group in groups:
        mixers[group.name].start(SIZES, {name: tensor.clone() for name, tensor in group.of(first.modules).items()})
    shared = mixers.get("global", mixers[groups[0].name])
    curve = []
    for number in range(ROUNDS + 1):
        for name, site in sites.items():
            site.receive({group: aggregator.current(name) for group, aggregator in mixers.items()})
            algorithm.personalise(site.context)
        ends = {name: of(site.modules["model"].state_dict()) for name, site in sites.items()}
        curve.append(ends | {"shared": of(shared.current("a"))})
        if number == ROUNDS:
            break
        for aggregator in mixers.values():
            aggregator.start(SIZES)
        for name, site in sites.items():
            site.phase.train_round(site.context)
            for group in groups:
                sent = {key: tensor.detach().clone() for key, tensor in group.of(site.modules).items()}
                mixers[group.name].add(name, sent, SIZES[name])
        for aggregator in mixers.values():
            aggregator.finish()
    return curve


def study(case: Case, start: Array, algorithm: Algorithm | None = None) -> list[dict[str, Array]]:
    return curve_of(algorithm or METHODS[case.name](**case.numbers), regression(start), theta_of)


@pytest.fixture(scope="module")
def start() -> Array:
    return np.random.default_rng(5).normal(size=(3, 5))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_rounds_at_three_sites_are_those_of_the_equations(case: Case, start: Array) -> None:
    mine, expected = study(case, start), study_by_hand(case, start)
    for number in range(ROUNDS + 1):
        for name in expected[number]:
            np.testing.assert_allclose(mine[number][name], expected[number][name], rtol=0, atol=1e-6)
    ends = list(expected[-1].values())
    if case.numbers.get("epochs") != 0:  # equal models would hide a mix-up of sites
        assert all(np.abs(one - other).max() > 1e-3 for i, one in enumerate(ends) for other in ends[:i])


@pytest.mark.parametrize("sync", ["closed-form", "server-adam"])
@pytest.mark.parametrize("case", [case for case in CASES if case.name != "mr-mtl"], ids=str)
def test_table_6_the_methods_inside_fedsm_are_those_of_the_equations(case: Case, sync: str, start: Array) -> None:
    """The selector trains with the same batches as the models.

    In the last round, sites send the models that were evaluated.
    """
    inside = METHODS["fedsm"](personal_method={"name": case.name, **case.numbers}, selector_sync=sync)
    assert [group.name for group in inside.phases(TRAINING.rounds)[-1].sent] == ["personal"]
    mine, expected = study(case, start, inside), study_by_hand(case, start)
    for number in range(ROUNDS + 1):
        assert mine[number].keys() == expected[number].keys()
        for name in expected[number]:
            np.testing.assert_allclose(mine[number][name], expected[number][name], rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- batch norm
@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    one, other = (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)) for _ in range(2))
    return one, other, torch.randn(8, 4), torch.arange(8) % 3


def test_pfedme_s_shared_network_has_statistics_of_its_own_passes(pair: tuple) -> None:
    own, shared, inputs, targets = pair
    mean = shared[0](inputs).mean(0).detach()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    inner = train_step(own, OutputLoss(functional.cross_entropy), optimizer, CPU)
    shared.eval()
    moreau(inner, own, shared, 4, 0.5)(inputs, targets)
    assert (int(own[1].num_batches_tracked), int(shared[1].num_batches_tracked)) == (4, 1)
    torch.testing.assert_close(shared[1].running_mean, 0.1 * mean)


def test_the_meta_gradient_counts_each_batch_once_and_leaves_the_weights(pair: tuple) -> None:
    model, _, inputs, targets = pair
    before = [parameter.detach().clone() for parameter in model.parameters()]
    meta = MetaGradient(model, functional.cross_entropy, 0.1, CPU)

    def without_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]) -> Tensor:
        return closure()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learn = meta.train_step(train_step(model, meta.objective, optimizer, CPU, without_step))
    for _ in range(3):
        learn(inputs, targets)
    assert int(model[1].num_batches_tracked) == 3
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_an_adaptation_goes_over_all_cases_and_forgets_its_gradients(pair: tuple) -> None:
    model, _, inputs, targets = pair
    halves = [(inputs[:5], targets[:5]), (inputs[5:], targets[5:])]
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in halves:
        loss = functional.cross_entropy(model(x), y)
        for total, one in zip(expected, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            total += one * len(x) / 8
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of = OutputLoss(functional.cross_entropy)
    adapt(model, loss_of, 0.3, lambda train_steps: train_epoch(iter(halves), train_steps, CPU), CPU)
    for parameter, old, g in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.3 * g)
        assert parameter.grad is None


def test_tuning_for_an_evaluation_leaves_an_input_layer_as_it_is() -> None:
    layer = AmplitudeNorm((1, 8, 8))
    images = torch.rand(4, 1, 8, 8)

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(images, torch.zeros(4)), (2 * images, torch.zeros(4))])

    list(passed_through(layer, data()))
    known = layer.amplitude.clone()
    list(passed_through(layer, data(), learns=False))
    assert torch.equal(layer.amplitude, known)
    list(passed_through(layer, data()))
    assert not torch.equal(layer.amplitude, known)


# ---------------------------------------------------------------------------------------------------- extremes
SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.batch_size=16", "model_selection.keep=last"]


def run(method: str, folder: Path, *changes: str) -> dict[str, dict[str, Tensor]]:
    inprocess.run(make_plan(method, *SMALL, *changes), folder=folder)
    ends = {site: load_tensors(folder / "sites" / site / "last.safetensors")[0] for site in SITES}
    lead = folder / "global" / "last.safetensors"
    return ends | ({"global": load_tensors(lead)[0]} if lead.exists() else {})


def is_statistic(name: str) -> bool:
    return name.split(".")[-1] in ("running_mean", "running_var", "num_batches_tracked")


def distance(one: dict[str, Tensor], other: dict[str, Tensor], statistics: bool = True) -> float:
    assert one.keys() == other.keys()
    names = [name for name in one if statistics or not is_statistic(name)]
    return max(float((one[name] - other[name]).abs().max()) for name in names)


# ---------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        ("ditto", "pull=-0.1", "algorithm.pull: -0.1 is too small"),
        ("apfl", "alpha=1.1", "algorithm.alpha: 1.1 is too large"),
        ("per-fedavg", "inner_lr=-1", "algorithm.inner_lr: -1 is too small"),
        ("pfedme", "outer_lr=0.1", "outer_lr 0.1 times pull 15.0 is above 1"),
        ("ditto", "alpha=0.5", "algorithm.alpha: unknown key with value 0.5"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(method: str, change: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(method, f"algorithm.{change}")
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
